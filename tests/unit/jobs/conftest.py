"""Fixtures of the tests of this folder."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhpc.jobs import segment as claim
from tests.unit.jobs.foreign_folder import SQUEUE
from tests.unit.jobs.local_jobs import fake_slurm, full_slurm, run  # noqa: F401 (fixtures)


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


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()
