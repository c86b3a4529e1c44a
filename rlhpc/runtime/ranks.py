"""Which ranks are alive: their states, and waiting for them to change."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rlhpc.runtime.comm.background import in_background
from rlhpc.runtime.comm.service import Service
from rlhpc.runtime.comm.sockets import choose
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.host import process_key
from rlhpc.runtime.members import all_in
from rlhpc.runtime.starters import Member

_ALIVE = ("starting", "ready")
#: How long a rank may take to hear who takes part; one that takes longer hears of it with its next call.
_TELL_S = 5.0


class Ranks:
    """All ranks that a session has started: for each name the latest.

    Args:
        on_change: Called when ranks are added, have arrived or have ended, before anybody else knows of it, with the
            processes (`host.process_key`) of those that have ended.
    """

    def __init__(self, on_change: Callable[[Sequence[str]], None]) -> None:
        self.members: dict[str, Member] = {}
        #: Notified whenever a state changes.
        self.changed = threading.Condition(threading.RLock())
        self._on_change = on_change

    def all(self) -> list[Member]:
        return list(self.members.values())

    def alive(self, group: str | None = None) -> list[Member]:
        """The ranks that have not ended, of one group or of all."""
        return [m for m in self.all() if m.state != "ended" and group in (None, m.spec.group)]

    def ended_of(self, group: str) -> list[Member]:
        """Returns the ranks of a group that have ended."""
        return [m for m in self.all() if m.state == "ended" and m.spec.group == group]

    def add(self, members: Sequence[Member]) -> None:
        """Adds ranks; each replaces an earlier one of the same name."""
        with self.changed:
            self._on_change(())
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
            self._on_change(())
            member.record, member.pid = record, pid
            if member.state == "starting":
                member.state = "ready"
            self.changed.notify_all()

    def ended(self, members: Sequence[Member]) -> list[Member]:
        """Records that the processes of ranks have ended; returns those for which that is unexpected."""
        with self.changed:
            for member in members:
                member.has_exited = True
            return self.give_up(members)

    def give_up(self, members: Sequence[Member]) -> list[Member]:
        """Records that ranks count as ended, whatever their processes do; returns those for which that is unexpected."""
        with self.changed:
            ended = [m for m in members if self.members.get(m.spec.name) is m and m.state != "ended"]
            unexpected = [m for m in ended if m.state in _ALIVE]
            if ended:
                self._on_change(_keys(ended))
            for member in ended:
                member.state = "ended"
            self.changed.notify_all()
        return unexpected

    def await_exit(self, members: Sequence[Member], timeout: float) -> list[Member]:
        """Waits at most `timeout` seconds for the processes of ranks to end; returns those that are still there."""
        with self.changed:
            self.changed.wait_for(lambda: all(m.has_exited for m in members), timeout)
            return [m for m in members if not m.has_exited]

    def announce(self, service: Service, ended: Sequence[Member] = ()) -> None:
        """Tells the ranks that are ready, in the background, that others have come, or that these have ended.

        They free what they hold for the ended ones, and look up anew where the others are.
        """
        records = [member.record for member in self.all() if member.state == "ready"]
        note = pickle.dumps((service.epoch, _keys(ended)))

        def tell() -> None:
            pending = []
            for record in records:
                with contextlib.suppress(RlhpcError, OSError):  # one that has ended as well
                    whom = f"{record['group']}-{record['rank']} to hear who takes part"
                    pending.append(service.peers.begin(choose(record["data"]), b"MEMBERS", [note], whom, _TELL_S))
            for request in pending:
                with contextlib.suppress(RlhpcError, OSError):
                    service.peers.reply_to(request, _TELL_S)

        if records:
            in_background("members", tell)

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


def _keys(members: Sequence[Member]) -> list[str]:
    return [process_key(member.record["data"]) for member in members if member.record]
