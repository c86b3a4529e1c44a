"""Commands of a helper job's ranks: children of the job's script, or job steps with the options of `cluster.srun`."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from rlhpc.jobs.elastic.helper_job import HelperJob

#: Program that writes its arguments and some variables, instead of starting a rank; ends as it is told.
RECORDER = """#!/bin/bash
printf '%s\\n' "$@" >"$RECORDS/words-$$"
env | grep -E '^(SLURM_|CUDA_VISIBLE)' >"$RECORDS/environment-$$"
exit ${RECORDER_CODE:-0}
"""


def records(folder: Path, monkeypatch: pytest.MonkeyPatch, job: HelperJob) -> list[tuple[list[str], str]]:
    """Words and Slurm's variables of each process that the job starts; `srun` is a program that only records them."""
    program = folder / "srun"
    program.write_text(RECORDER)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("RECORDS", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    job()
    words = sorted(folder.glob("words-*"))
    return [(file.read_text().splitlines(), file.with_name(file.name.replace("words", "environment")).read_text())
            for file in words]  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_TRES_PER_TASK": "cpu:8",
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_with_options_each_rank_is_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the options and its share of cores and accelerators, and without the variables of the job's script."""
    job = HelperJob("/runs/a", "rollout", 2, 2, [], None, 60.0, ["--mpi=pmix", "--network=x"])
    found = records(tmp_path, monkeypatch, job)
    assert len(found) == 2
    masks = set()
    for words, environment in found:
        begin = words.index("env")
        assert words[:begin] == [
            "--job-name=rollout", "--overlap", "--mpi=pmix", "--network=x", "--nodes=1", "--ntasks=1", "--cpus-per-task=4",
            "--mem=0", "--gres=gpu:4", "--wait=0",
        ]  # fmt: skip
        masks.add(words[begin + 1])
        assert words[words.index("join") + 1] == "/runs/a"
        assert environment.splitlines() == ["SLURM_JOB_ID=7"]
    assert masks == {"CUDA_VISIBLE_DEVICES=4,5", "CUDA_VISIBLE_DEVICES=6,7"}


def test_without_options_it_is_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "container"
    job = HelperJob("/runs/a", "rollout", 1, 1, [str(program)], None, 60.0)
    shutil.copy(_recorder(tmp_path), program)
    [(words, environment)] = records(tmp_path, monkeypatch, job)
    assert words[words.index("join") + 1] == "/runs/a" and "SLURM_CPUS_PER_TASK=8" in environment
    assert "CUDA_VISIBLE_DEVICES=4" in environment.splitlines()


def test_a_killed_step_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun says 128 plus the signal; the job ends with that code."""
    monkeypatch.setenv("RECORDER_CODE", "137")
    with pytest.raises(SystemExit, match="137"):
        records(tmp_path, monkeypatch, HelperJob("/runs/a", "env", 1, 0, [], None, 60.0, ["--network=x"]))


def _recorder(folder: Path) -> Path:
    program = folder / "recorder"
    program.write_text(RECORDER)
    program.chmod(0o755)
    return program
