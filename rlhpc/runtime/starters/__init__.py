"""How ranks come to life and are ended: forked on this host, or as job steps. The session knows neither, only this."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster, Node
    from rlhpc.runtime.errors import RlhpcError
    from rlhpc.runtime.spec import WorkerSpec


@dataclass(eq=False)
class Member:
    """One rank as the driver sees it. `state`: starting, ready, stopping, ended."""

    spec: WorkerSpec
    starter: Starter
    pid: int = 0
    state: str = "starting"
    record: dict[str, Any] = field(default_factory=dict)
    alive: float = field(default_factory=time.monotonic)
    suspect: bool = False


class Starter(Protocol):
    """Starts ranks and ends them.

    Attributes:
        grace_s: Seconds that ranks have to end by themselves, before they are killed.
        limit_s: Seconds after which ranks that were ended are gone, or not waited for any more.
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
            fork: It may be forked.

        Raises:
            SubmitError: No rank can be started there.
        """

    def start(self, members: Sequence[Member], cluster: Cluster) -> None:
        """Starts ranks of a group; what becomes of them is reported."""

    def end(self, members: Sequence[Member]) -> None:
        """Asks ranks to end at once."""

    def kill(self, members: Sequence[Member]) -> None:
        """Ends ranks that do not."""

    def said(self, member: Member) -> str:
        """What was said for a rank that has not opened its log, "" where nothing was."""

    def late(self, members: Sequence[Member]) -> list[str]:
        """What is known of ranks that do not arrive, a line each."""

    def close(self, clear: bool) -> None:
        """When all ranks have ended. `clear`: some may have left files on other nodes."""


class Reports(Protocol):
    """What a starter tells, from threads of its own."""

    def started(self, member: Member, pid: int) -> None:
        """It has a process."""

    def exited(self, member: Member, status: int) -> None:
        """Its process has ended, with this wait status."""

    def all_ended(self, members: Sequence[Member]) -> list[Member]:
        """None of them can live any more; returns those for whom that is unexpected."""

    def fail(self, failure: RlhpcError) -> None:
        """Something is wrong for which no rank can be blamed."""
