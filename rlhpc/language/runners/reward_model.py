"""The loop of a reward model's training."""

from __future__ import annotations

import time
from typing import Any

from rlhpc.algorithms.reward_losses import find_reward_loss
from rlhpc.config.typed import plain
from rlhpc.jobs.signals import StopRequest
from rlhpc.language.preference_scores import validation_metrics
from rlhpc.language.reward_config import RewardRunConfig
from rlhpc.runs.folder import RunFolder
from rlhpc.runs.runner import Runner
from rlhpc.runtime.group import WorkerGroup


class RewardModelRunner(Runner[RewardRunConfig]):
    """Trains a reward model.

    Args:
        cfg: Configuration.
        actor: Launched group of `RewardModelActor`.
        run, stop: As the other runners'.
    """

    def __init__(
        self,
        cfg: RewardRunConfig,
        actor: WorkerGroup,
        *,
        run: RunFolder | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        super().__init__(cfg, {"actor": actor}, run=run, stop=stop)
        self.actor = actor
        self.form = find_reward_loss(cfg.algorithm.loss_type, plain(cfg.algorithm.loss_kwargs))[1]
        self.tokens = 0

    def build(self) -> None:
        """Loads model and datasets."""
        self.actor.init_worker(self.folder.total).wait(self.timeout)

    def one_step(self) -> dict[str, float]:
        """One optimizer step, and the evaluation that is due after it."""
        begin = time.perf_counter()
        trained = self.actor.prefer(self.step + 1).wait(self.timeout)[0]
        self.step += 1
        self.tokens += int(trained["tokens"])
        row = {f"train/{name}": value for name, value in trained.items()}
        row["train/tokens_total"] = float(self.tokens)
        row["time/train_tokens_per_s"] = trained["tokens"] / (time.perf_counter() - begin)
        every = self.cfg.runner.val_check_interval
        if every > 0 and self.step % every == 0:
            begin = time.perf_counter()
            row |= validation_metrics(self.actor.validate().wait(self.timeout), self.form)
            row["time/eval_s"] = time.perf_counter() - begin
        return row

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
