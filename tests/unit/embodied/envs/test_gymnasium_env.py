"""Vector environments: auto-reset, ends, seeds that ignore the partition, and state that continues bit for bit."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from omegaconf import OmegaConf

from rlhpc import ConfigError
from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import VectorEnv, make_env, space_from_json, space_to_json


def section(**changes):
    return OmegaConf.structured(EnvSideConfig(**{"env_id": "CartPole-v1", **changes}))


def actions_for(env, rng):
    if hasattr(env.action_space, "n"):
        return rng.integers(0, env.action_space.n, (env.num_envs, 1, 1))
    low, high = env.action_space.low, env.action_space.high
    return rng.uniform(low, high, (env.num_envs, 1, *low.shape)).astype(np.float32)


def rollout(env, steps, seed=0):
    rng = np.random.default_rng(seed)
    return [env.chunk_step(actions_for(env, rng)) for _ in range(steps)]


def test_one_slot_is_the_plain_gymnasium_loop():
    env = make_env(section(), 1, slot_offset=3, seed=5)
    obs, _ = env.reset()
    plain = gymnasium.make("CartPole-v1")
    seed = int(np.random.SeedSequence([5, 3]).generate_state(1)[0])
    expected, _ = plain.reset(seed=seed)
    np.testing.assert_array_equal(obs[0], expected)
    total, length, ends = 0.0, 0, 0
    for i in range(400):
        action = i // 3 % 2
        obs, rewards, terminations, truncations, infos = env.step(np.array([action]))
        expected, reward, terminated, truncated, _ = plain.step(action)
        total, length = total + reward, length + 1
        assert (rewards[0], terminations[0], truncations[0]) == (reward, terminated, truncated)
        if terminated or truncated:
            np.testing.assert_array_equal(infos["final_obs"][0], expected)
            assert infos["episode"]["return"][0] == total and infos["episode"]["length"][0] == length
            expected, _ = plain.reset()
            total, length, ends = 0.0, 0, ends + 1
        np.testing.assert_array_equal(obs[0], expected)
    assert ends > 3


def test_wrappers_that_change_rewards_leave_the_returns_that_a_wrapper_below_them_counts():
    wrappers = ["gymnasium.wrappers:RecordEpisodeStatistics", "gymnasium.wrappers:NormalizeReward"]
    settings = {"env_id": "Pendulum-v1", "max_episode_steps": 20}
    learner, plain = make_env(section(**settings, wrappers=wrappers), 2), make_env(section(**settings), 2)
    learner.reset(), plain.reset()
    ended = 0
    for changed, raw in zip(rollout(learner, 45), rollout(plain, 45), strict=True):
        np.testing.assert_array_equal(changed[0], raw[0])
        assert (changed[1] != raw[1]).all()
        if "episode" in raw[4]:
            np.testing.assert_allclose(changed[4]["episode"]["return"], raw[4]["episode"]["return"])
            ended += 1
    assert ended == 2


def test_a_step_limit_truncates_and_does_not_terminate():
    env = make_env(section(env_id="Pendulum-v1", max_episode_steps=5), 2)
    env.reset()
    ends = [(t.any(), c.any()) for _, _, t, c, _ in rollout(env, 10)]
    assert ends == [(False, False)] * 4 + [(False, True)] + [(False, False)] * 4 + [(False, True)]


def test_ignored_terminations_end_at_the_limit_only():
    env = make_env(section(ignore_terminations=True, max_episode_steps=50), 2)
    env.reset()
    results = rollout(env, 50)
    assert not any(t.any() for _, _, t, _, _ in results) and results[-1][3].all()


def test_slots_do_not_depend_on_who_simulates_them():
    whole = make_env(section(), 8, 0, seed=3)
    halves = [make_env(section(), 4, offset, seed=3) for offset in (0, 4)]
    start = whole.reset()[0]
    np.testing.assert_array_equal(start, np.concatenate([h.reset()[0] for h in halves]))
    for i in range(200):
        actions = np.random.default_rng(i).integers(0, 2, (8, 1, 1))
        together = whole.chunk_step(actions)[0]
        apart = np.concatenate([h.chunk_step(actions[4 * k : 4 * k + 4])[0] for k, h in enumerate(halves)])
        np.testing.assert_array_equal(together, apart)


def test_groups_share_their_reset():
    obs, _ = make_env(section(group_size=2), 4).reset()
    assert (obs[0] == obs[1]).all() and (obs[2] == obs[3]).all() and (obs[0] != obs[2]).any()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCarContinuous-v0"])
def test_state_continues_bit_for_bit(env_id):
    env, other = (make_env(section(env_id=env_id), 3, seed=seed) for seed in (1, 2))
    env.reset()
    other.reset()
    rollout(env, 57)
    assert env.supports_state
    other.load_state_dict(env.state_dict())
    for a, b in zip(rollout(env, 300, 9), rollout(other, 300, 9), strict=True):
        for x, y in zip(a[:4], b[:4], strict=True):
            np.testing.assert_array_equal(x, y)


def test_reward_scale_leaves_the_reported_return_alone():
    env = make_env(section(env_id="Pendulum-v1", max_episode_steps=3, reward_scale=0.1), 1)
    env.reset()
    results = rollout(env, 3)
    assert sum(r[0] for _, r, *_ in results) == pytest.approx(0.1 * results[-1][4]["episode"]["return"][0], rel=1e-5)


def test_chunks_stop_at_the_end_of_an_episode():
    env = make_env(section(env_id="Pendulum-v1", max_episode_steps=3), 1)
    env.reset()
    _, rewards, _, truncations, infos = env.chunk_step(np.zeros((1, 5, 1), np.float32))
    assert truncations[0] and rewards[0] == pytest.approx(infos["episode"]["return"][0], rel=1e-5)


class Counter(VectorEnv):
    """A third party's environment."""

    def __init__(self, cfg, num_envs, slot_offset, seed):
        self.num_envs = num_envs
        self.observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None):
        return np.zeros((self.num_envs, 1), np.float32), {}

    def step(self, actions):
        zeros = np.zeros(self.num_envs, bool)
        return np.ones((self.num_envs, 1), np.float32), np.ones(self.num_envs, np.float32), zeros, zeros, {}


def test_an_environment_from_outside_by_import_path(monkeypatch):
    import sys
    import types

    module = types.ModuleType("their_package")
    module.Counter = Counter
    monkeypatch.setitem(sys.modules, "their_package", module)
    env = make_env(section(env_type="their_package:Counter"), 4)
    assert env.chunk_step(np.zeros((4, 1, 1)))[1].sum() == 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"env_id": "CartPol-v1"}, "did you mean"),
        ({"kwargs": {"gravity_of_it": 1}}, "refuses kwargs"),
        ({"env_type": "gymnasum"}, "did you mean 'gymnasium'"),
        ({"env_type": "no.such:Thing"}, "cannot be imported"),
        ({"env_id": "Blackjack-v1"}, "supported is Box"),
    ],
)
def test_what_cannot_be_built_is_explained(changes, says):
    with pytest.raises(ConfigError, match=says):
        make_env(section(**changes), 1)


@pytest.mark.parametrize(
    "space",
    [
        gymnasium.spaces.Box(-1, 1, (3,), np.float32),
        gymnasium.spaces.Box(np.array([-1, -2], np.float32), np.array([1, np.inf], np.float32)),
        gymnasium.spaces.Box(0, 255, (4, 4, 3), np.uint8),
        gymnasium.spaces.Discrete(5, start=2),
        gymnasium.spaces.MultiDiscrete([2, 3]),
    ],
)
def test_spaces_survive_json(space):
    import json

    assert space_from_json(json.loads(json.dumps(space_to_json(space)))) == space


class Misfit(gymnasium.Env):  # type: ignore[type-arg]
    """Says that its observations are three numbers, and from the second step on gives four."""

    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, **_: Any) -> Any:
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(3 + (self.steps > 1), np.float32), 0.0, False, False, {}


def test_an_observation_that_is_not_of_its_space() -> None:
    gymnasium.register("Misfit-v0", entry_point=Misfit)
    try:
        env = make_env(section(env_id="Misfit-v0"), 2, slot_offset=0, seed=1)
        env.reset()
        env.step(np.zeros((2, 1), np.int64))
        with pytest.raises(
            ConfigError, match=r"Misfit-v0: slot 0 gave .* shape \(4,\), .*observation_space is Box.*3,"
        ):
            env.step(np.zeros((2, 1), np.int64))
    finally:
        del gymnasium.registry["Misfit-v0"]
