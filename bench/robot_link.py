"""Latency of the link to a robot outside the cluster, from an observation to its command, compared with a local robot.

    python -m bench.robot_link --ssh 'me@localhost' --repeat 3

A simulated robot observes on request and moves at `--hz` with constant commands. It runs in turn in this process
(`env_type: robot`), in another process over TCP, and in another process through ssh (`env_type: distant_robot`). All processes
run on one machine, so the figures do not include a network.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from omegaconf import OmegaConf

from bench.machine import spread, write
from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.envs.base import timing_row
from rlhpc.embodied.robots.joining import invite
from rlhpc.embodied.robots.robot_env import Observation, Robot, Verdict

ROOT = Path(__file__).resolve().parents[1]
SHOWS: dict[str, Any] = {"7 numbers": 7, "2 pictures of 128 x 128": {"state": 7, "rgb": [128, 128, 6]}}


class Still(Robot):
    """Robot that does not move."""

    action_space = spaces.Box(-1, 1, (7,), np.float32)

    def __init__(self, has_pictures: bool = False) -> None:
        state = spaces.Box(-np.inf, np.inf, (7,), np.float32)
        rgb = spaces.Box(0, 255, (128, 128, 6), np.uint8)
        self.observation_space = spaces.Dict({"state": state, "rgb": rgb}) if has_pictures else state
        self._obs = self.observation_space.sample()

    def reset(self, seed: int) -> None:
        """Returns the unchanged observation."""

    def act(self, action: np.ndarray) -> None:
        """Ignores the action."""

    def observe(self) -> Observation:
        """Returns the same observation with the present time."""
        return Observation(self._obs, time.monotonic())

    def judge(self, obs: Any, action: np.ndarray) -> Verdict:
        """Returns no reward."""
        return Verdict(0.0)

    def stop(self) -> None:
        """Does nothing: the robot does not move."""


def measure_latency(env: Any, num_steps: int) -> dict[str, float]:
    """Returns a row of metrics."""
    env.reset()
    for _ in range(num_steps):
        env.step(np.zeros((1, 7), np.float32))
    return timing_row(env.timing.pop_measurements())


def serve_robot(folder: Path, way: str, ssh: str, has_pictures: bool) -> None:
    """Starts the robot server, which joins once the run waits for a robot."""
    key = folder / f"{way}-{time.monotonic_ns()}.key"
    invite(folder / "meeting", key, slot=None, minutes=5, wait_s=60, run="bench")
    ssh_options = ["--ssh", ssh] if way == "ssh" else []
    subprocess.run(
        [sys.executable, "-m", "rlhpc.cli", "robot", "serve", str(key), "--robot", "bench.robot_link:Still",
         "--kwargs", f"has_pictures: {str(has_pictures).lower()}", *ssh_options],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True,
    )  # fmt: skip


def measure_link(way: str, shows: Any, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Measures one repetition of one link."""
    has_pictures, limits = isinstance(shows, dict), {"hz": options.hz, "stale_s": 5.0}
    if way == "the same process":
        section = EnvSideConfig(
            env_type="robot",
            env_id="bench.robot_link:Still",
            kwargs={**limits, "has_pictures": has_pictures},
            simulators=0,
        )
    else:
        bounds = {"low": [-1.0] * 7, "high": [1.0] * 7}
        kwargs = {**limits, "observes": shows, "acts": bounds, "folder": str(folder / "meeting"), "wait_s": 60.0}
        section = EnvSideConfig(env_type="distant_robot", env_id="still", kwargs=kwargs)
        threading.Thread(target=serve_robot, args=(folder, way, options.ssh, has_pictures), daemon=True).start()
    env = make_env(OmegaConf.structured(section), 1)
    try:
        return measure_latency(env, options.steps)
    finally:
        env.close()
        time.sleep(1.0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ssh", default="", help="arguments for an ssh that ends on this machine; none leaves it out")
    parser.add_argument("--hz", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    link_names = ["the same process", "TCP", *(["ssh"] if options.ssh else [])]
    rows: dict[str, dict[str, list[dict[str, float]]]] = {
        picture_mode: {link_name: [] for link_name in link_names} for picture_mode in SHOWS
    }
    with tempfile.TemporaryDirectory() as work_dir:
        for _ in range(options.repeat):
            for picture_mode, description in SHOWS.items():
                for link_name in link_names:
                    rows[picture_mode][link_name].append(measure_link(link_name, description, options, Path(work_dir)))
                    print(picture_mode, link_name, rows[picture_mode][link_name][-1], flush=True)
    figures: dict[str, Any] = {}
    for picture_mode, rows_by_link in rows.items():
        for link_name, way_rows in rows_by_link.items():
            names = ("latency_ms_p50", "latency_ms_p95", "latency_ms_max", "link_ms_p50", "late", "dropped")
            measured_names = [name for name in names if f"env/robot_{name}" in way_rows[0]]
            figures.setdefault(picture_mode, {})[link_name] = {
                name: spread([row[f"env/robot_{name}"] for row in way_rows]) for name in measured_names
            }
            p50 = statistics.median(row["env/robot_latency_ms_p50"] for row in way_rows)
            print(f"{picture_mode}, {link_name}: {p50:.2f} ms from an observation to its command")
    command_words = f"--ssh … --hz {options.hz:g} --steps {options.steps} --repeat {options.repeat}"
    print(write("robot_link", f"python -m bench.robot_link {command_words}", {"figures": figures}))


if __name__ == "__main__":
    main()
