"""Payloads: small ones travel inside their message, large ones through a shared-memory segment that the reader maps.

Large tensors on an accelerator stay there if the readers compute on the same one: see `device_pool`.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhpc.runtime.comm.device_memory import Crossing, DevicePool, current_device
from rlhpc.runtime.comm.serialization import Apart, Buffer, dumps, loads, owned
from rlhpc.runtime.comm.shared_memory import AND, HEADER, Mappings, SegmentPool, discard
from rlhpc.runtime.comm.zero_copy import LEND_LIMIT, PREFIX, Loan, Loans
from rlhpc.runtime.errors import DeadlineExceeded

#: The first receiver has memory that is still warm from last time; the others wait this long for it.
_PRECEDENCE_S = 0.05
_PAUSE_S = 0.001


class Share(NamedTuple):
    """A receiver's place among the receivers on its host.

    Attributes:
        name: Name of the message on this host.
        number, of: Which receiver this is, of how many.
        holders: Their processes (`host.process_key`), where these are known.
    """

    name: str
    number: int
    of: int
    holders: tuple[str, ...] = ()


def once_for_all(
    folder: Path, share: Share, fetch: Callable[[], str], check: Callable[[], None], timeout: float = 600.0
) -> str:
    """Fetches the message, or waits for the receiver that does; returns the path of its segment on this host.

    Args:
        folder: The session's folder on this host.
        share: The requesting receiver.
        fetch: Fetches the message into a segment for all receivers; called by one of them.
        check: Called while waiting; raises when the run has failed.
        timeout: Seconds.

    Raises:
        DeadlineExceeded: Another receiver on this host was still fetching after that time.
    """
    meeting = folder / f"share-{share.name}"
    started = time.monotonic()
    while share.number and not meeting.exists() and time.monotonic() - started < _PRECEDENCE_S:
        time.sleep(_PAUSE_S)
    fd = os.open(meeting, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not _lock(fd):
            check()
            if time.monotonic() - started > timeout:
                raise DeadlineExceeded(f"waited {timeout:.0f} s for another rank of this host to fetch {share.name}")
            time.sleep(_PAUSE_S)
        come, _, path = os.pread(fd, 4096, 0).decode().partition(" ")
        path = path or fetch()
        number = int(come or 0) + 1
        if number == share.of:
            meeting.unlink(missing_ok=True)
        else:
            os.pwrite(fd, f"{number} {path}".encode(), 0)
        return path
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


INLINE_LIMIT = 32 * 1024


class Origin(NamedTuple):
    """The process that owns a segment.

    Attributes:
        host: Host id.
        endpoint: Where the owner's service takes messages from other hosts.
        bulk: Where it serves its segments to them.
    """

    host: str
    endpoint: str
    bulk: str = ""


class Packed:
    """A serialized object, ready to be sent.

    Attributes:
        nbytes: Size of the object's data, which back pressure counts.
        segment: Path of the shared-memory file, or the name of a loan, and path of the lease on a buffer of the accelerator;
            None when everything is inline.
        readers: How many readers it is for.
    """

    __slots__ = (
        "_crossing", "_data", "_inline", "_loan", "_loans", "_origin", "_path", "_pool", "_spans", "nbytes", "readers",
        "segment",
    )  # fmt: skip

    def __init__(
        self,
        obj: Any,
        pool: SegmentPool,
        origin: Origin,
        readers: int = 1,
        loans: Loans | None = None,
        lane: DevicePool | None = None,
        inline: bool = False,
        holders: Sequence[str] = (),
    ) -> None:
        """Serializes `obj`.

        Args:
            obj: Anything that can be pickled.
            pool: Of this process.
            origin: This process, for readers on other hosts.
            readers: How many processes will read it; processes of one host that share a fetched copy count once.
            loans: Given if all readers are on other hosts: large data then stays where it is until `settle`.
            lane: Given if all readers compute on this process's accelerator: large tensors then stay there, if there is room.
            inline: All data travels in the message, which then no longer depends on this process.
            holders: The readers' processes, see `segments.Segment`.
        """
        self._crossing: Crossing | None = None
        buffers = None if lane is None else self._cross(obj, lane, readers, holders)
        if buffers is None:
            self._data, buffers = dumps(obj)
        self._origin, self.readers = origin, readers
        size = sum(len(b) for b in buffers)
        self.nbytes = len(self._data) + size + (self._crossing.size if self._crossing else 0)
        self._path = ""
        self._inline: list[Any] = []
        self._spans: list[tuple[int, int]] = []
        self._pool, self._loans = pool, loans
        self._loan: Loan | None = None
        if inline or size < INLINE_LIMIT:
            self._inline = buffers
        elif loans is not None and size >= LEND_LIMIT:
            self._loan = loans.lend(buffers, readers, holders)
            self._path, self._spans = self._loan.name, self._loan.spans
        else:
            self._path, self._spans = pool.write(buffers, readers, holders=holders)
        self.segment: str | None = self._path or None
        if self._crossing is not None:
            self.segment = AND.join(filter(None, (self._path, self._crossing.path)))

    def _cross(self, obj: Any, lane: DevicePool, readers: int, holders: Sequence[str]) -> list[Any] | None:
        """Pickles without the tensors on the accelerator; returns the buffers, or None if no tensor can stay there."""
        device = current_device()
        if device is None:
            return None
        apart = Apart(device.holds)
        self._data, buffers = dumps(obj, apart)
        if sum(tensor.nbytes for tensor in apart.tensors) < INLINE_LIMIT:
            return None if apart.tensors else buffers
        self._crossing = lane.write(apart.tensors, readers, holders)
        return None if self._crossing is None else buffers

    def frames(self, reader: int = 0, share: Share | None = None) -> list[Any]:
        """Returns message frames for one reader: the pickle stream, a descriptor, and the buffers that travel inline.

        Args:
            reader: Number of the reader.
            share: Its index among the processes of another host that together are this reader.
        """
        if self.segment is None:
            return [self._data, b"", *self._inline]
        place = None if share is None else tuple(share)
        crossing = None if self._crossing is None else tuple(self._crossing)
        about = (tuple(self._origin), self._path, self._spans, reader, self.readers, place, crossing)
        return [self._data, pickle.dumps(about), *self._inline]

    def owned(self) -> None:
        """Copies data that still refers to the caller's memory, so that the object may change while it is in transit."""
        self._inline = owned(self._inline)

    def settle(self, handed: bool, check: Callable[[], None]) -> None:
        """Releases the object's memory after the message has been sent: it is not read afterwards.

        Args:
            handed: Whether all readers were waiting for the message already.
            check: Called while waiting; raises when the run has failed.
        """
        if self._loan is not None:
            self._loan.settle(handed, self._pool, check)

    def discard(self, first: int = 0, end: int | None = None) -> None:
        """Frees the segment for the readers that will not come: those from number `first` on, before `end`."""
        for reader in range(first, (self.readers if end is None else end) if self.segment else 0):
            if self._loan is not None and self._loans is not None:
                self._loans.release(self._loan.name, reader)
            discard(str(self.segment), reader)


#: `(origin, path, bytes, reader, share)` -> memory laid out as a segment: fetches one of another host.
Fetch = Callable[[Origin, str, int, int, Share | None], memoryview]
#: `(crossing, origin, reader)` -> the tensors of a message that stayed on the sender's accelerator.
Land = Callable[[Crossing, Origin, int], list[Any]]


def nowhere(crossing: Crossing, origin: Origin, reader: int) -> list[Any]:
    """Refuses tensors in accelerator memory, in processes that never compute on an accelerator."""
    raise ValueError(f"a message from {crossing.address}, to a process that computes on no accelerator")


def unpack(
    frames: Sequence[Buffer],
    host: str,
    mappings: Mappings,
    fetch: Fetch,
    land: Land = nowhere,
    *,
    borrow: bool = False,
) -> Any:
    """Rebuilds the object of `frames`.

    Args:
        frames: As made by `Packed.frames`, after transport.
        host: This process's host id; a segment of another host is fetched.
        mappings: Of this process.
        fetch: Gets a segment from another host.
        land: Gets tensors from a buffer on an accelerator.
        borrow: The caller only reads the result, so no copy on write is needed if there are other readers.

    Returns:
        The object. A segment that holds its data stays in use by this reader until the last view is gone.
    """
    data, descriptor, *inline = frames
    if not len(descriptor):
        return loads(data, [bytearray(b) for b in inline])
    origin, path, spans, reader, readers, place, crossing = pickle.loads(descriptor)
    tensors = land(Crossing(*crossing), Origin(*origin), reader) if crossing else ()
    if not path:
        return loads(data, [bytearray(b) for b in inline], tensors)
    if origin[0] != host or path.startswith(PREFIX):
        share = Share(*place) if place else None
        view = fetch(Origin(*origin), path, spans[-1][0] + spans[-1][1] - HEADER, reader, share)
    else:
        view = mappings.lease(path, reader, own=borrow or readers == 1)
    return loads(data, [view[start : start + size] for start, size in spans], tensors)


def forgo(frames: Sequence[Buffer]) -> None:
    """Releases a message's claim on an accelerator's memory, without reading it."""
    if len(frames[1]):
        _, _, _, reader, _, _, crossing = pickle.loads(frames[1])
        if crossing:
            discard(Crossing(*crossing).path, reader)
