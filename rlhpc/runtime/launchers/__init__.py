"""Launchers: start and end ranks on this host or as job steps. The session knows this interface alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster, Node
    from rlhpc.runtime.errors import RlhpcError
    from rlhpc.runtime.worker_spec import WorkerSpec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster, Node
    from rlhpc.runtime.worker_spec import WorkerSpec


@dataclass(eq=False)
class Member:
    """One rank as the driver sees it.

    Attributes:
        state: "starting", "ready", "stopping" or "ended". A rank that the run has given up is ended at once.
        has_exited: Whether its process is known to have ended; until then no other may be started in its place.
        told: Why it leaves, if it was told to.
        leaving: Whether it waits for the others to do without it.
    """

    spec: WorkerSpec
    starter: Starter
    pid: int = 0
    state: str = "starting"
    record: dict[str, Any] = field(default_factory=dict)
    alive: float = field(default_factory=time.monotonic)
    suspect: bool = False
    told: str = ""
    leaving: bool = False
    has_exited: bool = False


class Starter(Protocol):
    """Starts ranks and ends them.

    Attributes:
        grace_s: Seconds that ranks have to end on their own before they are killed.
        limit_s: Seconds after which killed ranks are gone, or no longer waited for.
    """

    @property
    def grace_s(self) -> float: ...
    @property
    def limit_s(self) -> float: ...

    def prepare(self, spec: WorkerSpec, node: Node, fork: bool) -> None:
        """Completes what a rank on `node` is told.

        Args:
            spec: What it is told.
            node: Where it will be.
            fork: Whether it may be forked.

        Raises:
            SubmitError: No rank can be started there.
        """

    def start(self, members: Sequence[Member], cluster: Cluster) -> None:
        """Starts ranks of a group; reports what happens to them."""

    def end(self, members: Sequence[Member]) -> None:
        """Asks ranks to end at once."""

    def kill(self, members: Sequence[Member]) -> None:
        """Kills the processes of ranks, also of ranks that were given up; reports each when it is gone."""

    def said(self, member: Member) -> str:
        """What a rank printed that has not opened its log; "" if nothing."""

    def late(self, members: Sequence[Member]) -> list[str]:
        """What is known about ranks that do not arrive, one line each."""

    def close(self, clear: bool) -> None:
        """Cleans up when all ranks have ended. With `clear`, some may have left files on other nodes."""


class Reports(Protocol):
    """What a starter reports to, from threads of its own."""

    def started(self, member: Member, pid: int) -> None:
        """A rank's process has started."""

    def exited(self, member: Member, status: int) -> None:
        """A rank's process has ended, with this wait status."""

    def all_ended(self, members: Sequence[Member]) -> list[Member]:
        """None of these ranks can still be alive; returns those for which that is unexpected."""

    def fail(self, failure: RlhpcError) -> None:
        """Something is wrong that is no rank's fault."""


class JoinedStarter:
    """Stands for whoever started them. That process asks whether the run is still there, and ends its ranks where not."""

    grace_s = 2.0
    limit_s = 2.0

    def prepare(self, spec: WorkerSpec, node: Node, fork: bool) -> None:
        """Nothing: they know where they are."""

    def start(self, members: Sequence[Member], cluster: Cluster) -> None:
        """Nothing: they come when they like."""

    def end(self, members: Sequence[Member]) -> None:
        """Nothing: they notice."""

    def kill(self, members: Sequence[Member]) -> None:
        """Nothing: they notice."""

    def said(self, member: Member) -> str:
        """Whoever started them has it."""
        return ""

    def late(self, members: Sequence[Member]) -> list[str]:
        """Nothing is known."""
        return []

    def close(self, clear: bool) -> None:
        """Nothing is left here."""
