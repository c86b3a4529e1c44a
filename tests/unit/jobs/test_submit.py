"""Submission of a driver as a job of this machine or of Slurm: results, refusals, and drivers that are not this run's."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlhpc.jobs import submit as submit_module
from rlhpc.jobs.probes import ProcessId
from rlhpc.jobs.segment import Claim
from rlhpc.jobs.state import run_state
from rlhpc.jobs.submit import (
    JobCancelled,
    JobRecord,
    Submission,
    SubmitRequest,
    TemporaryRefusal,
    WaitInterrupted,
    WaitOptions,
    cancel,
    choose_executor,
    driver_command,
)
from rlhpc.runtime.errors import DeadlineExceeded, SubmitError, UserError
from tests.unit.jobs.foreign_folder import claim_of, folder
from tests.unit.jobs.local_jobs import LIMIT, Run, refuse


def test_a_driver_that_is_none_is_not_killed(
    tmp_path: Path, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = folder(tmp_path, executor="local")
    gone = {**ProcessId.from_pid(bystander.pid).to_json(), "start": 1}
    claim_of(files, executor="local", job=gone, driver=ProcessId.from_pid(bystander.pid).to_json())
    assert Claim.newest(files) is not None
    with pytest.raises(UserError, match="left alone"):
        submit_module._await_orphan(files, 0.0, open("/dev/null", "w"))  # noqa: SIM115
    assert bystander.poll() is None


def test_finishes_and_returns_at_once_the_next_time(run: Run) -> None:
    answer = run.submit()
    assert answer["state"] == "finished" and answer["result"] == {"global_step": 20}
    assert (run.paths.segment_logs(0) / "driver.out").read_text() == "driver starts\n"
    assert (run.paths.submit.stat().st_mode & 0o777) == 0o700
    record = json.loads(run.files.record.read_text())
    assert record["job_id"] == answer["job_id"] and record["phase"] == "submitted" and record["attempt"] == 1
    assert "step " in run.out.getvalue() and "/20, return 12.5, 1000 env steps/s, ETA 3s" in run.out.getvalue()
    start = time.monotonic()
    assert run.submit()["result"] == {"global_step": 20}
    assert time.monotonic() - start < 0.5
    assert len(run.starts()) == 1


def test_bad_arguments(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SubmitError, match="found 'pbs', allowed are auto, local, slurm"):
        run.submit(executor="pbs")
    (tmp_path / "file").touch()
    with pytest.raises(SubmitError, match="cannot write to the run folder"):
        Submission(SubmitRequest(tmp_path / "file" / "run", ["true"], executor="local")).run()


def test_sbatch_refuses(run: Run, fake_slurm: Path) -> None:
    (fake_slurm / "sbatch").write_text(
        "#!/bin/bash\necho 'sbatch: error: invalid partition specified: gpx' >&2; exit 1\n"
    )
    with pytest.raises(SubmitError, match=r"could not be submitted \(slurm\): .*invalid partition specified: gpx"):
        run.submit(executor="slurm", slurm={"partition": "gpx"})
    with pytest.raises(SubmitError, match="could not be submitted"):
        run.submit(executor="slurm", slurm={"partitoin": "gpu"})


def test_waiting_for_room_ends(run: Run, full_slurm: Path) -> None:
    refuse(full_slurm, LIMIT)
    with pytest.raises(DeadlineExceeded, match="waited 1 s for room; nothing was submitted"):
        run.submit(executor="slurm", deadline_s=1.0)
    with pytest.raises(TemporaryRefusal):
        run.submit(executor="slurm", patient=False)
    assert run_state(run.paths) == ("waiting", "not submitted yet: QOSMaxSubmitJobPerAccountLimit; waits for room")
    threading.Timer(1.0, cancel, (run.paths,)).start()
    with pytest.raises(JobCancelled):
        run.submit(executor="slurm")
    assert run_state(run.paths)[0] == "cancelled"
    # a limit that lets in none of this user's jobs, though none is there
    (full_slurm / "squeue").write_text("#!/bin/bash\n")
    refuse(full_slurm, LIMIT.replace("PerAccount", "PerUser"))
    with pytest.raises(SubmitError, match="will never be let in"):
        run.submit(executor="slurm")
    refuse(full_slurm, "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy")
    with pytest.raises(SubmitError, match="could not be submitted"):
        run.submit(executor="slurm")


def test_a_submission_that_does_not_wait_names_the_job_and_the_next_one_attaches(run: Run) -> None:
    decisions: list[bool] = []
    submitted = run.submit(30.0, enabled=False, on_decision=decisions.append)
    attached = run.submit(30.0, enabled=False, on_decision=decisions.append)
    assert (submitted["state"], attached["state"]) == ("submitted", "attached") and decisions == [False, True]
    assert submitted["job_id"] == attached["job_id"] and submitted["result"] is None
    record = JobRecord.read(run.files)
    assert record is not None and record.process is not None and record.process.alive()
    run.claim()
    cancel(run.paths)
    with pytest.raises(JobCancelled, match="was cancelled"):
        run.submit(enabled=False, attempt=2)
    gone = subprocess.Popen(["true"])
    requester = ProcessId.from_pid(gone.pid)
    gone.wait()
    with pytest.raises(WaitInterrupted, match=r"who asked for segment 0 of .* is gone"):
        Submission(SubmitRequest(run.root, ["true"], executor="local"), WaitOptions(requester=requester)).run()


def test_slurm_is_chosen_outside_of_its_jobs_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert choose_executor("auto") == "local" and choose_executor("slurm") == "slurm"
    (tmp_path / "sbatch").touch(mode=0o755)
    assert choose_executor("auto") == "slurm"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert choose_executor("auto") == "local"


def test_the_command_of_a_driver_names_the_segment_and_the_file_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = driver_command("a.yaml", ["runner.seed=3"], segment=2)
    assert command[0] == sys.executable
    assert command[-5:] == ["train", str(tmp_path / "a.yaml"), "--segment", "2", "runner.seed=3"]
    assert "--segment" not in driver_command("a.yaml", segment=None)
