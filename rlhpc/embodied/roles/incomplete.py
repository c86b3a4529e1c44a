"""Steps of which transitions are missing: what is there, as whole rows of the replay buffer's table."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Gathering(Protocol):
    """A rank among others."""

    world_size: int

    def all_gather_object(self, obj: object) -> list[object]:
        """The objects of all ranks, in rank order."""


class Incomplete:
    """Where each row of the table is a decision in every slot, and some slots brought nothing, transitions change places: in
    an off-policy buffer nothing depends on which slot one is from. What does not fill a row waits for the next such step.

    Args:
        num_envs: Slots of the run.
        share: Those of this rank.
    """

    def __init__(self, num_envs: int, share: range) -> None:
        self._num_envs, self._share = num_envs, share
        self.clear()

    def clear(self) -> None:
        """Forgets what waits: less than a row."""
        self._waiting: dict[str, np.ndarray] = {}

    def table(self, columns: dict[str, np.ndarray], there: np.ndarray, ranks: Gathering) -> dict[str, np.ndarray]:
        """Rows of this rank's slots, `[n, rows, ...]`, as many on all ranks, which call together.

        Args:
            columns: A step's transitions `[n, T, ...]`.
            there: Which of them there are, `[n, T]`.
            ranks: This rank, which reaches the others.
        """
        times, slots = np.nonzero(there.T)
        position = times * self._num_envs + slots + self._share.start
        rows_here = {name: column[slots, times] for name, column in columns.items()}
        parts: Any = [(position, rows_here)]
        if ranks.world_size > 1:
            parts = ranks.all_gather_object(parts[0])
        order = np.argsort(np.concatenate([position for position, _ in parts]))  # the same for any number of ranks
        flat = {name: np.concatenate([part[name] for _, part in parts])[order] for name in columns}
        if self._waiting:
            flat = {name: np.concatenate([self._waiting[name], column]) for name, column in flat.items()}
        rows = len(next(iter(flat.values()))) // self._num_envs
        used = rows * self._num_envs
        self._waiting = {name: column[used:].copy() for name, column in flat.items()}
        return {
            name: column[:used]
            .reshape(rows, self._num_envs, *column.shape[1:])
            .swapaxes(0, 1)[self._share.start : self._share.stop]
            for name, column in flat.items()
        }
