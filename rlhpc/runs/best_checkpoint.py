"""Best checkpoint of a run, and early stopping of a run that no longer improves (`runner.keep_best`, `runner.patience`)."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.manifest import is_complete
from rlhpc.config.constraints import Fail, check_name
from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.seed_scores import goal_of
from rlhpc.runs.task_type import Cfg, TaskType
from rlhpc.runtime.errors import CheckpointError, ConfigError

#: Metric that replaces all others of an evaluation whose returns were not finite.
NONFINITE = "eval/nonfinite"
#: Stop reason of a run that no longer improved.
PATIENCE = "patience"


class BestCheckpoint:
    """Best evaluation of a run so far.

    Args:
        metric: `runner.keep_best`; None tracks no metric.
        patience: `runner.patience`.

    Attributes:
        step: The step with the best value; None before the first evaluation.
        value: That value.
        waited: Evaluations since then without an improvement.
    """

    def __init__(self, metric: str | None, patience: int) -> None:
        self.metric, self.patience = metric, patience
        self.step: int | None = None
        self.value = math.nan
        self.waited = 0
        self._before: int | None = None

    def take(self, step: int, row: Mapping[str, float]) -> bool:
        """Records a step's row of metrics and returns whether the step is now the best. A non-finite value never is, and the
        first of equal values stays the best.
        """
        value = row.get(self.metric or "", math.nan if self.metric and NONFINITE in row else None)
        if value is None:
            self._require_measured(row)
            return False
        better = math.isfinite(value) and (
            self.step is None
            or (value > self.value if goal_of(self.metric or "") == "maximize" else value < self.value)
        )
        if not better:
            self.waited += 1
            return False
        self._before, self.step, self.value, self.waited = self.step, step, float(value), 0
        return True

    def _require_measured(self, row: Mapping[str, float]) -> None:
        measured = sorted(name for name in row if name.startswith("eval/"))
        if measured and self.metric is not None and self.step is None and not self.waited:
            raise ConfigError(
                f"runner.keep_best is {self.metric!r}, which this run's evaluation does not measure; allowed: "
                f"{', '.join(measured)}"
            )

    def is_over(self) -> bool:
        """Returns whether `runner.patience` evaluations in a row were not better."""
        return 0 < self.patience <= self.waited

    def reason(self) -> str:
        """Returns why the run ends, in a sentence."""
        best = "no value was finite" if self.step is None else f"the best is still {self.value:.6g} of step {self.step}"
        return f"{self.waited} evaluations in a row did not improve {self.metric} (runner.patience={self.patience}); {best}"

    def facts(self) -> dict[str, Any]:
        """Returns the entries of status.json about the best checkpoint."""
        return (
            {} if self.step is None else {"best_metric": self.metric, "best_step": self.step, "best_value": self.value}
        )

    def state(self) -> dict[str, Any]:
        """Returns the state that a resumed run continues from, as JSON values."""
        if self.metric is None:
            return {}
        value = self.value if self.step is not None else None
        return {"best": {"metric": self.metric, "step": self.step, "value": value, "waited": self.waited}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state` returned; a run with another metric starts anew."""
        saved = state.get("best")
        self.step, self.value, self.waited, self._before = None, math.nan, 0, None
        if isinstance(saved, Mapping) and saved.get("metric") == self.metric:
            self.waited = int(saved["waited"])
            if saved["step"] is not None:
                self.step, self.value = int(saved["step"]), float(saved["value"])

    def protected(self, paths: RunPaths) -> list[int]:
        """Returns the steps whose checkpoints are retained: the best one and, until that is complete, the previous best."""
        steps = [step for step in (self.step, self._before) if step is not None]
        return steps[:1] if steps and is_complete(paths.checkpoint(steps[0])) else steps

    def link(self, paths: RunPaths) -> None:
        """Points `checkpoints/best` at the best checkpoint once it is complete. Removes a link whose checkpoint no longer
        exists or was the best by another metric.

        Raises:
            CheckpointError: The filesystem refused.
        """
        link, target = paths.best, None if self.step is None else paths.checkpoint(self.step)
        try:
            if target is not None and is_complete(target):
                if not (link.is_symlink() and link.readlink() == Path(target.name)):
                    new = link.with_name(f".{link.name}-{secrets.token_hex(4)}")
                    new.symlink_to(target.name)
                    new.replace(link)
            elif link.is_symlink() and (target is None or not link.exists()):
                link.unlink()
        except OSError as error:
            raise CheckpointError(
                f"the link {link} to the best checkpoint could not be made: {error.strerror}"
            ) from error


def check_best(kind: TaskType[Cfg], cfg: Cfg, fail: Fail) -> None:
    """Raises an error for a `runner.keep_best` that the run does not measure, and for a `runner.patience` without it.

    Raises:
        ConfigError: Names the nearest metric.
    """
    metric = cfg.runner.keep_best
    if metric is None:
        if cfg.runner.patience > 0:
            raise fail("runner.patience", "it counts evaluations by a metric: name that with runner.keep_best")
        return
    names = list(kind.checks.evaluation_metrics(cfg))
    if not names:
        evaluates = "runner.val_check_interval" in kind.schema
        way_out = "set runner.val_check_interval, such as 10" if evaluates else "leave it out"
        raise fail("runner.keep_best", f"this run evaluates nothing while it trains: {way_out}")
    check_name("runner.keep_best", metric, names, fail)
