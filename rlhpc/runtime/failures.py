"""What a failure means: which one is the first, which ranks may live on, and what can be restarted. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rlhpc.runtime.errors import RlhpcError, StepFailed, WorkerFailed
from rlhpc.runtime.spec import WorkerSpec


class Rank(Protocol):
    """What the policy needs to know of a rank: who it is, and whether it is starting, ready, stopping or ended."""

    @property
    def spec(self) -> WorkerSpec: ...
    @property
    def state(self) -> str: ...


@dataclass
class FailurePolicy:
    """The failures of a session.

    Attributes:
        expendable: Groups whose failure leaves the others alive.
        independent: Those among them whose ranks do not need one another: one that dies leaves the rest of its group alive.
        elastic: Groups whose ranks may come and go, and how many must stay: the end of one beyond that is no failure.
        together: Groups in which so many neighbours are one replica, such as an engine: they come, go and end together.
        first: The failure that all the others follow from; None while nothing has failed.
        past: The failure after which the session went on.
    """

    expendable: frozenset[str] = frozenset()
    independent: frozenset[str] = frozenset()
    elastic: Mapping[str, int] = field(default_factory=dict)
    together: Mapping[str, int] = field(default_factory=dict)
    first: RlhpcError | None = None
    past: RlhpcError | None = None

    def take(self, failure: RlhpcError) -> bool:
        """Records a failure; returns whether it is the first, of which later ones are consequences."""
        if self.first is not None:
            return False
        self.first = failure
        return True

    def departs(self, failure: RlhpcError, ranks: Collection[Rank]) -> bool:
        """Whether this is the end of a rank, for whatever reason, that the others do without.

        What a rank raises is none, unless it has joined: then it may be its machine's fault, and what is the program's the
        others will raise, too.
        """
        group, rank = failure.group, failure.rank
        if group not in self.elastic or rank is None or not isinstance(failure, (WorkerFailed, StepFailed)):
            return False
        joined = any((r.spec.group, r.spec.rank) == (group, rank) and r.spec.rank >= r.spec.world_size for r in ranks)
        if isinstance(failure, WorkerFailed) and failure.remote_traceback and not joined:
            return False
        replica = self.replica_of(group, rank)
        left = [r for r in ranks if r.spec.group == group and r.state == "ready" and r.spec.rank not in replica]
        return self.first is None and len(left) >= self.elastic[group]

    def replica_of(self, group: str, rank: int) -> range:
        """The ranks that are one with a rank, itself included."""
        size = self.together.get(group, 1)
        return range(rank - rank % size, rank - rank % size + size)

    def put_behind(self) -> None:
        """Treats the failure as past when new groups are launched: it happened before them."""
        if self.first is not None:
            self.past, self.first = self.first, None

    def spared(self, failure: RlhpcError, ranks: Collection[Rank]) -> set[str]:
        """Names of the ranks that may live on.

        If an expendable group has failed: the ranks of the groups that are not expendable. If what failed is a
        single rank of an independent group, and it has ended: all other ranks, too.
        """
        group, rank = failure.group, failure.rank
        if group not in self.expendable or not failure.restartable:
            return set()
        alone = group in self.independent and any(
            r.spec.rank == rank and r.state == "ended" for r in ranks if r.spec.group == group
        )
        return {r.spec.name for r in ranks if (alone and r.state != "ended") or r.spec.group not in self.expendable}

    def doomed(self, failure: RlhpcError, ranks: Collection[Rank]) -> set[str]:
        """Names of the ranks that must end with it."""
        return {r.spec.name for r in ranks} - self.spared(failure, ranks)

    def recoverable(self, ranks: Collection[Rank]) -> bool:
        """Whether the run can go on with the other ranks, once those that had to end have ended.

        All that are gone must be expendable, some rank must be left, and none may be in an intermediate state, but for those
        that are about to join: nobody needs them, and whether they will arrive nobody knows.
        """
        states = [r.state for r in ranks if r.state != "starting" or r.spec.rank < r.spec.world_size]
        gone = {r.spec.group for r in ranks if r.state == "ended"}
        return gone <= self.expendable and "ready" in states and {*states} <= {"ended", "ready"}


def by_group(ranks: Iterable[Rank]) -> dict[str, list[int]]:
    """Rank numbers of each group, both in order."""
    found: dict[str, list[int]] = {}
    for r in sorted(ranks, key=lambda r: (r.spec.group, r.spec.rank)):
        found.setdefault(r.spec.group, []).append(r.spec.rank)
    return found
