"""Episode bookkeeping: seeds, returns, ends and successes of slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhpc.embodied.envs.episode_tracker import EpisodeTracker

ALL = np.ones(2, bool)
NONE = np.zeros(2, bool)


def tracker(num_envs: int = 2, slot_offset: int = 0, seed: int = 7, limit: int = 0, **keys: Any) -> EpisodeTracker:
    """Returns a tracker; `keys` are those of the section."""
    section = {
        "group_size": 1, "use_fixed_reset_state_ids": False, "use_rel_reward": False, "ignore_terminations": False,
        "reward_scale": 1.0,
    }  # fmt: skip
    cfg: Any = SimpleNamespace(**{**section, **keys})
    return EpisodeTracker(cfg, num_envs, slot_offset, seed, limit)


def test_slots_of_a_group_share_the_seeds_of_their_episodes() -> None:
    episodes = tracker(4, group_size=2)
    first, second = episodes.begin(np.arange(4)), episodes.begin(np.arange(4))
    assert first[0] == first[1] != first[2] == first[3]
    assert first[0] != second[0] and all(0 <= seed < 2**31 for seed in first + second)


def test_seeds_do_not_depend_on_the_rank_that_has_the_slot() -> None:
    whole = tracker(4, group_size=2).begin(np.arange(4))
    assert whole[2:] == tracker(2, slot_offset=2, group_size=2).begin(np.arange(2))
    assert whole != tracker(4, group_size=2, seed=8).begin(np.arange(4))


def test_fixed_states_are_the_same_in_each_episode() -> None:
    episodes = tracker(use_fixed_reset_state_ids=True)
    assert episodes.begin(np.arange(2)) == episodes.begin(np.arange(2))


def test_an_episode_can_be_begun_again_from_its_place() -> None:
    episodes = tracker()
    episodes.begin(np.arange(2))
    second = episodes.begin(np.arange(2))
    place = episodes.position(1)
    assert place == {"seed": 7, "begun": 2}
    other = tracker(seed=1)
    other.replay(1, place)
    assert other.begin(np.array([1])) == second[1:] and other.position(1) == place
    episodes.reseed(9)
    assert episodes.position(0) == {"seed": 9, "begun": 0}
    assert episodes.begin(np.arange(2)) == tracker(seed=9).begin(np.arange(2))


def test_success_and_failure_end_an_episode_and_the_limit_truncates_it() -> None:
    episodes = tracker(3, limit=2)
    episodes.begin(np.arange(3))
    every = np.ones(3, bool)
    rewards, terminated, truncated = episodes.add(
        np.array([1.0, 2.0, 3.0]), np.array([False, True, False]), np.array([True, False, False]), every
    )
    assert rewards.dtype == np.float32 and rewards.tolist() == [1, 2, 3]
    assert terminated.tolist() == [True, True, False] and not truncated.any()
    waiting = np.array([False, False, True])
    rewards, terminated, truncated = episodes.add(np.ones(3), np.zeros(3, bool), np.zeros(3, bool), waiting)
    assert rewards.tolist() == [0, 0, 1] and not terminated.any() and truncated.tolist() == [False, False, True]
    report = episodes.report(truncated)
    assert report["return"].tolist() == [1, 2, 4] and report["length"].tolist() == [1, 1, 2]
    assert report["success_once"].tolist() == [1, 0, 0] and report["success_at_end"].tolist() == [1, 0, 0]
    assert report["mask"].tolist() == [False, False, True]


def test_terminations_may_be_ignored() -> None:
    episodes = tracker(limit=2, ignore_terminations=True)
    episodes.begin(np.arange(2))
    for step in range(2):
        _, terminated, truncated = episodes.add(np.ones(2), ALL, ALL, ALL)
        assert not terminated.any() and truncated.all() == (step == 1)
    assert episodes.report(truncated)["success_once"].tolist() == [1, 1]


def test_success_once_and_at_the_end_differ() -> None:
    episodes = tracker(ignore_terminations=True)
    episodes.begin(np.arange(2))
    episodes.add(np.zeros(2), NONE, np.array([True, False]), ALL)
    episodes.add(np.zeros(2), NONE, np.array([False, True]), ALL)
    report = episodes.report(ALL)
    assert report["success_once"].tolist() == [1, 1] and report["success_at_end"].tolist() == [0, 1]


def test_a_simulator_without_successes_reports_none() -> None:
    episodes = tracker()
    episodes.begin(np.arange(2))
    episodes.add(np.zeros(2), NONE, None, ALL)
    assert set(episodes.report(ALL)) == {"return", "length", "mask"}


@pytest.mark.parametrize(("scale", "expected"), [(1.0, [[1, 2], [2, 0]]), (0.5, [[0.5, 1], [1, 0]])])
def test_relative_rewards_are_differences_within_an_episode(scale: float, expected: list[list[float]]) -> None:
    episodes = tracker(use_rel_reward=True, reward_scale=scale)
    episodes.begin(np.arange(2))
    rewards = [episodes.add(np.array(values), NONE, None, ALL)[0].tolist() for values in ([1.0, 2.0], [3.0, 2.0])]
    assert rewards == expected
    assert episodes.report(ALL)["return"].tolist() == [4, 4]  # as the simulator gives them
    episodes.begin(np.array([0]))
    again, _, _ = episodes.add(np.array([5.0, 2.0]), NONE, None, ALL)
    assert again.tolist() == [5 * scale, 0]
