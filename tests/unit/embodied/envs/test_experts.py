"""Scripted experts of ManiSkill tasks: directions and the gripper, state by state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlhpc.embodied.envs.experts import pick_cube, push_cube, stack_cube


def push(tcp: list[float], cube: list[float], goal: list[float]) -> np.ndarray:
    """Returns the action of PushCube's expert."""
    obs = np.zeros((1, 35), np.float32)
    obs[0, 18:21], obs[0, 25:28], obs[0, 28:31] = tcp, goal, cube
    [action] = push_cube(obs)
    return action


CUBE, GOAL = [0.0, 0.0, 0.02], [0.2, 0.0, 0.0]


@pytest.mark.parametrize(
    ("tcp", "direction"),
    [
        ([-0.3, 0.2, 0.1], (1, -1, -1)),  # towards the place behind the cube, above it
        ([-0.07, 0.0, 0.08], (0, 0, -1)),  # there: down
        ([-0.04, 0.0, 0.015], (1, 0, 0)),  # behind it and low: forward
        ([0.1, 0.0, 0.015], (-1, 0, 1)),  # past it: up, and back
    ],
)
def test_the_cube_is_pushed_from_behind(tcp: list[float], direction: tuple[int, int, int]) -> None:
    action = push(tcp, CUBE, GOAL)
    assert np.sign(np.round(action[:3], 3)).tolist() == list(direction) and action[3] == -1
    assert (np.abs(action[:3]) <= 1).all()


def test_slots_are_independent_and_may_have_images() -> None:
    draw = np.random.default_rng(0)
    for expert, size in ((push_cube, 35), (pick_cube, 42), (stack_cube, 48)):
        obs = draw.normal(0, 0.1, (5, size)).astype(np.float32)
        obs[:, 18 if expert is pick_cube else 7] = [0, 1, 0.02, 0.04, 0.01]
        actions: Any = expert(obs)
        assert actions.shape == (5, 4) and actions.dtype == np.float32
        assert np.array_equal(expert({"state": obs, "rgb": None}), actions)
        for row in range(5):
            assert np.array_equal(expert(obs[row : row + 1])[0], actions[row])


def pick(tcp: list[float], grasped: float, goal: list[float]) -> np.ndarray:
    """Returns the action of PickCube's expert for the cube at `CUBE`."""
    obs = np.zeros((1, 42), np.float32)
    obs[0, 18], obs[0, 19:22], obs[0, 26:29], obs[0, 29:32] = grasped, tcp, goal, CUBE
    [action] = pick_cube(obs)
    return action


def test_the_cube_is_approached_grasped_and_carried() -> None:
    above = pick([0.1, 0.1, 0.1], 0, [0, 0, 0.2])
    assert above[0] < 0 and above[1] < 0 and above[3] == 1
    down = pick([0.0, 0.0, 0.1], 0, [0, 0, 0.2])
    assert down[:3].tolist() == pytest.approx([0, 0, -0.8]) and down[3] == 1
    closing = pick([0.0, 0.0, 0.02], 0, [0, 0, 0.2])
    assert closing[3] == -1
    carried = pick([0.0, 0.0, 0.02], 1, [0.05, 0, 0.2])
    assert carried[:3].tolist() == pytest.approx([0.5, 0, 1]) and carried[3] == -1


def stack(tcp: list[float], cube: list[float], fingers: float) -> np.ndarray:
    """Returns the action of StackCube's expert for the second cube at the origin."""
    obs = np.zeros((1, 48), np.float32)
    obs[0, 7], obs[0, 18:21], obs[0, 25:28], obs[0, 32:35] = fingers, tcp, cube, [0, 0, 0.02]
    [action] = stack_cube(obs)
    return action


def test_a_cube_is_lifted_carried_and_released_on_the_other() -> None:
    beside = [0.2, 0.0, 0.02]
    lifted = stack(beside, beside, 0.02)
    assert lifted[:2].tolist() == [0, 0] and lifted[2] == 1 and lifted[3] == -1  # first up
    across = stack([0.2, 0.0, 0.13], [0.2, 0.0, 0.13], 0.02)
    assert across[0] == -1 and across[3] == -1
    on_it = [0.0, 0.0, 0.06]
    assert stack(on_it, on_it, 0.02)[3] == 1  # opens, without moving
    assert stack(on_it, on_it, 0.02)[:3].tolist() == [0, 0, 0]
    away = stack(on_it, on_it, 0.04)
    assert away[:3].tolist() == [0, 0, 0.5] and away[3] == 1
