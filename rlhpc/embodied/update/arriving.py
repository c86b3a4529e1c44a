"""Transitions of a rollout that is played in parts, as the parts come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch

Item = TypeVar("Item")


class Arriving:
    """A step's transitions of one rank.

    Args:
        take: Takes in the part of a number: columns `[n, T / parts, ...]` of its decisions in all slots.
        parts: How many there are; they come in order.
        steps: T, decisions of the step.

    Attributes:
        columns: `[n · T, ...]`, slot by slot. Rows of parts that have not been taken in hold anything.
        waited: Seconds in which parts were taken in.
    """

    def __init__(self, take: Callable[[int], dict[str, torch.Tensor]], parts: int, steps: int) -> None:
        self._take, self.parts, self.steps = take, parts, steps
        self.columns: dict[str, torch.Tensor] = {}
        self._next, self.waited = 0, 0.0

    def until(self, part: int) -> None:
        """Takes in all parts up to one, as far as that has not been done, and waits for them."""
        begun = time.perf_counter()
        while self._next <= part:
            for name, column in self._take(self._next).items():
                slots, size, *rest = column.shape
                if name not in self.columns:
                    self.columns[name] = column.new_empty((slots * size * self.parts, *rest))
                self.columns[name].view(slots, self.parts, size, *rest)[:, self._next] = column
            self._next += 1
        self.waited += time.perf_counter() - begun

    def awaited(self, indices: torch.Tensor, size: int, make: Callable[[torch.Tensor], Item]) -> Sequence[Item]:
        """What is made of rows, `size` of one part at a time, in the order of the parts; each when it is asked for, and once
        its rows are there."""
        whose = indices % self.steps // (self.steps // self.parts)
        pieces = [(part, rows) for part in whose.unique().tolist() for rows in indices[whose == part].split(size)]

        def made(part: int, rows: torch.Tensor) -> Item:
            self.until(part)
            return make(rows)

        return Awaited([partial(made, part, rows) for part, rows in pieces])


class Awaited(Sequence[Item], Generic[Item]):
    """Things that are made when they are asked for, one after the other."""

    def __init__(self, makers: Sequence[Callable[[], Item]]) -> None:
        self._makers = makers

    def __len__(self) -> int:
        return len(self._makers)

    def __iter__(self) -> Iterator[Item]:
        return (make() for make in self._makers)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._makers[index]()
