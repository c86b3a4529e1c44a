"""Checkpoints of a run: saves, the best checkpoint (`runner.keep_best`) and early stopping (`runner.patience`).

Ranks copy their state and write the copy while training continues. A checkpoint appears after all ranks have written.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.checkpoint import CheckpointWriter
from rlhpc.checkpoint.manifest import is_complete
from rlhpc.config.constraints import Fail, check_name
from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.seed_scores import goal_of
from rlhpc.runs.task_type import Cfg, TaskType
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.errors import CheckpointError, ConfigError, RlhpcError
from rlhpc.runtime.files import rename

if TYPE_CHECKING:
    from rlhpc.checkpoint.async_writer import Checksums


@dataclass
class _Save:
    """Save in progress.

    Attributes:
        writer: Writer of the checkpoint's folder.
        cleanup: Exit stack that closes the writer and removes the folder of an incomplete checkpoint.
        meta: Entries of the manifest.
        start_time: Start time of the save.
        queries: Role → pending call that asks the ranks whether they have written all files.
        checksums: Role → checksums of the files that the role's ranks have written.
    """

    writer: CheckpointWriter
    cleanup: contextlib.ExitStack
    meta: dict[str, Any]
    start_time: float
    queries: dict[str, Any] = field(default_factory=dict)
    checksums: dict[str, Checksums] = field(default_factory=dict)

    def record(self, role: str, answers: Sequence[Checksums | None]) -> None:
        """Stores the checksums of a group, unless one of its ranks is still writing."""
        checksums = [rank_checksums for rank_checksums in answers if rank_checksums is not None]
        if len(checksums) == len(answers):
            self.checksums[role] = merge_checksums(checksums)


class Saves:
    """Saves of a run, at most one at a time.

    Args:
        groups: Launched worker groups by role.
        async_save: True to continue training while ranks write files.
        timeout: Maximum seconds to wait for the ranks.
    """

    def __init__(self, groups: Mapping[str, Any], async_save: bool, timeout: float) -> None:
        self._groups, self._async_save, self._timeout = groups, async_save, timeout
        self._current_save: _Save | None = None

    @property
    def pending_step(self) -> int | None:
        """Step of a save that is not yet a complete checkpoint."""
        return None if self._current_save is None else self._current_save.writer.step

    def begin(self, writer: CheckpointWriter, files: Mapping[str, bytes | Path], meta: dict[str, Any]) -> None:
        """Starts to save the current step on all ranks; returns when training may continue.

        Args:
            writer: Writer of the checkpoint.
            files: Name → content of an additional file, or the path of a file to copy.
            meta: Entries of the manifest.

        Raises:
            CheckpointError: A file cannot be written.
            RlhpcError: A rank failed.
        """
        start_time = time.perf_counter()
        with contextlib.ExitStack() as exit_stack:
            folder = str(exit_stack.enter_context(writer).staging)
            handles = {
                role: group.begin_save(folder, self._async_save)
                if _can_save_in_background(group)
                else group.save(folder)
                for role, group in self._groups.items()
            }
            answers = {role: call_handle.wait(self._timeout) for role, call_handle in handles.items()}
            for name, file_content in files.items():
                if isinstance(file_content, bytes):
                    writer.add_bytes(name, file_content)
                else:
                    writer.add_file(name, file_content)
            self._current_save = _Save(writer, exit_stack.pop_all(), meta, start_time)
        for role, group in self._groups.items():
            if _can_save_in_background(group):
                self._current_save.record(role, answers[role])

    def advance(self) -> float | None:
        """Commits the save in progress if all its files are written; does not wait.

        Returns:
            Seconds from the start of the save to its commit, or None if nothing was committed.

        Raises:
            CheckpointError: A file cannot be written.
            RlhpcError: A rank failed.
        """
        return self._commit_if_written(waits=False)

    def finish(self) -> float | None:
        """Waits until the save in progress is a complete checkpoint.

        Returns:
            The result of `advance`.

        Raises:
            CheckpointError: A file cannot be written.
            RlhpcError: A rank failed.
        """
        return self._commit_if_written(waits=True)

    def finish_or_drop(self) -> float | None:
        """Finishes the save in progress after a failure, when all ranks respond again. Drops the save if it fails, because a
        lost rank had not written its files.

        Returns:
            The result of `advance`; None if the save was dropped.
        """
        try:
            return self.finish()
        except RlhpcError:
            return None

    def abandon(self) -> None:
        """Drops the save in progress and removes its folder."""
        if (save := self._current_save) is not None:
            self._current_save = None
            save.cleanup.close()

    def _commit_if_written(self, waits: bool) -> float | None:
        save = self._current_save
        if save is None:
            return None
        try:
            if not self._is_written(save, waits):
                return None
            current().registry.check_current()  # raises if another driver has replaced this driver
        except BaseException:
            self.abandon()
            raise
        self._current_save = None
        with save.cleanup:
            save.writer.commit(save.meta, merge_checksums(save.checksums.values()))
        return time.perf_counter() - save.start_time

    def _is_written(self, save: _Save, waits: bool) -> bool:
        """Returns whether all ranks have written all files."""
        unreported_groups = {
            role: group
            for role, group in self._groups.items()
            if role not in save.checksums and _can_save_in_background(group)
        }
        for role, group in unreported_groups.items():
            if role not in save.queries:
                save.queries[role] = group.saved(waits)
        for role, group in unreported_groups.items():
            if not waits and not save.queries[role].done():  # the role's ranks are busy
                continue
            answers = save.queries.pop(role).wait(self._timeout)
            if None in answers and waits:  # the pending query did not wait for the files
                answers = group.saved(True).wait(self._timeout)
            save.record(role, answers)
        return all(role in save.checksums for role in unreported_groups)


def merge_checksums(reports: Iterable[Checksums]) -> Checksums:
    """Merges the ranks' reports of file checksums. A checksum has precedence over None, which a rank reports for a file of
    another rank.
    """
    checksums: Checksums = {}
    for report in reports:
        checksums |= {
            name: checksum for name, checksum in report.items() if checksum is not None or name not in checksums
        }
    return checksums


def _can_save_in_background(group: Any) -> bool:
    """Returns whether a group's ranks can write files in the background: their class reports checksums of written files."""
    from rlhpc.checkpoint.async_writer import (
        SavingWorker,  # needs torch, which a check of the configuration does without
    )

    return issubclass(group.worker_class, SavingWorker)


#: Metric that replaces all other metrics of an evaluation with non-finite returns.
NONFINITE = "eval/nonfinite"
#: Stop reason of a run that ended by `runner.patience`.
PATIENCE = "patience"


class BestCheckpoint:
    """Best evaluation of a run so far.

    Args:
        metric: Value of `runner.keep_best`; None tracks no metric.
        patience: Value of `runner.patience`.

    Attributes:
        step: Step with the best value; None before the first finite value.
        value: Best value of the metric.
        num_unimproved: Number of evaluations since the best one.
    """

    def __init__(self, metric: str | None, patience: int) -> None:
        self.metric, self.patience = metric, patience
        self.step: int | None = None
        self.value = math.nan
        self.num_unimproved = 0
        self._previous_step: int | None = None

    def record(self, step: int, row: Mapping[str, float]) -> bool:
        """Records a step's row of metrics; returns whether the step is now the best. A non-finite value is never the best, and
        of equal values, the first stays the best.
        """
        metric_value = row.get(self.metric or "", math.nan if self.metric and NONFINITE in row else None)
        if metric_value is None:
            self._check_metric_exists(row)
            return False
        is_better = math.isfinite(metric_value) and (
            self.step is None
            or (metric_value > self.value if goal_of(self.metric or "") == "maximize" else metric_value < self.value)
        )
        if not is_better:
            self.num_unimproved += 1
            return False
        self._previous_step, self.step, self.value, self.num_unimproved = self.step, step, float(metric_value), 0
        return True

    def _check_metric_exists(self, row: Mapping[str, float]) -> None:
        eval_metrics = sorted(name for name in row if name.startswith("eval/"))
        if eval_metrics and self.metric is not None and self.step is None and not self.num_unimproved:
            raise ConfigError(
                f"runner.keep_best is {self.metric!r}, which this run's evaluation does not measure; allowed: "
                f"{', '.join(eval_metrics)}"
            )

    def is_over(self) -> bool:
        """Returns whether the last `runner.patience` evaluations did not improve the metric."""
        return 0 < self.patience <= self.num_unimproved

    def reason(self) -> str:
        """Returns the reason why the run ends, as a text for the user."""
        best_text = (
            "no value was finite" if self.step is None else f"the best is still {self.value:.6g} of step {self.step}"
        )
        return (
            f"{self.num_unimproved} evaluations in a row did not improve {self.metric} "
            f"(runner.patience={self.patience}); {best_text}"
        )

    def facts(self) -> dict[str, Any]:
        """Returns the fields of status.json about the best checkpoint."""
        return (
            {} if self.step is None else {"best_metric": self.metric, "best_step": self.step, "best_value": self.value}
        )

    def state(self) -> dict[str, Any]:
        """Returns the state for a resumed run, as JSON values."""
        if self.metric is None:
            return {}
        best_value = self.value if self.step is not None else None
        return {"best": {"metric": self.metric, "step": self.step, "value": best_value, "waited": self.num_unimproved}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`; a run with another metric starts without a best step."""
        saved_best = state.get("best")
        self.step, self.value, self.num_unimproved, self._previous_step = None, math.nan, 0, None
        if isinstance(saved_best, Mapping) and saved_best.get("metric") == self.metric:
            self.num_unimproved = int(saved_best["waited"])
            if saved_best["step"] is not None:
                self.step, self.value = int(saved_best["step"]), float(saved_best["value"])

    def retained_steps(self, paths: RunPaths) -> list[int]:
        """Returns the steps of the checkpoints to keep: the best and, until its checkpoint is complete, the previous best."""
        steps = [step for step in (self.step, self._previous_step) if step is not None]
        return steps[:1] if steps and is_complete(paths.checkpoint(steps[0])) else steps

    def link(self, paths: RunPaths) -> None:
        """Points the link `checkpoints/best` at the best checkpoint if the checkpoint is complete. Removes a link to a missing
        checkpoint, or to the best checkpoint of another metric.

        Raises:
            CheckpointError: The link cannot be written.
        """
        link, target = paths.best, None if self.step is None else paths.checkpoint(self.step)
        try:
            if target is not None and is_complete(target):
                if not (link.is_symlink() and link.readlink() == Path(target.name)):
                    temporary_link = link.with_name(f".{link.name}-{secrets.token_hex(4)}")
                    temporary_link.symlink_to(target.name)
                    rename(temporary_link, link)
            elif link.is_symlink() and (target is None or not link.exists()):
                link.unlink()
        except OSError as error:
            raise CheckpointError(
                f"the link {link} to the best checkpoint could not be made: {error.strerror}"
            ) from error


def check_best(task_type: TaskType[Cfg], cfg: Cfg, fail: Fail) -> None:
    """Checks that the run measures `runner.keep_best`, and that `runner.patience` is not set without it.

    Raises:
        ConfigError: The run does not measure the metric, or `runner.patience` is set without `runner.keep_best`.
    """
    metric = cfg.runner.keep_best
    if metric is None:
        if cfg.runner.patience > 0:
            raise fail("runner.patience", "it counts evaluations by a metric: name that with runner.keep_best")
        return
    metric_names = list(task_type.checks.evaluation_metrics(cfg))
    if not metric_names:
        has_evaluation = "runner.val_check_interval" in task_type.schema
        way_out = "set runner.val_check_interval, such as 10" if has_evaluation else "leave it out"
        raise fail("runner.keep_best", f"this run evaluates nothing while it trains: {way_out}")
    check_name("runner.keep_best", metric, metric_names, fail)
