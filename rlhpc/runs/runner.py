"""Base class of all training loops: loop, timers, checkpoint intervals, stop conditions and recovery after a failure. A
subclass defines one step.
"""

from __future__ import annotations

import collections
import hashlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Generic, final

import numpy as np

from rlhpc.checkpoint import CheckpointWriter, newest_valid, prune
from rlhpc.config import segment_ends
from rlhpc.config.alerts import has_hook
from rlhpc.config.constraints import parse_steps
from rlhpc.config.typed import plain, select
from rlhpc.jobs.alerts import stall_limit_s
from rlhpc.jobs.paths import CONFIG
from rlhpc.jobs.signals import StopRequest, end_of_job
from rlhpc.metrics import MetricLogger, ProgressBar
from rlhpc.metrics.energy import RunEnergy
from rlhpc.metrics.loggers.base import public_config
from rlhpc.metrics.phase_times import active_s
from rlhpc.metrics.provenance import update_provenance
from rlhpc.runs.checkpointing import PATIENCE, BestCheckpoint, Saves
from rlhpc.runs.run_folder import RunFolder, note
from rlhpc.runs.task_type import Cfg
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.errors import ChannelError, CheckpointError, RlhpcError, StepFailed, WorkerFailed
from rlhpc.runtime.files import read_json
from rlhpc.runtime.former_names import former_members
from rlhpc.runtime.session import Session
from rlhpc.runtime.trace_control import ProfileOptions, TraceControl
from rlhpc.runtime.trace_recorder import span

#: Number of recent steps, and of recent saves, in the estimates of their durations.
_MAX_RECENT = 100


def _compute_p95(step_seconds: Collection[float]) -> float:
    return float(np.percentile(list(step_seconds), 95)) if step_seconds else 0.0


@former_members(restored="check_restored")
class Runner(Generic[Cfg]):
    """Training loop of one start of a run.

    Args:
        cfg: Configuration.
        groups: Launched worker groups by role. All groups are saved and restored, in this order.
        run: The open run folder; by default the folder of `runner.run_dir` and `runner.name`.
        stop: Stop request, which the loop checks between steps.

    Attributes:
        step: Number of completed steps.
        elapsed: Seconds of training so far, over all starts.
        recoveries: Number of recoveries so far.
        stateless: Groups without state that outlives a step (see `unharmed`).
    """

    stateless: frozenset[str] = frozenset()

    def __init__(
        self, cfg: Cfg, groups: dict[str, Any], *, run: RunFolder | None = None, stop: StopRequest | None = None
    ) -> None:
        self.cfg: Cfg = cfg
        self.groups = groups
        self.folder, self._opens_folder = RunFolder.plan(cfg) if run is None else run, run is None
        self.stop = stop or StopRequest()
        self.step, self.elapsed, self.stop_reason = 0, 0.0, ""
        self.timeout = cfg.runner.step_timeout_s
        self._has_alerts = has_hook(cfg.runner.alerts)
        self._energy = RunEnergy(self.folder.paths.energy, is_continued=self.folder.continues_run)
        self._step_durations_s: collections.deque[float] = collections.deque(maxlen=_MAX_RECENT)
        self._save_durations_s: collections.deque[float] = collections.deque(maxlen=_MAX_RECENT)
        self.best = BestCheckpoint(cfg.runner.keep_best, cfg.runner.patience)
        self.saves = Saves(groups, cfg.runner.async_save, self.timeout)
        self._saved_step, self._pause_s = -1, 0.0
        self._is_ready = False
        self.recoveries = 0
        self._num_recoveries_in_a_row, self._recovery_step = 0, -1
        self._elapsed_before, self._started_s = 0.0, active_s()
        self._trace = self._build_trace_control()

    def _build_trace_control(self) -> TraceControl:
        section = self.cfg.runner.trace
        steps = parse_steps(section.steps) or frozenset()
        profile = ProfileOptions(
            set(section.profile.groups),
            parse_steps(section.profile.ranks, first=0) or frozenset(),
            (parse_steps(section.profile.steps) or steps) if section.profile.groups else (),
            set(section.profile.nsys),
            parse_steps(section.profile.nsys_steps) or (),
        )
        return TraceControl(self.folder.paths.trace, steps, Session.running(), profile)

    # -- hooks of a subclass --------------------------------------------------------------------------------------

    def build(self) -> None:
        """Builds the models and other objects of the ranks, and connects the ranks."""
        raise NotImplementedError

    def begin(self) -> None:
        """Prepares the first step of this start, or the first step after a recovery."""

    def one_step(self) -> dict[str, float]:
        """Runs step `self.step + 1` and counts it; returns its metrics, without `time/step_s` and `time/wall_s`."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Returns the runner's state for a checkpoint, as JSON values."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the result of `state` from a checkpoint, and drops newer data."""

    def facts(self, row: dict[str, float]) -> dict[str, Any]:
        """Returns additional fields of status.json for a step's row of metrics."""
        return {}

    def result(self) -> dict[str, Any]:
        """Returns additional fields of the result of `run`."""
        return {}

    def goal(self) -> str:
        """Returns the reason to stop if the run has reached its goal; otherwise ""."""
        return ""

    def check_restored(self, answers: dict[str, list[Any]]) -> None:
        """Checks the results of the ranks' `load`, by role."""

    def rebuild(self, lost_ranks: dict[str, list[int]]) -> None:
        """Restarts the lost ranks of each role after a failure, and connects them."""
        raise NotImplementedError

    def unharmed(self, lost_ranks: dict[str, list[int]]) -> bool:
        """Returns after `rebuild` whether the run can continue from `step` without a checkpoint.

        This requires that the lost ranks had no state, and that the other ranks still have their state of `step`.
        """
        return False

    def count_lost(self, num_ranks: int, state_before: dict[str, Any]) -> None:
        """Updates the counters of losses after a recovery. `num_ranks` is the number of lost ranks, `state_before` the
        result of `state` before the recovery restored it.
        """

    # -- start ----------------------------------------------------------------------------------------------------

    @final
    def init_workers(self) -> None:
        """Builds the ranks' objects (`build`), and restores the checkpoint to resume from or loads `runner.init_from`."""
        if self._opens_folder:
            self.folder.open(self.cfg)
        self.build()
        if self.folder.resume.path is not None:
            self._restore_run_state(self.folder.resume.path)
        elif (start_folder := select(self.cfg, "runner.init_from")) is not None:  # only some task types have this key
            self._start_from(start_folder)
        self._is_ready = True
        self.folder.mark("ready")

    def _start_from(self, path: str) -> None:
        """Loads the weights of `runner.init_from` without other state, and adds their source to provenance.json."""
        from rlhpc.checkpoint.start import WEIGHTS, find_weights

        folder = find_weights(path)
        self.groups["actor"].start_from(str(folder)).wait(self.timeout)
        checksum = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
        update_provenance(self.folder.paths, init_from={"folder": str(folder), "sha256": checksum})
        note(f"starts from the weights of {folder}")

    def _restore_run_state(self, checkpoint: Path) -> None:
        """Restores the run from a checkpoint: first the state of all ranks, then the state of the runner (`runner.json`)."""
        handles = {role: group.load(str(checkpoint)) for role, group in self.groups.items()}
        self.check_restored({role: call_handle.wait(self.timeout) for role, call_handle in handles.items()})
        try:
            saved_state = read_json((checkpoint / "runner.json").read_bytes())
            self.step, self.elapsed = int(saved_state["step"]), float(saved_state["elapsed_s"])
            self.stop_reason = str(saved_state["stop_reason"])
            self.load_state(saved_state)
            is_same_run = checkpoint.parent.resolve() == self.folder.paths.checkpoints.resolve()
            self.best.load_state(
                saved_state if is_same_run else {}
            )  # this run does not manage the checkpoints of another run
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{checkpoint / 'runner.json'}: cannot be read ({error!r})") from error
        self.best.link(self.folder.paths)
        self._saved_step = -1 if self.folder.foreign else self.step

    # -- the loop -------------------------------------------------------------------------------------------------

    @property
    @final
    def stall_limit_s(self) -> float | None:
        """Seconds without a finished step after which the run counts as stalled; None if `runner.alerts` has no hook."""
        runner = self.cfg.runner
        if not self._has_alerts:
            return None
        start_limit_s = runner.rendezvous_timeout_s + runner.step_timeout_s
        return stall_limit_s(self._step_durations_s, runner.alerts, start_limit_s)

    @property
    @final
    def max_recoveries(self) -> int:
        """Maximum number of restarts of restartable groups without a new checkpoint in between (`SessionPolicies`)."""
        session = Session.running()
        return session.failures.policies.max_recoveries if session else 0

    @final
    def run(
        self,
        on_step: Callable[[dict[str, float]], None] | None = None,
        on_lost: Callable[[str, Sequence[int], str], None] = lambda role, ranks, reason: None,
    ) -> dict[str, Any]:
        """Trains until the end of this start, or until a stop is requested.

        Args:
            on_step: Called with each step's row of metrics.
            on_lost: Called with role, ranks and reason when ranks were lost and start again.

        Returns:
            global_step, stop_reason, finished (whether this start reached its end), checkpoint, elapsed_s, and the fields of
            `result`.
        """
        if not self._is_ready:
            self.init_workers()
        folder = self.folder
        resumed_step = None if folder.resume.path is None else self.step
        while True:
            try:
                self._train(resumed_step, on_step)
                break
            except (WorkerFailed, StepFailed, ChannelError) as error:
                resumed_step = self._recover(error, on_lost)
        is_finished = self.stop_reason != "signal"
        reason = self.stop_reason or ("max_steps" if self.step >= folder.total else "segment_end")
        stop_reason = self.stop.reason if reason == "signal" else reason
        final_state = "finished" if is_finished and reason != "segment_end" else "stopped"
        run_result = self.result()
        returns = {"return": run_result["episode_return"]} if run_result.get("episode_return") is not None else {}
        folder.write_status(
            final_state,
            self.step,
            force=True,
            stop_reason=stop_reason,
            elapsed_s=self.elapsed,
            **returns,
            **self.best.facts(),
        )
        return {
            "global_step": self.step,
            **run_result,
            "stop_reason": reason,
            "finished": is_finished,
            "checkpoint": str(folder.paths.checkpoint(self.step)),
            "elapsed_s": self.elapsed,
        }

    def _train(self, resumed_step: int | None, on_step: Callable[[dict[str, float]], None] | None) -> None:
        """Runs the loop from the current step to the end of this start."""
        cfg, folder = self.cfg, self.folder
        recorded_config = public_config(plain(cfg, resolve=False), plain(cfg))
        self._started_s, self._elapsed_before = active_s(), self.elapsed
        # A resumed run that had reached its goal stops at once, unless the user has changed the goal.
        self.stop_reason = self._find_stop_reason() if self.stop_reason in ("stop_return", PATIENCE) else ""
        with (
            MetricLogger(
                folder.paths,
                cfg.runner.logger.logger_backends,
                resumed_step,
                plain(cfg.runner.logger.kwargs),
                recorded_config,
            ) as logger,
            ProgressBar(folder.end_step, self.step, name=cfg.runner.name) as bar,
        ):
            folder.write_status(
                "running", self.step, force=True, recoveries=self.recoveries, stall_after_s=self.stall_limit_s
            )  # fmt: skip
            self.begin()
            while self.step < folder.end_step and not self.stop_reason:
                self._count_save(self.saves.advance)
                self._check_walltime()
                if self.stop.requested:
                    self.stop_reason = "signal"
                    bar.message(f"rlhpc: {self.stop.reason}: saving step {self.step}; Ctrl-C again ends at once")
                    break
                row = self._run_timed_step()
                if on_step is not None:
                    on_step(row)
                if "first_step" not in folder.marks:
                    folder.mark("first_step")
                    folder.write_marks(current().registry.root)
                    if (session := Session.running()) is not None:
                        session.end_start()
                logger.log(self.step, row)
                bar.update(self.step, row)
                is_best = self.best.record(self.step, row)
                folder.step_facts = {"elapsed_s": self.elapsed, **self.facts(row), **self.best.facts()}
                folder.write_status("running", self.step, eta_s=bar.eta_s(), stall_after_s=self.stall_limit_s)
                self.stop_reason = self._find_stop_reason()
                if self.stop_reason == PATIENCE:
                    bar.message(f"rlhpc: ends at step {self.step}: {self.best.reason()}")
                if is_best or self._save_is_due():
                    self._save(logger)
            self._count_time()
            if self._saved_step != self.step:
                self._save(logger)
            self._count_save(self.saves.finish)
            self._trace.end()
            self._collect_energy()

    def _run_timed_step(self) -> dict[str, float]:
        self._trace.begin_step(self.step + 1)
        start_s = active_s()
        with span(f"step {self.step + 1}", "step", step=self.step + 1):
            row = self.one_step()
        step_s = active_s() - start_s
        self._step_durations_s.append(step_s)
        self._count_time()
        row["time/wall_s"] = self.elapsed
        if self._pause_s:
            row["time/save_s"], self._pause_s = self._pause_s, 0.0
        row.setdefault("time/step_s", step_s)
        row.update(self._collect_energy(time.monotonic()))
        return row

    def _collect_energy(self, now: float | None = None) -> dict[str, float]:
        """Returns the step's energy metrics, and writes the run's account if it is due; always without `now`."""
        if (session := Session.running()) is None:
            return {}
        answers, busy_ranks, records = session.pop_energy()
        if not answers and now is not None:  # no rank has a counter; the end's account says why
            return {}
        metrics = self._energy.collect(answers, busy_ranks)
        self._energy.write(records, now)
        return metrics

    def _count_time(self) -> None:
        self.elapsed = self._elapsed_before + active_s() - self._started_s

    # -- after a failure ------------------------------------------------------------------------------------------

    def _recover(self, error: RlhpcError, on_lost: Callable[[str, Sequence[int], str], None]) -> int:
        """Restarts the lost ranks, and continues from the newest checkpoint or, if no state was lost, from the current step.
        The other ranks stay alive.

        Returns:
            The step to continue from.

        Raises:
            RlhpcError: Recovery is impossible, so `error` is raised again: no group is restartable, a stop was requested, no
                checkpoint exists, or `max_recoveries` is exceeded.
        """
        session = Session.running()
        is_stateless = error.group in self.stateless
        if session is None or not session.failures.policies.restartable or self.stop.requested:
            raise error
        newest_checkpoint = newest_valid(self.folder.paths, checks_digests=False)
        pending_step = self.saves.pending_step
        if newest_checkpoint.path is None and not is_stateless and pending_step is None:
            raise error
        step = self.step if is_stateless else max(newest_checkpoint.step, pending_step or 0)
        self._num_recoveries_in_a_row = self._num_recoveries_in_a_row + 1 if step <= self._recovery_step else 1
        self._recovery_step = step
        if self._num_recoveries_in_a_row > self.max_recoveries:
            raise error
        lost_ranks = session.recover()
        ranks_text = ", ".join(f"{role}[{rank}]" for role, role_ranks in lost_ranks.items() for rank in role_ranks)
        reason = str(error).splitlines()[0]
        for role, role_ranks in lost_ranks.items():
            on_lost(role, role_ranks, reason)
        with session.recovering():
            self.rebuild(lost_ranks)
            self._count_save(self.saves.finish_or_drop)
            newest_path = newest_valid(self.folder.paths, checks_digests=False).path
            if pending_step is not None and newest_path != self.folder.paths.checkpoint(pending_step):
                self._saved_step = -1
            state_before = self.state()
            if self.unharmed(lost_ranks):
                note(f"{reason}; {ranks_text} start again, and step {self.step + 1} with them; nothing else is lost")
            elif newest_path is None:
                raise error
            else:
                note(f"{reason}; {ranks_text} start again from {newest_path.name}, all other ranks stay")
                self._restore_run_state(newest_path)
        self.count_lost(sum(map(len, lost_ranks.values())), state_before)
        self.recoveries += 1
        return self.step

    # -- when to stop ---------------------------------------------------------------------------------------------

    def _find_stop_reason(self) -> str:
        """Returns the reason to stop after this step: the goal or `runner.patience`; "" to continue."""
        return self.goal() or (PATIENCE if self.best.is_over() else "")

    def _check_walltime(self) -> None:
        """Requests a stop if the job's remaining walltime is too short for another step and a save."""
        reserve = max(self.cfg.runner.save_reserve_s, 2 * _compute_p95(self._save_durations_s))

        def is_enough(end_step: float | None) -> bool:
            return end_step is None or time.time() + _compute_p95(self._step_durations_s) + reserve <= end_step

        if not is_enough(end_of_job()) and not is_enough(end_of_job(queries_slurm=True)):
            self.stop.request("the job's walltime leaves no room for another step")

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _save_is_due(self) -> bool:
        save_interval = self.cfg.runner.save_interval
        return save_interval > 0 and self.step % save_interval == 0

    def _save(self, logger: MetricLogger) -> None:
        """Commits the metrics of the current step, and begins its checkpoint; the ranks may complete the checkpoint later."""
        with span("save", "save", step=self.step):
            self._begin_save(logger)

    def _begin_save(self, logger: MetricLogger) -> None:
        self._count_save(self.saves.finish)
        start_s = active_s()
        current().registry.check_current()  # raises if another driver has replaced this driver
        runner_state = {
            "step": self.step,
            **self.state(),
            **self.best.state(),
            "elapsed_s": self.elapsed,
            "stop_reason": self.stop_reason,
            "seed": self.cfg.runner.seed,
        }
        logger.commit()
        files: dict[str, bytes | Path] = {
            "runner.json": json.dumps(runner_state, indent=1).encode() + b"\n",
            CONFIG: self.folder.paths.config,
        }
        self.saves.begin(CheckpointWriter(self.folder.paths, self.step), files, self.result())
        self._saved_step = self.step
        self._pause_s += active_s() - start_s

    def _count_save(self, commit_save: Callable[[], float | None]) -> None:
        """Calls `commit_save`; if it committed a save, records the duration and prunes older checkpoints."""
        start_s = active_s()
        if (save_s := commit_save()) is not None:
            self._save_durations_s.append(save_s)
            self.best.link(self.folder.paths)
            prune(
                self.folder.paths, self.cfg.runner.keep_checkpoints, self._find_retained_steps(), checks_digests=False
            )
            self._pause_s += active_s() - start_s

    def _find_retained_steps(self) -> list[int]:
        """Returns the steps that pruning keeps for evaluation and conversion: the best step and the end of each segment."""
        planned_steps = segment_ends(self.cfg) if self.cfg.runner.segments > 1 else []
        return [*planned_steps, *self.folder.finished_segments(), *self.best.retained_steps(self.folder.paths)]
