"""Frame rate, robot, names and task of datasets: what one says reaches all that is made of it, and no number is made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest
from omegaconf import OmegaConf

from rlhpc.cli import main
from rlhpc.embodied.config import EvalEnvConfig
from rlhpc.embodied.data.datasets import WriteOptions
from rlhpc.embodied.data.trajectories import TrajectoryWriter
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.evaluation.recorder import record
from tests.extras import need_extra
from tests.unit.embodied.data.lerobot_files import Clocked, Shown, episode, info

need_extra("embodied")


def test_a_rate_that_nothing_says_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TrajectoryWriter(tmp_path / "a.h5", env_id="Task-v1") as writer:
        writer.add(episode(4))
    words = ["data", "convert", str(tmp_path / "a.h5"), "--to", "lerobot", "--output"]
    assert main([*words, str(tmp_path / "out")]) == 0
    assert "nothing says the frame rate; 20 frames a second" in "".join(capsys.readouterr())
    assert info(tmp_path / "out")["fps"] == 20 and info(tmp_path / "out")["robot_type"] == "Task-v1"


gymnasium.register("test/Clocked-v0", entry_point=Clocked, max_episode_steps=4)
gymnasium.register("test/Shown-v0", entry_point=Shown, max_episode_steps=4)


def played(env_id: str, **changes: Any) -> Any:
    values = {"env_type": "gymnasium", "env_id": env_id, "num_envs": 1, "simulators": 0, "wrappers": [], "kwargs": {},
              "max_episode_steps": None, "ignore_terminations": False, "simulator_python": None}  # fmt: skip
    return OmegaConf.structured(EvalEnvConfig(**(values | changes)))


@pytest.mark.parametrize(
    ("env_id", "changes", "hz"),
    [
        ("test/Clocked-v0", {}, 100),
        ("test/Clocked-v0", {"wrappers": [{"frame_skip": {"skip": 4}}]}, 25),
        ("test/Clocked-v0", {"simulators": 1}, 100),
        ("test/Shown-v0", {}, 30),
        ("Pendulum-v1", {}, 20),
        ("CartPole-v1", {}, 50),
        ("HalfCheetah-v5", {}, 20),
    ],
)
def test_the_control_rate_of_an_environment(env_id: str, changes: dict[str, Any], hz: float) -> None:
    section = played(env_id, **changes)
    if changes.get("simulators"):  # another process has not registered it
        section.env_id = "tests.unit.embodied.data.test_lerobot_info:test/Clocked-v0"
    env = make_env(section, 1)
    try:
        assert env.control_hz == pytest.approx(hz)
    finally:
        env.close()


def test_recordings_have_the_rate_of_the_environment(tmp_path: Path) -> None:
    class Still:
        def predict_action_batch(self, obs: Any, mode: str) -> Any:
            import torch

            return torch.zeros(1, 1, 2), {}

    def recorded(name: str, to: str, fps: int | None = None) -> Path:
        ending = ".h5" if to == "hdf5" else ""
        record(Still(), played("test/Clocked-v0"), tmp_path / f"{name}{ending}", episodes=1, seed=0,
               options=WriteOptions(to, fps))  # fmt: skip
        return tmp_path / f"{name}{ending}"

    assert info(recorded("a", "lerobot"))["fps"] == 100 and info(recorded("b", "lerobot", 10))["fps"] == 10
    words = ["data", "convert", str(recorded("c", "hdf5")), "--to", "lerobot", "--output", str(tmp_path / "d")]
    assert main(words) == 0 and info(tmp_path / "d")["fps"] == 100
