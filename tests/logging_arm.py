"""A simulated arm that writes down every call by its own clock, has faults, and says what it must never have seen."""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from rlhpc.embodied.robots.driver import Observation, Robot, Verdict

BOUND, MAX_CHANGE = 3.0, 0.1
#: What moves it.
MOVEMENTS = ("act", "reset")


def write(path: str, *entry: Any) -> None:
    """Appends a line: the time, then the entry."""
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps([time.monotonic(), *entry]).encode() + b"\n")


class LoggingArm(Robot):
    """An arm of two joints with absolute targets, which it approaches by a part of the way.

    Args:
        path: File for the log; without one it is `log` alone.
        faults: Probability of each kind of fault at an observation: something unsafe, a camera that stands still, a push.
        ready: Whether there is always somebody who lets it move again.
        independent: Whether it can be stopped from another process, which is written down as `independent stop`.
        blocks_at: Number of the command in which it blocks its whole process for three seconds.
    """

    observation_space = spaces.Box(-10, 10, (2,), np.float32)
    action_space = spaces.Box(-BOUND, BOUND, (2,), np.float32)
    control_mode = "absolute"

    def __init__(
        self, path: str = "", faults: float = 0.0, ready: bool = True, independent: bool = False, blocks_at: int = 0
    ) -> None:
        self.path, self.faults, self.is_ready, self.blocks_at = path, faults, ready, blocks_at
        self._independent = independent
        self.rng = np.random.default_rng(0)
        self.place = np.array([2.0, -2.0])
        self.log: list[list[Any]] = []
        #: Names of calls that hang, until the event is set.
        self.hangs: set[str] = set()
        self.released = threading.Event()
        self.danger, self.acts = "", 0

    def note(self, *entry: Any) -> None:
        self.log.append([time.monotonic(), *entry])
        if self.path:
            write(self.path, *entry)

    def hang(self, name: str) -> None:
        if name in self.hangs:
            self.note("hangs", name)
            self.released.wait(60)

    def reset(self, seed: int) -> None:
        self.note("reset")
        self.hang("reset")
        self.place = np.array([2.0, -2.0])
        self.danger = ""

    def act(self, action: np.ndarray) -> None:
        self.note("act", action.tolist(), self.place.tolist())
        self.acts += 1
        self.hang("act")
        if self.acts == self.blocks_at:
            import ctypes

            ctypes.PyDLL(None).usleep(3_000_000)  # keeps the interpreter's lock
        if np.isfinite(action).all():
            self.place = self.place + 0.7 * (action - self.place)

    def observe(self) -> Observation:
        self.hang("observe")
        taken_at = time.monotonic()
        if self.faults:
            stands_still, pushed, self.danger = self.rng.random(3) < self.faults
            self.danger = "force limit" if self.danger else ""
            if pushed:
                self.place = np.clip(self.place + self.rng.uniform(-1, 1, 2), -BOUND - 0.3, BOUND + 0.3)
            if stands_still:
                self.note("fault", "camera")
                taken_at -= 1000
        return Observation(self.place.astype(np.float32), taken_at)

    def position(self) -> np.ndarray:
        self.hang("position")
        return self.place.copy()

    def unsafe(self, obs: Any) -> str:
        self.hang("unsafe")
        if self.danger:
            self.note("fault", self.danger)
        return self.danger

    def judge(self, obs: Any, action: np.ndarray) -> Verdict:
        self.hang("judge")
        return Verdict(1.0, success=bool(self.rng.random() < self.faults))

    def stop(self) -> None:
        self.note("stop")

    def ready(self) -> bool:
        if self.is_ready:
            self.note("word")
        return self.is_ready

    def independent_stop(self) -> Callable[[], None] | None:
        return partial(write, self.path, "independent stop") if self._independent else None

    def close(self) -> None:
        self.note("close")


def read_log(path: str | Path) -> list[list[Any]]:
    """What was written down; the last line may be incomplete."""
    text = Path(path).read_text() if os.path.exists(path) else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("]")]


def violations(log: Sequence[Sequence[Any]], max_change: float = MAX_CHANGE) -> list[str]:
    """What must never happen: a command that is not finite, leaves the bounds or jumps from where the arm is, and a movement
    between a fault of the arm and somebody's word."""
    found, fault = [], ""
    for at, kind, *rest in log:
        if kind == "word":
            fault = ""
        elif kind == "fault":
            fault = rest[0]
        elif kind in MOVEMENTS and fault:
            found.append(f"{kind} at {at} after {fault}, without a word")
        if kind == "act":
            command, place = np.array(rest[0], float), np.array(rest[1], float)
            if not np.isfinite(command).all():
                found.append(f"{command} is not finite")
            elif (np.abs(command) > BOUND).any():
                found.append(f"{command} is out of bounds")
            elif (np.abs(command - place) > max_change + 1e-4).any():
                found.append(f"{command} is a jump from {place}")
    return found


def kinds(log: Sequence[Sequence[Any]]) -> list[str]:
    return [entry[1] for entry in log]


class WildPolicy:
    """Commands as of a policy that has diverged: far ones, and some that are not finite.

    Args:
        chunk: Actions of a decision.
    """

    def __init__(self, chunk: int = 1, nonfinite: float = 0.01) -> None:
        self.rng, self.chunk, self.nonfinite, self.bad = np.random.default_rng(1), chunk, nonfinite, 0

    def actions(self) -> np.ndarray:
        chosen = self.rng.normal(0, 5, (1, self.chunk, 2)).astype(np.float32)
        chosen[self.rng.random(chosen.shape) < 0.01] = 1e30
        spoiled = self.rng.random(chosen.shape) < self.nonfinite / 2
        chosen[spoiled] = self.rng.choice([math.nan, math.inf, -math.inf], spoiled.sum())
        return chosen

    def predict_action_batch(self, obs: Any, mode: str = "eval", noise: Any = None) -> tuple[Any, dict[str, Any]]:
        import torch

        return torch.from_numpy(self.actions()), {}


class Ticks(threading.Thread):
    """Heartbeats of this process: how long the machine let none of its threads run."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self.times = [time.monotonic()]

    def run(self) -> None:
        while not self._ended.wait(0.005):
            self.times.append(time.monotonic())

    def __enter__(self) -> Ticks:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def gap(self, since: float, until: float) -> float:
        """The longest time without a heartbeat."""
        inside = [since, *(at for at in self.times if since < at < until), until]
        return max(b - a for a, b in itertools.pairwise(inside))
