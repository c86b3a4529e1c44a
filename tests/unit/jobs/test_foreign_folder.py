"""A run folder from elsewhere names jobs and processes of this user that are none of the run's: each is left alone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs import segment as claim
from rlhpc.jobs import submit as submit_module
from rlhpc.jobs.cancel import cancel
from rlhpc.jobs.elastic.records import HelperJobRecord, HelperRecord
from rlhpc.jobs.job_record import JobRecord, find_job, segment_job_name
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import ProcessId
from rlhpc.jobs.segment import Claim, SegmentFiles
from rlhpc.jobs.slurm import hasten, scancel
from rlhpc.runs.elastic_driver import HelperJobs
from rlhpc.runtime.errors import RlhpcError, UserError
from tests.unit.runs.test_elastic_driver import helpers_of

#: Jobs of the user: a training of another program, and its array.
SQUEUE = """#!/bin/sh
echo "squeue $*" >> CALLS
case "$*" in
*--name=analysis*) echo 12;;
*--name=*) ;;
*"--jobs=12 "*%j*) echo '12|/home/a/analysis|mine|NAME';;
*"--jobs=12 "*%S*) echo '12|PENDING|BeginTime|2999-01-01T00:00:00';;
*"--jobs=12 "*) echo '12|STATE|BeginTime';;
*) echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Puts Slurm's commands on PATH; returns those that change a job."""
    monkeypatch.setattr(claim, "LEASE_S", 0.2)
    noted = tmp_path / "calls"
    noted.touch()
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def answer(name: str = "analysis", state: str = "RUNNING") -> None:
        bodies = {"squeue": SQUEUE.replace("CALLS", str(noted)).replace("NAME", name).replace("STATE", state)}
        bodies |= {c: f'#!/bin/sh\necho "{c} $*" >> {noted}\n' for c in ("scancel", "scontrol", "sacct", "sbatch")}
        for command, body in bodies.items():
            (folder / command).write_text(body)
            (folder / command).chmod(0o755)

    answer()

    def changes(**answers: str) -> list[str]:
        if answers:
            answer(**answers)
        lines = noted.read_text().splitlines()
        return [line for line in lines if line.startswith(("scancel", "scontrol update", "scontrol requeue"))]

    return changes


def folder(tmp_path: Path, name: str = "run", **fields: Any) -> SegmentFiles:
    files = SegmentFiles(RunPaths(tmp_path / name), 0)
    files.paths.submit.mkdir(parents=True)
    given = {"token": "t", "executor": "slurm", "job_name": "analysis", "job_id": "12", "phase": "submitted", **fields}
    JobRecord(0, 1, command=[], **given).write(files)
    return files


def claim_of(files: SegmentFiles, **fields: Any) -> None:
    elsewhere = {"pid": 7, "start": 5, "host": "n1/other/x"}
    files.claim(1).write_text(json.dumps({"token": "t", "executor": "slurm", "job": elsewhere, **fields}))


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
    hasten("12", "rlhpc-run-0-00000000")
    assert calls() == []
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexit 1\n")
    hasten("12", "analysis")
    assert calls() == []


def test_a_slurm_that_does_not_answer_cancels_nothing(tmp_path: Path, calls: Callable[..., list[str]]) -> None:
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    with pytest.raises(RlhpcError, match="squeue does not say whose job 12 is"):
        scancel("12", name="analysis")
    assert calls() == []


def test_helpers_in_the_record_are_not_trusted(tmp_path: Path, calls: Callable[..., list[str]]) -> None:
    """A driver that takes the folder up lets go only of jobs that Slurm knows by the helpers' name."""
    helpers: HelperJobs = helpers_of(tmp_path)
    foreign = HelperJobRecord("12", helpers.plan.group, 1, submitted=1.0, started=1.0, leaving=1.0)
    HelperRecord({"12": foreign}).write(helpers.paths, helpers.plan.group)
    helpers._record = HelperRecord.read(helpers.paths, helpers.plan.group)
    helpers.look()
    assert calls() == []


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("place", ["record", "job", "driver"])
def test_another_process_is_not_ended(
    tmp_path: Path, calls: Callable[..., list[str]], bystander: subprocess.Popen[bytes], place: str
) -> None:
    """A colleague on this host can write down what identifies any process of it."""
    identity = ProcessId.of(bystander.pid)
    record = {"process": identity} if place == "record" else {}
    files = folder(tmp_path, executor="local", job_id=str(bystander.pid), **record)
    if place != "record":
        gone = {**identity.to_json(), "start": 1}
        claim_of(files, executor="local", job_id="1", **{"job": gone, place: identity.to_json()})
    with pytest.raises(UserError, match=f"process {bystander.pid}.*left alone"):
        cancel(files.paths, grace_s=0.0)
    assert bystander.poll() is None


def test_a_driver_that_is_none_is_not_killed(
    tmp_path: Path, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = folder(tmp_path, executor="local")
    gone = {**ProcessId.of(bystander.pid).to_json(), "start": 1}
    claim_of(files, executor="local", job=gone, driver=ProcessId.of(bystander.pid).to_json())
    assert Claim.newest(files) is not None
    with pytest.raises(UserError, match="left alone"):
        submit_module._await_orphan(files, 0.0, open("/dev/null", "w"))  # noqa: SIM115
    assert bystander.poll() is None
