"""The loop of training on a dataset's rows: an optimizer step on some of them, and the evaluation that is due after it."""

from __future__ import annotations

import time
from typing import Any

from rlhpc.jobs.signals import StopRequest
from rlhpc.runs.folder import RunFolder
from rlhpc.runs.kinds import Cfg
from rlhpc.runs.runner import Runner
from rlhpc.runtime.group import WorkerGroup
from rlhpc.runtime.rpc import Handle


class SupervisedRunner(Runner[Cfg]):
    """Trains a language model on rows; a subclass says how.

    Args:
        cfg: Configuration.
        actor: Launched group of a `LanguageActor`.
        run, stop: As the other runners'.
    """

    def __init__(
        self, cfg: Cfg, actor: WorkerGroup, *, run: RunFolder | None = None, stop: StopRequest | None = None
    ) -> None:
        super().__init__(cfg, {"actor": actor}, run=run, stop=stop)
        self.actor = actor
        self.tokens = 0

    def train(self, step: int) -> Handle:
        """The actor's call for a step, which gives metrics, `tokens` among them."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, float]:
        """The metrics of the evaluation that is due after a step; none where there is no such evaluation."""
        return {}

    def build(self) -> None:
        """Loads model and datasets."""
        self.actor.init_worker(self.folder.total).wait(self.timeout)

    def one_step(self) -> dict[str, float]:
        """One optimizer step, and the evaluation that is due after it."""
        begin = time.perf_counter()
        trained = self.train(self.step + 1).wait(self.timeout)[0]
        self.step += 1
        self.tokens += int(trained["tokens"])
        row = {f"train/{name}": value for name, value in trained.items()}
        row["train/tokens_total"] = float(self.tokens)
        row["time/train_tokens_per_s"] = trained["tokens"] / (time.perf_counter() - begin)
        return row | self.evaluate()

    def state(self) -> dict[str, Any]:
        """The counters that a resumed run continues from."""
        return {"tokens": self.tokens}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned when the checkpoint was made."""
        self.tokens = int(state.get("tokens", 0))

    def result(self) -> dict[str, Any]:
        """Tokens trained on so far."""
        return {"tokens": self.tokens}

    def facts(self, row: dict[str, float]) -> dict[str, Any]:
        """Loss and rate."""
        return {"loss": row["train/loss"], "tokens_per_s": row["time/train_tokens_per_s"]}
