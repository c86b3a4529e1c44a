"""A robot as an environment: one slot, in real time, with a safety stop. `env_id` is the `module:Class` of a `Robot`."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlhpc.embodied.envs.base import Step, VectorEnv
from rlhpc.embodied.envs.episodes import Episodes
from rlhpc.embodied.envs.timing import Timing
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.lookup import load_attribute

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig

log = logging.getLogger(__name__)


class Seen(NamedTuple):
    """An observation, and when it was taken (`time.monotonic`)."""

    obs: Any
    taken_at: float


class Verdict(NamedTuple):
    """What a step was worth, and whether the task is done; None where nobody knows."""

    reward: float
    success: bool | None = None
    failed: bool = False


class Robot(ABC):
    """What a run needs of a robot. Calls come one at a time, `stop` from another thread, too.

    Attributes:
        observation_space: A `Box`, or a `Dict` of them.
        action_space: A `Box`; no command leaves its bounds.
    """

    observation_space: Any
    action_space: Any

    @abstractmethod
    def reset(self, seed: int) -> None:
        """Brings it to the start of an episode; may take as long as it takes."""

    @abstractmethod
    def act(self, action: np.ndarray) -> None:
        """Sends a command, and does not wait for what comes of it."""

    @abstractmethod
    def observe(self) -> Seen:
        """The newest observation."""

    @abstractmethod
    def judge(self, obs: Any, action: np.ndarray) -> Verdict:
        """What the step to `obs` was worth."""

    @abstractmethod
    def stop(self) -> None:
        """Holds still, until the next `act` or `reset`. Safe at any time, also twice."""

    def unsafe(self, obs: Any) -> str:
        """Why it must stop now; empty if it need not."""
        del obs
        return ""

    def close(self) -> None:  # noqa: B027 (not all have something to free)
        """Lets go of the hardware."""


class RobotVectorEnv(VectorEnv):
    """One robot. Its episodes cannot be resumed.

    `kwargs`: `hz` (10), steps a second; `max_change` (null), by how much a number of the command may change in a step;
    `stale_s` (0.5), age at which an observation is none any more, and time without a command after which the robot is
    stopped; `late` (keep), whether it keeps to the last command or must `stop` when the step for the next one is over; the
    others are the robot's own. A stop for safety ends the episode as truncated, without an entry in the
    statistics.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: 1.
        slot_offset: Global number of the slot.
        seed: Of the run.
        robot: The robot, where it is there already.
    """

    timing: Timing

    def __init__(
        self, cfg: EnvSideConfig, num_envs: int, slot_offset: int, seed: int, robot: Robot | None = None
    ) -> None:
        kwargs = {str(name): value for name, value in (cfg.kwargs or {}).items()}
        pace = Pace.of(num_envs, kwargs)
        self._period, self._stale_s, self._stops_late = 1.0 / pace.hz, pace.stale_s, pace.late == "stop"
        self._change = np.inf if pace.max_change is None else pace.max_change
        self.robot = built(cfg.env_id, "env.env_id", kwargs) if robot is None else robot
        self.num_envs = 1
        self.observation_space, self.action_space = self.robot.observation_space, self.robot.action_space
        self.max_episode_steps = cfg.max_episode_steps or 0
        self.episodes = Episodes(cfg, 1, slot_offset, seed, self.max_episode_steps)
        self.timing = Timing()
        self._lock = threading.Lock()
        #: Until when the last command is one; None while the robot is stopped.
        self._good_until: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="robot-watchdog", daemon=True).start()

    def _watch(self) -> None:
        """Stops the robot while no commands come: a run trains between its rollouts."""
        look_s = min(self._stale_s, self._period if self._stops_late else self._stale_s) / 4
        while not self._closed.wait(look_s):
            with self._lock:
                if self._good_until is not None and time.monotonic() > self._good_until:
                    self._good_until = None
                    self.timing.held += 1
                    self.robot.stop()

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode (`VectorEnv.reset`)."""
        if seed is not None:
            self.episodes.reseed(seed)
        return _row(self._begin()), {}

    def _begin(self) -> Any:
        (seed,) = self.episodes.begin(np.array([0]))
        with self._lock:
            self._good_until = None
            self.robot.stop()
            self.robot.reset(seed)
            self._seen = self.robot.observe()
        middle = (self.action_space.low + self.action_space.high) / 2
        self._last = np.where(np.isfinite(middle), middle, 0).astype(self.action_space.dtype)
        self._tick = time.monotonic()
        return self._seen.obs

    def step(self, actions: np.ndarray) -> Step:
        """One step in its time (`VectorEnv.step`)."""
        space = self.action_space
        wanted = np.clip(actions.reshape(space.shape), self._last - self._change, self._last + self._change)
        self._last = np.clip(wanted, space.low, space.high).astype(space.dtype)
        try:
            stopped, verdict = self._move()
        except BaseException:
            self.robot.stop()
            raise
        if stopped:
            log.warning("the robot was stopped: %s", stopped)
        rewards, ends, cut = (
            self._count(verdict) if not stopped else (np.zeros(1, np.float32), *np.array([[False], [True]]))
        )
        infos: dict[str, Any] = {}
        obs = _row(self._seen.obs)
        if ends[0] or cut[0]:
            infos = {"final_obs": obs, "episode": self.episodes.report(np.array([not stopped]))}
            infos |= {"lost": np.array([True])} if stopped else {}
            log.info("an episode of the robot: %s", self.timing)
            obs = _row(self._begin())
        return obs, rewards, ends, cut, infos

    def _count(self, verdict: Verdict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        success = None if verdict.success is None else np.array([verdict.success])
        return self.episodes.add(
            np.array([verdict.reward], np.float32), np.array([verdict.failed]), success, np.array([True])
        )

    def _move(self) -> tuple[str, Verdict]:
        """Sends the command and waits for the end of the step; why it had to stop, and what the step was worth."""
        with self._lock:
            self.robot.act(self._last)
            sent_at = time.monotonic()
            self._tick += self._period
            if (left := self._tick - sent_at) < 0:
                self.timing.late += 1
                self._tick -= left
            self._good_until = sent_at + self._stale_s
            if self._stops_late:
                self._good_until = min(self._good_until, self._tick + self._period)
        self.timing.latency_s.append(sent_at - self._seen.taken_at)
        time.sleep(max(0.0, left))
        with self._lock:
            before, self._seen = self._seen, self.robot.observe()
            self.timing.dropped += self._seen.taken_at == before.taken_at
            age = time.monotonic() - self._seen.taken_at
            why = (
                f"its newest observation is {age:.2f} s old"
                if age > self._stale_s
                else self.robot.unsafe(self._seen.obs)
            )
            if why:
                self._good_until = None
                self.robot.stop()
                return why, Verdict(0.0)
            return "", self.robot.judge(self._seen.obs, self._last)

    def hold(self) -> None:
        """Stops it until the next command."""
        with self._lock:
            self._good_until = None
            self.robot.stop()

    def retire(self) -> None:
        """Stops it, and leaves it to another."""
        self._closed.set()
        self.hold()

    def close(self) -> None:
        """Stops it, and lets go of it."""
        self.retire()
        self.robot.close()


class Pace(NamedTuple):
    """How fast a robot is moved: see `RobotVectorEnv`."""

    hz: float
    stale_s: float
    max_change: float | None
    late: str

    @classmethod
    def of(cls, num_envs: int, kwargs: dict[str, Any]) -> Pace:
        """Takes what concerns it out of `kwargs`.

        Raises:
            ConfigError: A number is not above 0, another value is none, or a rank has several robots.
        """
        if num_envs != 1:
            raise ConfigError(
                f"a robot is one slot: set env.train.num_envs, env.eval.num_envs to 1 (a rank has {num_envs})"
            )
        hz = above_0("hz", kwargs.pop("hz", 10.0))
        stale_s = above_0("stale_s", kwargs.pop("stale_s", 0.5))
        change = kwargs.pop("max_change", None)
        if (late := kwargs.pop("late", "keep")) not in ("keep", "stop"):
            raise ConfigError(f"env.train.kwargs.late is {late!r}; a robot may keep to its last command, or stop")
        return cls(hz, stale_s, None if change is None else above_0("max_change", change), late)


def built(path: str, key: str, kwargs: dict[str, Any]) -> Robot:
    """A robot by its class, as `module:Class`.

    Raises:
        ConfigError: It cannot be imported, or refuses its arguments.
    """
    try:
        robot: Robot = load_attribute(path, key)(**kwargs)
    except TypeError as error:
        raise ConfigError(f"{key.split('.')[-1]} {path!r} refuses kwargs {kwargs}: {error}") from None
    return robot


def above_0(name: str, value: Any) -> float:
    """A number of `kwargs`.

    Raises:
        ConfigError: It is not above 0.
    """
    if not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"env.train.kwargs.{name} is {value!r}; it must be a number above 0")
    return float(value)


def _row(obs: Any) -> Any:
    return {key: part[None] for key, part in obs.items()} if isinstance(obs, dict) else np.asarray(obs)[None]
