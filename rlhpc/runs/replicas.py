"""Replicas of a rollout or env group, which join and leave during the run. Their presence is updated before each step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

from rlhpc.runs.run_folder import note
from rlhpc.runtime.worker_group import WorkerGroup


class Opening(Protocol):
    """Pending call in which ranks load their inputs, such as a `Handle`."""

    def done(self) -> bool:
        """Returns whether the ranks have loaded their inputs."""

    def wait(self) -> object:
        """Waits for the end of the call; raises the error of a failed load."""


class CompletedCall:
    """Handle of a call with no target ranks; it is complete at once."""

    def done(self) -> bool:
        """Returns True."""
        return True

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Returns an empty list of results."""
        return []


class Originals:
    """Proxy of a group for calls to its initial ranks only, not to ranks that joined later. All other attributes come from
    the group.

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

    A replica is one rank, or several neighbouring ranks that form one engine. Other replicas take over the work of a lost
    replica. A lost replica is restarted during the following steps, and takes part again after it has loaded its inputs.

    Args:
        group: The launched group.
        opens: Starts the call in which a replica's ranks load their inputs, and returns its handle.
        joins: Connects loaded ranks, so that they take part from the next step on.
        restarts: Returns the maximum number of restarts of replicas.
        cost: Cost of the loss of a rank, as a text for the user.
        restart: Restarts ended ranks and returns them; by default the group's `restart`.
        size: Number of ranks of a replica. If one rank ends, the others end too (`GroupPolicy.replica_size`).
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
        self._admitted_ranks: set[int] = set()
        self._opening_calls: dict[tuple[int, ...], Opening] = {}
        self._num_restarts = 0
        #: Ranks to restart whose processes may still exist.
        self._awaiting_restart: set[int] = set()
        self.ranks: list[int] = []

    def begin(self) -> None:
        """Marks all complete replicas of the group as taking part."""
        self._opening_calls.clear()
        self._admitted_ranks.clear()
        self.ranks = self._complete_replicas(self._group.present)

    def present(self) -> list[int]:
        """Returns the ranks of all replicas that take part in steps and are still complete."""
        present_ranks = self._group.present
        return self._complete_replicas([rank for rank in self.ranks if rank in present_ranks])

    def firsts(self) -> list[int]:
        """Returns the first rank of each present replica."""
        return self.present()[:: self._size]

    def _list_replica_ranks(self, rank: int) -> tuple[int, ...]:
        leader = rank - rank % self._size
        return tuple(range(leader, leader + self._size))

    def _complete_replicas(self, ranks: Collection[int]) -> list[int]:
        """Returns the ranks that belong to replicas whose ranks are all among `ranks`, in ascending order."""
        return [rank for rank in sorted(ranks) if {*self._list_replica_ranks(rank)} <= {*ranks}]

    def step_group(self) -> WorkerGroup:
        """Returns the group restricted to the ranks that take part."""
        return self._group.execute_on(*self.present())

    def update_presence(self) -> None:
        """Updates the replicas before a step: removes lost ranks, restarts lost ranks, and adds ranks that are ready."""
        present_ranks = self._group.present
        self._opening_calls = {
            ranks: call_handle for ranks, call_handle in self._opening_calls.items() if {*ranks} <= {*present_ranks}
        }
        self._admitted_ranks &= {*present_ranks}
        if lost_ranks := sorted({*self.ranks} - {*self.present()}):
            self.ranks = [rank for rank in self.ranks if rank not in lost_ranks]
            note(f"{self._describe_lost(lost_ranks)}; {self._cost}")
            self._awaiting_restart |= {
                rank for rank in lost_ranks if rank < self._group.world_size
            }  # ranks that joined during the run are not restarted
        self._restart_lost()
        self._admitted_ranks |= {*self._group.admit()}
        for leader in self._complete_replicas(self._admitted_ranks)[:: self._size]:
            ranks = self._list_replica_ranks(leader)
            self._admitted_ranks -= {*ranks}
            self._opening_calls[ranks] = self._opens(*ranks)
        for ranks in [ranks for ranks, call_handle in self._opening_calls.items() if call_handle.done()]:
            self._opening_calls.pop(ranks).wait()
            self._joins(*ranks)
            for rank in ranks:
                self._group.took_in(rank)
            self.ranks = sorted([*self.ranks, *ranks])
            note(f"{self._format_ranks(ranks)} takes part from the next step on")

    def _restart_lost(self) -> None:
        """Restarts lost ranks with ended processes; the next call retries the remaining ranks."""
        if not self._awaiting_restart or self._num_restarts >= self._restarts():
            return
        if restarted_ranks := self._restart():
            self._num_restarts += len(restarted_ranks) // self._size
            self._awaiting_restart -= {*restarted_ranks}
            note(f"{self._format_ranks(restarted_ranks)} starts again")

    def _describe_lost(self, ranks: Collection[int]) -> str:
        """Formats the lost ranks: ranks that ended, and ranks that left on request."""
        reasons = {rank: self._group.find_leave_reason(rank) for rank in ranks}
        ended_ranks = [rank for rank in ranks if not reasons[rank]]
        loss_phrases = [f"{self._format_ranks([rank])} left ({reason})" for rank, reason in reasons.items() if reason]
        return ", ".join([*([f"{self._format_ranks(ended_ranks)} ended"] if ended_ranks else []), *loss_phrases])

    def _format_ranks(self, ranks: Collection[int]) -> str:
        return ", ".join(f"{self._group.name}[{rank}]" for rank in ranks)
