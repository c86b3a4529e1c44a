"""The order in which problems are drawn."""

from __future__ import annotations

import random
from typing import Any

from rlhpc.runtime.errors import CheckpointError, ConfigError


class PromptSampler:
    """Epochs of a seeded shuffle, cut into batches; a batch may reach over the end of an epoch.

    Draw i is a function of (n, seed, shuffle, i) alone, so that processes, restarts and batch sizes do not matter.

    Args:
        n: Problems.
        batch: Draws of a step.
        seed: Of the order.
        shuffle: False draws in order.

    Raises:
        ConfigError: Nothing to draw from.
    """

    def __init__(self, n: int, batch: int, seed: int = 0, shuffle: bool = True) -> None:
        if n < 1 or batch < 1:
            raise ConfigError(f"a sampler needs problems and a batch size; it was given {n} and {batch}")
        self.n, self.batch, self.seed, self.shuffle = n, batch, seed, shuffle
        self.drawn = 0
        self._order: tuple[int, list[int]] | None = None

    @property
    def epoch(self) -> int:
        """Number of complete passes so far."""
        return self.drawn // self.n

    def next(self) -> list[int]:
        """Positions of the next batch."""
        batch = [self.at(self.drawn + i) for i in range(self.batch)]
        self.drawn += self.batch
        return batch

    def of_step(self, step: int, part: int = 0, parts: int = 1) -> list[int]:
        """Positions of the batch of a step, from 1; of one of several ranks that share it, those of its part."""
        return [self.at((step - 1) * self.batch + draw) for draw in range(part, self.batch, parts)]

    def at(self, draw: int) -> int:
        """Position of the given draw, from 0."""
        epoch, place = divmod(draw, self.n)
        if not self.shuffle:
            return place
        if self._order is None or self._order[0] != epoch:
            order = list(range(self.n))
            # Seeded by text and shuffled by the standard library: the same on every machine and version.
            random.Random(f"order {self.seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][place]

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next draw depends on."""
        return {"drawn": self.drawn, "n": self.n, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the last draw of `state`; the batch size may be another.

        Raises:
            CheckpointError: The state is of other data or another order.
        """
        mine = self.state_dict()
        for name, what in (("n", "problems"), ("seed", "the seed"), ("shuffle", "shuffling")):
            if state[name] != mine[name]:
                raise CheckpointError(
                    f"the checkpoint's data position is for another order of problems: {what} was {state[name]}, now "
                    f"{mine[name]}; resume with the data it was made with, or start a fresh run"
                )
        self.drawn = int(state["drawn"])
