"""Environments of tensors: episodes, seeds, chunks, state, and what is said about a class that returns something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs.episode_tracker import EpisodeTracker
from rlhpc.embodied.envs.interface import InterfaceError
from rlhpc.embodied.envs.registry import make_env
from rlhpc.embodied.envs.tensor_env import TensorEnv, TensorVectorEnv, draw_uniform
from rlhpc.embodied.envs.tensor_tasks import CartPole
from rlhpc.runtime.errors import ConfigError

CPU = torch.device("cpu")
HERE = f"{__name__}:"


class Counting(TensorEnv):
    """Counts its steps up to the number that it drew, in memory that it uses again at every step."""

    observation_space = spaces.Dict(
        {"count": spaces.Box(0, 99, (1,), np.float32), "seen": spaces.Box(0, 1, (2,), np.uint8)}
    )
    action_space = spaces.Discrete(3, start=-1)
    max_episode_steps = 50

    def __init__(self, num_envs: int, device: torch.device, limit: int = 6) -> None:
        super().__init__(num_envs, device)
        self.limit = limit
        self.ends, self.count = (torch.zeros(num_envs, dtype=torch.int64) for _ in range(2))
        self.obs = {"count": torch.zeros(num_envs, 1), "seen": torch.zeros(num_envs, 2, dtype=torch.uint8)}
        self.actions: list[Tensor] = []

    def reset(self, mask: Tensor, seeds: Tensor) -> Any:
        self.ends = torch.where(mask, (draw_uniform(seeds, 1)[:, 0] * self.limit).long() + 1, self.ends)
        self.count.masked_fill_(mask, 0)
        self.obs["count"][:, 0] = self.count
        return self.obs

    def step(self, actions: Tensor) -> Any:
        self.actions.append(actions)
        self.count += 1
        self.obs["count"][:, 0] = self.count
        ended = self.count >= self.ends
        return self.obs, self.count.float(), torch.zeros_like(ended), torch.zeros_like(ended), {"success": ended}

    def state_dict(self) -> dict[str, Tensor]:
        return {"ends": self.ends, "count": self.count}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.ends, self.count = state["ends"], state["count"]


class Forgetful(CartPole):
    state_dict = TensorEnv.state_dict


class Wrong(CartPole):
    """Returns one thing of the interface in another form."""

    def __init__(self, num_envs: int, device: torch.device, fault: str) -> None:
        super().__init__(num_envs, device)
        self.fault = fault

    def reset(self, mask: Tensor, seeds: Tensor) -> Any:
        obs = super().reset(mask, seeds)
        return obs.double() if self.fault == "dtype" else obs[:-1] if self.fault == "rows" else obs

    def step(self, actions: Tensor) -> Any:
        obs, rewards, terminations, truncations, infos = super().step(actions)
        if self.fault == "four":
            return obs, rewards, terminations, infos
        if self.fault == "array":
            return obs, rewards.numpy(), terminations, truncations, infos
        return obs, rewards, terminations.float() if self.fault == "flags" else terminations, truncations, infos


def build(env_id: str = "cartpole", count: int = 6, offset: int = 0, seed: int = 3, **options: Any) -> TensorVectorEnv:
    cfg = EnvSideConfig(env_type="tensors", env_id=env_id, num_envs=count, **options)
    return TensorVectorEnv(cfg, count, offset, seed, CPU)


def play(env: TensorVectorEnv, steps: int, first_slot: int = 0) -> list[np.ndarray]:
    """Observations, rewards and ends of steps with actions that follow from step and slot."""
    rows = []
    for t in range(steps):
        actions = np.array([[(3 * slot + t * t) % 2] for slot in range(first_slot, first_slot + env.num_envs)])
        obs, rewards, terminations, truncations, _ = env.step(actions)
        rows.append(np.concatenate([obs, rewards[:, None], terminations[:, None], truncations[:, None]], 1))
    return rows


def test_random_numbers_follow_from_a_slots_seed_alone() -> None:
    seeds = torch.arange(4000)
    numbers = draw_uniform(seeds, 5)
    assert torch.equal(draw_uniform(seeds[70:71], 5), numbers[70:71]) and numbers.dtype == torch.float32
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    assert len(numbers.unique()) > 0.99 * numbers.numel()
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.01) and float(numbers.var()) == pytest.approx(
        1 / 12, abs=0.005
    )
    assert abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.05
    assert abs(np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1]) < 0.05


def test_an_episodes_last_observation_is_kept_and_the_next_episode_begins() -> None:
    env, ended = build(HERE + "Counting", 8), 0
    assert env.reset()[0]["count"].tolist() == [[0.0]] * 8
    for _ in range(12):
        count = env._env.count.clone()  # type: ignore[attr-defined]
        obs, rewards, terminations, truncations, infos = env.step(np.zeros((8, 1), np.int64))
        assert rewards.tolist() == (count + 1).tolist() and not truncations.any()
        assert obs["count"][:, 0].tolist() == [
            0 if done else n + 1 for n, done in zip(count.tolist(), terminations, strict=True)
        ]
        assert ("final_obs" in infos) == terminations.any()
        for slot in np.flatnonzero(terminations):
            length = int(count[slot]) + 1
            assert infos["final_obs"]["count"][slot] == [length] and infos["episode"]["length"][slot] == length
            assert infos["episode"]["return"][slot] == length * (length + 1) / 2
            assert infos["episode"]["success_once"][slot] == infos["success"][slot] == 1.0
            ended += 1
    assert ended > 8
    assert {int(action) for action in env._env.actions[0]} == {-1}  # type: ignore[attr-defined]


def test_a_slot_whose_episode_ends_within_a_chunk_waits_for_its_end() -> None:
    env, single = build(HERE + "Counting", 8), build(HERE + "Counting", 8)
    env.reset()
    single.reset()
    ends = env._env.ends.clone()  # type: ignore[attr-defined]
    obs, rewards, terminations, _, infos = env.chunk_step(np.zeros((8, 4, 1), np.int64))
    executed = np.arange(4) < ends.numpy()[:, None]
    assert (infos["chunk"]["mask"] == executed).all()
    assert (infos["chunk"]["rewards"] == np.where(executed, [1, 2, 3, 4], 0)).all()
    assert (rewards == infos["chunk"]["rewards"].sum(1)).all() and (terminations == (ends.numpy() <= 4)).all()
    assert (infos["final_obs"]["count"][:, 0] == np.minimum(ends.numpy(), 4)).all()
    assert (obs["count"][:, 0] == np.where(terminations, 0, 4)).all()
    assert (infos["episode"]["length"] == np.minimum(ends.numpy(), 4)).all()


def test_a_slots_episodes_do_not_depend_on_the_rank_that_simulates_it() -> None:
    parts = [build(count=6), build(count=2), build(count=4, offset=2)]
    starts = [env.reset()[0] for env in parts]
    assert np.array_equal(starts[0], np.concatenate(starts[1:])) and len(np.unique(starts[0])) == starts[0].size
    whole, first, second = (play(env, 90, offset) for env, offset in zip(parts, (0, 0, 2), strict=True))
    assert all(np.array_equal(row, np.concatenate(pair)) for row, *pair in zip(whole, first, second, strict=True))
    assert sum(row[:, 5].sum() for row in whole) > 6
    again, other = build(), build(seed=4)
    assert not np.array_equal(other.reset()[0], starts[0])
    assert np.array_equal(again.reset(seed=4)[0], other.reset(seed=4)[0])


def test_a_group_starts_alike_and_a_fixed_start_is_the_same_again() -> None:
    obs = build(count=6, group_size=3).reset()[0]
    assert (obs[:3] == obs[0]).all() and (obs[3:] == obs[3]).all() and not np.array_equal(obs[0], obs[3])
    fixed, changing = build(use_fixed_reset_state_ids=True), build()
    assert np.array_equal(fixed.reset()[0], fixed.reset()[0])
    assert not np.array_equal(changing.reset()[0], changing.reset()[0])


@pytest.mark.parametrize("options", [{}, {"ignore_terminations": True}, {"use_rel_reward": True, "reward_scale": 0.3}])
def test_steps_are_counted_as_in_other_environments(options: dict[str, Any]) -> None:
    """Rewards, ends and statistics are those of `EpisodeTracker`, of the same steps."""
    env = build(HERE + "Counting", 8, max_episode_steps=5, kwargs={"limit": 9}, **options)
    cfg = EnvSideConfig(env_type="tensors", num_envs=8, **options)
    tracker, active = EpisodeTracker(cfg, 8, 0, 3, limit=5), np.ones(8, bool)
    env.reset()
    tracker.begin(np.arange(8))
    ends_by_length = set()
    for _ in range(14):
        count = env._env.count.numpy() + 1  # type: ignore[attr-defined]
        success = count >= env._env.ends.numpy()  # type: ignore[attr-defined]
        rewards, terminations, truncations = tracker.add(count.astype(np.float32), np.zeros(8, bool), success, active)
        _, *found, infos = env.step(np.zeros((8, 1), np.int64))
        for mine, theirs in zip(found, (rewards, terminations, truncations), strict=True):
            assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
        done = terminations | truncations
        if done.any():
            for name, column in tracker.report(done).items():
                assert np.array_equal(infos["episode"][name][done], column[done]), name
            tracker.begin(np.flatnonzero(done))
            ends_by_length |= {int(n) for n in count[done]}
    assert 5 in ends_by_length


def test_a_restored_state_goes_on_alike_in_another_layout() -> None:
    env = build(HERE + "Counting", 6)
    env.reset()
    for _ in range(4):
        env.step(np.zeros((6, 1), np.int64))
    state = env.state_dict()
    slots = [env.slot_state(state, i) for i in range(6)]
    parts = [build(HERE + "Counting", 2, seed=9), build(HERE + "Counting", 4, offset=2, seed=9)]
    for part, members in zip(parts, (slots[:2], slots[2:]), strict=True):
        part.load_state_dict(part.merge_states(members))
    for _ in range(12):
        whole = env.step(np.zeros((6, 1), np.int64))
        first, second = (part.step(np.zeros((part.num_envs, 1), np.int64)) for part in parts)
        assert np.array_equal(whole[0]["count"], np.concatenate([first[0]["count"], second[0]["count"]]))
        assert np.array_equal(whole[2], np.concatenate([first[2], second[2]]))
    with pytest.raises(ValueError, match="state of 6 slots for 2"):
        parts[0].load_state_dict(state)
    assert env.supports_state and not build(HERE + "Forgetful").supports_state


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "dtype",
            "reset() returned an array of shape (6, 4) and type torch.float64 on cpu as observations; the space is Box",
        ),
        ("rows", "reset() returned an array of shape (5, 4) and type torch.float32 on cpu as observations"),
        ("four", "step() returned a tuple of 4"),
        ("array", "step() returned an array of shape (6,) and type float32 as rewards"),
        ("flags", "step() returned an array of shape (6,) and type torch.float32 on cpu as terminations"),
    ],
)
def test_another_interface_is_refused(fault: str, message: str) -> None:
    env = build(HERE + "Wrong", kwargs={"fault": fault})
    with pytest.raises(InterfaceError) as error:
        env.reset()
        env.step(np.zeros((6, 1), np.int64))
    assert message in str(error.value) and "Wrong" in str(error.value) and "step(actions)" in str(error.value)


def test_wrong_names_and_arguments_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"env_id 'pendulum' refuses kwargs \{'gravity': 3\}: got an unexpected keyword"
    ):
        build("pendulum", kwargs={"gravity": 3})
    with pytest.raises(ConfigError, match="'cartpol', which is unknown; did you mean 'cartpole'"):
        build("cartpol")
    with pytest.raises(ConfigError, match=r"which builds a list; .* subclass of rlhpc\.embodied.envs.TensorEnv"):
        build(HERE + "no_environment")
    with pytest.raises(ConfigError, match="environments of tensors take none"):
        build(wrappers=["flatten"])


def no_environment(num_envs: int, device: torch.device) -> list[int]:
    return []


def test_actions_beyond_the_bounds_are_clipped() -> None:
    beyond, within = build("pendulum", 3), build("pendulum", 3)
    for env in (beyond, within):
        env.reset()
    step = beyond.step(np.full((3, 1), 9.0, np.float32))
    assert np.array_equal(step[0], within.step(np.full((3, 1), 2.0, np.float32))[0])


def test_arrays_are_of_their_own_memory_and_tensors_stay_tensors() -> None:
    env: Any = make_env(EnvSideConfig(env_type="tensors", env_id=HERE + "Counting", num_envs=4), 4)
    obs, _ = env.reset()
    env.step(np.zeros((4, 1), np.int64))
    assert obs["count"].tolist() == [[0.0]] * 4
    env.on_device = True
    obs, rewards, *_ = env.step(np.zeros((4, 1), np.int64))
    assert isinstance(obs["count"], Tensor) and isinstance(rewards, np.ndarray)
