"""Cancelling a run: only its own jobs and processes are ended."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.jobs.cancel import cancel
from rlhpc.jobs.job_record import find_job, segment_job_name
from rlhpc.jobs.probes import ProcessId
from rlhpc.jobs.segment import Claim
from rlhpc.jobs.slurm import scancel
from rlhpc.runtime.errors import RlhpcError, UserError
from tests.unit.jobs.foreign_folder import claim_of, folder


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "SUSPENDED"])
def test_another_job_is_not_cancelled(tmp_path: Path, calls: Callable[..., list[str]], state: str) -> None:
    calls(state=state)
    files = folder(tmp_path)
    before = sorted(path.name for path in files.paths.submit.iterdir())
    with pytest.raises(UserError, match=r"^Slurm job 12 is named 'analysis', and this run's 'rlhpc-run-0-.*left alone"):
        cancel(files.paths)
    assert calls() == [] and sorted(path.name for path in files.paths.submit.iterdir()) == before


def test_the_runs_own_job_is_cancelled(tmp_path: Path, calls: Callable[..., list[str]]) -> None:
    files = folder(tmp_path)
    calls(name=segment_job_name(files))
    assert cancel(files.paths, grace_s=0.0) == ["segment 0: Slurm job 12 was cancelled"]
    assert calls() == ["scancel --batch --signal=TERM 12", "scancel 12"]


def test_a_job_named_in_the_claim_alone(
    tmp_path: Path, calls: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = folder(tmp_path, job_id="")
    claim_of(files, job_id="12")
    monkeypatch.setattr(Claim, "alive", lambda self, probe=None: True)  # as if its holder renewed it
    with pytest.raises(UserError, match="left alone"):
        cancel(files.paths)
    assert calls() == []


def test_a_job_that_is_looked_for_by_name(tmp_path: Path, calls: Callable[..., list[str]]) -> None:
    """The name is the folder's, not the one that the record gives."""
    files = folder(tmp_path, job_id="", phase="submitting")
    assert find_job(files) is None and cancel(files.paths) == [] and calls() == []


def test_a_slurm_that_does_not_answer_cancels_nothing(tmp_path: Path, calls: Callable[..., list[str]]) -> None:
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    with pytest.raises(RlhpcError, match="squeue does not say whose job 12 is"):
        scancel("12", name="analysis")
    assert calls() == []


@pytest.mark.parametrize("place", ["record", "job", "driver"])
def test_another_process_is_not_ended(
    tmp_path: Path, calls: Callable[..., list[str]], bystander: subprocess.Popen[bytes], place: str
) -> None:
    """A colleague on this host can write down what identifies any process of it."""
    identity = ProcessId.from_pid(bystander.pid)
    record = {"process": identity} if place == "record" else {}
    files = folder(tmp_path, executor="local", job_id=str(bystander.pid), **record)
    if place != "record":
        gone = {**identity.to_json(), "start": 1}
        claim_of(files, executor="local", job_id="1", **{"job": gone, place: identity.to_json()})
    with pytest.raises(UserError, match=f"process {bystander.pid}.*left alone"):
        cancel(files.paths, grace_s=0.0)
    assert bystander.poll() is None
