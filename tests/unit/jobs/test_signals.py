"""Stop requests, requeues and signals of a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhpc.jobs.signals import EXIT_REQUEUE, StopRequest, end_of_job


def test_stop_request() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop.requested and stop.reason == "" and stop.exit_code == 0
        signal.raise_signal(signal.SIGUSR2)
        assert stop.requested and "walltime" in stop.reason and stop.exit_code == EXIT_REQUEUE
        signal.raise_signal(signal.SIGTERM)  # to end is more than to go on later
        assert "SIGTERM" in stop.reason and stop.exit_code == 143
        signal.raise_signal(signal.SIGUSR2)
        assert stop.exit_code == 143
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
    own = StopRequest()
    own.request("no room for another step before the job's end")
    own.request("later")
    assert own.reason.startswith("no room") and own.exit_code == EXIT_REQUEUE


def test_end_of_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert end_of_job() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1795000000")
    assert end_of_job() == 1795000000.0
    monkeypatch.setenv("SLURM_JOB_END_TIME", "Unknown")
    assert end_of_job() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", "0")
    assert end_of_job() is None


def test_an_end_that_is_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """squeue has the last word; where it says nothing, the last known end counts. No limit is not an unknown one."""
    said = tmp_path / "said"
    (tmp_path / "squeue").write_text(f"#!/bin/bash\n[ ! -e {said} ] || cat {said}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1795000000")
    said.write_text("2027-01-02T03:04:05\n2027-01-02T03:04:04\n")
    later = time.mktime(time.strptime("2027-01-02T03:04:04", "%Y-%m-%dT%H:%M:%S"))
    assert (end_of_job(), end_of_job(queries_slurm=True), end_of_job()) == (1795000000.0, later, later)
    said.unlink()
    assert end_of_job(queries_slurm=True) == later
    said.write_text("N/A\n")
    assert end_of_job(queries_slurm=True) is None
    said.unlink()
    assert end_of_job(queries_slurm=True) is None
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert end_of_job() == 1795000000.0, "of another job"


def test_workers_ignore_the_jobs_signals() -> None:
    code = (
        "import os, signal; from rlhpc.runtime.worker_process import ignore_job_signals; ignore_job_signals();"
        "[os.kill(os.getpid(), s) for s in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)];"
        "print('alive', signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout == "alive True\n", done.stderr
