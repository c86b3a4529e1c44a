"""Which ranks are alive: their states, and waiting for them to change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rlhpc.runtime.members import all_in
from rlhpc.runtime.starters import Member

_ALIVE = ("starting", "ready")


class Ranks:
    """All ranks that a session has started: for each name the latest.

    Args:
        on_end: Called with the name of each rank that has ended.
    """

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self.members: dict[str, Member] = {}
        #: Notified whenever a state changes.
        self.changed = threading.Condition(threading.RLock())
        self._on_end = on_end

    def all(self) -> list[Member]:
        return list(self.members.values())

    def alive(self, group: str | None = None) -> list[Member]:
        """The ranks that have not ended, of one group or of all."""
        return [m for m in self.all() if m.state != "ended" and group in (None, m.spec.group)]

    def add(self, members: Sequence[Member]) -> None:
        """Adds ranks; each replaces an earlier one of the same name."""
        with self.changed:
            self.members.update({member.spec.name: member for member in members})

    def forget_ended(self, group: str) -> None:
        """Forgets the ranks that have ended, and those of the group."""
        with self.changed:
            self.members = {n: m for n, m in self.members.items() if m.state != "ended" and m.spec.group != group}

    def find(self, name: str, incarnation: str) -> Member | None:
        """The rank of that name; None if another has replaced the one that is meant."""
        member = self.members.get(name)
        return member if member is not None and member.spec.incarnation == incarnation else None

    def started(self, member: Member, pid: int) -> None:
        """Records that a rank's process has started."""
        with self.changed:
            member.pid = pid
            self.changed.notify_all()

    def arrived(self, member: Member, pid: int, record: dict[str, Any]) -> None:
        """Records that a rank has built its object."""
        with self.changed:
            member.record, member.pid = record, pid
            if member.state == "starting":
                member.state = "ready"
            self.changed.notify_all()

    def ended(self, members: Sequence[Member]) -> list[Member]:
        """Records that ranks have ended; returns those for which that is unexpected."""
        with self.changed:
            gone = [m for m in members if self.members.get(m.spec.name) is m and m.state != "ended"]
            unexpected = [m for m in gone if m.state in _ALIVE]
            for member in gone:
                member.state = "ended"
            self.changed.notify_all()
        for member in gone:
            self._on_end(member.spec.name)
        return unexpected

    def stopping(self, members: Collection[Member]) -> None:
        """Records that ranks were told to end: from now on their end is no failure."""
        with self.changed:
            for member in members:
                if member.state != "ended":
                    member.state = "stopping"
            self.changed.notify_all()

    def await_ended(self, members: Sequence[Member], timeout: float) -> bool:
        """Waits at most `timeout` seconds for ranks to end; returns whether all have."""
        with self.changed:
            return self.changed.wait_for(all_in("ended", members), timeout)

    def settle(self, arrival_s: float = 0.0) -> None:
        """Waits for all ranks that are ending, for as long as that may take; at most so long, before, for those that are
        starting."""
        with self.changed:
            self.changed.wait_for(lambda: all(m.state != "starting" for m in self.all()), arrival_s)
        limit = max((m.starter.limit_s for m in self.all()), default=0.0)
        self.await_ended([m for m in self.all() if m.state != "ready"], limit)
