"""Adapter of Snakemake's Slurm executor (snakemake-executor-plugin-slurm 2.8.0).

Snakemake forgets a job that a round of status queries neither returns as active nor reports as ended. While slurmdbd or
slurmctld restarts, all queries of a round fail. `check_active_jobs` then returns no job, and Snakemake waits for jobs that it
no longer queries. `keep_unanswered_jobs` returns such jobs as active.

The executor knows only the jobs that it submitted. Two Snakemakes that work on the same run would each submit every job.
`share_jobs` makes them share a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from rlhpc.jobs.lease import lease_lock
from rlhpc.jobs.probes import JobReport, JobState, ProcessId, SlurmProbe
from rlhpc.jobs.shared_files import read_json_file, write_json
from rlhpc.jobs.shared_probe import SharedProbe
from rlhpc.jobs.slurm import identify_job
from rlhpc.runtime.errors import RlhpcError

_PLUGIN = "snakemake_executor_plugin_slurm"
#: Attributes added to an executor: jobs that it has reported as ended, jobs that it has submitted, and its Slurm probe.
_REPORTED, _SUBMITTED, _PROBE = "_reported_jobs", "_submitted_jobs", "_attached_probe"
#: Marks a job that another Snakemake submitted, in `SubmittedJobInfo.aux`.
_ATTACHED = "attached"
#: Inputs up to this size are compared by content.
_MAX_DIGESTED_BYTES = 1 << 20
#: Final states of a job that do not mean failure.
_RESUBMITTED_STATES = (JobState.CANCELLED, JobState.PREEMPTED, JobState.REVOKED)
#: Types of parameters that the digest contains as text; Snakemake compares the same types between two runs of a rule.
_COMPARED_TYPES = (str, int, float, bool, complex, range, list, tuple, dict, set, frozenset, bytes, type(None))


def _find_unadapted_executor(log_mark: str) -> Any:
    """Returns the class of Snakemake's Slurm executor and marks the class as adapted; None if the class is not imported or
    already has the mark.

    Snakemake imports its executors before it reads a workflow.
    """
    executor = getattr(sys.modules.get(_PLUGIN), "Executor", None)
    if executor is None or hasattr(executor, log_mark):
        return None
    setattr(executor, log_mark, True)
    return executor


def keep_unanswered_jobs() -> None:
    """Makes Snakemake's Slurm executor return each job that it has not reported as ended."""
    executor = _find_unadapted_executor("_keeps_unanswered_jobs")
    if executor is None:
        return
    executor.report_job_success = _wrap_reporting(executor.report_job_success)
    executor.report_job_error = _wrap_reporting(executor.report_job_error)
    check_jobs = executor.check_active_jobs

    @functools.wraps(check_jobs)
    async def check_active_jobs(self: Any, active_jobs: list[Any]) -> AsyncIterator[Any]:
        reported_jobs = self.__dict__.setdefault(_REPORTED, {})
        open_jobs = {id(job): job for job in active_jobs}
        async for job in check_jobs(self, active_jobs):
            open_jobs.pop(id(job), None)
            yield job
        unanswered_jobs = [job for identity, job in open_jobs.items() if identity not in reported_jobs]
        reported_jobs.clear()
        if unanswered_jobs:
            self.logger.warning(f"Slurm gave no states of {len(unanswered_jobs)} jobs; they are asked about again")
        for job in unanswered_jobs:
            yield job

    executor.check_active_jobs = check_active_jobs


def _wrap_reporting(report: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(report)
    def note(self: Any, job_info: Any, *arguments: Any, **options: Any) -> None:
        # keeps the object alive, so that no later job gets the same id()
        self.__dict__.setdefault(_REPORTED, {})[id(job_info)] = job_info
        report(self, job_info, *arguments, **options)

    return note


def share_jobs() -> None:
    """Makes Snakemake's Slurm executor wait for a job that another Snakemake has submitted for the same outputs.

    A file next to the rule's log records the rule's Slurm job; a lock protects the file. No job is submitted if the recorded
    job has the same parameters and is alive or has written outputs that are newer than the inputs. Jobs of a rule without a
    log, grouped jobs and job arrays are not shared.
    """
    executor = _find_unadapted_executor("_shares_jobs")
    if executor is None:
        return
    submit, check = executor.run_job, executor.check_active_jobs
    cancel, report_submission = executor.cancel_jobs, executor.report_job_submission

    @functools.wraps(submit)
    def run_job(self: Any, job: Any) -> None:
        record = _record_of(job)
        if record is None:
            submit(self, job)
            return
        is_submitted = False
        try:
            record.parent.mkdir(parents=True, exist_ok=True)
            with lease_lock(record.with_suffix(".lease"), str(job.rule.name)):
                if (job_info := _find_shared_job(self, job, record)) is not None:
                    self.logger.info(
                        f"Job {job.jobid} waits for SLURM job {job_info.external_jobid}, submitted for it before."
                    )
                    self.report_job_submission(job_info)
                    return
                is_submitted = True
                submit(self, job)
                if job_id := self.__dict__.get(_SUBMITTED, {}).pop(id(job), None):
                    write_json(record, _record_content(job, job_id))
        except Exception as error:  # in a thread of Snakemake, which would wait for the job forever
            self.logger.warning(f"Other Snakemakes cannot know of job {job.jobid}: {error}")
            if not is_submitted:
                submit(self, job)

    @functools.wraps(report_submission)
    def report_job_submission(self: Any, job_info: Any, *arguments: Any, **options: Any) -> None:
        if not _is_attached(job_info):
            self.__dict__.setdefault(_SUBMITTED, {})[id(job_info.job)] = job_info.external_jobid
        report_submission(self, job_info, *arguments, **options)

    @functools.wraps(check)
    async def check_active_jobs(self: Any, active_jobs: list[Any]) -> AsyncIterator[Any]:
        attached_jobs = [job_info for job_info in active_jobs if _is_attached(job_info)]
        if attached_jobs:
            reports = await asyncio.to_thread(
                _probe_of(self).query, [job_info.external_jobid for job_info in attached_jobs]
            )
            for job_info in attached_jobs:
                if await _report_end(self, job_info, reports[job_info.external_jobid]):
                    _probe_of(self).leave([job_info.external_jobid])
                else:
                    yield job_info
        async for job_info in check(self, [job_info for job_info in active_jobs if not _is_attached(job_info)]):
            yield job_info

    @functools.wraps(cancel)
    def cancel_jobs(self: Any, active_jobs: list[Any]) -> None:
        _probe_of(self).leave([job_info.external_jobid for job_info in active_jobs if _is_attached(job_info)])
        # only the Snakemake that submitted a job cancels the job, as long as that Snakemake runs
        cancel(self, [job_info for job_info in active_jobs if not _is_attached(job_info) or _is_orphan(job_info)])

    executor.run_job, executor.report_job_submission = run_job, report_job_submission
    executor.check_active_jobs, executor.cancel_jobs = check_active_jobs, cancel_jobs


def _record_of(job: Any) -> Path | None:
    """Returns the file that records the Slurm job of a Snakemake job; None if the job cannot be shared."""
    logs = [] if job.is_group() else list(job.log)
    return Path(str(logs[0])).with_suffix(".job.json") if logs else None


def _compute_job_digest(job: Any) -> str:
    """Returns a digest of a job's rule, its outputs, and the parameters that restart the job when they change."""
    param_texts = sorted(repr(param) for param in job.non_derived_params if isinstance(param, _COMPARED_TYPES))
    return hashlib.sha256(json.dumps([job.rule.name, sorted(map(str, job.output)), param_texts]).encode()).hexdigest()


def _record_content(job: Any, job_id: str) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "digest": _compute_job_digest(job),
        "inputs": _compute_input_digests(job),
        "process": ProcessId.from_pid(os.getpid()).to_json(),
        "submitted": time.time(),
    }


def _compute_input_digests(job: Any) -> dict[str, str]:
    """Returns digests of the small inputs. Modification times do not suffice: each Snakemake that regards a job as finished
    touches the job's outputs, which are inputs of the next job.
    """
    digests = {}
    for path in job.input:
        with contextlib.suppress(OSError):
            if os.stat(path).st_size <= _MAX_DIGESTED_BYTES:
                digests[str(path)] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return digests


def _find_shared_job(executor: Any, job: Any, record: Path) -> Any:
    """Returns the job to wait for, as Snakemake's `SubmittedJobInfo`; None if a new job must be submitted."""
    from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

    job_content = read_json_file(record)
    if job_content is None or job_content.get("digest") != _compute_job_digest(job) or not job_content.get("job_id"):
        return None
    job_id = str(job_content["job_id"])
    report = SlurmProbe().query_job(job_id)
    if report.is_over and not (report.state.is_success and _outputs_are_current(executor, job, job_content)):
        return None
    return SubmittedJobInfo(job, external_jobid=job_id, aux={_ATTACHED: job_content, "slurm_logfile": None})


def _outputs_are_current(executor: Any, job: Any, job_content: dict[str, Any]) -> bool:
    """Returns whether a finished job is up to date: all outputs exist, and no input has changed since their creation."""
    if executor.workflow.dag.reason(job).forced:
        return False
    inputs_before, inputs_now = job_content.get("inputs") or {}, _compute_input_digests(job)
    try:
        oldest_mtime = min(os.stat(path).st_mtime for path in job.output)
        return all(
            path.is_ancient
            or os.stat(path).st_mtime <= oldest_mtime
            or (path in inputs_now and inputs_now[path] == inputs_before.get(path))
            for path in job.input
        )
    except OSError:
        return False


def _is_attached(job_info: Any) -> bool:
    return bool((job_info.aux or {}).get(_ATTACHED))


def _is_orphan(job_info: Any) -> bool:
    """Returns whether the Snakemake that submitted the job has ended, and Slurm reports a job of this rule from this folder.

    The second check is needed because the job's record may have been copied from elsewhere.
    """
    process = ProcessId.from_json(job_info.aux[_ATTACHED].get("process"))
    if process is None or process.alive() is not False:
        return False
    try:
        identity = identify_job(job_info.external_jobid)
    except RlhpcError:
        return False
    rule_name = f"rule_{job_info.job.rule.name}"
    return (
        identity is not None
        and identity.folder == os.getcwd()
        and (identity.comment == rule_name or identity.comment.startswith(f"{rule_name}_wildcards_"))
    )


def _probe_of(executor: Any) -> SharedProbe:
    probe: SharedProbe | None = executor.__dict__.get(_PROBE)
    if probe is None:
        probe = executor.__dict__[_PROBE] = SharedProbe(SlurmProbe())
    return probe


async def _report_end(executor: Any, job_info: Any, report: JobReport) -> bool:
    """Reports the end of a job that another Snakemake submitted; returns False if the job has not ended.

    Submits the job again if it was cancelled or preempted or Slurm has forgotten it: the job did not fail, and the other
    Snakemake may have ended.
    """
    if report.state.is_success:
        executor.report_job_success(job_info)
    elif report.state in _RESUBMITTED_STATES or (report.state is JobState.UNKNOWN and report.is_over):
        await asyncio.to_thread(executor.run_job, job_info.job)
    elif report.state.is_terminal:
        executor.report_job_error(
            job_info, msg=f"SLURM-job '{job_info.external_jobid}' failed, SLURM status is: '{report.state.value}'. "
        )
    else:
        return False
    return True
