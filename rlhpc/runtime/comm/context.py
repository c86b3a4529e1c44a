"""Context of a process of a run: the process's name, the registry and the process's service."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhpc.runtime.errors import RendezvousTimeout, RlhpcError, StaleGeneration
from rlhpc.runtime.host import host_id
from rlhpc.runtime.registry import DEPARTED, MEMBERS, GenerationFolder

if TYPE_CHECKING:
    from rlhpc.runtime.comm.service import Service


class GracefulLeave:
    """Graceful leave of a rank: the steps between the notice to leave and the rank's end.

    The notice arrives on another thread or in a signal handler, which must not wait for the main thread. Therefore no method
    takes a lock.

    Attributes:
        has_notice: Whether the rank has received a notice to leave.
        wake: Called when the notice arrives, to wake a main thread that waits for calls.
        announce: Tells the driver that the rank has to leave.
    """

    def __init__(self) -> None:
        self.has_notice = self._is_staying = False
        self.wake: Callable[[], None] = lambda: None
        self.announce: Callable[[], None] = lambda: None
        self._action: Callable[[], None] | None = None
        self._ends_itself = False

    def set_action(self, action: Callable[[], None] | None) -> None:
        """Sets the action that runs before the rank ends; with None the rank may end at any moment."""
        self._action, self._is_staying = action, False

    def stay(self) -> None:
        """Makes the rank report a notice to the driver and still take calls, until `set_action` is called."""
        self._action, self._is_staying = self.announce, True

    @property
    def is_over(self) -> bool:
        """True if the rank has to leave and takes no further calls."""
        return self.has_notice and not self._is_staying

    @property
    def may_finish(self) -> bool:
        """True if the rank has to leave and ends itself. A rank that had no action when the notice arrived is ended by another
        thread at any moment, so it must not begin to hand anything back: half of that may be done when it ends.
        """
        return self.has_notice and self._ends_itself

    def notify(self) -> bool:
        """Notifies the rank that it has to leave. Slurm's signal and the parent process may both call this.

        Returns:
            True if the main thread ends the rank after an action; False if the caller may end the rank at once.
        """
        self._ends_itself = self._ends_itself or self._action is not None
        self.has_notice = True
        if self._ends_itself:
            self.wake()
        return self._ends_itself

    def run_action(self) -> None:
        """Runs the action before leaving, once; called on the main thread."""
        action, self._action = self._action, None
        if action is not None:
            action()


#: Seconds between two checks whether the process that this one waits for has ended.
_CHECK_S = 1.0


def default_wait_deadline_s() -> float:
    """Returns the seconds after which a wait fails: `RLHPC_WAIT_DEADLINE_S`, by default 1800."""
    return float(os.environ.get("RLHPC_WAIT_DEADLINE_S", 1800))


@dataclass
class Context:
    """Identity and connections of this process in the run.

    Attributes:
        name: `driver` or `<group>-<rank>`.
        registry: The generation's registry.
        service: This process's data plane.
        check: Raises when the run has failed.
        wait_deadline: Seconds after which a wait fails.
        host: Host id of this process.
        graceful_leave: Graceful leave of this process.
        tell_driver: Sends the driver a note about a member, given its event, name and incarnation.
    """

    name: str
    registry: GenerationFolder
    service: Service
    check: Callable[[], None] = lambda: None
    wait_deadline: float = field(default_factory=default_wait_deadline_s)
    host: str = field(default_factory=host_id)
    graceful_leave: GracefulLeave = field(default_factory=GracefulLeave)
    tell_driver: Callable[[str, str, str], None] = lambda event, name, incarnation: None
    _check_times: dict[str, float] = field(default_factory=dict)
    _rank_records: dict[tuple[str, int], tuple[int, dict[str, Any]]] = field(default_factory=dict)

    def group_names(self) -> list[str]:
        """Returns the names of the groups that have been launched."""
        return sorted(p.stem for p in (self.registry.root / "groups").glob("[!.]*.json"))

    def group_size(self, group: str, timeout: float = 60.0) -> int:
        """Returns the world size of a group; waits at most `timeout` seconds until the group has been launched.

        Raises:
            RegistryError: The group was not launched in time.
        """
        record = self.registry.wait_for("groups", group, timeout, f"group {group!r} to be launched", self.check)
        return int(record["world_size"])

    def rank_record(self, group: str, rank: int, timeout: float | None = None) -> dict[str, Any]:
        """Returns the record of a rank (endpoints, node, pid, log files); waits until the rank has published it.

        Records are cached until the run's membership changes (`Service.epoch`). This method opens the record's file instead
        of checking whether it exists, because a network filesystem may answer such a check from a cache for up to a minute.

        Raises:
            RendezvousTimeout: The rank has not published its record within `timeout` seconds (default: 300); the message
                names the rank.
            StaleGeneration: The generation's registry has been removed.
        """
        name = f"{group}-{rank}"
        deadline = time.monotonic() + (300.0 if timeout is None else timeout)
        pause_s = 0.002
        while True:
            epoch, cached_record = self.service.epoch, self._rank_records.get((group, rank))
            if cached_record and cached_record[0] == epoch:
                return cached_record[1]
            if record := self.registry.get(MEMBERS, name):
                self._rank_records[group, rank] = (epoch, record)
                return record
            if not (self.registry.root / MEMBERS).is_dir():
                self.registry.check_current()  # if the whole registry is gone, no rank can publish a record
                if cached_record:
                    return cached_record[1]  # this generation's folder was removed, but it is still the current one
                raise StaleGeneration(self.registry.removal_message())
            self.check()
            if time.monotonic() > deadline:
                raise RendezvousTimeout(f"{self.name} waited for {name}, which never arrived in {self.registry.root}")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.25)

    def has_left(self, group: str, rank: int, patience_s: float = 0.0) -> bool:
        """Returns whether the driver has recorded that a group continues without this rank.

        Waits up to `patience_s` seconds for this record.
        """
        name, deadline = f"{group}-{rank}", time.monotonic() + patience_s
        while True:
            cached_record = self._rank_records.get((group, rank))
            departure = self.registry.get(DEPARTED, name)
            if (
                departure is not None
                and cached_record is not None
                and departure["incarnation"] == cached_record[1]["incarnation"]
            ):
                return True
            if cached_record is not None:
                self._report_if_ended(name, cached_record[1])
            if time.monotonic() >= deadline:
                return False
            self.check()
            time.sleep(0.02)

    def _report_if_ended(self, name: str, record: dict[str, Any]) -> None:
        """Notifies the driver if a rank on this host has ended, because the driver may not notice this.

        Checks at most once per second.
        """
        if time.monotonic() - self._check_times.get(name, 0.0) < _CHECK_S:
            return
        self._check_times[name] = time.monotonic()
        if self.service.peers.has_ended(record):
            self.tell_driver("unreachable", name, record["incarnation"])


_current: Context | None = None


def install(context: Context | None) -> None:
    """Sets this process's context."""
    global _current
    _current = context


def installed_context() -> Context | None:
    """Returns the context of this process; None if the process belongs to no run."""
    return _current


def check_run(reason: str = "") -> None:
    """Raises if this process's run has failed; does nothing outside a run. Waits without a deadline call this.

    Args:
        reason: Reason of the wait; not used.
    """
    del reason
    if _current is not None:
        _current.check()


def current() -> Context:
    """Returns this process's context.

    Raises:
        RlhpcError: This process belongs to no run yet.
    """
    if _current is None:
        raise RlhpcError("this process belongs to no run yet: launch a group or create a channel first")
    return _current
