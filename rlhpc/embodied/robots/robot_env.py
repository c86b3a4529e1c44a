"""Environment of a robot: one slot, in real time. `env_id` is the `module:Class` of a `Robot`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlhpc.embodied.envs.base import Step, Timing, VectorEnv
from rlhpc.embodied.envs.episode_tracker import EpisodeTracker
from rlhpc.embodied.robots.driver import Observation, Robot, Verdict
from rlhpc.embodied.robots.limits import RESUME_MODES, CommandLimits, RobotStopped, StaleObservation
from rlhpc.embodied.robots.safety import SafetyCore, build_safe_robot
from rlhpc.runtime.comm.context import check_run
from rlhpc.runtime.errors import ConfigError, RlhpcError

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig


__all__ = ["Observation", "OneRobotEnv", "Pace", "Robot", "RobotVectorEnv", "Verdict", "positive_number"]

log = logging.getLogger(__name__)

#: Maximum number of consecutive commands that are rejected because the policy takes too long.
_MAX_REFUSALS = 20
#: Number of consecutive stops during resets after which a robot with `resume: auto` raises an error.
_MAX_STOPS = 3


class OneRobotEnv(VectorEnv):
    """Vector environment of one robot. A chunk ends with its episode or at a rejected command."""

    num_envs = 1

    def chunk_step(self, actions: np.ndarray) -> Step:
        """Executes an action chunk until it or the episode ends (`VectorEnv.chunk_step`). The remaining actions are dropped,
        because they were chosen for an earlier scene.
        """
        length = actions.shape[1]
        if length == 1:
            return self.step(actions[:, 0])
        rewards, is_executed = np.zeros((1, length), np.float32), np.zeros((1, length), bool)
        for index in range(length):
            obs, step_rewards, terminations, truncations, infos = self.step(actions[:, index])
            rewards[:, index], is_executed[:, index] = step_rewards, "lost" not in infos
            if not is_executed[0, index] or terminations[0] or truncations[0]:
                break
        infos["chunk"] = {"rewards": rewards, "mask": is_executed}
        return obs, rewards.sum(1), terminations, truncations, infos


class RobotVectorEnv(OneRobotEnv):
    """Vector environment of one local robot. Episodes cannot be resumed.

    `kwargs`: `hz` (10), steps per second; `max_change`, `stale_s` and `resume`, see `CommandLimits`; `late` (keep): the robot
    repeats the last command, or must `stop`, when the next command is late. Other keys are the robot's arguments. A
    safety stop ends the episode as truncated, without an entry in the statistics (`infos["lost"]`), and the next
    episode begins when a person allows it. A rejected command does the same, except that the next episode begins at once.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: 1.
        slot_offset: Global number of the slot.
        seed: Seed of the run.
        robot: Existing robot, or its safety core if other code closes the robot; None builds the robot from `cfg`.
    """

    holds_hardware = True
    on_wait: Callable[[str], None]
    timing: Timing

    def __init__(
        self, cfg: EnvSideConfig, num_envs: int, slot_offset: int, seed: int, robot: Robot | SafetyCore | None = None
    ) -> None:
        kwargs = {str(name): value for name, value in (cfg.kwargs or {}).items()}
        pace = Pace.pop_from(num_envs, kwargs)
        self.control_hz = pace.hz
        self._period, self._stops_on_late_action = 1.0 / pace.hz, pace.late_action == "stop"
        if robot is None:
            self._core = build_safe_robot(cfg.env_id, "env.env_id", kwargs, pace.limits)
        elif isinstance(robot, SafetyCore):
            self._core = robot
        else:
            self._core = SafetyCore(robot, pace.limits)
        self.observation_space, self.action_space = self._core.observation_space, self._core.action_space
        self.max_episode_steps = cfg.max_episode_steps or 0
        self.episodes = EpisodeTracker(cfg, 1, slot_offset, seed, self.max_episode_steps)
        self.timing = self._core.timing
        self.on_wait = check_run
        self._num_refusals = 0
        self._step_start = 0.0
        self._last_sent: float | None = None  # time of the episode's last command

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode (`VectorEnv.reset`)."""
        if seed is not None:
            self.episodes.reseed(seed)
        return self._begin_episode(), {}

    def _begin_episode(self) -> Any:
        """Begins an episode once the robot may move, and returns the first observation."""
        (seed,) = self.episodes.begin(np.array([0]))
        self._last_sent = None
        for num_stops in range(1 << 62):
            self._core.wait_for_person(self.on_wait)
            try:
                observation = self._core.begin(seed)
                break
            except RobotStopped:
                if num_stops + 1 >= _MAX_STOPS and self._core.limits.resume == "auto":
                    raise
        self._step_start = time.monotonic()
        return _add_batch_axis(observation.obs)

    def refresh(self) -> Any:
        """Returns a current observation (`VectorEnv.refresh`). The next step reports a stopped robot."""
        self._step_start = time.monotonic()
        try:
            return _add_batch_axis(self._core.observe().obs)
        except RobotStopped:
            return self._newest_row()

    def step(self, actions: np.ndarray) -> Step:
        """Executes one step of the control period (`VectorEnv.step`)."""
        try:
            verdict = self._move(actions)
        except (RobotStopped, StaleObservation) as refusal:
            return self._end_lost_episode(refusal)
        except BaseException:
            self._core.end()
            raise
        self._num_refusals = 0
        rewards, terminations, truncations = self._record_verdict(verdict)
        obs, infos = self._newest_row(), {}
        if terminations[0] or truncations[0]:
            infos = {"final_obs": obs, "episode": self.episodes.report(np.array([True]))}
            log.info("an episode of the robot: %s", self.timing)
            obs = self._begin_episode()
        return obs, rewards, terminations, truncations, infos

    def _end_lost_episode(self, refusal: RlhpcError) -> Step:
        """Ends the episode after a stop or a rejected command, and begins the next episode."""
        self._num_refusals = self._num_refusals + 1 if isinstance(refusal, StaleObservation) else 0
        if self._num_refusals >= _MAX_REFUSALS:
            raise RlhpcError(
                f"{refusal}, {_MAX_REFUSALS} times in a row: the policy is slower than stale_s ({self._core.limits.stale_s:g})"
            ) from None
        log.info("an episode of the robot is lost: %s; %s", refusal, self.timing)
        infos = {"final_obs": self._newest_row(), "episode": self.episodes.report(np.array([False]))}
        infos["lost"] = np.array([True])
        return self._begin_episode(), np.zeros(1, np.float32), np.array([False]), np.array([True]), infos

    def _record_verdict(self, verdict: Verdict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        success = None if verdict.success is None else np.array([verdict.success])
        return self.episodes.add(
            np.array([verdict.reward], np.float32), np.array([verdict.failed]), success, np.array([True])
        )

    def _move(self, actions: np.ndarray) -> Verdict:
        """Sends the command, waits for the end of the step, and returns the driver's verdict on the step."""
        previous_observation = self._core.observation
        step_end = self._step_start + self._period
        within_s = max(step_end - time.monotonic(), 0.0) + self._period if self._stops_on_late_action else None
        sent_time = self._core.command(actions[0], within_s)
        self._step_start = max(step_end, sent_time)
        assert previous_observation is not None
        if self._last_sent is not None:
            self.timing.record_period(sent_time - self._last_sent, self._period)
        self._last_sent = sent_time
        self.timing.record_command(sent_time - previous_observation.taken_at, is_late=sent_time > step_end)
        if (pause_s := self._step_start - time.monotonic()) > 0:
            time.sleep(pause_s)
        self.timing.record_step(is_dropped=self._core.observe().taken_at == previous_observation.taken_at)
        return self._core.judge()

    def hold(self) -> None:
        """Makes the robot hold still (`VectorEnv.hold`)."""
        self._last_sent = None
        self._core.hold()

    def stop(self, reason: str) -> None:
        """Stops the robot for safety (`VectorEnv.stop`). The next step reports a lost episode and waits for a person."""
        self._core.stop(reason)

    def _newest_row(self) -> Any:
        observation = self._core.observation
        assert observation is not None
        return _add_batch_axis(observation.obs)

    def close(self) -> None:
        """Stops the robot and releases it."""
        self._core.close()


class Pace(NamedTuple):
    """Control rate and limits of a robot (see `RobotVectorEnv`)."""

    hz: float
    stale_s: float
    max_change: float | None
    late_action: str
    resume: str

    def to_json(self) -> dict[str, Any]:
        """Returns the values by their keys in `kwargs`, for a remote robot."""
        fields = self._asdict()
        return {"late": fields.pop("late_action"), **fields}

    @property
    def limits(self) -> CommandLimits:
        """Limits of the robot's commands."""
        return CommandLimits(self.stale_s, self.max_change, self.resume)

    @classmethod
    def pop_from(cls, num_envs: int, kwargs: dict[str, Any]) -> Pace:
        """Removes rate and limits from `kwargs` and returns them.

        Raises:
            ConfigError: A number is not above 0, another value is invalid, or a rank has several robots.
        """
        if num_envs != 1:
            raise ConfigError(
                f"a robot is one slot: set env.train.num_envs, env.eval.num_envs to 1 (a rank has {num_envs})"
            )
        rate_hz = positive_number("hz", kwargs.pop("hz", 10.0))
        stale_s = positive_number("stale_s", kwargs.pop("stale_s", 0.5))
        max_change = kwargs.pop("max_change", None)
        if (late_action := kwargs.pop("late", "keep")) not in ("keep", "stop"):
            raise ConfigError(
                f"env.train.kwargs.late is {late_action!r}; a robot may keep to its last command, or stop"
            )
        if (resume := kwargs.pop("resume", "person")) not in RESUME_MODES:
            raise ConfigError(
                f"env.train.kwargs.resume is {resume!r}; after a stop for safety a robot waits for a person, or goes on (auto)"
            )
        return cls(
            rate_hz,
            stale_s,
            None if max_change is None else positive_number("max_change", max_change),
            late_action,
            resume,
        )


def positive_number(name: str, value: Any) -> float:
    """Checks a number of `kwargs` and returns it as a float.

    Raises:
        ConfigError: The value is not a finite number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"env.train.kwargs.{name} is {value!r}; it must be a number above 0")
    return float(value)


def _add_batch_axis(obs: Any) -> Any:
    return {key: array[None] for key, array in obs.items()} if isinstance(obs, dict) else np.asarray(obs)[None]
