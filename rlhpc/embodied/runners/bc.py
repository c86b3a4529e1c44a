"""Training loop of behaviour cloning. A step is `algorithm.update_epochs` passes over the demonstrations, or
`algorithm.minibatches_per_step` minibatches of them."""

from __future__ import annotations

from typing import Any

from rlhpc.embodied.config import BcConfig
from rlhpc.jobs.signals import StopRequest
from rlhpc.metrics import PhaseTimers
from rlhpc.metrics.phase_times import active_s
from rlhpc.runs.run_folder import RunFolder
from rlhpc.runs.runner import Runner


class BcRunner(Runner[BcConfig]):
    """Runner that trains an embodied policy on demonstrations.

    Args:
        cfg: Configuration.
        actor: Launched group of `BcActor`.
        run, stop: See `PlayingRunner`.
    """

    def __init__(
        self, cfg: BcConfig, actor: Any, *, run: RunFolder | None = None, stop: StopRequest | None = None
    ) -> None:
        super().__init__(cfg, {"actor": actor}, run=run, stop=stop)
        self.actor = actor
        self.samples, self.eval_return = 0, None

    def build(self) -> None:
        """Builds the policy and indexes the demonstrations."""
        self.demos = self.actor.init_worker().wait(self.timeout)[0]

    def one_step(self) -> dict[str, float]:
        """Trains for a step, evaluates if an evaluation is due, and returns the row of metrics."""
        timers, start_s = PhaseTimers(), active_s()
        progress = self.step / max(self.folder.total, 1)
        with timers("update"):
            train_metrics = self.actor.imitate(self.step + 1, progress).wait(self.timeout)[0]
        self.step += 1
        num_samples = int(train_metrics.pop("samples"))
        self.samples += num_samples
        row = {f"train/{name}": metric for name, metric in train_metrics.items()}
        row |= {"train/samples": float(self.samples), "train/demonstrations": self.demos["episodes"]}
        if self.demos["left_out"]:
            row["train/nonfinite_demonstrations"] = self.demos["left_out"]
        eval_interval = self.cfg.runner.val_check_interval
        if eval_interval > 0 and self.step % eval_interval == 0:
            with timers("eval"):
                metrics = self.actor.evaluate().wait(self.timeout)[0]
            self.eval_return = metrics.get("return_mean", self.eval_return)
            row.update({f"eval/{name}": metric for name, metric in metrics.items()})
        row.update(timers.pop())
        row["time/samples_per_s"] = num_samples / max(row["time/update_s"], 1e-9)
        row["time/step_s"] = active_s() - start_s
        return row

    def state(self) -> dict[str, Any]:
        """Returns the counters that a resumed run continues from."""
        return {"samples": self.samples, "evaluated": self.eval_return}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the state that `state` returned when the checkpoint was made."""
        self.samples, self.eval_return = int(state.get("samples", 0)), state.get("evaluated")

    def result(self) -> dict[str, Any]:
        """Returns `samples` and `episode_return`, the mean return of the last evaluation."""
        return {"samples": self.samples, "episode_return": self.eval_return}

    def facts(self, row: dict[str, float]) -> dict[str, Any]:
        """Returns the loss and the mean return of the last evaluation, for `rlhpc status`."""
        return {"loss": row["train/loss"], "return": self.eval_return}
