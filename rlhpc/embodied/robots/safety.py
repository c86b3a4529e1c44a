"""Safety core of a robot: the only code that calls the robot's driver.

The safety core guarantees for all callers, from any thread:

- A command that is not finite is not sent, and stops the robot.
- A command is within the bounds of the action space. With `max_change` it is also close to the robot's current state: to the
  measured position if commands are absolute, otherwise to the command being executed (0 while the robot holds still).
- A command based on an observation older than `stale_s` is rejected, and the robot holds still.
- A robot holds still if no command arrives for `stale_s`, and is stopped if a call of its driver hangs. `stop` is called
  from a separate thread and does not wait for a running call.
- After a safety stop nothing moves the robot until a person allows it (`rlhpc robot resume`, `Robot.ready`). This also
  applies to later processes, unless `resume` is auto.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rlhpc.embodied.envs.base import Timing
from rlhpc.embodied.robots.driver import Observation, Robot, Verdict
from rlhpc.embodied.robots.limits import (
    CommandLimits,
    StaleObservation,
    explain_no_max_change,
    nearest_command,
    observation_fault,
)
from rlhpc.embodied.robots.notices import Notice, robot_name
from rlhpc.embodied.robots.states import LIVE, State, StateMachine
from rlhpc.embodied.robots.watchdog import WatchdogProcess
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.plugins import load_attribute

log = logging.getLogger(__name__)

#: Seconds between two checks of the watchdog thread.
_WATCH_INTERVAL_S = 0.01
#: Maximum seconds that a stop waits for a running movement, and for a movement that is about to begin, so that it comes last.
_SENDING_S, _BEGINNING_S = 0.03, 1.0
#: Seconds between two checks for a person's permission, and between reminders that a permission is needed.
_READY_POLL_S, _REMIND_S = 0.2, 60.0
#: Maximum seconds by which an observation's time may be in the future.
_CLOCK_TOLERANCE_S = 0.05
#: Maximum seconds that a driver may take to release its hardware.
_CLOSE_S = 5.0


class SafetyCore:
    """Safety core of one robot: limits its commands and runs its watchdog.

    Args:
        driver: Driver of the robot; no other code may call it from now on.
        limits: Limits of commands.
        name: Name in messages and notices. With an empty name, no notice is written for later processes.

    Attributes:
        observation: Newest observation; None before the first reset.
        timing: Counts of stops, holds and rejected commands.
    """

    def __init__(self, driver: Robot, limits: CommandLimits, name: str = "") -> None:
        self.__driver = driver
        self.observation_space, self.action_space = driver.observation_space, driver.action_space
        self.name = name or type(driver).__name__
        self.observation: Observation | None = None
        self.timing = Timing()
        self._states = StateMachine(self.name)
        self._last_command = np.zeros(self.action_space.shape)
        self._current_call: tuple[str, float, float] | None = None  # name, start time, maximum seconds
        self._is_stop_unconfirmed = False  # the driver raised in `stop`
        self._call_lock = threading.RLock()  # serializes all calls except stops
        self._move_lock = threading.RLock()  # locked while a movement begins
        self._close_event, self._release_event = threading.Event(), threading.Event()
        try:
            self.set_limits(limits)
            stop = driver.independent_stop()
            self._process = None if stop is None else WatchdogProcess(stop)
        except BaseException:
            driver.close()
            raise
        self._notice = Notice(name) if name else None  # notice for later processes
        if self._notice is not None and (reason := self._notice.earlier_reason()):
            self.stop(reason)
        threading.Thread(target=self._watch, name="robot-watchdog", daemon=True).start()

    @property
    def state(self) -> State:
        """State of the robot."""
        return self._states.state

    def set_limits(self, limits: CommandLimits) -> None:
        """Replaces the limits.

        Raises:
            ConfigError: `max_change` is set, but cannot be enforced with this driver.
        """
        if limits.max_change is not None and (reason := self.explain_no_max_change()):
            raise ConfigError(f"max_change is {limits.max_change:g}; {reason}")
        self.limits = limits

    def explain_no_max_change(self) -> str:
        """Returns the reason why `max_change` cannot be enforced with this driver; empty if it can be enforced."""
        return explain_no_max_change(self.__driver)

    # -- episodes and commands ------------------------------------------------------------------------------------

    def begin(self, seed: int) -> Observation:
        """Resets the robot and returns its first observation.

        Raises:
            RobotStopped: The robot is stopped, or was stopped during the reset.
            RlhpcError: Two threads reset the robot at once.
        """
        with self._call_lock:
            self._states.require()
            self.end()
            self._post_notice()
            if not self._move("reset", seed, State.IDLE, State.RESETTING):
                raise RlhpcError(f"{self.name} was reset by two threads at a time")
            observation = self._observe()
            self._states.move(State.RESETTING, State.HELD)
            return observation

    def observe(self) -> Observation:
        """Reads an observation from the driver and returns it.

        Raises:
            RobotStopped: The observation is too old or unsafe, or the robot was stopped before.
        """
        with self._call_lock:
            self._states.require(State.HELD, State.MOVING)
            return self._observe()

    def command(self, action: np.ndarray, within_s: float | None = None) -> float:
        """Limits a command that is based on the newest observation, sends it, and returns the time (`time.monotonic`).

        Args:
            action: Command, of the shape of the action space.
            within_s: Seconds after which the robot holds still unless another command arrives; at most `stale_s`.

        Raises:
            StaleObservation: The observation is too old; the robot holds still.
            RobotStopped: The robot was stopped before, or because of this command.
        """
        with self._call_lock:
            self._states.require(State.HELD, State.MOVING)
            action = np.asarray(action, np.float64).reshape(self.action_space.shape)
            if not np.isfinite(action).all():
                self.stop(f"a command is not finite: {np.array2string(action, threshold=20)}")
                self._states.require()
            while True:
                self._states.require(State.HELD, State.MOVING)
                previous_state = self.state
                limited_action = self._limit_command(action, previous_state)
                now = self._require_fresh()
                deadline = now + min(self.limits.stale_s, np.inf if within_s is None else within_s)
                if self._move("act", limited_action, previous_state, State.MOVING, deadline):
                    self._last_command = limited_action.astype(np.float64)
                    return now

    def judge(self) -> Verdict:
        """Returns the driver's verdict on the step that led to the newest observation.

        Raises:
            RobotStopped: The robot is stopped.
        """
        with self._call_lock:
            self._states.require(State.HELD, State.MOVING)
            assert self.observation is not None
            verdict: Verdict = self._call(
                "judge", self.observation.obs, self._last_command.astype(self.action_space.dtype)
            )
            self._states.require()
            return verdict

    def _require_fresh(self) -> float:
        """Checks that the newest observation is not too old, and returns the current time (`time.monotonic`).

        Raises:
            StaleObservation: The observation is too old; the robot holds still.
        """
        now = time.monotonic()
        age = now - (self.observation.taken_at if self.observation is not None else -np.inf)
        if age > self.limits.stale_s:
            self.timing.record_refusal()
            self.hold()
            raise StaleObservation(f"a command was chosen from an observation that is {age:.2f} s old")
        return now

    def _limit_command(self, action: np.ndarray, state: State) -> np.ndarray:
        """Returns the command within the limits that is nearest to `action`.

        Raises:
            RobotStopped: No command is within the limits.
        """
        max_change, origin = self.limits.max_change, None
        if max_change is not None and self.__driver.control_mode == "absolute":
            origin = self._read_position()
        elif max_change is not None:
            origin = self._last_command if state is State.MOVING else np.zeros(self.action_space.shape)
        command = nearest_command(action, self.action_space, origin, max_change)
        if command is None:
            self.stop(f"it is outside of the bounds of its commands by more than max_change ({max_change:g}): {origin}")
            self._states.require()
        assert command is not None
        return command

    def _read_position(self) -> np.ndarray:
        position = np.asarray(self._call("position"), np.float64)
        if position.shape != self.action_space.shape or not np.isfinite(position).all():
            self.stop(f"its measured position is {position}")
        self._states.require()
        return position

    def _observe(self) -> Observation:
        observation: Observation = self._call("observe")
        if reason := observation_fault(observation.obs, self.observation_space):
            self.stop(reason)
            self._states.require()
        age = time.monotonic() - observation.taken_at
        self.observation = observation
        if not age > -_CLOCK_TOLERANCE_S:
            self.stop(f"the time of its observation is {age:.2f} s from now: it must be by time.monotonic")
        elif age > self.limits.stale_s:
            self.stop(f"its newest observation is {age:.2f} s old")
        elif reason := self._call("unsafe", observation.obs):
            self.stop(str(reason))
        self._states.require()
        return observation

    # -- calls of the driver --------------------------------------------------------------------------------------

    def _call(self, name: str, *args: Any) -> Any:
        """Calls a method of the driver and returns its result. Stops the robot if the driver raises an error; `_check` stops
        the robot if the call hangs.
        """
        max_s = self.__driver.reset_s if name == "reset" else self.limits.stale_s
        self._current_call = (name, time.monotonic(), max_s)
        try:
            return getattr(self.__driver, name)(*args)
        except KeyboardInterrupt:
            self.end()
            raise
        except BaseException as error:
            self.stop(f"{name} raised {type(error).__name__}: {error}")
            raise
        finally:
            self._current_call = None

    def _move(
        self, name: str, argument: Any, old_state: State, new_state: State, end_time: float | None = None
    ) -> bool:
        """Makes a call that moves the robot if the robot is still in the state `old_state`. A stop that arrives during the
        call is repeated after the call.

        Returns:
            Whether the call was made; False if the robot was no longer in the state `old_state`.
        """
        with self._move_lock:
            self._check_watchdog(is_moving=True)
            if not self._states.move(old_state, new_state, end_time):
                return False
            try:
                self._call(name, argument)
            finally:
                if self.state is not new_state:
                    self._stop_driver()
        self._states.require()
        return True

    def _check_watchdog(self, *, is_moving: bool) -> None:
        """Sends a heartbeat to the watchdog process, if any. Stops the robot if the watchdog process has stopped its
        hardware.
        """
        if self._process is not None:
            self._process.beat(is_moving=is_moving, silence_s=self.limits.stale_s)
            if self._process.has_fired():
                self.stop("the watchdog process has stopped it: this process was blocked, or that one ended")

    def _stop_driver(self) -> None:
        """Calls the driver's `stop`, after a short wait for a movement that is running or about to begin."""
        pending_call, wait_s = self._current_call, _SENDING_S
        if pending_call is None:
            wait_s = _BEGINNING_S  # a movement must not begin after the stop
        elif pending_call[0] == "act":
            wait_s = max(wait_s, pending_call[1] + pending_call[2] - time.monotonic())
        has_lock = self._move_lock.acquire(timeout=wait_s)
        try:
            self.__driver.stop()
            self._is_stop_unconfirmed = False
        except Exception as error:  # the watchdog tries again
            if not self._is_stop_unconfirmed:
                log.exception("%s: stop() failed; it is tried again", self.name)
            self._is_stop_unconfirmed = True
            if self.state is not State.STOPPED:
                self.stop(f"stop raised {type(error).__name__}: {error}")
        finally:
            if has_lock:
                self._move_lock.release()

    # -- states ---------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Makes the robot hold still until the next command; its episode continues."""
        self._states.hold()
        if self.state is not State.CLOSED:
            self._stop_driver()

    def end(self) -> None:
        """Ends the episode: the robot holds still and accepts no command before a reset."""
        self._states.end()
        if self.state is not State.CLOSED:
            self._stop_driver()

    def stop(self, reason: str) -> None:
        """Stops the robot for safety: nothing moves it until a person allows it. Any thread may call this repeatedly."""
        is_new = self._states.stop(reason)
        if self.state is State.CLOSED:
            return
        self._stop_driver()
        if is_new:
            self.timing.record_stop()
            self._log_stop(reason)
            self._post_notice()

    def _log_stop(self, reason: str) -> None:
        """Writes a log message that the robot is stopped, and who may release the stop."""
        hint = ""
        if self.limits.resume == "person":
            resume_hint = f"rlhpc robot resume {self.name}" if self._notice is not None else "its ready() says so"
            hint = f"; it waits for a person who looks at it: {resume_hint}"
        log.warning("%s is stopped: %s%s", self.name, reason, hint)

    def _post_notice(self) -> None:
        """Writes a notice for later processes: that this process uses the robot and, if it is stopped, the reason."""
        if self._notice is not None:
            self._notice.post(lambda: self._states.reason if self.limits.resume == "person" else "")

    def wait_for_person(self, check: Callable[[str], None] = lambda reason: None) -> None:
        """Waits without a deadline until a stopped robot may move again. Returns at once if the robot is not stopped.

        Args:
            check: Function called repeatedly with the reason of the stop. It cancels the wait by raising an error.

        Raises:
            RobotStopped: The robot was closed.
        """
        last_reminder = time.monotonic()
        while self.state is State.STOPPED:
            if not self._is_stop_unconfirmed and (self.limits.resume == "auto" or self._person_is_ready()):
                if self._notice is not None:
                    self._notice.remove()
                self._states.resume()
                log.info("%s may move again", self.name)
                return
            reason = self._states.reason
            if time.monotonic() - last_reminder > _REMIND_S:
                last_reminder = time.monotonic()
                self._log_stop(reason)
            check(reason)
            self._close_event.wait(_READY_POLL_S)
        self._states.require()

    def _person_is_ready(self) -> bool:
        if self._notice is not None and self._notice.resumed():
            return True
        try:
            return bool(self.__driver.ready())
        except Exception:
            log.exception("%s: ready() failed", self.name)
            return False

    def close(self) -> None:
        """Stops and releases the robot. Waits at most a few seconds for the driver, even if another thread is closing it."""
        self.end()
        previous_state = self._states.close()
        if previous_state is State.CLOSED:
            self._release_event.wait(_CLOSE_S)
            return
        self._close_event.set()
        if self._process is not None:
            self._process.close()
        stays_stopped = self._is_stop_unconfirmed or (
            previous_state is State.STOPPED and self.limits.resume == "person"
        )
        if self._notice is not None and not stays_stopped:
            self._notice.remove()
        close_thread = threading.Thread(target=self.__driver.close, name="robot-close", daemon=True)
        close_thread.start()
        close_thread.join(_CLOSE_S)
        self._release_event.set()

    # -- watchdog -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._close_event.wait(_WATCH_INTERVAL_S):
            try:
                self._check()
            except Exception:
                log.exception("%s: the watchdog goes on", self.name)

    def _check(self) -> None:
        """Makes the robot hold still once its last command has expired, and stops it if its driver hangs."""
        now, pending_call = time.monotonic(), self._current_call
        self._check_watchdog(is_moving=self.state in (State.RESETTING, State.MOVING))
        if pending_call is not None and self.state in LIVE and now - pending_call[1] > pending_call[2]:
            self.stop(f"its driver hangs: {pending_call[0]} has not returned for {now - pending_call[1]:.2f} s")
        elif self._states.is_over(now):
            self.timing.record_hold()
            self.hold()
        elif self._is_stop_unconfirmed:
            self._stop_driver()


def build_safe_robot(path: str, key: str, kwargs: dict[str, Any], limits: CommandLimits) -> SafetyCore:
    """Builds a robot's driver from its class (`module:Class`), and returns the driver's safety core.

    Raises:
        ConfigError: The class cannot be imported or rejects its arguments, or `max_change` cannot be enforced.
    """
    try:
        driver: Robot = load_attribute(path, key)(**kwargs)
    except TypeError as error:
        raise ConfigError(f"{key.split('.')[-1]} {path!r} refuses kwargs {kwargs}: {error}") from None
    return SafetyCore(driver, limits, robot_name(path, kwargs))
