"""Replicas of a rollout or env group whose ranks join and leave: their presence is updated before each step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

from rlhpc.runs.run_folder import note
from rlhpc.runtime.worker_group import WorkerGroup


class Opening(Protocol):
    """Call in which ranks load their inputs; a `Handle` is one."""

    def done(self) -> bool:
        """Returns whether everything is loaded."""

    def wait(self) -> object:
        """Waits, and raises the error of a failed load."""


class CompletedCall:
    """Handle of a call with no target ranks; it is complete at once."""

    def done(self) -> bool:
        """Returns True."""
        return True

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Returns an empty list of results."""
        return []


class Originals:
    """Initial ranks of a group: calls go to the ranks that the run started with, not to ranks that have joined. Other
    attributes are the group's.

    Args:
        group: The launched group.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        group = self._group
        if name[0] == "_" or hasattr(WorkerGroup, name) or name in vars(group):
            return getattr(group, name)
        getattr(group, name)  # raises if the method does not exist

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(group.execute_on(*range(group.world_size)), name)(*args, **kwargs)

        return call


class Replicas:
    """Replicas of a group that take part in a step.

    A replica is one rank, or several neighbouring ranks that form one engine. Other replicas take over the work of a lost one.
    It is restarted during the following steps, and takes part again from the first step before which it has loaded everything.

    Args:
        group: The launched group.
        opens: Lets a replica's ranks load their inputs, as at the start.
        joins: Connects ranks that have loaded, so that they take part from the next step on.
        restarts: Returns how often ranks may be restarted.
        cost: Cost of the loss of a rank, as a text for the user.
        restart: Restarts ended ranks, if that takes more than the group's own restart.
        size: Ranks of a replica. If one of them ends, the others end with it (`GroupPolicy.replica_size`).
    """

    def __init__(
        self,
        group: WorkerGroup,
        opens: Callable[..., Opening],
        joins: Callable[..., None],
        restarts: Callable[[], int],
        cost: str,
        restart: Callable[[], list[int]] | None = None,
        size: int = 1,
    ) -> None:
        self._group, self._opens, self._joins, self._restarts = group, opens, joins, restarts
        self._cost, self._restart = cost, restart or group.restart
        self._size = size
        self._arrived: set[int] = set()
        self._opening: dict[tuple[int, ...], Opening] = {}
        self._restarted = 0
        #: Ranks to restart whose processes may still exist.
        self._awaiting_restart: set[int] = set()
        self.ranks: list[int] = []

    def begin(self) -> None:
        """Marks all complete replicas of the group as taking part."""
        self._opening.clear()
        self._arrived.clear()
        self.ranks = self._complete_replicas(self._group.present)

    def present(self) -> list[int]:
        """Returns the ranks that take part and have not been lost since."""
        present_ranks = self._group.present
        return self._complete_replicas([rank for rank in self.ranks if rank in present_ranks])

    def firsts(self) -> list[int]:
        """Returns the first ranks of the replicas that are present."""
        return self.present()[:: self._size]

    def _replica(self, rank: int) -> tuple[int, ...]:
        leader = rank - rank % self._size
        return tuple(range(leader, leader + self._size))

    def _complete_replicas(self, ranks: Collection[int]) -> list[int]:
        """Returns, in order, the ranks whose complete replica is among them."""
        return [rank for rank in sorted(ranks) if {*self._replica(rank)} <= {*ranks}]

    def step_group(self) -> WorkerGroup:
        """Returns the group restricted to the ranks that take part."""
        return self._group.execute_on(*self.present())

    def update_presence(self) -> None:
        """Updates the replicas before a step: removes lost ranks, restarts them, and adds ranks that are ready."""
        present_ranks = self._group.present
        self._opening = {ranks: handle for ranks, handle in self._opening.items() if {*ranks} <= {*present_ranks}}
        self._arrived &= {*present_ranks}
        if lost_ranks := sorted({*self.ranks} - {*self.present()}):
            self.ranks = [rank for rank in self.ranks if rank not in lost_ranks]
            note(f"{self._describe_lost(lost_ranks)}; {self._cost}")
            self._awaiting_restart |= {
                rank for rank in lost_ranks if rank < self._group.world_size
            }  # the others joined during the run
        self._restart_lost()
        self._arrived |= {*self._group.admit()}
        for leader in self._complete_replicas(self._arrived)[:: self._size]:
            ranks = self._replica(leader)
            self._arrived -= {*ranks}
            self._opening[ranks] = self._opens(*ranks)
        for ranks in [ranks for ranks, handle in self._opening.items() if handle.done()]:
            self._opening.pop(ranks).wait()
            self._joins(*ranks)
            for rank in ranks:
                self._group.took_in(rank)
            self.ranks = sorted([*self.ranks, *ranks])
            note(f"{self._named(ranks)} takes part from the next step on")

    def _restart_lost(self) -> None:
        """Restarts lost ranks whose processes have ended; retries the others before the next step."""
        if not self._awaiting_restart or self._restarted >= self._restarts():
            return
        if restarted_ranks := self._restart():
            self._restarted += len(restarted_ranks) // self._size
            self._awaiting_restart -= {*restarted_ranks}
            note(f"{self._named(restarted_ranks)} starts again")

    def _describe_lost(self, ranks: Collection[int]) -> str:
        """Formats which ranks ended, and which left on request."""
        reasons = {rank: self._group.why_left(rank) for rank in ranks}
        ended_ranks = [rank for rank in ranks if not reasons[rank]]
        phrases = [f"{self._named([rank])} left ({reason})" for rank, reason in reasons.items() if reason]
        return ", ".join([*([f"{self._named(ended_ranks)} ended"] if ended_ranks else []), *phrases])

    def _named(self, ranks: Collection[int]) -> str:
        return ", ".join(f"{self._group.name}[{rank}]" for rank in ranks)
