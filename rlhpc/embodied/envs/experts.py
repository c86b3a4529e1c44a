"""Scripted experts of ManiSkill tasks: rules written by hand, from the state observation alone.

Experts have no planner and no memory: an expert is a function `obs [N, D] -> actions [N, A]`, so it can also relabel states
that another policy visited (DAgger). They need `obs_mode=state` (or `rgb+state`, for policies with images),
`control_mode=pd_ee_delta_pos` and the Panda arm. Lengths are metres.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: Metres of one action of size 1 in `pd_ee_delta_pos`.
_REACH = 0.1
_OPEN, _CLOSED = 1.0, -1.0


def _state(obs: Any) -> np.ndarray:
    """Returns the state part of an observation."""
    state: np.ndarray = obs["state"] if isinstance(obs, dict) else obs
    return state


def _towards(tcp: np.ndarray, target: np.ndarray, gripper: np.ndarray | float, gain: float = 1.0) -> np.ndarray:
    """Returns actions `[N, 4]` that move the gripper's centre to `target [N, 3]`."""
    actions = np.empty((len(tcp), 4), np.float32)
    actions[:, :3] = np.clip(gain * (target - tcp) / _REACH, -1, 1)
    actions[:, 3] = gripper
    return actions


def push_cube(obs: Any) -> np.ndarray:
    """Returns actions for PushCube-v1: behind the cube, down, and forward until the cube lies on the goal.

    Args:
        obs: `[N, 35]`: qpos 9, qvel 9, tcp pose 7, goal 3, cube pose 7.
    """
    obs = _state(obs)
    tcp, goal, cube = obs[:, 18:21], obs[:, 25:28], obs[:, 28:31]
    gap, aside = cube[:, 0] - tcp[:, 0], np.abs(tcp[:, 1] - cube[:, 1])
    low = tcp[:, 2] < 0.04
    pushing = low & (gap > 0.01) & (aside < 0.02)
    behind = ~pushing & (gap > 0.045) & (aside < 0.015)
    # On its way to behind the cube, the hand stays above it.
    target = np.stack([cube[:, 0] - 0.07, cube[:, 1], np.full(len(obs), 0.08)], 1)
    target[behind, 2] = 0.015
    push = np.stack([goal[:, 0] - 0.02, cube[:, 1], np.full(len(obs), 0.015)], 1)
    target = np.where(pushing[:, None], push, target)
    return _towards(tcp, target, _CLOSED)


def pick_cube(obs: Any) -> np.ndarray:
    """Returns actions for PickCube-v1: over the cube, down, grasp, to the goal.

    Args:
        obs: `[N, 42]`: qpos 9, qvel 9, is_grasped 1, tcp pose 7, goal 3, cube pose 7, and differences of these.
    """
    obs = _state(obs)
    tcp, goal, cube = obs[:, 19:22], obs[:, 26:29], obs[:, 29:32]
    return _grasp_and_carry(tcp, cube, obs[:, 18] > 0.5, goal - cube)


def _grasp_and_carry(tcp: np.ndarray, cube: np.ndarray, grasped: np.ndarray, carry: np.ndarray) -> np.ndarray:
    """Returns actions that grasp the cube from above and, once it is grasped, move it by `carry [N, 3]`."""
    aside = np.linalg.norm(tcp[:, :2] - cube[:, :2], axis=1)
    above = aside < 0.012
    at = above & (np.abs(tcp[:, 2] - cube[:, 2]) < 0.012)
    target = cube + np.array([0, 0, 0.08])
    target[above] = cube[above]
    target = np.where(grasped[:, None], tcp + carry, target)
    return _towards(tcp, target, np.where(grasped | at, _CLOSED, _OPEN))


def stack_cube(obs: Any) -> np.ndarray:
    """Returns actions for StackCube-v1: grasp the first cube, over the second, down, release.

    Args:
        obs: `[N, 48]`: qpos 9, qvel 9, tcp pose 7, first cube's pose 7, second's 7, and differences of these.
    """
    obs = _state(obs)
    tcp, cube, base = obs[:, 18:21], obs[:, 25:28], obs[:, 32:35]
    fingers = obs[:, 7]
    near = np.linalg.norm(tcp - cube, axis=1) < 0.02
    grasped = near & (fingers < 0.03) & (fingers > 0.015)
    offset = base - cube
    aside = np.linalg.norm(offset[:, :2], axis=1)
    carry = offset + np.array([0, 0, 0.04])
    # First up, then across, then down onto it.
    carry[:, 2] += np.where(aside > 0.02, 0.06, 0.0)
    low = cube[:, 2] < base[:, 2] + 0.045
    carry[:, :2] *= ~(low & (aside > 0.03))[:, None]
    actions = _grasp_and_carry(tcp, cube, grasped, carry)
    placed = (aside < 0.01) & (np.abs(offset[:, 2] + 0.04) < 0.005)
    actions[placed, 3] = _OPEN
    # Lets go and moves away upwards.
    actions[placed & (fingers > 0.03), :3] = (0, 0, 0.5)
    actions[placed & (fingers <= 0.03), :3] = 0
    return actions
