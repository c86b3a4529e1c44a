"""The ranks of a group that play or generate, while these come and go: who is there is asked here, before each step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from rlhpc.runs.folder import note
from rlhpc.runtime.group import WorkerGroup


class Opening(Protocol):
    """A rank that loads what it needs; a `Handle` is one."""

    def done(self) -> bool:
        """Whether it has all."""

    def wait(self) -> object:
        """Raises what went wrong."""


class Replicas:
    """Who of a group takes part in a step.

    A rank that is lost costs what it had under way, which others take; it is started again beside the steps that follow, and
    takes part from the one on before which it had all that it needs.

    Args:
        group: The launched group.
        opens: Has a rank load what it needs, as at the start.
        joins: Connects one that has, to take part from the next step on.
        restarts: How often ranks may be started again.
        cost: What the loss of a rank costs, for the user.
        restart: Starts those again that have ended, where that takes more than the group's own.
    """

    def __init__(
        self,
        group: WorkerGroup,
        opens: Callable[[int], Opening],
        joins: Callable[[int], None],
        restarts: Callable[[], int],
        cost: str,
        restart: Callable[[], list[int]] | None = None,
    ) -> None:
        self._group, self._opens, self._joins, self._restarts = group, opens, joins, restarts
        self._cost, self._restart = cost, restart or group.restart
        self._opening: dict[int, Opening] = {}
        self._restarted = 0
        self.ranks: list[int] = []

    def begin(self) -> None:
        """All ranks of the group take part."""
        self._opening.clear()
        self.ranks = self._group.present

    def present(self) -> list[int]:
        """Those that take part and have not been lost since."""
        there = self._group.present
        return [rank for rank in self.ranks if rank in there]

    def of_step(self) -> WorkerGroup:
        """The group, for a call of those that take part."""
        return self._group.execute_on(*self.present())

    def tend(self) -> None:
        """Before a step: leaves out who is gone, has them started again, and takes in who is ready."""
        there = self._group.present
        self._opening = {rank: handle for rank, handle in self._opening.items() if rank in there}
        if lost := sorted({*self.ranks} - {*there}):
            self.ranks = [rank for rank in self.ranks if rank in there]
            told = f"{self._lost(lost)}; {self._cost}"
            if self._restarted < self._restarts() and (again := self._restart()):
                self._restarted += len(again)
                told += f"; {self._named(again)} starts again"
            note(told)
        for rank in self._group.admit():
            self._opening[rank] = self._opens(rank)
        for rank in [rank for rank, handle in self._opening.items() if handle.done()]:
            self._opening.pop(rank).wait()
            self._joins(rank)
            self._group.took_in(rank)
            self.ranks = sorted([*self.ranks, rank])
            note(f"{self._named([rank])} takes part from the next step on")

    def _lost(self, ranks: Collection[int]) -> str:
        """Who ended, and who has left as told."""
        reasons = {rank: self._group.why_left(rank) for rank in ranks}
        ended = [rank for rank in ranks if not reasons[rank]]
        words = [f"{self._named([rank])} left ({why})" for rank, why in reasons.items() if why]
        return ", ".join([*([f"{self._named(ended)} ended"] if ended else []), *words])

    def _named(self, ranks: Collection[int]) -> str:
        return ", ".join(f"{self._group.name}[{rank}]" for rank in ranks)
