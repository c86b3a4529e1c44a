"""State machine of a robot, which determines whether the robot may be reset or moved, or waits for a person."""

from __future__ import annotations

import enum
import threading

from rlhpc.embodied.robots.limits import RobotStopped
from rlhpc.runtime.errors import RlhpcError


class State(enum.Enum):
    """State of a robot. A reset leads from `IDLE` via `RESETTING` to `HELD`; a command leads from `HELD` or `MOVING` to
    `MOVING`.
    """

    IDLE = "holds still, and must be reset"
    RESETTING = "is being reset"
    HELD = "holds still in an episode"
    MOVING = "carries out a command"
    STOPPED = "is stopped, and waits for a person"
    CLOSED = "is closed"


LIVE = (State.RESETTING, State.HELD, State.MOVING)


class StateMachine:
    """State machine of one robot, for use from any thread. Only `resume` leads from `STOPPED` to `IDLE`.

    Args:
        name: Name of the robot.

    Attributes:
        state: Current state.
        reason: Reason why the robot is stopped; empty if it is not stopped.
    """

    def __init__(self, name: str) -> None:
        self.state, self.reason = State.IDLE, ""
        self._name = name
        self._end_time: float | None = None
        self._lock = threading.Lock()

    def require(self, *states: State) -> None:
        """Checks that the robot is in one of the states or, without arguments, that it is neither stopped nor closed.

        Raises:
            RobotStopped: The robot is stopped or closed.
            RlhpcError: The robot is in another state.
        """
        with self._lock:
            self._require(states)

    def _require(self, states: tuple[State, ...]) -> None:
        if self.state is State.STOPPED:
            raise RobotStopped(self.reason)
        if self.state is State.CLOSED:
            raise RobotStopped("it is closed")
        if states and self.state not in states:
            raise RlhpcError(f"{self._name} {self.state.value}")

    def move(self, old_state: State, new_state: State, end_time: float | None = None) -> bool:
        """Changes the state from `old_state` to `new_state`; returns False if the robot was not in the state `old_state`.

        Args:
            old_state, new_state: Old and new state.
            end_time: Time (`time.monotonic`) at which the command expires; None for no command.

        Raises:
            RobotStopped: The robot is stopped or closed.
        """
        with self._lock:
            self._require(())
            if self.state is not old_state:
                return False
            self.state, self._end_time = new_state, end_time
            return True

    def hold(self) -> None:
        """Changes the state from `MOVING` to `HELD`."""
        with self._lock:
            self._end_time = None
            if self.state is State.MOVING:
                self.state = State.HELD

    def end(self) -> None:
        """Ends an episode: changes a state in `LIVE` to `IDLE`."""
        with self._lock:
            self._end_time = None
            if self.state in LIVE:
                self.state = State.IDLE

    def stop(self, reason: str) -> bool:
        """Changes the state to `STOPPED`; returns False if the robot was already stopped or closed."""
        with self._lock:
            if self.state in (State.STOPPED, State.CLOSED):
                return False
            self.state, self._end_time, self.reason = State.STOPPED, None, reason
            return True

    def resume(self) -> None:
        """Changes the state from `STOPPED` to `IDLE`, after a person has allowed it."""
        with self._lock:
            if self.state is State.STOPPED:
                self.state, self.reason = State.IDLE, ""

    def close(self) -> State:
        """Changes the state to `CLOSED`, and returns the previous state."""
        with self._lock:
            previous_state, self.state, self._end_time = self.state, State.CLOSED, None
            return previous_state

    def is_over(self, now: float) -> bool:
        """Returns whether the current command has expired."""
        with self._lock:
            return self._end_time is not None and now > self._end_time
