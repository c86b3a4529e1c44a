"""A simulated arm in a process that sees of a run only what comes through a real sshd: it joins, is lost, comes again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests import warm
from tests.distant_arm import Arm, sshd
from tests.eventually import wait_until

pytestmark = pytest.mark.long

CONFIG: dict[str, Any] = {
    "runner": {"task_type": "off_policy", "name": "arm", "max_steps": 10_000, "save_interval": -1,
               "logger": {"logger_backends": ["jsonl"]}},
    "cluster": {"num_nodes": 1, "accelerators_per_node": 0,
                "component_placement": {"actor": 0, "rollout": 0, "env": 0}},
    "algorithm": {"rollout_steps": 8, "update_to_data": 0.25, "replay_buffer": {"size": 10_000, "min_buffer_size": 64}},
    "env": {
        "train": {
            "env_type": "distant_robot", "env_id": "arm", "num_envs": 1, "max_episode_steps": 20,
            "kwargs": {"observes": 3, "acts": {"low": [-2], "high": [2]}, "hz": 50, "wait_s": 60},
        },
        "eval": {"num_envs": 1},
    },
    "actor": {"global_batch_size": 16, "model": {"model_type": "sac", "hidden_sizes": [8, 8]}},
}  # fmt: skip


@pytest.fixture
def login(tmp_path: Path) -> Iterator[str]:
    """What ssh needs for a login node."""
    with sshd(tmp_path) as words:
        yield words


def rows(run: Path) -> list[dict[str, float]]:
    with contextlib.suppress(OSError):
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return []


def test_it_joins_over_ssh_is_lost_comes_again_and_stops_when_the_run_is_killed(tmp_path: Path, login: str) -> None:
    root = tmp_path / "runs" / "arm"
    config = tmp_path / "arm.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, "runner": {**CONFIG["runner"], "run_dir": str(tmp_path / "runs")}}))
    rlhpc = [sys.executable, "-m", "rlhpc.cli"]
    with (tmp_path / "train.log").open("w") as log:
        train = warm.Popen([*rlhpc, "train", str(config)], stdout=log, stderr=log, start_new_session=True)

    def arrive(name: str) -> Arm:
        wait_until(lambda: (root / "registry" / "current").exists() or train.poll() is not None, 60)
        key = tmp_path / f"{name}.key"
        invited = warm.run(
            [*rlhpc, "robot", "invite", str(root), "--output", str(key), "--wait", "60"], capture_output=True, text=True
        )
        assert invited.returncode == 0, invited.stderr + (tmp_path / "train.log").read_text()
        return Arm(tmp_path / name, key, login)

    def status() -> str:
        return str(warm.run([*rlhpc, "status", str(root)], capture_output=True, text=True).stdout)

    def plays(count: int, what: Callable[[dict[str, float]], bool] = lambda row: True) -> None:
        before = len(rows(root))
        wait_until(lambda: sum(map(what, rows(root)[before:])) >= count, 60)

    try:
        first = arrive("first")
        plays(3)
        assert "env/robot_latency_ms_p95" in rows(root)[-1] and "arm has joined arm" in first.said
        assert "robot        arm (slot 0) has been there for" in status()
        wait_until(lambda: any("env/robot_link_ms_p50" in row for row in rows(root)), 60)
        tunnel = first.tunnel
        tunnel.kill()
        plays(1, lambda row: row["env/robot_lost"] == 1)
        plays(2)  # the same one is back
        assert "the robot is stopped, and tries to come back" in first.said and first.tunnel.pid != tunnel.pid
        tunnel = first.tunnel
        first.process.kill()
        first.process.wait()
        psutil.wait_procs([tunnel], 20)
        assert not tunnel.is_running()
        wait_until(lambda: "robot        arm (slot 0) is waited for" in status(), 20)
        second = arrive("second")
        plays(1, lambda row: row["env/robot_lost"] == 1)
        plays(2)
        tunnel = second.tunnel
        os.killpg(train.pid, signal.SIGKILL)
        assert second.process.wait(60) == 1 and not tunnel.is_running()
        assert "has not come back in 3 s (--patience)" in second.said and "the robot is stopped" in second.said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(train.pid, signal.SIGKILL)
        train.wait()
