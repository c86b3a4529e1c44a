"""Claims of a run's segment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs import segment as claims
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import JobProbe, JobReport, JobState, ProcessId
from rlhpc.jobs.segment import Claim, SegmentJournal
from rlhpc.runtime.errors import DeadlineExceeded


@pytest.mark.parametrize(
    ("state", "conclusive", "alive"),
    [("RUNNING", True, True), ("SUSPENDED", True, True), ("RUNNING", False, False), ("PENDING", True, False),
     ("NODE_FAIL", True, False), ("UNKNOWN", True, False)],
)  # fmt: skip
def test_a_running_job_keeps_its_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, conclusive: bool, alive: bool
) -> None:
    """However long ago it was renewed: the job's node may be cut off from the filesystem for a while."""

    class Probe(JobProbe):
        def query(self, job_ids: Iterable[str]) -> dict[str, JobReport]:
            return dict.fromkeys(job_ids, JobReport(JobState.parse(state), "", "squeue", conclusive))

    files = SegmentJournal(RunPaths(tmp_path), 0)
    files.paths.submit.mkdir()
    claim = Claim(files, 1, "t", "27", "slurm", ProcessId(77, 5, "n1/other/x"), started=2.0)
    claim.path.write_text("{}")
    monkeypatch.setattr(claims, "LEASE_S", 0.2)  # nobody renews it
    assert claim.alive(Probe()) is alive


def test_a_claim_that_this_host_remembers_as_missing_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing has it. The claim before it is over, and would let a second job own the segment."""
    files = SegmentJournal(RunPaths(tmp_path), 0)
    files.paths.submit.mkdir()
    first = Claim.take(files, token="first", job_id="1", executor="local")
    assert first is not None
    first.update(released=True)
    second = Claim.take(files, token="second", job_id="2", executor="local")
    assert second is not None and second.number == 2
    read, misses = claims.read_json_file, iter(range(10))

    def remember_missing(path: Path) -> dict[str, Any] | None:
        return None if path == second.path and next(misses, None) is not None else read(path)

    monkeypatch.setattr(claims, "read_json_file", remember_missing)
    monkeypatch.setattr(claims, "_is_missing_or_empty", lambda path: True)
    assert Claim.take(files, token="third", job_id="3", executor="local") is None
    assert next(misses, None) is None, "it was read until it was there"
    monkeypatch.setattr(claims, "read_json_file", lambda path: None if path == second.path else read(path))
    monkeypatch.setattr(claims, "MISSING_NAME_S", 0.2)
    newest = Claim.newest(files)
    assert newest is not None and newest.number == 1, "one that never gets content is nobody's"


def test_one_process_submits_at_a_time(tmp_path: Path) -> None:
    files = SegmentJournal(RunPaths(tmp_path / "run"), 0)
    files.paths.submit.mkdir(parents=True)
    with files.submit_lock():
        assert files.lease.exists()
        with pytest.raises(DeadlineExceeded, match="holds"), files.submit_lock(timeout_s=0.3):
            pass
    assert not files.lease.exists()
    gone = subprocess.Popen(["true"])
    identity = ProcessId.from_pid(gone.pid)
    gone.wait()
    files.lease.write_text(json.dumps({"process": identity.to_json()}))
    with files.submit_lock(timeout_s=5.0):
        pass
    assert not list(files.paths.submit.glob("*stale*"))
