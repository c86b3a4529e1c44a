"""Mixture of demonstrations and played transitions."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from rlhpc.embodied.data.mixture import fit, transitions_of
from rlhpc.runtime.errors import ConfigError
from tests.unit.embodied.data.transitions import batch, buffers, fill


def test_demonstrations_are_a_fixed_share_on_any_number_of_ranks(tmp_path):
    demos = transitions_of([demo(5), demo(8)])
    one, two = buffers(tmp_path), buffers(tmp_path, 2)
    for found in (one, two):
        fill(found, 0, 9)
    rows = batch(one, demos=demos, ratio=0.25)
    assert (rows[:, 0] < 0).sum() == 4
    assert np.array_equal(rows, batch(two, demos=demos, ratio=0.25))
    assert (batch(one, demos=demos, ratio=1.0)[:, 0] < 0).all()
    other = transitions_of([{**demo(5), "obs": np.zeros((6, 3))}])
    with pytest.raises(ConfigError, match=r"algorithm\.demo_buffer\.load_path.*float32\[3\].*float32\[2\]"):
        batch(one, demos=other)


def test_before_anything_is_played_all_rows_are_demonstrations_on_any_number_of_ranks(tmp_path):
    demos = transitions_of([demo(5), demo(8)])
    one, two = buffers(tmp_path), buffers(tmp_path, 2)
    rows = batch(one, alone=True, demos=demos, ratio=0.25)
    assert len(rows) == 16 and (rows[:, 0] < 0).all() and len(set(rows[:, 1])) == 16
    assert np.array_equal(rows, batch(two, alone=True, demos=demos, ratio=0.25))


def demo(steps: int) -> dict[str, np.ndarray]:
    ends = np.zeros(steps, bool)
    ends[-1] = True
    return {
        "obs": np.arange(2 * steps + 2, dtype=np.float64).reshape(-1, 2),
        "actions": np.full((steps, 1), 0.5),
        "rewards": -np.arange(1.0, steps + 1),
        "terminations": ends,
        "truncations": np.zeros(steps, bool),
        "success": ends,
    }


def test_trajectories_become_transitions_with_the_run_s_rewards_and_ends():
    rows = transitions_of([demo(3)], reward_scale=0.1)
    assert rows["rewards"].tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert rows["obs"][:, 0].tolist() == [0, 2, 4] and rows["next_obs"][:, 0].tolist() == [2, 4, 6]
    assert rows["terminations"].tolist() == [False, False, True]
    assert not transitions_of([demo(3)], ignore_terminations=True)["terminations"].any()
    several = transitions_of([{**demo(3), "obs": {"state": np.zeros((4, 2)), "rgb": np.zeros((4, 2, 2, 3), np.uint8)}}])
    assert several["next_obs.rgb"].shape == (3, 2, 2, 3) and several["obs.state"].dtype == np.float32


def test_demonstrations_of_another_task_are_refused_and_what_is_not_needed_is_left_out():
    actions = spaces.Box(-1, 1, (1,), np.float32)
    plain = spaces.Box(-np.inf, np.inf, (2,), np.float64)  # environments hand over float32
    rows = fit(transitions_of([demo(3)]), plain, actions, 1)
    assert rows["next_obs"][:, 0].tolist() == [2, 4, 6] and rows["rewards"].tolist() == [-1, -2, -3]
    several = {**demo(3), "obs": {"state": np.ones((4, 2)), "rgb": np.zeros((4, 2, 2, 3), np.uint8)}}
    rows = fit(transitions_of([several]), spaces.Dict({"state": plain}), actions, 1)
    assert set(rows.dtype.names) == {"obs.state", "next_obs.state", "actions", "rewards", "terminations"}
    for space, action, chunk in (
        (plain, spaces.Box(-1, 1, (2,)), 1),
        (plain, actions, 3),
        (spaces.Dict({"x": plain}), actions, 1),
    ):
        with pytest.raises(ConfigError, match=r"algorithm\.demo_buffer\.load_path.*this run's transitions have"):
            fit(transitions_of([demo(3)]), space, action, chunk)
