"""Vector environment of simulators that step one slot after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlhpc.embodied.envs.sync_vector_env import SlotStep, SlotwiseVectorEnv, SuiteVectorEnv

SECTION: Any = SimpleNamespace(
    group_size=1, use_fixed_reset_state_ids=False, use_rel_reward=False, ignore_terminations=False, reward_scale=1.0
)


class Sum(SlotwiseVectorEnv):
    """Adds up actions from a start that the seed decides; succeeds at 3 above it and fails at 3 below it."""

    single_observation_space = observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, num_envs: int = 2, limit: int = 0, mapping: bool = False, slot_offset: int = 0) -> None:
        super().__init__(SECTION, num_envs, slot_offset, 7, limit)
        self.starts, self.sums, self.mapping = [0.0] * num_envs, [0.0] * num_envs, mapping

    def _obs(self, slot: int) -> Any:
        values = np.array([self.starts[slot], self.sums[slot]], np.float32)
        return {"values": values} if self.mapping else values

    def begin_slot(self, slot: int, seed: int) -> Any:
        self.starts[slot], self.sums[slot] = float(seed % 1000), 0.0
        return self._obs(slot)

    def step_slot(self, slot: int, action: np.ndarray) -> SlotStep:
        self.sums[slot] += float(action[0])
        return SlotStep(self._obs(slot), float(action[0]), self.sums[slot] >= 3, self.sums[slot] <= -3)

    def picture(self, slot: int) -> np.ndarray | None:
        return None if slot > 1 else np.full((2, 2, 3), slot, np.uint8)

    def close(self) -> None:
        pass


def test_rewards_and_ends_of_each_slot() -> None:
    env = Sum()
    first, _ = env.reset()
    for step in range(3):
        obs, rewards, terminated, truncated, infos = env.step(np.array([[1.0], [-5.0]]))  # clipped to -1
        assert rewards.tolist() == [1, -1] and not truncated.any()
        assert terminated.all() == (step == 2)
    assert infos["success"].tolist() == [True, False]
    assert infos["final_obs"][:, 1].tolist() == [3, -3]
    assert infos["episode"]["return"].tolist() == [3, -3] and infos["episode"]["length"].tolist() == [3, 3]
    assert infos["episode"]["success_once"].tolist() == [1, 0]
    assert obs[:, 1].tolist() == [0, 0] and not np.array_equal(obs, first)  # the next episodes


def test_an_ended_slot_waits_for_the_end_of_the_chunk() -> None:
    env = Sum(limit=4)
    env.reset()
    actions = np.array([[1.0] * 5, [0.5] * 5])
    _, rewards, terminated, truncated, infos = env.chunk_step(actions.reshape(2, 5, 1))
    assert terminated.tolist() == [True, False] and truncated.tolist() == [False, True]
    assert infos["chunk"]["mask"].tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False]]
    assert infos["chunk"]["rewards"].tolist() == [[1, 1, 1, 0, 0], [0.5] * 4 + [0]]
    assert rewards.tolist() == [3, 2] and "success" not in infos


def test_a_seed_begins_the_series_of_episodes_anew() -> None:
    env, other = Sum(), Sum()
    first, _ = env.reset(3)
    env.reset()
    assert np.array_equal(env.reset(3)[0], first)
    assert np.array_equal(other.reset(3)[0], first) and not np.array_equal(other.reset(4)[0], first)


@pytest.mark.parametrize("mapping", [False, True])
def test_a_saved_slot_is_replayed(mapping: bool) -> None:
    env = Sum(mapping=mapping)
    env.reset()
    for _ in range(4):
        obs, *_ = env.step(np.array([[0.5], [1.0]]))
    state = env.state_dict()
    again = Sum(mapping=mapping)
    again.reset()
    again.load_state_dict(state)
    for _ in range(3):
        expected, *results = env.step(np.array([[0.5], [0.5]]))
        obs, *others = again.step(np.array([[0.5], [0.5]]))
        assert np.array_equal(obs["values"], expected["values"]) if mapping else np.array_equal(obs, expected)
        assert all(np.array_equal(a, b) for a, b in zip(results[:3], others[:3], strict=True))


def test_pictures_of_slots() -> None:
    assert Sum().render().shape == (2, 2, 2, 3)  # type: ignore[union-attr]
    assert Sum().render([1]).max() == 1  # type: ignore[union-attr]
    assert Sum(3).render() is None


class Suite(SuiteVectorEnv):
    """Notes the (task, start) of each slot's episode, which ends with its first action."""

    single_observation_space = observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, section: Any, num_envs: int, slot_offset: int, shuffles: bool = True, seed: int = 7) -> None:
        super().__init__(
            section, num_envs, slot_offset, seed, 0, stage="train", task_names=["a", "b"], starts={0: 4, 1: 2},
            shuffles=shuffles,
        )  # fmt: skip
        self.played: list[list[tuple[int, int]]] = [[] for _ in range(num_envs)]

    def begin_slot(self, slot: int, seed: int) -> Any:
        self.played[slot].append(self.draw_start(slot, seed))
        return np.zeros(2, np.float32)

    def step_slot(self, slot: int, action: np.ndarray) -> SlotStep:
        return SlotStep(np.zeros(2, np.float32), 1.0, True)

    def picture(self, slot: int) -> None:
        return None


def test_shuffled_starts_are_played_once_each_before_any_is_played_again() -> None:
    section = SimpleNamespace(**{**vars(SECTION), "group_size": 2, "num_envs": 6})
    parts = [Suite(section, 4, 0), Suite(section, 2, 4)]  # two ranks
    for part in parts:
        part.reset()
        for _ in range(7):
            part.step(np.ones((part.num_envs, 1), np.float32))
    slots = [played for part in parts for played in part.played]
    assert all(slots[slot] == slots[slot + 1] for slot in range(0, 6, 2)), "a group begins alike"
    rounds = [[slots[slot][number] for slot in range(0, 6, 2)] for number in range(8)]
    passes = [sorted(rounds[number] + rounds[number + 1]) for number in range(0, 8, 2)]
    assert all(starts == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)] for starts in passes)
    assert len({tuple(rounds[number] + rounds[number + 1]) for number in range(0, 8, 2)}) > 1, (
        "another order in each pass"
    )
    drawn = Suite(section, 6, 0, shuffles=False)
    drawn.reset()
    drawn.step(np.ones((6, 1), np.float32))
    assert len({start for played in drawn.played for start in played}) < 6, "without, some are drawn twice"
    fixed = SimpleNamespace(**{**vars(section), "use_fixed_reset_state_ids": True})
    again = Suite(fixed, 6, 0)
    again.reset()
    again.step(np.ones((6, 1), np.float32))
    assert all(first == second for first, second in again.played)
