"""State machine of a robot: whether it may be reset, may be moved, or waits for a person."""

from __future__ import annotations

import enum
import threading

from rlhpc.embodied.robots.limits import RobotStopped
from rlhpc.runtime.errors import RlhpcError


class State(enum.Enum):
    """State of a robot. A reset leads from `IDLE` over `RESETTING` to `HELD`, a command from there or `MOVING` to `MOVING`."""

    IDLE = "holds still, and must be reset"
    RESETTING = "is being reset"
    HELD = "holds still in an episode"
    MOVING = "carries out a command"
    STOPPED = "is stopped, and waits for a person"
    CLOSED = "is closed"


LIVE = (State.RESETTING, State.HELD, State.MOVING)


class StateMachine:
    """State of one robot, which any thread may change. Only a person can lead from `STOPPED` to `IDLE`.

    Args:
        name: Name of the robot.

    Attributes:
        current: The state.
        reason: Why the robot is stopped; empty if it is not.
    """

    def __init__(self, name: str) -> None:
        self.current, self.reason = State.IDLE, ""
        self._name = name
        self._until: float | None = None
        self._lock = threading.Lock()

    def require(self, *states: State) -> None:
        """Refuses a call unless the robot is in one of the states; with none, unless it is stopped or closed.

        Raises:
            RobotStopped: It is stopped or closed.
            RlhpcError: It is in another state.
        """
        with self._lock:
            self._require(states)

    def _require(self, states: tuple[State, ...]) -> None:
        if self.current is State.STOPPED:
            raise RobotStopped(self.reason)
        if self.current is State.CLOSED:
            raise RobotStopped("it is closed")
        if states and self.current not in states:
            raise RlhpcError(f"{self._name} {self.current.value}")

    def move(self, before: State, after: State, until: float | None = None) -> bool:
        """Enters a state from another one; returns whether the robot was still in that.

        Args:
            before, after: The states.
            until: Time (`time.monotonic`) at which a command is over; None for none.

        Raises:
            RobotStopped: It is stopped or closed.
        """
        with self._lock:
            self._require(())
            if self.current is not before:
                return False
            self.current, self._until = after, until
            return True

    def hold(self) -> None:
        """Leaves `MOVING` for `HELD`."""
        with self._lock:
            self._until = None
            if self.current is State.MOVING:
                self.current = State.HELD

    def end(self) -> None:
        """Leaves an episode for `IDLE`."""
        with self._lock:
            self._until = None
            if self.current in LIVE:
                self.current = State.IDLE

    def stop(self, reason: str) -> bool:
        """Enters `STOPPED`; returns False if the robot was stopped before."""
        with self._lock:
            if self.current in (State.STOPPED, State.CLOSED):
                return False
            self.current, self._until, self.reason = State.STOPPED, None, reason
            return True

    def resume(self) -> None:
        """Leaves `STOPPED` for `IDLE`, because a person allows it."""
        with self._lock:
            if self.current is State.STOPPED:
                self.current, self.reason = State.IDLE, ""

    def close(self) -> State:
        """Enters `CLOSED`; returns the state before."""
        with self._lock:
            previous_state, self.current, self._until = self.current, State.CLOSED, None
            return previous_state

    def is_over(self, now: float) -> bool:
        """Returns whether the current command has expired."""
        with self._lock:
            return self._until is not None and now > self._until
