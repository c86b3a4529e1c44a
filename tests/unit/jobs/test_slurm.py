"""Slurm queries and commands about jobs, with commands that print what Slurm prints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.jobs import slurm
from rlhpc.runtime.errors import RlhpcError, SubmitError, UserError

Commands = Callable[..., list[str]]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Returns a function that defines commands by their bash bodies, and returns the calls so far."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    calls.touch()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    slurm.forget_partitions()

    def define(**bodies: str) -> list[str]:
        for name, body in bodies.items():
            (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {calls}\n{body}\n')
            (folder / name).chmod(0o755)
        return calls.read_text().splitlines()

    return define


@pytest.mark.parametrize(
    ("environ", "ids"),
    [
        ({}, []),
        ({"SLURM_JOB_ID": "7"}, ["7"]),
        ({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "7", "SLURM_JOB_ID_HET_GROUP_1": "8"},
         ["7", "8"]),
        ({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "x"}, ["7"]),
    ],
)  # fmt: skip
def test_the_components_of_a_job(environ: dict[str, str], ids: list[str]) -> None:
    assert slurm.component_ids(environ) == ids


def test_steps_of_a_dead_driver_are_killed(commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)
    killed = tmp_path / "killed"
    commands(squeue=f"[ -e {killed} ] || echo -e '7.0\\n7.extern\\n7.batch\\n7.3'", scancel=f"touch {killed}")
    assert slurm.end_steps()
    assert [call for call in commands() if call.startswith("scancel")] == ["scancel --signal=KILL 7.0 7.3"]
    commands(squeue="exit 1")
    assert not slurm.end_steps(0.0)


def queue(rows: str, named: str = "mine") -> str:
    """Returns the body of a squeue that says whose job it is, and how it stands."""
    return f"case $* in *%Z*) echo '7|/folder||{named}';; *) printf '{rows}';; esac"


@pytest.mark.parametrize(
    ("rows", "named", "moved"),
    [
        ("7|PENDING|BeginTime|2999-01-01T00:00:00\\n8|PENDING|BeginTime|2999-01-01T00:00:00\\n", "mine", ["7", "8"]),
        ("7|PENDING|BeginTime|2000-01-01T00:00:00\\n", "mine", []),
        ("7|PENDING|Resources|2999-01-01T00:00:00\\n", "mine", []),
        ("7|COMPLETING|None|2999-01-01T00:00:00\\n", "mine", []),
    ],
    ids=["later", "sooner anyway", "waits for something else", "its processes still end"],
)
def test_the_start_of_a_requeued_job_is_moved_forward(
    commands: Commands, rows: str, named: str, moved: list[str]
) -> None:
    commands(squeue=queue(rows, named), scontrol="")
    slurm.bring_start_forward("7", "mine")
    updates = [call.split()[2] for call in commands() if call.startswith("scontrol update")]
    assert updates == [f"JobId={job}" for job in moved]


def test_a_job_of_another_name_is_not_hastened_or_cancelled(commands: Commands) -> None:
    commands(squeue=queue("7|PENDING|BeginTime|2999-01-01T00:00:00\\n", "theirs"), scontrol="", scancel="")
    slurm.bring_start_forward("7", "mine")
    with pytest.raises(UserError, match="Slurm job 7 is named 'theirs', and this run's 'mine': it was left alone"):
        slurm.scancel("7", name="mine")
    assert not [call for call in commands() if not call.startswith("squeue")]


def test_who_a_job_belongs_to(commands: Commands) -> None:
    commands(squeue="printf '7+0|/folder|note|a|b\\n8|/x||c\\n'")
    identity = slurm.identify_job("7")
    assert identity == slurm.JobIdentity("a|b", "/folder", "note")
    assert slurm.identify_job("7,8") is slurm.identify_job("--me") is slurm.identify_job("9") is None
    commands(squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert slurm.identify_job("7") is None and not slurm.is_job_named("7", "a")
    commands(squeue="echo 'Unable to contact controller' >&2; exit 1")
    with pytest.raises(RlhpcError, match="squeue does not say whose job 7 is: Unable to contact controller"):
        slurm.identify_job("7")


def test_a_job_that_ended_already_is_no_error(commands: Commands) -> None:
    commands(squeue=queue(""), scancel="echo 'Job 7 already completing or completed' >&2; exit 1")
    slurm.scancel("7", "--signal=USR1", name="mine")
    commands(scancel="echo 'Access denied' >&2; exit 1")
    with pytest.raises(RlhpcError, match="scancel 7 failed: Access denied"):
        slurm.scancel("7", name="mine")
    assert "scancel --signal=USR1 7" in commands()


def test_the_end_of_a_job_is_that_of_its_first_component(commands: Commands) -> None:
    commands(squeue="printf '2030-01-01T00:00:10\\n2030-01-01T00:00:00\\nN/A\\n'")
    assert slurm.end_of("7") == time.mktime((2030, 1, 1, 0, 0, 0, 0, 0, -1))
    commands(squeue="echo N/A")
    assert slurm.end_of("7") == math.inf
    commands(squeue="")
    assert slurm.end_of("7") is None


def test_when_a_job_would_start(commands: Commands) -> None:
    commands(sbatch="cat > /dev/null; echo 'sbatch: Job 12 to start at 2030-01-01T00:00:00 using 4 processors' >&2")
    assert slurm.would_start("#!/bin/bash\n") == slurm.EstimatedStart(time.mktime((2030, 1, 1, 0, 0, 0, 0, 0, -1)))
    seconds, words = slurm.seconds_to_start({"partition": "gpu"})
    assert seconds is not None and seconds >= 0 and "to start at" in words
    assert any("--test-only --partition=gpu --wrap=true" in call for call in commands())
    commands(
        sbatch="cat > /dev/null; echo 'allocation failure: Requested node configuration is not available' >&2; exit 1"
    )
    assert slurm.would_start("") == slurm.EstimatedStart(None, "Requested node configuration is not available")
    assert slurm.seconds_to_start({})[0] is None


@pytest.mark.parametrize(
    ("partition", "printed", "counts"),
    [
        ("gpu", "gpu|gpu:4\\ngpu|gpu:a100:2(S:0,2),nvme:1\\ngpu|gpu:4\\n", (2, 4)),
        ("gpu", "gpu|gpu:a100:2,gpu:v100:1\\ngpu|(null)\\n", (0, 3)),
        (None, "gpu|gpu:4\\ncpu*|(null)\\n", (0,)),
    ],
)
def test_numbers_of_gpus_in_a_partition(
    commands: Commands, partition: str | None, printed: str, counts: tuple[int, ...]
) -> None:
    commands(sinfo=f"printf '{printed}'")
    assert slurm.gpus_of_partition(partition) == counts


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'sinfo: error: no way to slurmctld' >&2; exit 1", "no way to slurmctld"),
        ("exit 0", "lists no such nodes"),
    ],
)
def test_a_partition_that_slurm_does_not_describe_is_an_error(commands: Commands, body: str, reason: str) -> None:
    commands(sinfo=body)
    with pytest.raises(SubmitError, match=reason):
        slurm.gpus_of_partition("gpu")


@pytest.mark.parametrize(
    ("partition", "printed", "gpus"),
    [("gpu", "gpu|gpu:4\\ngpu|gpu:a100:2\\n", True), ("gpu", "gpu|gpu:4\\ngpu|(null)\\n", False),
     (None, "gpu|gpu:4\\ncpu*|(null)\\n", False), (None, "gpu*|gpu:4\\ncpu|(null)\\n", True), ("gpu", "", False)],
)  # fmt: skip
def test_partitions_with_gpus(commands: Commands, partition: str | None, printed: str, gpus: bool) -> None:
    commands(sinfo=f"printf '{printed}'")
    assert slurm.has_gpus(partition) == gpus


def test_the_limits_of_an_account(commands: Commands) -> None:
    rows = (
        "root|||1.0|cpu=1", "mine|||cpu=1000,gres/gpu=600|cpu=400,gres/gpu=10",
        "mine|me|0.25|cpu=500|cpu=450", "other|me|0.5||",
    )  # fmt: skip
    commands(sshare="printf '%s\\n' " + " ".join(f"'{row}'" for row in rows))
    allowance = slurm.allowance(None)
    assert allowance is not None and allowance.account == "mine" and allowance.fair_share == 0.25
    assert allowance.minutes == {"cpu": (500.0, 450.0), "gres/gpu": (600.0, 10.0)}  # the tighter limit
    assert slurm.allowance("other") == slurm.Allowance("other", {}, 0.5)
    assert "--accounts=other" in commands()[-1]
    commands(sshare="exit 1")
    assert slurm.allowance(None) is None


def test_jobs_of_a_user(commands: Commands) -> None:
    lines = [
        "7|RUNNING|None|n1|2030-01-01T00:00:00|a|b",
        "8|PENDING|Priority||N/A|c",
        "CLUSTER: other",
        "9|COMPLETED|None",
    ]
    jobs = slurm.parse_queue(lines)
    assert [(job.id, job.state, job.reason, job.node, job.name) for job in jobs] == [
        ("7", "RUNNING", "None", "n1", "a|b"), ("8", "PENDING", "Priority", "", "c"), ("9", "COMPLETED", "None", "", ""),
    ]  # fmt: skip
    assert jobs[0].started is not None and jobs[1].started is None
    commands(squeue="echo 7")
    assert not slurm.has_no_jobs()
    commands(squeue="")
    assert slurm.has_no_jobs()
    commands(squeue="exit 1")
    assert not slurm.has_no_jobs()


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, ["scancel --me --name=h"]),
        ({"queued_only": True}, ["scancel --me --name=h --state=PENDING"]),
        (
            {"graceful": True},
            ["scancel --me --name=h --state=PENDING", "scancel --me --name=h --state=RUNNING --batch --signal=USR1"],
        ),
    ],
)
def test_jobs_are_ended_by_their_name(commands: Commands, options: dict[str, bool], calls: list[str]) -> None:
    commands(scancel="")
    assert slurm.end_named("h", **options) and commands() == calls  # type: ignore[arg-type]
    commands(scancel="exit 1")
    assert not slurm.end_named("h", **options)  # type: ignore[arg-type]


def test_another_job_inherits_nothing_of_this_ones() -> None:
    kept = {"SLURM_CONF": "/etc/slurm.conf", "HOME": "/h"}
    environ = {"SLURM_JOB_ID": "7", "SBATCH_X": "1", "CUDA_VISIBLE_DEVICES": "0", **kept}
    assert slurm.without_job_variables(environ) == kept


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("30:00", 30),
        ("30:01", 31),
        ("02:00:00", 120),
        ("1-12", 2160),
        ("1-12:30", 2190),
        ("1-12:00:01", 2161),
    ],
)
def test_walltimes_are_rounded_up_to_minutes(text: str, minutes: int) -> None:
    assert slurm.minutes_of(text) == minutes
