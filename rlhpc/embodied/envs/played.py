"""The actions that brought slots to where they are: what an episode under way is played again from."""

from __future__ import annotations

import numpy as np


class Played:
    """The actions of each slot since its reset, kept step by step: to append to thousands of lists takes as long as to
    simulate.

    Args:
        num_envs: Slots.
        width: Numbers of an action.
    """

    def __init__(self, num_envs: int, width: int) -> None:
        self._steps: list[np.ndarray] = []
        self._dropped = 0
        #: Number of the step, of all that there were, that is the first of each slot's episode.
        self._since = np.zeros(num_envs, np.int64)
        self._none = np.zeros((0, width), np.float32)

    def begin(self, slots: np.ndarray) -> None:
        """Forgets what these slots did: their episodes begin."""
        self._since[slots] = self._dropped + len(self._steps)
        over = int(self._since.min()) - self._dropped
        del self._steps[:over]
        self._dropped += over

    def add(self, actions: np.ndarray) -> None:
        """Takes in a step of all slots, `[N, width]`. What one does between its end and its next `begin` does not matter."""
        self._steps.append(np.array(actions, np.float32))

    def of(self, slot: int) -> np.ndarray:
        """A slot's actions since its reset, float32 `[steps, width]`."""
        steps = self._steps[self._since[slot] - self._dropped :]
        return np.stack([step[slot] for step in steps]) if steps else self._none
