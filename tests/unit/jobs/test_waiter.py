"""Waiters: results, progress, failures, cancellations, deadlines, and jobs that are over and left no result."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhpc.checkpoint import CheckpointWriter
from rlhpc.jobs import waiter as waiter_module
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import JobProbe, JobReport, JobState, ProcessId
from rlhpc.jobs.segment import Claim, ExitRecord, JobRecord, SegmentJournal
from rlhpc.jobs.waiter import (
    DriverFailed,
    DriverRejected,
    FolderRemoved,
    JobCancelled,
    JobLost,
    Waiter,
    WaitInterrupted,
)
from rlhpc.runtime.errors import DeadlineExceeded
from tests.alert_hooks import KeptAlerts
from tests.eventually import wait_until

TRACEBACK = "Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'torch'\n"


@pytest.mark.parametrize("said_by", ["job", "driver"])
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("state", [JobState.FAILED, JobState.TIMEOUT])
def test_a_lost_job(tmp_path: Path, said_by: str, saved: bool, state: JobState) -> None:
    files = SegmentJournal(RunPaths(tmp_path / "run"), 0)
    for folder in (files.driver_err.parent, files.paths.submit):
        folder.mkdir(parents=True)
    log = files.paths.submit / "5_0_log.err"
    log.write_text(TRACEBACK if said_by == "job" else "srun: some line\n")
    files.driver_err.write_text("" if said_by == "job" else "rlhpc: error: no such policy\n")
    if saved:
        with CheckpointWriter(files.paths, 4) as writer:
            writer.add_bytes("runner.json", b"{}")
            writer.commit()
    record = JobRecord(
        0, 1, "token", "slurm", [], "name", job_id="5", phase="submitted", submitted=1.0, job_log=str(log)
    )
    waiter = Waiter(files, record, print)
    waiter._report = JobReport(state, "", "sacct")
    said = str(waiter._make_lost_error())
    assert ("No module named 'torch'" if said_by == "job" else "no such policy") in said and "some line" not in said
    assert ("resumes from the last checkpoint" if saved else "starts anew: there is no checkpoint") in said
    assert ("cluster.time" in said) == (state is JobState.TIMEOUT and not saved)


class Reports(JobProbe):
    """Answers of Slurm, by job id; one that it does not know is unknown for sure."""

    def __init__(self, **states: JobReport) -> None:
        self.states, self.left = {name.removeprefix("job"): report for name, report in states.items()}, list[str]()

    def query(self, job_ids: Iterable[str]) -> dict[str, JobReport]:
        unknown = JobReport(JobState.UNKNOWN, "", "squeue")
        return {job_id: self.states.get(job_id, unknown) for job_id in job_ids}

    def leave(self, job_ids: Iterable[str]) -> None:
        self.left += job_ids


RUNNING = JobReport(JobState.RUNNING, "None", "squeue")


@pytest.fixture
def files(tmp_path: Path) -> SegmentJournal:
    files = SegmentJournal(RunPaths(tmp_path / "run"), 0)
    for folder in (files.driver_err.parent, files.paths.submit, files.paths.segments):
        folder.mkdir(parents=True)
    return files


@pytest.fixture
def waiter(files: SegmentJournal, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Waiter]:
    monkeypatch.setattr(waiter_module, "_SETTLE_S", 0.1)
    record = JobRecord(0, 1, "token", "slurm", [], "name", job_id="5", phase="submitted", submitted=1.0)

    def build(reports: Reports, out: Callable[[str], None] = print, **options: Any) -> Waiter:
        options = {"poll_s": 0.0, "progress_s": 0.0, **options}
        return Waiter(files, record, out, find_probe=lambda record, files: reports, **options)

    return build


def claimed(files: SegmentJournal, number: int = 1, **fields: Any) -> None:
    claim = {"token": "token", "job_id": "5", "executor": "slurm", "job": {"pid": 7, "start": 5, "host": "n1/other/x"}}
    files.claim(number).write_text(json.dumps({**claim, "started": 1.0, **fields}))


def test_progress_is_told_until_the_result_is_there(files: SegmentJournal, waiter: Callable[..., Waiter]) -> None:
    lines, reports = list[str](), Reports(job5=JobReport(JobState.PENDING, "Priority", "squeue"))
    waiting = waiter(reports, lines.append)
    assert waiting.poll() is None and lines == ["run segment 0: Slurm job 5 pending: Priority"]
    reports.states["5"] = RUNNING
    claimed(files)
    status = {"step": 3, "max_steps": 9, "return": 12.5, "updated": 2.0}
    files.paths.driver_state.write_text(json.dumps(status))
    waiting._next_probe = 0.0
    assert waiting.poll() is None and lines[1:] == ["run segment 0: Slurm job 5 running: None, step 3/9, return 12.5"]
    waiting._next_probe = 0.0
    assert waiting.poll() is None and len(lines) == 2, "the same line is told once"
    files.marker.write_text(json.dumps({"global_step": 9}))
    assert waiting.wait() == {"global_step": 9} and reports.left == ["5"]
    assert waiting.answer({"global_step": 9})["state"] == "finished"


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"exit_code": 2, "message": "env.train.env_id: unknown"}, DriverRejected, "env.train.env_id: unknown"),
        ({"exit_code": 3, "message": "a rank was killed"}, DriverFailed, "a rank was killed\n  driver log: "),
        ({"exit_code": 1}, DriverFailed, "the driver ended with exit code 1 and said nothing"),
        ({"exit_code": 137, "signal": "SIGKILL", "message": "x"}, DriverFailed, "ended by SIGKILL; its last words:\nx"),
        ({"exit_code": 143, "cancelled": True}, JobCancelled, "Slurm job 5 was cancelled\n  no retry starts it again"),
    ],
)
def test_the_end_that_a_driver_recorded_is_the_error(
    files: SegmentJournal, waiter: Callable[..., Waiter], changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    end = {"token": "token", "job_id": "5", "attempt": 1, "exit_code": 1, "signal": "", "cancelled": False}
    files.write_exit(ExitRecord(**{**end, "message": "", "end_time": 2.0, **changes}))
    with pytest.raises(error) as failed:
        waiter(Reports(job5=RUNNING)).wait()
    assert said in str(failed.value)
    if isinstance(failed.value, DriverFailed):
        assert failed.value.exit_code == changes["exit_code"] and failed.value.log_path == str(files.driver_err)


def test_a_job_that_slurm_ended_is_lost_and_reported_once(
    files: SegmentJournal, waiter: Callable[..., Waiter], tmp_path: Path
) -> None:
    kept = KeptAlerts(tmp_path / "hook")
    files.config.write_text(json.dumps({"runner": {"alerts": {"command": kept.command}}}))
    with pytest.raises(JobLost, match=r"Slurm job 5 ended without a result \(NODE_FAIL\)"):
        waiter(Reports(job5=JobReport(JobState.NODE_FAIL, "", "sacct"))).wait()
    wait_until(lambda: bool(kept.rules()), 20.0)
    assert kept.rules() == ["failed"]
    with pytest.raises(JobCancelled):
        waiter(Reports(job5=JobReport(JobState.CANCELLED, "", "sacct"))).wait()
    assert files.is_cancelled("token"), "Slurm forgets it, and a retry must not"


def test_a_folder_that_was_removed_is_the_cause(files: SegmentJournal, waiter: Callable[..., Waiter]) -> None:
    files.paths.root.rename(files.paths.root.with_name("moved"))
    with pytest.raises(FolderRemoved, match=r"run folder .*run was removed while Slurm job 5 was pending or ran"):
        waiter(Reports(job5=JobReport(JobState.FAILED, "", "sacct"))).wait()


def test_a_silent_slurm_is_borne_for_a_while(
    waiter: Callable[..., Waiter], files: SegmentJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that Slurm has forgotten is over sooner than one of which it says nothing."""
    silent = Reports(job5=JobReport(JobState.UNKNOWN, "", "squeue", conclusive=False))
    monkeypatch.setattr(waiter_module, "_FORGOTTEN_S", 0.0)
    for reports, over in ((Reports(), True), (silent, False)):
        waiting = waiter(reports)
        assert waiting.poll() is None and (waiting._over_since is not None) is over
    claimed(files)
    waiting = waiter(silent)
    assert waiting.poll() is None
    os.utime(files.claim(1))  # as its job renews it
    waiting._next_probe = waiting._next_check = 0.0
    assert waiting.poll() is None
    assert waiting._query_job() == JobReport(JobState.RUNNING, source="claim")


def test_the_job_that_owns_the_segment_is_waited_for(files: SegmentJournal, waiter: Callable[..., Waiter]) -> None:
    job = ProcessId.from_pid(os.getpid())
    replace(waiter(Reports()).record, token="other", job_id="6").write(files)
    claimed(files, token="other", job_id="6", job=job.to_json())
    reports = Reports(job6=RUNNING)
    waiting = waiter(reports)
    assert waiting.poll() is None and waiting.record.job_id == "6" and reports.left == ["5"]
    assert waiting._query_job() == JobReport(JobState.RUNNING, source="proc"), "its process is on this host"


def test_a_job_that_ended_because_one_of_another_host_has_the_segment_is_not_lost(
    files: SegmentJournal, waiter: Callable[..., Waiter]
) -> None:
    """Only a renewal of the claim shows that the other job lives, and it comes after a while."""
    claimed(files, token="other", job_id="6")
    waiting = waiter(Reports(job5=JobReport(JobState.COMPLETED, "", "sacct"), job6=RUNNING))
    assert waiting.poll() is None and waiting._over_since is not None
    waiting._over_since -= 1.0  # the time for the last files is over
    assert waiting.poll() is None and waiting.record.job_id == "5"
    os.utime(files.claim(1))
    assert waiting.poll() is None and waiting.record.job_id == "6" and waiting._over_since is None
    files.marker.write_text(json.dumps({"global_step": 9}))
    assert waiting.wait() == {"global_step": 9}


def test_a_job_is_lost_if_the_one_of_another_host_is_not_heard_of(
    files: SegmentJournal, waiter: Callable[..., Waiter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiter_module, "LEASE_S", 0.2)
    claimed(files, token="other", job_id="6")
    with pytest.raises(JobLost, match="Slurm job 5 ended without a result"):
        waiter(Reports(job5=JobReport(JobState.COMPLETED, "", "sacct"))).wait()


def test_the_wait_ends_at_its_deadline_or_with_who_asked(waiter: Callable[..., Waiter]) -> None:
    with pytest.raises(DeadlineExceeded, match=r"not finished within 0 s; Slurm job 5 goes on"):
        waiter(Reports(job5=RUNNING), deadline_s=0.0).wait()
    gone = subprocess.Popen(["true"])
    asked_by = ProcessId.from_pid(gone.pid)
    gone.wait()
    with pytest.raises(WaitInterrupted, match=r"Slurm job 5 goes on with segment 0[^$]*rlhpc cancel"):
        waiter(Reports(job5=RUNNING), asked_by=asked_by).wait()


def test_a_driver_whose_status_stands_still_is_reported(
    files: SegmentJournal, waiter: Callable[..., Waiter], tmp_path: Path
) -> None:
    kept = KeptAlerts(tmp_path / "hook")
    files.config.write_text(json.dumps({"runner": {"alerts": {"command": kept.command}}}))
    claimed(files, driver={"pid": 9, "start": 5, "host": "n1/other/x"})
    status = {"pid": 9, "state": "running", "step": 4, "stall_after_s": 100.0, "updated": 2.0}
    files.paths.driver_state.write_text(json.dumps(status))
    waiting, now = waiter(Reports(job5=RUNNING)), time.monotonic()
    waiting._claim = Claim.newest(files)
    for seconds in (0.0, 99.0):
        waiting._check_stall(RUNNING, now + seconds)
    assert not kept.rules()
    waiting._check_stall(RUNNING, now + 126.0)
    wait_until(lambda: bool(kept.rules()), 20.0)
    [alert] = kept.read()
    assert (
        alert["rule"] == "stalled" and alert["step"] == 4 and "the driver does not report it itself" in alert["message"]
    )
