"""Ranks that came by themselves: `rlhpc join` started them, in an allocation of their own, and says when they have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhpc.runtime.starters import Member

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster, Node
    from rlhpc.runtime.spec import WorkerSpec


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
