"""A run's driver as seen from the login node, where a driver on a compute node listens to its own host only."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from rlhpc.cli import main
from rlhpc.cli.arguments import require_driver, run_paths
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import ProcessId
from rlhpc.jobs.segment import JobRecord, SegmentJournal
from rlhpc.jobs.state import owner
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.registry import MEMBERS, ROBOTS, CurveKeys, GenerationFolder

NODE = "gpu1"


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run on one node as its files show it elsewhere: a driver without a TCP port, and a robot that is waited for."""
    paths = RunPaths(tmp_path / "arm")
    paths.submit.mkdir(parents=True)
    paths.config.write_text("{}")
    files = SegmentJournal(paths, 0)
    JobRecord(0, 1, "t", "slurm", [], "name", job_id="27", phase="submitted", submitted=1.0).write(files)
    claimed = ProcessId(77, 5, f"{NODE}/a-boot/pid:[1]").to_json()
    claim = {"token": "t", "job_id": "27", "executor": "slurm", "job": claimed, "driver": {**claimed, "pid": 78}}
    files.claim(1).write_text(json.dumps({**claim, "number": 1, "started": 2.0}))
    status = {"state": "running", "pid": 78, "host": NODE, "started": 3.0, "updated": time.time(), "step": 1}
    paths.driver_state.write_text(json.dumps(status))
    registry = GenerationFolder.create(paths.registry, "27-0")
    registry.save_keys(CurveKeys.fresh())
    away = {"host": f"{NODE}/a-boot", "ipc": "ipc:///tmp/rlhpc-0-abc/driver", "tcp": "", "bulk": ""}
    registry.put(MEMBERS, "driver", {"group": "driver", "node": NODE, "data": away})
    (registry.root / ROBOTS).mkdir()
    place = {"robot": "arm", "slot": 0, "address": "127.0.0.1", "port": 5, "node": NODE, "run": "arm"}
    (registry.root / ROBOTS / "slot_0.json").write_text(json.dumps({**place, "there": False, "since": 1.0}))
    return paths


def slurm_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """Puts a squeue on PATH for which job 27 has that state."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "squeue").write_text(f"#!/bin/sh\necho '27|{state}|None'\n")
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_robot_is_invited_from_another_host(run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm_says(tmp_path, monkeypatch, "RUNNING")
    assert main(["robot", "invite", str(run.root), "--output", str(tmp_path / "arm.key")]) == 0
    key = json.loads((tmp_path / "arm.key").read_text())
    assert key["place"]["robot"] == "arm" and key["place"]["node"] == NODE


@pytest.mark.parametrize("state", ["PENDING", "SUSPENDED", "COMPLETING", "CANCELLED", "NODE_FAIL"])
def test_a_driver_elsewhere_that_is_not_at_work_hears_nothing(
    run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    slurm_says(tmp_path, monkeypatch, state)
    with pytest.raises(ConfigError, match="its driver does not answer; `rlhpc status"):
        require_driver(run)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_run_that_is_closed_to_the_user_is_named_with_its_owner(run: RunPaths, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    run.root.chmod(0o700)
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:  # a new process could not read this interpreter's own files
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            run_paths(str(run.root))
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as answer:
        assert answer.read() == (
            f"ConfigError: {run.root} cannot be opened: Permission denied; the folder belongs to {owner(run)}"
        )
