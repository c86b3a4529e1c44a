"""Messages about jobs that are over and left no result."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.checkpoint import CheckpointWriter
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import JobReport, JobState
from rlhpc.jobs.segment import JobRecord, SegmentJournal
from rlhpc.jobs.waiter import Waiter

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
    said = str(waiter._lost_error())
    assert ("No module named 'torch'" if said_by == "job" else "no such policy") in said and "some line" not in said
    assert ("resumes from the last checkpoint" if saved else "starts anew: there is no checkpoint") in said
    assert ("cluster.time" in said) == (state is JobState.TIMEOUT and not saved)
