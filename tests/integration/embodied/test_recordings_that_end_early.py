"""`rlhpc record` on a robot that a person leads, ended in the middle of an episode: the data are kept, and the robot stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from gymnasium import spaces

from rlhpc.embodied.data.recording import incomplete_datasets
from rlhpc.embodied.data.trajectories import read_trajectories
from rlhpc.embodied.robots.driver import Observation
from tests.eventually import wait_until
from tests.logging_arm import LoggingArm, kinds, read_log
from tests.unit.embodied.interventions.hid_files import Pipe, attached

ROOT = Path(__file__).parents[3]
EPISODE = 30


class CameraArm(LoggingArm):
    """An arm with a camera, which is lost once the file `unplugged` exists. Nobody lets it move again."""

    observation_space = spaces.Dict(
        {"state": spaces.Box(-10, 10, (2,), np.float32), "rgb": spaces.Box(0, 255, (8, 8, 3), np.uint8)}
    )

    def __init__(self, path: str, unplugged: str) -> None:
        super().__init__(path, ready=False)
        self.unplugged = Path(unplugged)

    def observe(self) -> Observation:
        observation = super().observe()
        obs = {"state": observation.obs}
        if not self.unplugged.exists():
            obs["rgb"] = np.full((8, 8, 3), self.acts % 256, np.uint8)
        return Observation(obs, observation.taken_at)

    def unsafe(self, obs: object) -> str:
        return ""


def still(obs: dict[str, np.ndarray]) -> np.ndarray:
    return np.asarray(obs["state"])


@pytest.fixture
def gamepad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = {
        "defaults": [str(ROOT / "configs/base/sac.yaml")],
        "runner": {"name": "arm", "max_steps": 1},
        "env": {
            "train": {
                "env_type": "robot", "env_id": f"{__name__}:CameraArm", "max_episode_steps": EPISODE, "num_envs": 1,
                "kwargs": {"hz": 20.0, "stale_s": 5.0, "path": str(tmp_path / "log"), "unplugged": str(tmp_path / "gone")},
            },
            "eval": {"num_envs": 1, "num_episodes": 2},
        },
        "actor": {"model": {"model_type": "sac"}},
    }  # fmt: skip
    Path("arm.yaml").write_text(yaml.safe_dump(run))
    with attached("gamepad", tmp_path) as pipe:
        yield pipe


def launch(pipe: Pipe, output: str) -> subprocess.Popen[str]:
    """Starts a recording."""
    who = f"{{gamepad: {{device: {pipe.path}, descriptor: {pipe.descriptor}, window: false, hz: 20}}}}"
    to = [] if output.endswith(".h5") else ["--to", "lerobot", "--videos", "--task", "reach"]
    words = ["record", "--expert", f"{__name__}:still", "--config", "arm.yaml", "--episodes", "3", "--output", output]
    return subprocess.Popen(
        [sys.executable, "-m", "rlhpc.cli", *words, "--intervene", who, *to],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def start(pipe: Pipe, output: str) -> subprocess.Popen[str]:
    """Starts a recording, and returns it in its second episode, which a person leads."""
    process = launch(pipe, output)
    wait_until(lambda: process.poll() is not None or kinds(read_log("log")).count("act") > 3, 60)
    pipe.send(2)
    wait_until(lambda: process.poll() is not None or kinds(read_log("log")).count("act") > EPISODE + 10, 60)
    assert process.poll() is None, process.communicate()[1]
    return process


def unplug(process: subprocess.Popen[str], pipe: Pipe) -> None:
    pipe.detach()
    pipe.path.unlink()


def lose_camera(process: subprocess.Popen[str], pipe: Pipe) -> None:
    Path("gone").touch()


def send(*signals: signal.Signals) -> Callable[[subprocess.Popen[str], Pipe], None]:
    def end(process: subprocess.Popen[str], pipe: Pipe) -> None:
        for signum in signals:
            process.send_signal(signum)

    return end


ENDS = {
    "device": (unplug, "the gamepad disconnected while a person led"),
    "camera": (lose_camera, "rgb"),
    "Ctrl-C twice": (send(signal.SIGINT, signal.SIGINT), "rlhpc: interrupted"),
    "cancel": (send(signal.SIGTERM), "rlhpc: interrupted"),
    "line": (send(signal.SIGHUP), "rlhpc: interrupted"),
    "walltime": (send(signal.SIGUSR2, signal.SIGTERM), "rlhpc: interrupted"),
}


@pytest.mark.parametrize(("name", "output"), [*((name, "a.h5") for name in ENDS), ("device", "a")])
def test_what_was_recorded_is_kept(gamepad: Pipe, name: str, output: str) -> None:
    """An episode in progress is apart from the complete ones, and a stop of the robot is said once."""
    end, reason = ENDS[name]
    process = start(gamepad, output)
    end(process, gamepad)
    if end in (unplug, lose_camera):  # the robot waits for a person, who ends the recording
        wait_until(lambda: kinds(read_log("log"))[-1] == "stop", 20)
        num_acts = kinds(read_log("log")).count("act")
        time.sleep(0.3)
        assert kinds(read_log("log")).count("act") == num_acts
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and kinds(read_log("log"))[-2:] == ["stop", "close"], errors
    assert errors.count(reason) == 1 and "Traceback" not in errors, errors
    lines = errors.splitlines()
    assert len(lines) == (2 if end in (unplug, lose_camera) else 1), errors
    assert lines[-1].startswith(f"rlhpc: interrupted; complete episodes: 1 in {output}; ended early: 1 (")
    [complete] = read_trajectories(output)
    [early_path] = incomplete_datasets(Path(output))
    [early] = read_trajectories(early_path)
    num_steps = len(early["actions"])
    assert len(complete["actions"]) == EPISODE and f"({num_steps} steps) in {early_path}" in lines[-1]
    num_acts = kinds(read_log("log")).count("act")
    assert num_acts - EPISODE - 1 <= num_steps <= num_acts - EPISODE
    assert early["truncations"].tolist() == [False] * (num_steps - 1) + [True]
    assert not early["terminations"].any() and not early["success"].any()


@pytest.mark.parametrize("output", ["a.h5", "a"])
def test_episodes_of_a_recording_that_is_killed_are_recovered(gamepad: Pipe, output: str) -> None:
    """The robot stops. The same command finishes the dataset, and says so."""
    process = start(gamepad, output)
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: kinds(read_log("log"))[-2:] == ["stop", "close"], 20)
    assert not Path(output).exists()
    again = launch(gamepad, output)
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 2 and errors.splitlines()[0] == (
        f"rlhpc: error: {output} is there already, with the complete episodes (1) of a killed recording; name another file, "
        "and join them with rlhpc data merge"
    )
    [complete] = read_trajectories(output)
    assert len(complete["actions"]) == EPISODE
    kept = {path.name for path in Path().iterdir() if path.name.lstrip(".").startswith("a.") or path.name == "a"}
    assert kept == ({"a.h5", "a.json", "arm.yaml"} if output == "a.h5" else {"a"}) - {"arm.yaml"}


def test_a_robot_that_may_move_again_goes_on_recording(gamepad: Pipe) -> None:
    from rlhpc.embodied.robots.notices import resume, stopped_robots

    process = start(gamepad, "a.h5")
    unplug(process, gamepad)
    wait_until(lambda: bool(stopped_robots()), 20)
    resume(str(stopped_robots()[0]["robot"]))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "ended early: 1 (" in errors.splitlines()[-1], errors
    assert [len(episode["actions"]) for episode in read_trajectories("a.h5")] == [EPISODE] * 3
    [early] = read_trajectories("a.incomplete")
    assert 5 < len(early["actions"]) < EPISODE
