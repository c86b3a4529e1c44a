"""Scripted experts of ManiSkill tasks: hand-written rules on the state observation.

An expert is a function `obs [N, D] -> actions [N, A]` without planner and memory, so that it can also label states that
another policy visited (DAgger). Experts need `obs_mode=state` (or `rgb+state`, for policies with images),
`control_mode=pd_ee_delta_pos` and the Panda arm. Lengths are metres.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: Distance in metres of an action of size 1 in `pd_ee_delta_pos`.
_REACH = 0.1
_OPEN, _CLOSED = 1.0, -1.0


def _state(obs: Any) -> np.ndarray:
    """Returns the state vector of an observation."""
    state: np.ndarray = obs["state"] if isinstance(obs, dict) else obs
    return state


def _towards(tcp: np.ndarray, target: np.ndarray, gripper: np.ndarray | float, gain: float = 1.0) -> np.ndarray:
    """Returns actions `[N, 4]` that move the gripper's centre to `target [N, 3]`."""
    actions = np.empty((len(tcp), 4), np.float32)
    actions[:, :3] = np.clip(gain * (target - tcp) / _REACH, -1, 1)
    actions[:, 3] = gripper
    return actions


def push_cube(obs: Any) -> np.ndarray:
    """Returns actions for PushCube-v1: move behind the cube, down, and forward until the cube lies on the goal.

    Args:
        obs: `[N, 35]`: qpos 9, qvel 9, tcp pose 7, goal 3, cube pose 7.
    """
    obs = _state(obs)
    tcp, goal, cube = obs[:, 18:21], obs[:, 25:28], obs[:, 28:31]
    x_distance, y_distance = cube[:, 0] - tcp[:, 0], np.abs(tcp[:, 1] - cube[:, 1])
    is_low = tcp[:, 2] < 0.04
    is_pushing = is_low & (x_distance > 0.01) & (y_distance < 0.02)
    is_behind = ~is_pushing & (x_distance > 0.045) & (y_distance < 0.015)
    # The hand stays above the cube while it moves behind the cube.
    target = np.stack([cube[:, 0] - 0.07, cube[:, 1], np.full(len(obs), 0.08)], 1)
    target[is_behind, 2] = 0.015
    push_target = np.stack([goal[:, 0] - 0.02, cube[:, 1], np.full(len(obs), 0.015)], 1)
    target = np.where(is_pushing[:, None], push_target, target)
    return _towards(tcp, target, _CLOSED)


def pick_cube(obs: Any) -> np.ndarray:
    """Returns actions for PickCube-v1: move over the cube, down, grasp, and move to the goal.

    Args:
        obs: `[N, 42]`: qpos 9, qvel 9, is_grasped 1, tcp pose 7, goal 3, cube pose 7, and differences of these.
    """
    obs = _state(obs)
    tcp, goal, cube = obs[:, 19:22], obs[:, 26:29], obs[:, 29:32]
    return _grasp_and_carry(tcp, cube, obs[:, 18] > 0.5, goal - cube)


def _grasp_and_carry(tcp: np.ndarray, cube: np.ndarray, is_grasped: np.ndarray, carry: np.ndarray) -> np.ndarray:
    """Returns actions that grasp the cube from above and, once it is grasped, move it by `carry [N, 3]`."""
    horizontal_distance = np.linalg.norm(tcp[:, :2] - cube[:, :2], axis=1)
    is_above = horizontal_distance < 0.012
    is_at_cube = is_above & (np.abs(tcp[:, 2] - cube[:, 2]) < 0.012)
    target = cube + np.array([0, 0, 0.08])
    target[is_above] = cube[is_above]
    target = np.where(is_grasped[:, None], tcp + carry, target)
    return _towards(tcp, target, np.where(is_grasped | is_at_cube, _CLOSED, _OPEN))


def stack_cube(obs: Any) -> np.ndarray:
    """Returns actions for StackCube-v1: grasp the first cube, move it over the second, lower it, and release it.

    Args:
        obs: `[N, 48]`: qpos 9, qvel 9, tcp pose 7, pose of the first cube 7, pose of the second cube 7, and differences
            of these.
    """
    obs = _state(obs)
    tcp, cube, target_cube = obs[:, 18:21], obs[:, 25:28], obs[:, 32:35]
    fingers = obs[:, 7]
    is_near = np.linalg.norm(tcp - cube, axis=1) < 0.02
    is_grasped = is_near & (fingers < 0.03) & (fingers > 0.015)
    offset = target_cube - cube
    horizontal_distance = np.linalg.norm(offset[:, :2], axis=1)
    carry_offset = offset + np.array([0, 0, 0.04])
    # The hand moves up, then across, then down onto the target cube.
    carry_offset[:, 2] += np.where(horizontal_distance > 0.02, 0.06, 0.0)
    is_low = cube[:, 2] < target_cube[:, 2] + 0.045
    carry_offset[:, :2] *= ~(is_low & (horizontal_distance > 0.03))[:, None]
    actions = _grasp_and_carry(tcp, cube, is_grasped, carry_offset)
    is_placed = (horizontal_distance < 0.01) & (np.abs(offset[:, 2] + 0.04) < 0.005)
    actions[is_placed, 3] = _OPEN
    # Releases the cube and moves up.
    actions[is_placed & (fingers > 0.03), :3] = (0, 0, 0.5)
    actions[is_placed & (fingers <= 0.03), :3] = 0
    return actions
