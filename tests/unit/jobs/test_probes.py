"""Job states, probes (Slurm's commands are small scripts on PATH here), and the driver's signals."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.jobs.probes import JobReport, JobState, LocalProbe, ProcessId, SlurmProbe
from rlhpc.runtime.host import process_space


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 123", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("OUT_OF_ME+", JobState.OUT_OF_MEMORY),
        ("PD", JobState.PENDING),
        (" running\n", JobState.RUNNING),
        ("NODE_FAIL", JobState.NODE_FAIL),
        ("RE+", JobState.UNKNOWN),  # REQUEUED, RESIZING, REVOKED, …
        ("COMPLETE", JobState.UNKNOWN),
        ("SOMETHING_NEW", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_parse(text: str, state: JobState) -> None:
    assert JobState.parse(text) is state


def test_every_state_says_what_it_means() -> None:
    ends = "COMPLETED FAILED CANCELLED TIMEOUT PREEMPTED NODE_FAIL OUT_OF_MEMORY BOOT_FAIL DEADLINE REVOKED"
    assert " ".join(s.value for s in JobState if s.is_terminal) == ends
    assert [s for s in JobState if s.is_success] == [JobState.COMPLETED]
    assert not JobState.UNKNOWN.is_terminal
    assert all(s.meaning.endswith(".") for s in JobState)
    assert len({s.code for s in JobState}) == len({s.meaning for s in JobState}) == len(JobState)


def test_process_identity() -> None:
    child = subprocess.Popen(["sleep", "60"])
    me = ProcessId.from_pid(child.pid)
    assert me.alive() and ProcessId.from_json(me.to_json()) == me
    assert ProcessId(me.pid, me.start + 1, me.host).alive() is False  # the pid was given to another process
    name, _, namespace = process_space().split("/")
    assert ProcessId(me.pid, me.start, f"{name}/other-boot/{namespace}").alive() is False
    assert ProcessId(me.pid, me.start, "elsewhere/boot/ns").alive() is None
    probe = LocalProbe({"1": me, "2": ProcessId(me.pid, me.start, "elsewhere/boot/ns")})
    reports = probe.query(["1", "2", "3"])
    assert reports["1"].state is JobState.RUNNING
    assert not reports["2"].conclusive and not reports["3"].conclusive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert me.alive() is False  # a zombie does not live
    child.wait()
    report = probe.query_job("1")
    assert report.conclusive and not report.state.is_success
    assert ProcessId.from_json(None) is None and ProcessId.from_json({"pid": "x"}) is None


Fake = Callable[[str, str], None]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts a command with that shell body on PATH; every call is noted in `calls`."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)

    def make(name: str, body: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> "{tmp_path}/calls"\n{body}\n')
        path.chmod(0o755)

    for name in ("squeue", "sacct", "scontrol"):
        make(name, f"echo '{name}: error: Unable to contact slurm controller' >&2; exit 1")
    return make


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def calls() -> list[str]:
    return Path("calls").read_text().splitlines() if Path("calls").exists() else []


def test_squeue_answers_for_all_jobs_at_once(fake: Fake) -> None:
    fake("squeue", "printf '12+0|PENDING|Priority\\n12+1|PENDING|Priority\\n13|RUNNING|None\\n99|RUNNING|None\\n'")
    clock = Clock()
    probe = SlurmProbe(interval_s=10, clock=clock)
    reports = probe.query(["12", "13"])
    assert reports == {
        "12": JobReport(JobState.PENDING, "Priority", "squeue"),
        "13": JobReport(JobState.RUNNING, "", "squeue"),
    }
    clock.now = 9.0
    probe.query(["12", "13"])
    assert len(calls()) == 1 and "--jobs=12,13" in calls()[0]
    clock.now = 11.0
    probe.query(["12", "13"])
    assert len(calls()) == 2


def test_sacct_knows_what_squeue_forgot(fake: Fake) -> None:
    fake("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    fake("sacct", "printf '12+0|COMPLETED|0:0\\n12+1|OUT_OF_ME+|0:125\\n13|COMPLETED|0:0\\n'")
    reports = SlurmProbe().query(["12", "13"])
    assert reports["12"].state is JobState.OUT_OF_MEMORY  # the worst component counts
    assert reports["13"] == JobReport(JobState.COMPLETED, "", "sacct")


def test_without_accounting(fake: Fake) -> None:
    fake("squeue", "exit 0")
    fake("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    fake(
        "scontrol", 'test $4 = 12 && echo "JobId=12 JobState=CANCELLED Reason=None" || { echo Invalid job id; exit 1; }'
    )
    reports = SlurmProbe(has_finished=lambda job_id: job_id == "14").query(["12", "13", "14"])
    assert reports["12"] == JobReport(JobState.CANCELLED, "", "scontrol")
    assert reports["13"].state is JobState.UNKNOWN and reports["13"].conclusive
    assert not reports["13"].state.is_success and not reports["13"].state.is_terminal
    assert reports["14"] == JobReport(JobState.COMPLETED, "", "marker")


def test_silence_is_not_an_answer_and_backs_off(fake: Fake) -> None:
    clock = Clock()
    probe = SlurmProbe(interval_s=10, max_interval_s=40, clock=clock)
    fake("squeue", "echo '12|RUNNING|None'")
    assert probe.query_job("12").conclusive
    fake("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    asked = []
    for clock.now in range(11, 211):
        before = len(calls())
        report = probe.query_job("12")
        assert report.state is JobState.RUNNING
        if len(calls()) > before:
            asked.append(clock.now)
    assert not report.conclusive and "does not answer" in report.reason
    assert [b - a for a, b in itertools.pairwise(asked)] == [20, 40, 40, 40, 40]
    fake("squeue", "echo '12|COMPLETED|None'")
    clock.now = 300.0
    assert probe.query_job("12").state.is_success
    done = len(calls())
    clock.now = 1000.0
    assert probe.query_job("12").state.is_success and len(calls()) == done  # an end needs no second question


def test_hanging_and_missing_commands(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake("squeue", "exec sleep 60")
    report = SlurmProbe(command_timeout_s=0.2).query_job("12")
    assert report.state is JobState.UNKNOWN and not report.conclusive
    monkeypatch.setenv("PATH", "/nowhere")
    assert not SlurmProbe().query_job("12").conclusive


def test_find_by_name(fake: Fake) -> None:
    fake("squeue", "echo 77+0; echo 77+1")
    assert SlurmProbe().find("rlhpc-x") == "77"
    assert "--name=rlhpc-x" in calls()[0]
    fake("squeue", "exit 0")
    assert SlurmProbe().find("rlhpc-x") is None


def test_one_list_of_the_users_jobs_answers_for_all(fake: Fake) -> None:
    """Further commands are for jobs that it lacks, and they are few however many those jobs are."""
    fake("squeue", "printf '12+0|RUNNING|None|n1|N/A|mine\\n12+1|RUNNING|None|n2|N/A|mine\\n13|FAILED|NonZero|||x\\n'")
    fake("sacct", "echo '14|COMPLETED|0:0'")
    fake("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    found = SlurmProbe().snapshot(["12", "13"])
    assert [job.id for job in found.jobs or []] == ["12+0", "12+1", "13"] and found.num_commands == 1
    assert found.reports == {
        "12": JobReport(JobState.RUNNING, "", "squeue"), "13": JobReport(JobState.FAILED, "NonZero", "squeue"),
    }  # fmt: skip
    assert len(calls()) == 1 and "--me" in calls()[0] and "--jobs" not in calls()[0]
    found = SlurmProbe().snapshot(["12", "14", *map(str, range(20, 40))])
    assert found.reports["14"] == JobReport(JobState.COMPLETED, "", "sacct") and found.num_commands == 6
    assert found.reports["20"].is_over and "24" not in found.reports, "asked about at the next query"
    assert len(calls()) == 7
    fake("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    fake("sacct", "exit 1")
    fake("scontrol", "exit 1")
    found = SlurmProbe().snapshot(["12"])
    assert found.jobs is None and not found.reports["12"].conclusive
