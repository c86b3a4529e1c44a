"""Supervised training loop: an optimizer step on rows of a dataset, and the evaluation that is due after it."""

from __future__ import annotations

from typing import Any, TypeVar

from rlhpc.algorithms.preference_losses import find_reward_loss
from rlhpc.config.parallel import MeshSizes
from rlhpc.config.typed import plain
from rlhpc.jobs.signals import StopRequest
from rlhpc.language.config.run import DpoConfig, RewardRunConfig, SftConfig
from rlhpc.language.evaluation.reward_model import preference_validation_metrics
from rlhpc.language.rollout.validation import validation_metrics
from rlhpc.language.training.prompt_dispatch import PromptMap, weight_shards
from rlhpc.metrics.phase_times import active_s
from rlhpc.runs.run_folder import RunFolder
from rlhpc.runs.runner import Runner
from rlhpc.runtime.worker_group import WorkerGroup

Cfg = TypeVar("Cfg", bound=SftConfig | RewardRunConfig)


class SupervisedRunner(Runner[Cfg]):
    """Runner that trains a language model on rows.

    Args:
        cfg: The run's configuration.
        actor: Launched group of a `LanguageActor` with a method `update`.
        rollout: Launched group of `EvaluationWorker`, which answers the suites; None in a run without this group.
        run, stop: See `Runner`.
    """

    def __init__(
        self, cfg: Cfg, actor: WorkerGroup, rollout: WorkerGroup | None = None, *, run: RunFolder | None = None,
        stop: StopRequest | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cfg, {"actor": actor}, run=run, stop=stop)
        self.actor = actor
        self.rollout = rollout
        self.tokens = self.dropped = 0

    def validate(self) -> dict[str, float]:
        """Returns the actor's metrics of the held-out rows with the current weights."""
        return {
            f"eval/{name}": metric_value for name, metric_value in self.actor.validate().wait(self.timeout)[0].items()
        }

    def evaluate(self) -> dict[str, float]:
        """Evaluates every `runner.val_check_interval` steps and after the last step; returns the metrics, {} otherwise."""
        eval_interval = self.cfg.runner.val_check_interval
        if eval_interval <= 0 or (self.step % eval_interval and self.step != self.folder.total):
            return {}
        start_s = active_s()
        return {**self.validate(), **self.answer_suites(), "time/eval_s": active_s() - start_s}

    def answer_suites(self) -> dict[str, float]:
        """Returns the metrics of the suites that the engines answer with the current weights; {} if there are no engines."""
        if self.rollout is None:
            return {}
        ranks = list(range(self.rollout.world_size))
        send_call = self.actor.send_weights(self.step, ranks)
        suite_rows = self.rollout.evaluate(self.step, ranks).wait(self.timeout)
        send_call.wait(self.timeout)
        return validation_metrics(suite_rows)

    def build(self) -> None:
        """Loads models, engines and datasets one after the other, because an engine measures the free memory."""
        self.dropped = int(self.actor.init_worker(self.folder.total).wait(self.timeout)[0]["dropped"])
        if self.rollout is None:
            return
        actors = MeshSizes.from_config(self.cfg.actor.parallel, self.actor.world_size).data
        prompts = PromptMap(
            self.cfg.data.prompts_per_step, 1, self.rollout.world_size, actors, self.rollout.name, self.actor.name,
            num_shards=weight_shards(self.cfg.actor, self.actor.world_size),
        )  # fmt: skip
        self.actor.open_weights(prompts).wait(self.timeout)
        self.rollout.init_worker(prompts).wait(self.timeout)

    def one_step(self) -> dict[str, float]:
        """Runs one optimizer step, and the evaluation that is due after it."""
        start_s = active_s()
        train_metrics = self.actor.update(self.step + 1).wait(self.timeout)[0]
        self.step += 1
        self.tokens += int(train_metrics["tokens"])
        row = {f"train/{name}": metric_value for name, metric_value in train_metrics.items()}
        row["train/tokens_total"] = float(self.tokens)
        if self.dropped:
            row["train/dropped_problems"] = float(self.dropped)
        row["time/train_tokens_per_s"] = train_metrics["tokens"] / (active_s() - start_s)
        return row | self.evaluate()

    def state(self) -> dict[str, Any]:
        """Returns the counters that a resumed run continues from."""
        return {"tokens": self.tokens}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the counters that `state` returned for the checkpoint."""
        self.tokens = int(state.get("tokens", 0))

    def result(self) -> dict[str, Any]:
        """Returns the number of tokens that were trained on so far."""
        return {"tokens": self.tokens}

    def facts(self, row: dict[str, float]) -> dict[str, Any]:
        """Returns loss and token rate of a step for `rlhpc status`."""
        return {"loss": row["train/loss"], "tokens_per_s": row["time/train_tokens_per_s"]}


class DpoRunner(SupervisedRunner[DpoConfig]):
    """Runner that trains a language model on preferences, with a group of `DpoActor`."""


class RewardModelRunner(SupervisedRunner[RewardRunConfig]):
    """Runner that trains a reward model, with a group of `RewardModelActor`."""

    def validate(self) -> dict[str, float]:
        """Returns the metrics of all suites of `workflow.eval_suites`."""
        algorithm = self.cfg.algorithm
        loss, loss_form = find_reward_loss(algorithm.loss_type, plain(algorithm.loss_kwargs))
        return preference_validation_metrics(self.actor.validate().wait(self.timeout), loss_form, loss)


class SftRunner(SupervisedRunner[SftConfig]):
    """Runner that trains a language model on demonstrations, with a group of `SftActor`."""
