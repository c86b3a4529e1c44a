"""Simulated robot: a Gymnasium environment that runs in real time, with or without commands."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from rlhpc.embodied.envs.interface import reset_env, step_env
from rlhpc.embodied.robots.driver import Observation, Robot, Verdict


class SimulatedRobot(Robot):
    """Robot simulated by a Gymnasium environment. Between commands it repeats the last command; after a stop it does nothing.

    Args:
        simulates: Id of a Gymnasium environment with a `Box` of actions, in which 0 means to do nothing.
        moves_hz: Steps of the environment per second.
        drop: Fraction of the observations that are lost.
        simulator: Arguments of the environment.
    """

    control_mode = "velocity"

    def __init__(
        self, simulates: str, moves_hz: float = 50.0, drop: float = 0.0, simulator: Mapping[str, Any] | None = None
    ) -> None:
        self._simulates = simulates
        self._env = gymnasium.make(simulates, **(simulator or {})).unwrapped
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
        self._period, self._drop, self._rng = 1.0 / moves_hz, drop, np.random.default_rng(0)
        self._lock = threading.Lock()
        self._close_event = threading.Event()
        self._thread: threading.Thread | None = None
        self._reward, self._is_terminated = 0.0, False
        self.stop()

    def _run(self) -> None:
        while not self._close_event.wait(self._period):
            with self._lock:
                if not self._is_terminated:
                    obs, reward, terminated, _, _ = step_env(self._env, self._simulates, self._command)
                    self._is_terminated = terminated
                    self._reward += reward
                    if self._rng.random() >= self._drop:
                        self._observation = Observation(obs, time.monotonic())

    def reset(self, seed: int) -> None:
        """Resets the environment (`Robot.reset`)."""
        with self._lock:
            self._observation = Observation(reset_env(self._env, self._simulates, seed=seed)[0], time.monotonic())
            self._reward, self._is_terminated = 0.0, False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="simulated-robot", daemon=True)
            self._thread.start()

    def act(self, action: np.ndarray) -> None:
        """Sets the command (`Robot.act`)."""
        self._command = np.array(action)

    def observe(self) -> Observation:
        """Returns the newest observation (`Robot.observe`)."""
        with self._lock:
            return self._observation

    def judge(self, obs: Any, action: np.ndarray) -> Verdict:
        """Returns the sum of rewards since the last call, and whether the episode terminated (`Robot.judge`)."""
        del obs, action
        with self._lock:
            reward, self._reward = self._reward, 0.0
            return Verdict(reward, failed=self._is_terminated)

    def stop(self) -> None:
        """Sets the command to 0 (`Robot.stop`)."""
        self._command = np.zeros(self.action_space.shape, self.action_space.dtype)

    def close(self) -> None:
        """Ends the thread and closes the environment (`Robot.close`)."""
        self._close_event.set()
        if self._thread is not None:
            self._thread.join()
        self._env.close()
