"""A small task of picking and carrying in the plane, with an expert: `tests.unit.embodied.toy_carry:CarryEnv`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlhpc.embodied.interventions.sources import Mark, Scripted, Signals

STEP = 0.08


class CarryEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """A hand picks a thing up and carries it to the top; the only reward is that of the end.

    Observations `[7]`: the hand's place, the thing's height, the vector between both, whether the thing is held, and whether
    the hand is closed.
    """

    action_space: Any = spaces.Box(-1, 1, (3,), np.float32)
    observation_space: Any = spaces.Box(-4, 4, (7,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode."""
        super().reset(seed=seed)
        self.hand = self.np_random.uniform(0.1, 0.9, 2)
        self.thing = self.np_random.uniform((0.1, 0.05), (0.9, 0.6))
        self.is_closed = self.is_held = False
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Moves the hand, and opens or closes it."""
        self.hand = np.clip(self.hand + STEP * np.asarray(action[:2], float), 0, 1)
        is_closed = bool(action[2] > 0)
        if is_closed and not self.is_closed and np.abs(self.hand - self.thing).max() < 0.06:
            self.is_held = True
        self.is_held &= is_closed
        self.is_closed = is_closed
        if self.is_held:
            self.thing = self.hand.copy()
        success = self.is_held and self.thing[1] > 0.9 and abs(self.thing[0] - 0.5) < 0.2
        return self._observation(), float(success), bool(success), False, {"success": bool(success)}

    def _observation(self) -> np.ndarray:
        offset = 5 * (self.thing - self.hand)
        centered = [*(2 * self.hand - 1), self.thing[1] * 2 - 1]
        return np.array([*centered, *np.clip(offset, -4, 4), self.is_held, self.is_closed], np.float32)


def carry(obs: np.ndarray) -> np.ndarray:
    """Returns the expert's actions `[N, 3]` for observations `[N, 7]`."""
    hand, offset = (obs[:, :2] + 1) / 2, obs[:, 3:5] / 5
    is_held, is_closed = obs[:, 5] > 0.5, obs[:, 6] > 0.5
    target = np.where(is_held[:, None], np.array([0.5, 0.97]) - hand, offset)
    is_near = np.abs(offset).max(1) < 0.04
    closes = np.where(is_held | (is_near & ~is_closed), 1.0, -1.0)
    return np.concatenate([np.clip(target / STEP, -1, 1), closes[:, None]], 1).astype(np.float32)


class Referee(Scripted):
    """A scripted person who leads like the expert, and ends episodes: a held thing above the middle is a success, an episode
    of `limit` steps a failure.
    """

    one_slot = True

    def __init__(self, limit: int = 25, **kwargs: Any) -> None:
        super().__init__("tests.unit.embodied.toy_carry:carry", **kwargs)
        self._limit, self._steps, self._is_done = limit, 0, False

    def act(self, obs: Any, actions: np.ndarray, picture: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        self._steps, self._is_done = self._steps + 1, bool(obs[0, 5] > 0.5 and obs[0, 2] > 0)
        return super().act(obs, actions, picture)

    def signals(self) -> Signals:
        if self._is_done:
            return Signals(Mark.SUCCESS)
        return Signals(Mark.FAILURE if self._steps >= self._limit else Mark.NONE)

    def end_episodes(self, slots: np.ndarray) -> None:
        super().end_episodes(slots)
        self._steps, self._is_done = 0, False

    def slot_states(self) -> list[Any] | None:
        return [{**state, "steps": self._steps} for state in super().slot_states() or ()]

    def load_slot_states(self, states: list[Any]) -> None:
        super().load_slot_states(states)
        self._steps = states[0]["steps"]


gymnasium.register("Carry-v0", entry_point=CarryEnv, max_episode_steps=40)
