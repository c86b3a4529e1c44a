"""Interface of a robot's driver, which only `rlhpc.embodied.robots.safety` calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Observation(NamedTuple):
    """Observation, and the time at which it was taken (`time.monotonic`)."""

    obs: Any
    taken_at: float


class Verdict(NamedTuple):
    """Reward of a step, and whether the task is done; None for unknown values."""

    reward: float
    success: bool | None = None
    failed: bool = False


class Robot(ABC):
    """Driver of a robot. Calls come one at a time; `stop` comes at any time and from other threads.

    Attributes:
        observation_space: A `Box`, or a `Dict` of them.
        action_space: A `Box`; no command leaves its bounds.
        control_mode: Meaning of a command: `absolute` (a target in the numbers of `position`), `delta` (a difference) or
            `velocity` (also forces). 0 is to hold still in the last two. `max_change` needs it.
        reset_s: Seconds in which `reset` must have ended, or the robot is stopped. A reset that waits for a person
            who puts things back sets `math.inf`.
    """

    observation_space: Any
    action_space: Any
    control_mode: str = ""
    reset_s: float = 120.0

    @abstractmethod
    def reset(self, seed: int) -> None:
        """Brings the robot to the start of an episode. `stop` must also end a movement that the reset makes."""

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
        """Holds still, until the next `act` or `reset`. Safe at any time, also twice, and also while another call lasts."""

    def position(self) -> np.ndarray | None:
        """Returns the measured position in the numbers of a command, as of now. `control_mode: absolute` needs it for
        `max_change`."""
        return None

    def unsafe(self, obs: Any) -> str:
        """Returns the reason why the robot must stop now; empty if it is safe."""
        del obs
        return ""

    def ready(self) -> bool:
        """Returns whether a person has said since the last stop that the robot may move again, as with a button at it."""
        return False

    def independent_stop(self) -> Callable[[], None] | None:
        """Returns a function that stops the robot from another process, over a connection that it opens itself; None if
        there is no such way. It is pickled (cloudpickle)."""
        return None

    def close(self) -> None:  # noqa: B027 (not all have something to free)
        """Releases the hardware."""
