"""ManiSkill: the batched slots are ManiSkill's own environments, an episode depends on its slot alone, and resumes exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from omegaconf import DictConfig, OmegaConf

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import make_env
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra

need_extra("embodied")
TASK = {"env_type": "maniskill", "simulators": 0}


def section(env_id: str = "PushCube-v1", **changes: Any) -> DictConfig:
    return OmegaConf.structured(EnvSideConfig(**{**TASK, "env_id": env_id, **changes}))


def actions(env: Any, steps: int, seed: int = 0) -> np.ndarray:
    """`[steps, N, dim]`, pushing down a bit, so that something is touched."""
    drawn = np.random.default_rng(seed).uniform(-1, 1, (steps, env.num_envs, *env.action_space.shape))
    drawn[:, :, 1] = 0.8
    return drawn.astype(np.float32)


def play(env: Any, chosen: np.ndarray) -> list[Any]:
    return [env.step(row) for row in chosen]


def assert_same(ones: list[Any], others: list[Any], rows: slice = slice(None)) -> None:
    for one, other in zip(ones, others, strict=True):
        for x, y in zip(one[:4], other[:4], strict=True):
            np.testing.assert_array_equal(x[rows], y)


@pytest.mark.parametrize("env_id", ["PushCube-v1", "PickCube-v1"])
def test_a_slot_is_maniskills_own_environment(env_id: str) -> None:
    env = make_env(section(env_id), 3, seed=5)
    obs, _ = env.reset()
    chosen = actions(env, 40)
    got = play(env, chosen)
    from mani_skill.utils.registration import REGISTERED_ENVS

    kwargs = {"obs_mode": "state", "sim_backend": "physx_cpu", "render_backend": "none"}
    for slot in range(3):
        plain = REGISTERED_ENVS[env_id].cls(num_envs=1, **kwargs)
        seed = int(np.random.SeedSequence([5, slot, 0]).generate_state(1)[0]) & 0x7FFFFFFF
        np.testing.assert_array_equal(obs[slot], plain.reset(seed=seed)[0][0].numpy())
        for row, (observed, rewards, *_rest) in zip(chosen, got, strict=True):
            expected, reward, terminated, _, _ = plain.step(row[slot])
            assert not terminated
            np.testing.assert_array_equal(observed[slot], expected[0].numpy())
            assert rewards[slot] == np.float32(reward)
        plain.close()


def test_a_slot_does_not_depend_on_its_neighbours_and_episodes_end_at_the_limit() -> None:
    whole = make_env(section(max_episode_steps=6), 4, seed=2)
    part = make_env(section(max_episode_steps=6), 2, slot_offset=2, seed=2)
    first, second = whole.reset()[0], part.reset()[0]
    np.testing.assert_array_equal(first[2:], second)
    assert len({row.tobytes() for row in first}) == 4
    chosen = actions(whole, 14)
    all_slots = play(whole, chosen)
    assert_same(all_slots, play(part, chosen[:, 2:]), slice(2, 4))
    for t, (obs, rewards, terminations, truncations, infos) in enumerate(all_slots):
        assert not terminations.any() and truncations.all() == ((t + 1) % 6 == 0)
        assert ((rewards >= 0) & (rewards <= 1)).all()  # normalized_dense
        if truncations.any():
            episode = infos["episode"]
            assert episode["mask"].all() and (episode["length"] == 6).all()
            np.testing.assert_allclose(episode["return"], sum(step[1] for step in all_slots[t - 5 : t + 1]), rtol=1e-5)
            assert set(episode) == {"return", "length", "mask", "success_once", "success_at_end"}
            assert (np.abs(obs - infos["final_obs"]) > 1e-3).any(1).all()


@pytest.mark.parametrize("env_id", ["PickCube-v1", "PegInsertionSide-v1"])
def test_a_resumed_episode_is_the_one_that_went_on(env_id: str) -> None:
    env = make_env(section(env_id, max_episode_steps=25), 2, seed=3)
    env.reset()
    play(env, actions(env, 31))
    state = env.state_dict()
    expected = play(env, actions(env, 30, seed=1))
    resumed = make_env(section(env_id, max_episode_steps=25), 2, seed=3)
    resumed.load_state_dict(state)
    again = play(resumed, actions(env, 30, seed=1))
    assert_same(expected, again)
    np.testing.assert_array_equal(expected[18][4]["episode"]["return"], again[18][4]["episode"]["return"])
    single = make_env(section(env_id, max_episode_steps=25), 1, slot_offset=1, seed=3)
    single.load_state_dict(single.merge_states([env.slot_state(state, 1)]))
    assert_same(expected, play(single, actions(env, 30, seed=1)[:, 1:]), slice(1, 2))


def test_groups_fixed_states_and_chunks() -> None:
    env = make_env(section(group_size=2, max_episode_steps=4), 4, seed=1)
    firsts = [env.reset()[0]]
    chosen = actions(env, 8)
    firsts += [env.chunk_step(chosen[at : at + 4].swapaxes(0, 1))[0] for at in (0, 4)]
    for obs in firsts:
        np.testing.assert_array_equal(obs[0], obs[1])
        np.testing.assert_array_equal(obs[2], obs[3])
    assert len({obs[i].tobytes() for obs in firsts for i in (0, 2)}) == 6
    fixed = make_env(section(use_fixed_reset_state_ids=True, max_episode_steps=4), 2, seed=1)
    first = fixed.reset()[0]
    stepped = play(fixed, actions(fixed, 8))
    np.testing.assert_array_equal(stepped[3][0], first)
    np.testing.assert_array_equal(stepped[7][0], first)
    chunked = make_env(section(use_fixed_reset_state_ids=True, max_episode_steps=4), 2, seed=1)
    chunked.reset()
    obs, rewards, _, truncations, infos = chunked.chunk_step(actions(fixed, 6).swapaxes(0, 1))
    np.testing.assert_array_equal(obs, first)  # what is left of a chunk after its end is not played
    np.testing.assert_allclose(rewards, sum(step[1] for step in stepped[:4]), rtol=1e-5)
    np.testing.assert_array_equal(infos["final_obs"], stepped[3][4]["final_obs"])
    assert truncations.all()
    assert (infos["chunk"]["mask"] == (np.arange(6) < 4)).all()
    np.testing.assert_array_equal(infos["chunk"]["rewards"][:, 3], stepped[3][1])


@pytest.mark.long
def test_processes_change_nothing() -> None:
    together, apart = (make_env(section(max_episode_steps=6, simulators=n), 3, seed=2) for n in (0, 2))
    try:
        np.testing.assert_array_equal(together.reset()[0], apart.reset()[0])
        chosen = actions(together, 18)
        assert_same(play(together, chosen[:8]), play(apart, chosen[:8]))
        apart.load_state_dict(together.state_dict())
        assert_same(play(together, chosen[8:]), play(apart, chosen[8:]))
    finally:
        apart.close()


def test_rewards_relative_and_by_mode() -> None:
    plain, relative, sparse = (
        make_env(section(max_episode_steps=5, **changes), 2, seed=4)
        for changes in ({}, {"use_rel_reward": True}, {"kwargs": {"reward_mode": "sparse"}})
    )
    for env in (plain, relative, sparse):
        env.reset()
    chosen = actions(plain, 5)
    absolute = np.stack([step[1] for step in play(plain, chosen)])
    steps = play(relative, chosen)
    np.testing.assert_allclose(np.stack([s[1] for s in steps]), np.diff(absolute, axis=0, prepend=0), atol=1e-6)
    np.testing.assert_allclose(steps[-1][4]["episode"]["return"], absolute.sum(0), rtol=1e-6)
    assert not np.stack([step[1] for step in play(sparse, chosen)]).any()


def test_success_ends_an_episode_unless_ignored() -> None:
    """The cube is put on its goal; the rest is the task's own doing."""
    for ignored in (False, True):
        env: Any = make_env(section(max_episode_steps=3, ignore_terminations=ignored), 2, seed=1)
        env.reset()
        task = env._simulations[0]
        state = task.get_state_dict()
        state["actors"]["cube"][0, :2] = task.goal_region.pose.p[0, :2]
        with torch.inference_mode():
            task.set_state_dict(state)
        steps = play(env, np.zeros((3, 2, *env.action_space.shape), np.float32))
        assert steps[0][2].tolist() == [not ignored, False]
        episode = steps[2][4]["episode"] if ignored else steps[0][4]["episode"]
        assert episode["success_once"].tolist() == [1, 0] and episode["mask"].tolist() == [True, ignored]


def test_several_robots_share_one_action() -> None:
    env = make_env(section("TwoRobotPickCube-v1"), 1)
    env.reset()
    assert isinstance(env.action_space, spaces.Box) and env.action_space.shape == (16,)
    assert np.isfinite(env.step(np.zeros((1, 16), np.float32))[0]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env_id": "PushCub-v1"}, r"PushCub-v1.*did you mean PushCube-v1"),
        ({"kwargs": {"control_mode": "pd_joints"}}, "refuses kwargs .*pd_joints"),
        ({"kwargs": {"reward_mode": "denser"}}, "reward_mode is 'denser'.*has: normalized_dense, dense, sparse, none"),
        ({"kwargs": {"gravity": 3}}, "refuses kwargs .*gravity"),
        ({"kwargs": {"num_envs": 3}}, "num_envs is 3"),
        ({"wrappers": ["gymnasium.wrappers:FlattenObservation"]}, "take none"),
        ({"env_id": "TurnFaucet-v1"}, "download_asset TurnFaucet-v1"),
    ],
)
def test_what_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_env(section(**changes), 1)
