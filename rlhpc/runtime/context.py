"""What a process of a run knows about the run: its name, the registry, its service thread. One per process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhpc.runtime.errors import RendezvousTimeout, RlhpcError, StaleGeneration
from rlhpc.runtime.host import host_id
from rlhpc.runtime.registry import LEFT, MEMBERS, GenerationFolder

if TYPE_CHECKING:
    from rlhpc.runtime.comm.service import Service


class Farewell:
    """What stands between the notice to leave and a rank's end.

    The notice comes on a thread, or in a signal handler, and must not wait for the main thread; so there is no lock.

    Attributes:
        told: Whether the rank is to leave.
        wake: Called with the notice, so that a main thread which waits for calls looks up.
        announce: Tells the driver that the rank is to leave.
    """

    def __init__(self) -> None:
        self.told = self._stays = False
        self.wake: Callable[[], None] = lambda: None
        self.announce: Callable[[], None] = lambda: None
        self._first: Callable[[], None] | None = None
        self._leaves = False

    def first(self, act: Callable[[], None] | None) -> None:
        """Says what is to be done before the rank ends; with None it may end at any moment."""
        self._first, self._stays = act, False

    def stay(self) -> None:
        """The rank tells the driver before it ends, and takes calls until `first` says otherwise."""
        self._first, self._stays = self.announce, True

    @property
    def over(self) -> bool:
        """Whether the rank is to leave, and to take no further call."""
        return self.told and not self._stays

    def tell(self) -> bool:
        """Gives notice; it may come more than once, as from Slurm and from the process that started this one.

        Returns:
            Whether the main thread has something to do first, and ends the rank afterwards. Otherwise it may end at once.
        """
        self.told = True
        self._leaves = self._leaves or self._first is not None
        if self._leaves:
            self.wake()
        return self._leaves

    def say(self) -> None:
        """Does what is to be done first; on the main thread."""
        act, self._first = self._first, None
        if act is not None:
            act()


#: How often a process looks whether another one that it waits for has ended.
_LOOK_S = 1.0


@dataclass
class Context:
    """This process's place in the run.

    Attributes:
        name: `driver` or `<group>-<rank>`.
        registry: The generation's registry.
        service: This process's data plane.
        check: Raises when the run has failed.
        wait_deadline: Seconds after which any wait gives up.
        farewell: What this process does before it leaves the run.
        tell_driver: Leaves the driver a note about a member: what, name, incarnation.
    """

    name: str
    registry: GenerationFolder
    service: Service
    check: Callable[[], None] = lambda: None
    wait_deadline: float = float(os.environ.get("RLHPC_WAIT_DEADLINE_S", 1800))
    host: str = field(default_factory=host_id)
    farewell: Farewell = field(default_factory=Farewell)
    tell_driver: Callable[[str, str, str], None] = lambda what, name, incarnation: None
    _looked: dict[str, float] = field(default_factory=dict)
    _members: dict[tuple[str, int], tuple[int, dict[str, Any]]] = field(default_factory=dict)

    def group_names(self) -> list[str]:
        """Names of the groups that have been launched."""
        return sorted(p.stem for p in (self.registry.root / "groups").glob("[!.]*.json"))

    def group_size(self, group: str, timeout: float = 60.0) -> int:
        """World size of a group; waits until it has been launched."""
        record = self.registry.wait_for("groups", group, timeout, f"group {group!r} to be launched", self.check)
        return int(record["world_size"])

    def member(self, group: str, rank: int, timeout: float | None = None) -> dict[str, Any]:
        """The record a member published: endpoints, node, pid, log files. Waits for the member to arrive.

        A record is read again once ranks have come or gone (`Service.epoch`), and then by opening its file: a network
        filesystem may answer other questions about it from a cache, for a minute.

        Raises:
            RendezvousTimeout: It did not arrive; names it.
        """
        name = f"{group}-{rank}"
        deadline = time.monotonic() + (300.0 if timeout is None else timeout)
        pause = 0.002
        while True:
            epoch, known = self.service.epoch, self._members.get((group, rank))
            if known and known[0] == epoch:
                return known[1]
            if record := self.registry.get(MEMBERS, name):
                self._members[group, rank] = (epoch, record)
                return record
            if not (self.registry.root / MEMBERS).is_dir():
                self.registry.check_current()  # if all of it is gone, nobody will ever arrive
                if known:
                    return known[1]  # old generations' folders were removed, and this one's with them
                raise StaleGeneration(self.registry.gone())
            self.check()
            if time.monotonic() > deadline:
                raise RendezvousTimeout(f"{self.name} waited for {name}, which never arrived in {self.registry.root}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.25)

    def has_left(self, group: str, rank: int, patience_s: float = 0.0) -> bool:
        """Whether a member's group goes on without it, as the driver says; waits at most so long for that."""
        name, deadline = f"{group}-{rank}", time.monotonic() + patience_s
        while True:
            known = self._members.get((group, rank))
            left = self.registry.get(LEFT, name)
            if left is not None and known is not None and left["incarnation"] == known[1]["incarnation"]:
                return True
            if known is not None:
                self._look_after(name, known[1])
            if time.monotonic() >= deadline:
                return False
            self.check()
            time.sleep(0.02)

    def _look_after(self, name: str, record: dict[str, Any]) -> None:
        """Tells the driver of a member of this host that has ended, if perhaps nobody else can."""
        if time.monotonic() - self._looked.get(name, 0.0) < _LOOK_S:
            return
        self._looked[name] = time.monotonic()
        if self.service.peers.knows_ended(record):
            self.tell_driver("unreachable", name, record["incarnation"])


_current: Context | None = None


def install(context: Context | None) -> None:
    """Makes `context` the context of this process."""
    global _current
    _current = context


def installed() -> Context | None:
    """This process's context, or None before there is one."""
    return _current


def check_run(reason: str = "") -> None:
    """Raises if the run that this process belongs to has failed; does nothing where there is no run. For waits without a
    deadline, of which `reason` says the cause."""
    del reason
    if _current is not None:
        _current.check()


def current() -> Context:
    """This process's context.

    Raises:
        RlhpcError: This process belongs to no run yet.
    """
    if _current is None:
        raise RlhpcError("this process belongs to no run yet: launch a group or create a channel first")
    return _current
