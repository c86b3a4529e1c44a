"""Claims of a run's segment."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from rlhpc.jobs import segment as claims
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import JobProbe, JobReport, JobState, ProcessId
from rlhpc.jobs.segment import Claim, SegmentJournal


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
