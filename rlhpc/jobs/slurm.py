"""Slurm queries and commands for jobs: steps, end times, start estimates, limits and cancellation."""

from __future__ import annotations

import functools
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhpc.runtime.allocation import gpus_in
from rlhpc.runtime.errors import RlhpcError, SubmitError, UserError
from rlhpc.runtime.slurm import CommandOutput, ask
from rlhpc.runtime.text import short_repr


def component_ids(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the job ids of this job's components; only the job's id for a job without components."""
    het_size_text = environ.get("SLURM_HET_SIZE") or "0"
    ids = [
        environ.get(f"SLURM_JOB_ID_HET_GROUP_{k}", "")
        for k in range(int(het_size_text) if het_size_text.isdigit() else 0)
    ]
    return [job for job in ids if job] or [job for job in [environ.get("SLURM_JOB_ID", "")] if job]


def end_steps(timeout_s: float = 20.0) -> bool:
    """Kills the job steps that a dead driver left, and waits for their end; returns whether all steps have ended."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.5
    jobs = component_ids()
    while True:
        squeue_output = ask("squeue", "--noheader", "--steps", f"--jobs={','.join(jobs)}", "--format=%i")
        steps = (
            [step_id for step_id in squeue_output.text.split() if step_id.rpartition(".")[2].isdigit()]
            if squeue_output.ok
            else []
        )
        if squeue_output.ok and not steps:
            return True
        if steps:
            ask("scancel", "--signal=KILL", *steps)
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 4.0)


#: Seconds until the new start of a requeued job. A node refuses a job whose credential is older, by the node's clock, than the
#: end of the job's previous start, and the job would be lost. Slurm waits two minutes; this delay tolerates differing clocks.
_START_DELAY_S = 15


def bring_start_forward(job_id: str, name: str) -> None:
    """Moves the start of a requeued job forward; Slurm delays the start by two minutes by default.

    All processes of the job must have ended (state PENDING, no longer COMPLETING). Leaves a job alone if its name differs or
    Slurm does not report the job.
    """
    try:
        if not is_job_named(job_id, name):
            return
    except RlhpcError:
        return
    squeue_output = ask("squeue", "--noheader", f"--jobs={job_id}", "--format=%A|%T|%r|%S")
    rows = [line.split("|") for line in squeue_output.lines if line.count("|") == 3]
    if not squeue_output.ok or not all(row[1:3] == ["PENDING", "BeginTime"] for row in rows):
        return
    soon_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + _START_DELAY_S))
    for job, _, _, start_time in rows:
        if start_time > soon_text:
            ask("scontrol", "update", f"JobId={job.strip()}", f"StartTime={soon_text}")


def requeue_without(job_id: str, node: str) -> bool:
    """Requeues this job and excludes a node; returns whether Slurm accepted. If so, Slurm soon ends this process.

    The requeue ends every process of the job. A child process that ignores SIGTERM therefore makes the update that follows.
    """
    if "Requeue=1" not in ask("scontrol", "show", "job", job_id).text:
        return False
    job_ids = " ".join(component_ids())
    script = (
        f"trap '' TERM; scontrol requeue {job_id} || exit 1; for job in {job_ids}; do for i in 1 2 3 4 5 6 7 8; do "
        f'scontrol update JobId="$job" ExcNodeList={node} && break; sleep 0.5; done; done'
    )
    return ask("bash", "-c", script, timeout_s=30, has_session=True).ok


def end_of(job_id: str) -> float | None:
    """Returns the Unix time at which Slurm ends a job; infinite without a limit, None if Slurm does not answer."""
    time_texts = ask("squeue", "--noheader", f"--jobs={job_id}", "--format=%e").text.split()
    end_times = [parse_time(time_text) for time_text in time_texts]  # one per component; N/A without a limit
    return min((math.inf if end_time is None else end_time for end_time in end_times), default=None)


_START_MESSAGE = re.compile(r"Job \d+ to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")


@dataclass(frozen=True)
class EstimatedStart:
    """Start estimate of Slurm for a job that is not submitted.

    Attributes:
        time: Unix time of the start; None if the job would not start.
        reason: Slurm's reason why the job would not start.
    """

    time: float | None
    reason: str = ""


def would_start(script: str) -> EstimatedStart:
    """Returns the start estimate of `sbatch --test-only` for a batch script.

    Slurm estimates from the time limits of the running and waiting jobs. Those jobs may end earlier, and other jobs may be
    scheduled before this job.
    """
    sbatch_output = ask("sbatch", "--test-only", stdin=script, timeout_s=60)
    start_time = _parse_start(sbatch_output)
    if not sbatch_output.ok or start_time is None:
        return EstimatedStart(
            None, sbatch_output.last_line.removeprefix("allocation failure: ").removeprefix("sbatch: error: ")
        )
    return EstimatedStart(start_time)


@functools.cache
def _ask_gres(partition: str | None) -> CommandOutput:
    """Asks `sinfo` for the GRES of a partition's nodes, once in the life of this process."""
    return ask("sinfo", "--noheader", *([f"--partition={partition}"] if partition else []), "--format=%P|%G")


def forget_partitions() -> None:
    """Makes `gpus_of_partition` ask Slurm again."""
    _ask_gres.cache_clear()


def gpus_of_partition(partition: str | None) -> tuple[int, ...]:
    """Returns the numbers of GPUs that nodes of a partition (None: the default one) have, by `sinfo`, in ascending order.

    Raises:
        SubmitError: Slurm does not report them; the message has its reason.
    """
    sinfo_output = _ask_gres(partition)
    rows = [line.split("|") for line in sinfo_output.lines if "|" in line]
    rows = rows if partition else [row for row in rows if row[0].endswith("*")]
    if not sinfo_output.ok or not rows:
        raise SubmitError(sinfo_output.last_line if not sinfo_output.ok else "sinfo lists no such nodes")
    return tuple(sorted({gpus_in(row[1]) or 0 for row in rows}))


def has_gpus(partition: str | None) -> bool:
    """Returns whether all nodes of a partition (None: the default one) have GPUs; False if Slurm does not report it."""
    try:
        return gpus_of_partition(partition)[0] > 0
    except SubmitError:
        return False


def _parse_start(answer: CommandOutput) -> float | None:
    """Parses the Unix time of a job's start from the output of `sbatch --test-only`; returns None if there is no time."""
    match = _START_MESSAGE.search(answer.error + answer.text)
    return parse_time(match[1]) if match else None


@dataclass(frozen=True)
class Allowance:
    """Resource limits of an account.

    Attributes:
        account: Name of the account.
        minutes: TRES (`cpu`, `gres/gpu`, …) → (allowed minutes, used minutes).
        fair_share: This user's fair-share factor, 0 to 1; None if the site does not use fair share.
    """

    account: str
    minutes: Mapping[str, tuple[float, float]]
    fair_share: float | None


def allowance(account: str | None) -> Allowance | None:
    """Returns the resource limits of an account and of this user in that account; None if Slurm does not report them.

    Args:
        account: Name of the account; None for this user's first account.
    """
    account_filter = [f"--accounts={account}"] if account else []
    columns = "Account,User,FairShare,GrpTRESMins,GrpTRESRaw"
    sshare_output = ask("sshare", "--noheader", "--parsable2", f"--format={columns}", *account_filter)
    rows = [[cell.strip() for cell in line.split("|")] for line in sshare_output.lines if line.count("|") == 4]
    user_rows = [row for row in rows if row[1]]
    name = account or next((row[0] for row in user_rows if row[0] != "root"), None)
    if not sshare_output.ok or name is None:
        return None
    minutes_by_resource: dict[str, tuple[float, float]] = {}
    for _, _, _, limits_text, used_text in (row for row in rows if row[0] == name):
        used_minutes = _parse_tres(used_text)
        for resource, limit_minutes in _parse_tres(limits_text).items():
            remaining_minutes = limit_minutes - used_minutes.get(resource, 0.0)
            if (
                resource not in minutes_by_resource
                or remaining_minutes < minutes_by_resource[resource][0] - minutes_by_resource[resource][1]
            ):
                minutes_by_resource[resource] = (limit_minutes, used_minutes.get(resource, 0.0))
    fair_shares = [row[2] for row in user_rows if row[0] == name]
    try:
        return Allowance(name, minutes_by_resource, float(fair_shares[0]) if fair_shares and fair_shares[0] else None)
    except ValueError:
        return Allowance(name, minutes_by_resource, None)


def _parse_tres(tres_text: str) -> dict[str, float]:
    """Parses a TRES list such as `cpu=100,gres/gpu=600` into a dict of numbers."""
    assignments = (assignment.partition("=") for assignment in tres_text.split(","))
    return {name: float(count_text) for name, _, count_text in assignments if count_text.replace(".", "", 1).isdigit()}


def has_no_jobs() -> bool:
    """Returns whether this user has no job in the queue. A limit on the number of jobs then never admits the refused job."""
    squeue_output = ask("squeue", "--noheader", "--me", "--format=%i")
    return squeue_output.ok and not squeue_output.text.strip()


@dataclass(frozen=True)
class JobIdentity:
    """Origin of a job, as Slurm reports it. A run folder and its job ids may come from another user.

    Attributes:
        name: Name of the job.
        folder: The folder in which it was submitted.
        comment: The submitter's comment.
    """

    name: str
    folder: str
    comment: str


_JOB_ID = re.compile(r"\d+(_\d+)?")


def identify_job(job_id: str) -> JobIdentity | None:
    """Returns the origin of a job; None if Slurm does not know it.

    Raises:
        RlhpcError: Slurm did not answer.
    """
    if not _JOB_ID.fullmatch(job_id):  # such as a list of ids or an option of squeue
        return None
    squeue_output = ask("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%i|%Z|%k|%j")
    if not squeue_output.ok and "nvalid job id" not in squeue_output.error:
        raise RlhpcError(f"squeue does not say whose job {job_id} is: {squeue_output.last_line}")
    for line in squeue_output.lines:
        leader, *columns = line.strip().split("|", 3)
        if len(columns) == 3 and leader.partition("+")[0] == job_id:  # the first component of a het job
            folder, comment, name = columns
            return JobIdentity(name, folder, comment)
    return None


def is_job_named(job_id: str, name: str) -> bool:
    """Returns whether Slurm knows a job with this id and this name.

    A run folder may contain the id of another run's job, so callers check the name before each command that changes a job.

    Raises:
        UserError: The job has another name.
        RlhpcError: Slurm did not answer.
    """
    identity = identify_job(job_id)
    if identity is not None and identity.name != name:
        raise UserError(
            f"Slurm job {job_id} is named {short_repr(identity.name)}, and this run's {short_repr(name)}: it was left alone. "
            "A run folder that was moved or copied from elsewhere names jobs that are not its own; "
            f"`scancel {job_id}` ends the job all the same"
        )
    return identity is not None


def scancel(job_id: str, *options: str, name: str) -> None:
    """Ends or signals a job; ignores a job that has already ended.

    Args:
        job_id: The job's id.
        options: Options of the command.
        name: Expected name of the job.

    Raises:
        UserError: The job has another name.
        RlhpcError: Slurm refused, or did not answer.
    """
    if not is_job_named(job_id, name):
        return
    scancel_output = ask("scancel", *options, job_id, timeout_s=60)
    if not scancel_output.ok and "already completing or completed" not in scancel_output.error:
        raise RlhpcError(f"scancel {job_id} failed: {scancel_output.last_line}")


@dataclass(frozen=True)
class QueuedJob:
    """Job that Slurm's controller knows: in the queue, running, or ended a few minutes ago.

    Attributes:
        state: Slurm's state: PENDING, RUNNING, COMPLETING, …
        reason: Reason why the job waits.
        node: Node on which the job runs; "" for a job that does not run.
        started: Unix time of the start; None for a job that does not run.
        name: Name of the job.
    """

    id: str
    state: str
    reason: str
    node: str
    started: float | None
    name: str = ""


#: Arguments of the `squeue` that lists all jobs of this user, for `parse_queue`.
QUEUE_ARGUMENTS = ("--noheader", "--me", "--states=all", "--format=%i|%T|%r|%N|%S|%j")


def parse_queue(lines: Iterable[str]) -> list[QueuedJob]:
    """Parses the output of `squeue` with `QUEUE_ARGUMENTS`; ignores malformed lines."""
    rows = [line.strip().split("|", 5) for line in lines if "|" in line]
    padded_rows = [(*row, *[""] * (6 - len(row))) for row in rows]
    return [
        QueuedJob(job, job_state, reason, node, parse_time(start_text) if node else None, name)
        for job, job_state, reason, node, start_text, name in padded_rows
    ]


def parse_time(time_text: str) -> float | None:
    """Parses a local time in Slurm's format into Unix time; returns None for other texts such as N/A."""
    try:
        return time.mktime(time.strptime(time_text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def end_named(name: str, *, queued_only: bool = False, graceful: bool = False, timeout_s: float = 20.0) -> bool:
    """Ends this user's jobs with a name; returns whether all commands succeeded.

    Args:
        name: Name of the jobs.
        queued_only: End only pending jobs.
        graceful: End pending jobs, and send SIGUSR1 to running jobs, which then leave by themselves.
        timeout_s: Maximum seconds for Slurm to answer.
    """
    if shutil.which("scancel") is None:
        return False
    selections = [["--state=PENDING"]] if queued_only or graceful else [[]]
    if graceful:
        selections.append(["--state=RUNNING", "--batch", "--signal=USR1"])
    argv = ("scancel", "--me", f"--name={name}")
    outputs = [ask(*argv, *options, timeout_s=timeout_s, has_session=True) for options in selections]
    return all(output.ok for output in outputs)


def seconds_to_start(options: Mapping[str, Any]) -> tuple[float | None, str]:
    """Returns (seconds until Slurm would start a job with these sbatch options, Slurm's message).

    The seconds are an estimate from `sbatch --test-only`; None if there is no estimate.
    """
    option_words = [f"--{name}={option_value}" for name, option_value in options.items()]
    sbatch_output = ask(
        "sbatch", "--test-only", *option_words, "--wrap=true", environment=without_job_variables(os.environ)
    )
    start_time = _parse_start(sbatch_output)
    return (None if start_time is None else max(0.0, start_time - time.time())), sbatch_output.last_line


_JOB_VARIABLE = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC|SUBMITIT)_(?!CONF$)")


def without_job_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns a copy of an environment without the variables of this process's job, for the submission of another job."""
    return {
        name: variable_value
        for name, variable_value in environ.items()
        if not _JOB_VARIABLE.match(name) and name not in _ACCELERATOR_MASKS
    }


_ACCELERATOR_MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


def minutes_of(time: str) -> int:
    """Returns the minutes of a walltime in Slurm's syntax: `90`, `30:00`, `02:00:00`, `1-12`, `1-12:00:00`. Rounds up, as
    Slurm does.
    """
    days_text, has_days, clock = time.rpartition("-")
    clock_fields = [int(clock_field) for clock_field in clock.split(":")]
    if has_days:  # days-hours[:minutes[:seconds]]
        hours_text, minutes_text, seconds_text = (*clock_fields, 0, 0)[:3]
    elif len(clock_fields) < 3:  # minutes[:seconds]
        hours_text, minutes_text, seconds_text = 0, *(*clock_fields, 0)[:2]
    else:
        hours_text, minutes_text, seconds_text = clock_fields
    return int(days_text or 0) * 1440 + hours_text * 60 + minutes_text + (seconds_text + 59) // 60
