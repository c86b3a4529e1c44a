"""Limits of a robot's commands, the errors of rejected commands, and faults of its observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from rlhpc.embodied.robots.driver import Robot
from rlhpc.runtime.errors import RlhpcError

CONTROL_MODES = ("absolute", "delta", "velocity")
RESUME_MODES = ("person", "auto")


class RobotStopped(RlhpcError):
    """Error raised by a call that was rejected or interrupted because the robot is stopped and waits for a person."""


class StaleObservation(RlhpcError):
    """Error raised for a command that is based on an observation that is too old."""


class CommandLimits(NamedTuple):
    """Limits of a robot's commands.

    Attributes:
        stale_s: Maximum age of an observation in seconds. The robot also holds still after this time without a command.
        max_change: Maximum difference of each component of a command from the robot's current state; None for no limit.
        resume: Authority that ends a safety stop: `person` or `auto`.
    """

    stale_s: float = 0.5
    max_change: float | None = None
    resume: str = "person"


def explain_no_max_change(driver: Robot) -> str:
    """Returns the reason why `max_change` cannot be enforced with a driver; empty if it can be enforced."""
    driver_name = f"{type(driver).__module__}:{type(driver).__name__}"
    if driver.control_mode not in CONTROL_MODES:
        return (
            f"{driver_name}.control_mode is {driver.control_mode!r}, which does not say from what a change is counted: set it "
            "in the class to absolute (with position()), delta or velocity, or leave max_change out"
        )
    if driver.control_mode == "absolute" and type(driver).position is Robot.position:
        return (
            f"{driver_name}.control_mode is absolute: position() must return the measured position, which a change is "
            "counted from"
        )
    return ""


def observation_fault(obs: Any, space: Any, name: str = "") -> str:
    """Returns why an observation is not one of `space`, such as a camera that is missing; empty if it has all entries in their
    shapes.

    Args:
        obs: Observation of the driver.
        space: Its observation space.
        name: Name of the entry that is looked at; empty for the whole observation.
    """
    entry_text = f"{name!r} of its observation" if name else "its observation"
    if isinstance(space, spaces.Dict):
        if not isinstance(obs, Mapping):
            return f"{entry_text} is a {type(obs).__name__}; its observation_space has {', '.join(space.spaces)}"
        if missing_names := [key for key in space.spaces if obs.get(key) is None]:
            return f"{entry_text} has no {', '.join(map(repr, missing_names))}: look after the camera or sensor"
        return next(filter(None, (observation_fault(obs[key], box, key) for key, box in space.spaces.items())), "")
    if isinstance(space, spaces.Box) and (shape := np.shape(obs)) != space.shape:
        return f"{entry_text} has the shape {shape}; its observation_space has {space.shape}"
    return ""


def nearest_command(
    action: np.ndarray, space: Any, position: np.ndarray | None, max_change: float | None
) -> np.ndarray | None:
    """Returns the command nearest to `action` that is within the bounds of `space` and at most `change` from the position
    `here`, in the space's dtype; None if the bounds exclude all such commands.
    """
    low, high = np.asarray(space.low, np.float64), np.asarray(space.high, np.float64)
    if max_change is None or position is None:
        return np.clip(action, low, high).astype(space.dtype)
    command = np.clip(np.clip(action, position - max_change, position + max_change), low, high).astype(space.dtype)
    is_within = np.abs(command - position) <= max_change + 1e-5 * np.maximum(1.0, np.abs(position))  # for float32
    return command if is_within.all() else None
