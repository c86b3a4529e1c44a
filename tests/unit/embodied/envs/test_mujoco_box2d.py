"""MuJoCo and Box2D through Gymnasium: real steps, and episodes that go on where they were saved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import make_env
from tests.extras import need_extra

need_extra("embodied")


def build(env_id: str, seed: int, **changes: Any) -> Any:
    return make_env(OmegaConf.structured(EnvSideConfig(env_id=env_id, max_episode_steps=60, **changes)), 2, seed=seed)


def draw(env: Any, rng: np.random.Generator) -> np.ndarray:
    if hasattr(env.action_space, "n"):
        return rng.integers(0, env.action_space.n, 2)
    return rng.uniform(-1, 1, (2, *env.action_space.shape)).astype(np.float32)


# Ant's and Humanoid's rewards use positions of bodies from before a step, which no MuJoCo state vector has.
@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Ant-v5", "Humanoid-v5", "LunarLander-v3"])
def test_an_episode_goes_on_where_it_was_saved(env_id: str) -> None:
    env, other = build(env_id, 1), build(env_id, 9)
    rng = np.random.default_rng(0)
    for one in (env, other):
        assert one.supports_state
        one.reset()
        for _ in range(47):
            one.step(draw(one, rng))
    other.load_state_dict(env.state_dict())
    ends = 0
    for _ in range(90):
        actions = draw(env, rng)
        expected, got = env.step(actions), other.step(actions)
        for x, y in zip(expected[:4], got[:4], strict=True):
            np.testing.assert_array_equal(x, y)
        if "episode" in expected[4]:
            ends += 1
            np.testing.assert_array_equal(expected[4]["episode"]["return"], got[4]["episode"]["return"])
    assert ends


def test_what_cannot_be_restored_says_so() -> None:
    assert not build("BipedalWalker-v3", 0).supports_state  # it keeps its Box2D world over resets


def test_frames() -> None:
    env = build("LunarLander-v3", 0)
    env.reset()
    frames = env.render()
    assert frames.dtype == np.uint8 and frames.shape == (2, 400, 600, 3) and frames.std() > 10
    assert env.render([1]).shape == (1, 400, 600, 3)


def test_relative_rewards_and_fixed_states() -> None:
    plain = build("Pendulum-v1", 1)
    relative = build("Pendulum-v1", 1, use_rel_reward=True, use_fixed_reset_state_ids=True)
    first, same = plain.reset()[0], relative.reset()[0]
    np.testing.assert_array_equal(first, same)
    actions = np.random.default_rng(0).uniform(-1, 1, (60, 2, 1)).astype(np.float32)
    rewards = np.stack([plain.step(row)[1] for row in actions])
    steps = [relative.step(row) for row in actions]
    np.testing.assert_allclose(np.stack([s[1] for s in steps]), np.diff(rewards, axis=0, prepend=0), atol=1e-5)
    np.testing.assert_allclose(steps[-1][4]["episode"]["return"], rewards.sum(0), rtol=1e-5)
    np.testing.assert_array_equal(steps[-1][0], first)
