"""ManiSkill's pictures, really drawn: on a GPU, or by Mesa on the CPU (tests/embodied/install.sh)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import make_env
from tests.extras import need_extra

need_extra("embodied")


@pytest.fixture(autouse=True, scope="module")
def renderer() -> Iterator[None]:
    """One environment with cameras that stays: with the last one SAPIEN drops its tables of light, which take a CPU 20 s."""
    from rlhpc.embodied.envs.maniskill import load_maniskill

    if not load_maniskill():
        pytest.skip("SAPIEN cannot render here; sudo tests/embodied/install.sh")
    # Of an MJCF file with textures, which open the renderer where SAPIEN likes: what follows renders there, too.
    first = build("MS-CartpoleSwingUp-v1")
    first.reset()
    stays = build(obs_mode="rgb", sensor_configs={"width": 32, "height": 32})
    yield
    stays.close()
    first.close()


def build(task: str = "PushCube-v1", **kwargs: Any) -> Any:
    section = EnvSideConfig(env_type="maniskill", env_id=task, simulators=0, kwargs=kwargs, max_episode_steps=4)
    return make_env(OmegaConf.structured(section), 2, seed=1)


def test_pictures_depth_and_state() -> None:
    env = build(obs_mode="rgb+depth+state", sensor_configs={"width": 32, "height": 24})
    assert isinstance(env.observation_space, spaces.Dict)
    assert {name: (box.shape, box.dtype) for name, box in env.observation_space.items()} == {
        "state": ((35,), np.float32), "rgb": ((24, 32, 3), np.uint8), "depth": ((24, 32, 1), np.float32),
    }  # fmt: skip
    plain = build()
    first, expected = env.reset()[0], plain.reset()[0]
    np.testing.assert_array_equal(first["state"], expected)  # the same episode, simulated apart and together
    assert all(env.observation_space[name].contains(first[name][1]) for name in first)
    assert (first["rgb"][0] != first["rgb"][1]).any() and first["rgb"].std() > 10
    assert 0.1 < np.median(first["depth"]) < 5  # metres
    actions = np.ones((2, *env.action_space.shape), np.float32)
    for _ in range(4):
        obs, rewards, _, truncations, infos = env.step(actions)
        same, their_rewards, *_ = plain.step(actions)
        np.testing.assert_array_equal(obs["state"], same)
        np.testing.assert_array_equal(rewards, their_rewards)
    assert truncations.all() and set(infos["final_obs"]) == {"state", "rgb", "depth"}
    assert (infos["final_obs"]["rgb"] != obs["rgb"]).any()


def test_a_policy_from_pictures_is_told_nothing_else() -> None:
    env = build(obs_mode="rgb")
    obs, _ = env.reset()
    assert obs["rgb"].shape == (2, 128, 128, 3) and obs["state"].shape == (2, 25)  # no pose of the cube


def test_frames_of_slots_that_are_simulated_without_a_renderer() -> None:
    env = build()
    env.reset()
    before = env.render()
    assert before.shape == (2, 512, 512, 3) and before.dtype == np.uint8 and (before[0] != before[1]).any()
    env.step(np.ones((2, *env.action_space.shape), np.float32))
    after = env.render([1])
    assert after.shape == (1, 512, 512, 3) and (after[0] != before[1]).any()
    pictures = build(obs_mode="rgb", sensor_configs={"width": 32, "height": 32})
    pictures.reset()
    assert np.abs(pictures.render()[0].astype(int) - before[0]).mean() < 2  # one's view of what the other shows
