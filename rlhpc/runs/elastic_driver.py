"""Elastic ranks in the driver: the address for joining ranks, the attendance log, and the helper jobs."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from rlhpc.jobs.elastic.helper_job import submit
from rlhpc.jobs.elastic.helper_plan import ClusterState, Decision, HelperPlan, LiveHelperJob, Rule
from rlhpc.jobs.elastic.records import Attendance, HelperJobRecord, HelperRecord, end_helpers, helpers_name
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import SlurmProbe
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.jobs.shared_probe import SharedProbe
from rlhpc.jobs.signals import EXIT_REQUEUE, MAX_RESTARTS, StopRequest
from rlhpc.jobs.slurm import QueuedJob, scancel, seconds_to_start
from rlhpc.metrics import update_provenance
from rlhpc.runs.run_folder import note
from rlhpc.runtime.allocation import in_slurm_job
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.network import address_for_partition
from rlhpc.runtime.ownership import make_private
from rlhpc.runtime.slurm import give_up

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster
    from rlhpc.runtime.session import Session

log = logging.getLogger(__name__)

#: Maximum seconds to wait for Slurm's last answer at the end of a run.
_ANSWER_TIMEOUT_S = 2.0
#: Maximum seconds for a job to leave, after which the job is cancelled.
_LEAVE_TIMEOUT_S = 60.0
#: Weight of a new step in the moving average of the wait share.
_NEW_STEP_WEIGHT = 0.3
#: Slurm's states of jobs whose processes have ended or are ending.
_ENDING_STATES = ("COMPLETING", "STAGE_OUT")


class HelperJobs:
    """Helper jobs of a run.

    Args:
        paths: The run.
        plan: Plan of the jobs.
        max_useful: Maximum number of ranks that the run can use in addition to the initial ranks.
        on_job_end: Called with the id of an ended job. No rank of that job can be alive.
        count_present: Returns a dict from job id to number of present ranks; 0 if all ranks of the job have left.
        faulty_jobs: Ids of jobs in which a rank raised an error, for example because of a broken node.
    """

    def __init__(
        self,
        paths: RunPaths,
        plan: HelperPlan,
        max_useful: int,
        on_job_end: Callable[[str], None],
        count_present: Callable[[], Mapping[str, int]],
        faulty_jobs: Collection[str] = (),
    ) -> None:
        self.paths, self.plan = paths, plan
        self._max_useful, self._faulty_jobs = max_useful, faulty_jobs
        self._on_job_end, self._count_present = on_job_end, count_present
        self._rule, self._name = Rule(plan.bounds), helpers_name(paths, plan.group)
        self._record = HelperRecord.read(paths, plan.group)
        self._wait_share: float | None = None
        self._num_failed, self._failed_at = 0, 0.0
        self._last_seen: dict[str, float] = {}
        self._last_note = ""
        self._probe = SharedProbe(SlurmProbe(command_timeout_s=10.0))
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlhpc-helpers", daemon=True)

    def start(self) -> None:
        """Starts the thread that manages the jobs; without Slurm, prints a note instead."""
        if shutil.which("sbatch") is None:
            note("cluster.elastic: there is no sbatch here, so no ranks join; the run goes on without")
            return
        make_private(self.paths.submit, parents=True)
        self._thread.start()

    def record_step(self, row: Mapping[str, float]) -> None:
        """Records the share of a step's time in which the actor waited for rollouts; a high share calls for more ranks."""
        step_s = row.get("time/step_s", 0.0)
        if step_s > 0:
            wait_share = min(1.0, row.get("time/rollout_s", 0.0) / step_s)
            last_share = wait_share if self._wait_share is None else self._wait_share
            self._wait_share = (1 - _NEW_STEP_WEIGHT) * last_share + _NEW_STEP_WEIGHT * wait_share

    def stop(self, *, is_restarting: bool, is_killed: bool = False) -> None:
        """Stops the thread at the end of the driver, and ends the helper jobs.

        Args:
            is_restarting: True if another driver continues the run. The helper jobs stay alive and wait for that driver.
            is_killed: True if only Slurm knows whether another driver follows. Only queued helper jobs end.
        """
        self._stop_event.set()
        if self._thread.is_alive():
            self._thread.join(_ANSWER_TIMEOUT_S)
            if self._thread.is_alive():
                give_up(self._thread)
                self._thread.join(_ANSWER_TIMEOUT_S)
        self._probe.leave([job.id for job in self.jobs])
        if shutil.which("scancel") is not None and not is_restarting:
            end_helpers(self.paths, queued_only=is_killed, graceful=not is_killed, timeout_s=10.0)

    @property
    def jobs(self) -> list[HelperJobRecord]:
        """All recorded helper jobs, including ended jobs."""
        return list(self._record.jobs.values())

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop_event.is_set():
            try:
                self.update()
            except RlhpcError as error:
                self._print_note(str(error).splitlines()[0])
            except Exception as error:  # such as a full disk; an error here must not end the run
                self._print_note(f"{type(error).__name__}: {error}")
                log.debug("looking after the helpers", exc_info=True)
            self._stop_event.wait(self.plan.look_s)

    def _print_note(self, note_text: str) -> None:
        """Prints a note for the user, unless it repeats the previous note."""
        if note_text != self._last_note and not self._stop_event.is_set():
            self._last_note = note_text
            note(f"cluster.elastic: {note_text}")

    def update(self) -> None:
        """Reads the job queue, updates the records, and applies the rule's decision.

        The queue is the last answer to any command of this user on this host, so it is up to 10 seconds old.
        """
        queue, asked_at = self._probe.jobs_named(self._name)
        if queue is None:
            self._print_note("Slurm does not answer; the run goes on with the ranks that there are")
            return
        now = time.time()
        self._reconcile(queue, asked_at, now)
        decision = self._rule.decide(self._find_cluster_state(now))
        try:
            self._apply_decision(decision, now)
        finally:
            self._record.write(self.paths, self.plan.group)

    def _reconcile(self, queue: Sequence[QueuedJob], asked_at: float, now: float) -> None:
        """Updates the records of all jobs from the queue, and adds jobs of an earlier driver and unrecorded jobs.

        Args:
            queue: Jobs in the queue.
            asked_at: Time of the queue; it lacks jobs that were submitted later.
            now: Current time.
        """
        joined_ranks, record = self._count_present(), self._record
        queued_jobs = {job.id: job for job in queue}
        for job in queue:
            job_record = record.jobs.get(job.id) or HelperJobRecord(job.id, self.plan.group, self.plan.counted, now)
            job_record = job_record.observe(job, _count_joined(joined_ranks, job.id))
            record.jobs[job.id] = job_record.leave(now) if job.state in _ENDING_STATES else job_record
            self._last_seen[job.id] = asked_at
            if job.state in _ENDING_STATES:
                self._on_job_end(job.id)
        missing_jobs = [job for job in record.live() if job.id not in queued_jobs and job.submitted < asked_at]
        reports = self._probe.query([job.id for job in missing_jobs]) if missing_jobs else {}
        for live_job in missing_jobs:
            if not reports[live_job.id].conclusive:
                continue  # Slurm was not asked about it yet, or does not answer
            job_record = record.jobs[live_job.id] = live_job.finish(
                reports[live_job.id].state.value,
                _count_joined(joined_ranks, live_job.id),
                now=now,
                last_seen=self._last_seen.pop(live_job.id, live_job.submitted),
                walltime_s=60.0 * self.plan.minutes,
            )
            self._on_job_end(job_record.id)
            if job_record.id in self._faulty_jobs:
                self._num_failed, self._failed_at = self._num_failed + 1, now
                self._print_note(
                    f"job {job_record.id} has left after an error of a rank; `rlhpc status` says which, and on what node"
                )
            elif job_record.joined:
                self._num_failed = 0
            elif job_record.started is not None and not job_record.leave_reason:
                self._num_failed, self._failed_at = self._num_failed + 1, now
                log_file = self.paths.helpers / f"{job_record.id}_0_log.err"
                self._print_note(
                    f"job {job_record.id} ended ({job_record.state}) before a rank of it had joined; see {log_file}"
                )

    def _find_cluster_state(self, now: float) -> ClusterState:
        joined_ranks = self._count_present()
        jobs = [
            LiveHelperJob(
                job.id, "leaving" if job.leaving is not None else "running" if job.started is not None else "queued",
                joined_ranks.get(job.id, 0), job.hours(now),
            )
            for job in self._record.live()
        ]  # fmt: skip
        return ClusterState(
            now, jobs, self._wait_share, requested_ranks(self.paths, self.plan.group), self._record.spent(), self._max_useful,
            self._num_failed, self._failed_at,
        )  # fmt: skip

    def _apply_decision(self, decision: Decision, now: float) -> None:
        for job in self._record.live():
            if job.leaving is not None and now - job.leaving > _LEAVE_TIMEOUT_S:
                scancel(job.id, name=self._name)
        for job_id in decision.leave:
            job = self._record.jobs[job_id]
            self._record.jobs[job_id] = job.leave(now, decision.reason)
            if job.started is None:
                scancel(job_id, name=self._name)
            else:
                scancel(job_id, "--batch", "--signal=USR1", name=self._name)
        if not decision.submit:
            return
        if decision.only_soon:
            wait_s, start_note = seconds_to_start(dict(self.plan.options))
            if wait_s is None or wait_s > self.plan.start_within_s:
                self._rule.limit_to_live_jobs(len([job for job in self._record.live() if job.leaving is None]))
                self._print_note(f"no further ranks for now: {start_note}")
                return
        for _ in range(decision.submit):
            if self._stop_event.is_set():
                return
            job_id = submit(self.paths.helpers, self._name, self.plan, self.paths.root)
            self._record.jobs[job_id] = HelperJobRecord(job_id, self.plan.group, self.plan.counted, time.time())
            # Writes the record at once, so that it contains the job even if the driver is killed now.
            self._record.write(self.paths, self.plan.group)
        self._print_note(
            f"submitted {decision.submit} job{'s' if decision.submit > 1 else ''} of helpers: {decision.reason}"
        )


def _count_joined(present_ranks: Mapping[str, int], job_id: str) -> int:
    """Returns the number of a job's present ranks, but at least 1 if a rank joined and has left again; 0 if no rank joined."""
    return max(1, present_ranks[job_id]) if job_id in present_ranks else 0


def requested_ranks(paths: RunPaths, group: str) -> int | None:
    """Returns the number of ranks requested with `rlhpc scale`; None if there is no request."""
    ranks = (read_json_file(paths.requested_ranks) or {}).get(group) if paths.requested_ranks.exists() else None
    return ranks if isinstance(ranks, int) else None


def join_address(helper_plans: Sequence[HelperPlan], cluster: Cluster) -> str | None:
    """Returns the TCP address for ranks that join from other hosts; None if no ranks can join, or if the run has remote nodes
    and therefore listens already.
    """
    if not helper_plans or any(not node.is_local for node in cluster.nodes):
        return None
    try:
        return address_for_partition(dict(helper_plans[0].options).get("partition"), cluster.interface)
    except ConfigError as error:
        note(f"cluster.elastic: {error}; only ranks on this host can join")
        return None


class Elastic:
    """Elastic ranks of one start of a run.

    Args:
        plans: Plans of the helper jobs, from `helper_plans`.
        paths: The run.
        max_useful: Group → maximum number of ranks that the run can use in addition to the initial ranks.
        session: The run's session.
        attendance: Log of joining and leaving ranks, which the session writes.
    """

    def __init__(
        self,
        plans: Sequence[HelperPlan],
        paths: RunPaths,
        max_useful: Mapping[str, int],
        session: Session,
        attendance: Attendance,
    ) -> None:
        self._paths, self._attendance = paths, attendance
        self._helpers = [
            HelperJobs(
                paths,
                plan,
                max_useful.get(plan.group, plan.bounds.max_ranks),
                session.job_gone,
                session.membership.by_job,
                session.membership.faulty,
            )
            for plan in plans
        ]
        self._is_restarting = False

    def start(self) -> None:
        """Starts the management of the helper jobs; called just before the first step."""
        for helpers in self._helpers:
            helpers.start()

    def record_step(self, row: Mapping[str, float]) -> None:
        """Passes a step's metrics to the helper jobs of each group."""
        for helpers in self._helpers:
            helpers.record_step(row)

    def failed(self, error: BaseException) -> None:
        """Records a failure of this start. The driver job restarts the driver if the error is restartable."""
        self._is_restarting = (
            isinstance(error, RlhpcError) and error.restartable and os.environ.get(MAX_RESTARTS, "0") != "0"
        )

    def close(self, stop: StopRequest) -> None:
        """Ends the helper jobs after the session. If a signal ended this driver in a Slurm job, ends only queued helper jobs,
        because Slurm may requeue the driver's job. `rlhpc cancel` ends the helper jobs without the driver.
        """
        is_restarting = self._is_restarting or stop.exit_code == EXIT_REQUEUE
        for helpers in self._helpers:
            helpers.stop(is_restarting=is_restarting, is_killed=stop.exit_code > 128 and in_slurm_job(os.environ))
        self._attendance.close("its driver ended, and another takes the run up" if is_restarting else "the run ended")
        if self._helpers:
            jobs = [job.to_json() for helpers in self._helpers for job in helpers.jobs]
            update_provenance(self._paths, helpers=jobs)
