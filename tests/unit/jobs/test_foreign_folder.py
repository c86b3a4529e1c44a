"""A run folder from elsewhere names jobs and processes of this user that are none of the run's: each is left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.jobs.cancel import cancel
from rlhpc.jobs.elastic.records import HelperJobRecord, HelperRecord
from rlhpc.jobs.job_record import segment_job_name
from rlhpc.jobs.slurm import bring_start_forward, scancel
from rlhpc.runs.elastic_driver import HelperJobs
from tests.unit.jobs.foreign_folder import claim_of, folder
from tests.unit.runs.test_elastic_driver import helpers_of


def test_a_folder_whose_name_is_a_list(tmp_path: Path) -> None:
    assert "," not in segment_job_name(folder(tmp_path, "a,analysis,b"))


@pytest.mark.parametrize("job_id", ["--me", "--user=root", "12,13", "12 13", "12_[0-9]", "-12", "", "12\n13", "x"])
def test_what_is_no_job_id_reaches_no_command(tmp_path: Path, calls: Callable[..., list[str]], job_id: str) -> None:
    files = folder(tmp_path, job_id=job_id)
    claim_of(files, job_id=job_id)
    cancel(files.paths, grace_s=0.0)
    scancel(job_id, name="analysis")
    assert calls() == []


def test_a_requeued_job_of_another_run_does_not_start_sooner(tmp_path: Path, calls: Callable[..., list[str]]) -> None:
    calls(state="PENDING")
    bring_start_forward("12", "rlhpc-run-0-00000000")
    assert calls() == []
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexit 1\n")
    bring_start_forward("12", "analysis")
    assert calls() == []


def test_helpers_in_the_record_are_not_trusted(tmp_path: Path, calls: Callable[..., list[str]]) -> None:
    """A driver that takes the folder up lets go only of jobs that Slurm knows by the helpers' name."""
    helpers: HelperJobs = helpers_of(tmp_path)
    foreign = HelperJobRecord("12", helpers.plan.group, 1, submitted=1.0, started=1.0, leaving=1.0)
    HelperRecord({"12": foreign}).write(helpers.paths, helpers.plan.group)
    helpers._record = HelperRecord.read(helpers.paths, helpers.plan.group)
    helpers.update()
    assert calls() == []
