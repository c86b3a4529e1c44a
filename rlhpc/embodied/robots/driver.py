"""Interface of a robot's driver, which only `rlhpc.embodied.robots.safety` calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Observation(NamedTuple):
    """Observation of a robot, and the time at which it was taken (`time.monotonic`)."""

    obs: Any
    taken_at: float


class Verdict(NamedTuple):
    """Reward and success of a step. `success` is None if unknown; `failed` ends the episode as terminated."""

    reward: float
    success: bool | None = None
    failed: bool = False


class Robot(ABC):
    """Driver of a robot. The safety core makes one call at a time, except `stop`, which may come at any time from any thread.

    Attributes:
        observation_space: A `Box`, or a `Dict` of boxes.
        action_space: A `Box`. All commands are within its bounds.
        control_mode: Meaning of a command: `absolute` (a target in the coordinates of `position`), `delta` (a difference) or
            `velocity` (also forces). In the modes delta and velocity, 0 means to hold still. `max_change` needs a mode.
        reset_s: Maximum seconds of a `reset`; a longer reset stops the robot. Use `math.inf` for a reset that waits for a
            person.
    """

    observation_space: Any
    action_space: Any
    control_mode: str = ""
    reset_s: float = 120.0

    @abstractmethod
    def reset(self, seed: int) -> None:
        """Moves the robot to the start of an episode. `stop` must also end the movement of a reset."""

    @abstractmethod
    def act(self, action: np.ndarray) -> None:
        """Sends a command without waiting for its effect."""

    @abstractmethod
    def observe(self) -> Observation:
        """Returns the newest observation."""

    @abstractmethod
    def judge(self, obs: Any, action: np.ndarray) -> Verdict:
        """Returns the reward of the step that led to `obs`."""

    @abstractmethod
    def stop(self) -> None:
        """Makes the robot hold still until the next `act` or `reset`. It must be safe at any time, also repeatedly and during
        another call.
        """

    def position(self) -> np.ndarray | None:
        """Returns the current measured position, in the coordinates of a command; None if unknown. `max_change` needs it with
        `control_mode: absolute`.
        """
        return None

    def unsafe(self, obs: Any) -> str:
        """Returns the reason why the robot must stop now; empty if it is safe."""
        del obs
        return ""

    def ready(self) -> bool:
        """Returns whether a person has allowed the robot to move again since the last stop, for example with a button."""
        return False

    def independent_stop(self) -> Callable[[], None] | None:
        """Returns a function that stops the robot from another process over a new connection; None if the driver has no such
        function. The function is pickled with cloudpickle.
        """
        return None

    def close(self) -> None:  # noqa: B027 (not all have something to free)
        """Releases the hardware."""
