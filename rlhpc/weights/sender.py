"""Sender of weight updates: writes what changed once per host, in parts, and announces each part.

A part is a shared-memory segment with a table of its contents. Parts that later versions build upon are kept. Together
they form a log, from which a receiver without valid weights reads all weights without a request to another rank.

    off         every version holds all tensors; nothing is kept
    frozen      tensors that are not trained are written once and kept; every version holds all others
    elements    the first version holds all tensors, kept; later ones hold what changed: tensors, or elements of them

When the changes in the log have grown larger than the weights, a new copy of the weights takes the place of both.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
import time
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from rlhpc.runtime.comm.device_memory import Crossing
from rlhpc.runtime.comm.shared_memory import ALIGN, HEADER, SegmentPool, ShmSegment, spans_of
from rlhpc.runtime.devices import SideCopies, locked
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.weights.base import DELTAS, NamedTensors, Receipt
from rlhpc.weights.delta import Elements, Shadow
from rlhpc.weights.transport_select import Cargo, Carries
from rlhpc.weights.verification import COST, digests

#: Destination and source of each copy: flat, uint8, of the same size.
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class HostCopies(Protocol):
    """Asynchronous copies into host memory."""

    def begin(self, pairs: Pairs) -> Callable[[], None]:
        """Starts to copy; the returned function waits until all is copied. Until then the sources must not change."""


class Carrier:
    """Writer of parts from tensors that are not on the CPU.

    Args:
        pool: Segment pool of this process.
        copies: Copies to host memory.
    """

    def __init__(self, pool: SegmentPool, copies: HostCopies) -> None:
        self._pool, self._copies = pool, copies

    @classmethod
    def of(cls, pool: SegmentPool, device: str) -> Carrier:
        """Returns a carrier for tensors of a kind of device."""
        return cls(pool, SideCopies(device))

    def begin(
        self, tensors: Sequence[torch.Tensor], table: bytes, readers: int, *, keep: bool
    ) -> tuple[str, tuple[int, int], Callable[[], None]]:
        """Starts to write a segment, as `SegmentPool.write` would.

        Args:
            tensors: Contiguous.
            table: Bytes that follow the tensors.
            readers: Number of readers.
            keep: See `SegmentPool.write`.

        Returns:
            Path of the segment, (offset, size) of the table, and a function that waits until all is written.
        """
        spans = spans_of([*(tensor.nbytes for tensor in tensors), len(table)])
        segment = self._pool.reserve(sum(size + -size % ALIGN for _, size in spans), readers, keep=keep)
        memory = _lock_pages(segment)
        start, size = spans[-1]
        segment.memory[start : start + size] = table
        flat_tensors = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
        destinations = [memory[start : start + size] for start, size in spans[:-1]]
        return segment.path, spans[-1], self._copies.begin(list(zip(destinations, flat_tensors, strict=True)))


def _lock_pages(segment: ShmSegment) -> torch.Tensor:
    """Returns a segment's memory with its pages locked for as long as the pool has it, since segments are reused."""
    if segment.locked is None:
        segment.locked = locked(segment.memory)
    memory: torch.Tensor = segment.locked
    return memory


#: Unread parts allowed for a reader that has started: one in transit, and one being written. With fewer, a sender would wait
#: for readers of a part that it has not announced yet.
PARTS = 2
_SHORTEST_S, _LONGEST_S = 0.0005, 0.02


class ChunkLocation(Protocol):
    """Interface of a memory that holds parts."""

    def awaited(self, path: str) -> list[bool]:
        """Returns which readers of a part have not read it yet; empty once no reader is missing."""


class ChunkWindow:
    """Flow control of a version's parts: bounds the number of unread parts.

    Args:
        pool: Holds the parts.
        readers: Names of the readers, by number.
        check: Called while waiting; raises when the run has failed.
        is_present: Returns whether a reader is still the process that the version was announced to.
        deadline: Seconds after which a wait gives up.
        parts: Maximum number of unread parts of a reader that has started.
    """

    def __init__(
        self,
        pool: ChunkLocation,
        readers: Sequence[str],
        *,
        check: Callable[[], None] = lambda: None,
        is_present: Callable[[int], bool] = lambda reader: True,
        deadline: float = 1800.0,
        parts: int = PARTS,
    ) -> None:
        self._pool, self._readers, self._parts = pool, list(readers), parts
        self._check, self._is_present, self._deadline = check, is_present, deadline
        self._open: list[str] = []
        self._started: set[int] = set()

    def wrote(self, path: str) -> None:
        """Counts a part that was written for all readers."""
        if path in self._open:  # all readers have read the previous part of this path
            self._open.remove(path)
            self._started.update(range(len(self._readers)))
        self._open.append(path)

    def wait(self) -> None:
        """Returns when another part may be written.

        Raises:
            DeadlineExceeded: The wait took too long; names the readers that did not read.
        """
        started, pause = time.monotonic(), _SHORTEST_S
        while lagging_readers := self._behind():
            self._check()
            replaced = {reader for reader in lagging_readers if not self._is_present(reader)}
            if replaced:
                self._started -= replaced
                continue
            if time.monotonic() - started > self._deadline:
                names = ", ".join(self._readers[reader] for reader in sorted(lagging_readers))
                raise DeadlineExceeded(f"waited {self._deadline:.0f} s for {names} to take in a part of the weights")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)

    def all_started(self) -> bool:
        """Returns whether all readers have started, and continue to the version's end."""
        self._behind()
        return len(self._started) == len(self._readers)

    def _behind(self) -> set[int]:
        """Returns the readers that have started and have the maximum number of unread parts."""
        awaited = {path: self._pool.awaited(path) for path in self._open}
        self._open = [path for path in self._open if any(awaited[path])]
        for states in awaited.values():
            readers_started = (reader for reader in range(len(self._readers)) if not (states and states[reader]))
            self._started.update(readers_started)
        counts = [sum(awaited[path][reader] for path in self._open) for reader in range(len(self._readers))]
        return {reader for reader in self._started if counts[reader] >= self._parts}


#: Bytes of a part: large enough to make its fixed costs negligible, small enough for two of them to be no burden.
PART_BYTES = 256 << 20


@dataclass(frozen=True)
class WeightChunk:
    """One segment of weights.

    Attributes:
        stream: The stream it belongs to.
        serial: Number in the stream; a receiver that has read all parts up to a number needs those beyond it.
        path: Path of the segment.
        table: (offset, size) of the pickled table of `Entry`.
        retained: True if other receivers may need the part later, so that every reader maps it privately.
        nbytes: Bytes of the tensors.
        fixed: True if it never changes after a receiver has loaded it: its tensors are not trained.
        cargo: Location of its tensors if they are in no segment (`transport_select`), and their names.
    """

    stream: str
    serial: int
    path: str
    table: tuple[int, int]
    retained: bool
    nbytes: int
    fixed: bool = False
    cargo: tuple[Cargo, tuple[str, ...]] | None = None

    @property
    def name(self) -> str:
        """Unique name of the part."""
        return f"{self.stream}-{self.serial}"

    @property
    def size(self) -> int:
        """Bytes of the segment's data, which ends with the table."""
        return sum(self.table) - HEADER


#: Name, shape, dtype without "torch.", sizes in bytes of the buffers (the tensor, or index and values of its elements),
#: and the index's dtype ("" for a whole tensor).
Entry = tuple[str, tuple[int, ...], str, tuple[int, ...], str]


@dataclass(frozen=True)
class Announcement:
    """Announcement of a piece of one version; pieces come in order.

    Attributes:
        stream: The stream it belongs to; serials of two streams are unrelated.
        version: Version of the weights.
        number: Number of the piece within the version, from 0.
        serial: Serial of the stream's newest part.
        part: The new part; None if there is no new part.
        last: Whether this is the version's last piece.
        log: The kept parts from before this version, in order; in the first announcement only.
        receipt: Digests of the version; in the last announcement only.
    """

    stream: str
    version: int
    number: int
    serial: int
    part: WeightChunk | None
    last: bool
    log: tuple[WeightChunk, ...] = ()
    receipt: Receipt | None = None


class _Bucket:
    """Tensors that go into one part."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.nbytes = 0
        self.tensors: list[torch.Tensor] = []

    def add(self, name: str, value: torch.Tensor | Elements) -> None:
        sizes: tuple[int, ...]
        if isinstance(value, Elements):
            index, sizes = _name(value.index.dtype), (value.index.nbytes, value.values.nbytes)
            self.tensors += [value.index, value.values]
        else:
            index, sizes = "", (value.nbytes,)
            self.tensors.append(value)
        self.entries.append((name, tuple(value.shape), _name(value.dtype), sizes, index))
        self.nbytes += sum(sizes)


def _memory(tensor: torch.Tensor) -> Any:
    """Returns a contiguous tensor's memory. This is ten times as fast as views and numpy, for hundreds of tensors."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Publisher:
    """Writer of versions for a fixed set of receivers.

    Args:
        pool: This process's pool.
        readers: Number of receivers.
        delta: One of `DELTAS`.
        part_bytes: Size of a part.
        carrier: Writes parts while the next tensors are gathered; by default used for tensors on an accelerator.
        roads: Carries parts that are not kept, where it can.
    """

    def __init__(
        self,
        pool: SegmentPool,
        readers: int,
        delta: str = "frozen",
        part_bytes: int = PART_BYTES,
        carrier: Carrier | None = None,
        roads: Carries | None = None,
    ) -> None:
        if delta not in DELTAS:
            raise ValueError(f"delta is {delta!r}; allowed: {', '.join(DELTAS)}")
        self._pool, self._readers, self._delta, self._part_bytes = pool, readers, delta, part_bytes
        self._carrier, self._roads = carrier, roads
        self._frozen: list[WeightChunk] = []
        self._base: list[WeightChunk] = []
        self._changes: list[WeightChunk] = []
        self._dropping: list[WeightChunk] = []
        self.forget()

    def forget(self) -> None:
        """Starts a new stream: whatever the receivers hold, the next version contains all tensors."""
        for chunk in [*self._frozen, *self._base, *self._changes, *self._dropping]:
            self._pool.drop(chunk.path)
        self._stream, self._serial = uuid.uuid4().hex, -1
        self._frozen, self._base, self._changes, self._dropping = [], [], [], []
        #: Frozen tensors that were sent, with torch's count of in-place changes; and those that changed nevertheless.
        self._frozen_counts: dict[str, int] = {}
        self._moved: set[str] = set()
        self._shadow = Shadow()

    def publish(
        self, version: int, tensors: NamedTensors, frozen: Container[str] = (), window: ChunkWindow | None = None
    ) -> Iterator[Announcement]:
        """Writes one version. Each announcement must have reached all receivers before the caller requests the second one
        after it.

        Args:
            version: Version of the weights.
            tensors: Names and tensors; each is dropped before the next part begins. Tensors in `frozen` that have been
                in the stream before may be left out.
            frozen: Names of tensors that are not trained. An in-place change of one is detected.
            window: Flow control; without it, parts are written without a wait.
        """
        pending: tuple[Announcement, Callable[[], None]] | None = None  # started, but not fully written
        try:
            for announcement, wait_written in self._announcements(version, tensors, frozen, window):
                if pending is not None:
                    (announced, wait_started), pending = pending, None
                    wait_started()
                    yield announced
                if wait_written is None:
                    yield announcement
                else:
                    pending = announcement, wait_written
            if pending is not None:
                (announced, wait_started), pending = pending, None
                wait_started()
                yield announced
        finally:
            if pending is not None:  # the version was aborted: this part is not announced
                pending[1]()
                if (chunk := pending[0].part) is not None and not chunk.retained:
                    for reader in range(self._readers):
                        self._pool.release(chunk.path, reader)

    def _announcements(
        self, version: int, tensors: NamedTensors, frozen: Container[str], window: ChunkWindow | None
    ) -> Iterator[tuple[Announcement, Callable[[], None] | None]]:
        """Yields each announcement with the function to wait for before sending it; None if no wait is needed."""
        self._settle()
        log, sent_frozen = (*self._frozen, *self._base, *self._changes), set(self._frozen_counts)
        sequence_number = 0
        frozen_bucket, trained_bucket = _Bucket(), _Bucket()
        undigested: list[
            tuple[str, torch.Tensor]
        ] = []  # not digested yet: in batches, since there are hundreds of small ones
        digests_by_name: dict[str, int] = {}

        @COST.proving()
        def prove() -> None:
            digests_by_name.update(digests(undigested, version))
            undigested.clear()

        def announce(bucket: _Bucket | None, last: bool) -> tuple[Announcement, Callable[[], None] | None]:
            nonlocal sequence_number
            chunk, wait_written = None, None
            prove()
            if bucket is not None:
                is_kept = bucket is frozen_bucket or self._delta == "elements"
                if window is not None:
                    window.wait()
                chunk, wait_written = self._write(
                    bucket, keep=is_kept, readers=self._readers, fixed=bucket is frozen_bucket
                )
                if window is not None and chunk.path:
                    window.wrote(chunk.path)
                if bucket is frozen_bucket:
                    self._frozen.append(chunk)
                elif self._delta == "elements":
                    (self._changes if log else self._base).append(chunk)
            receipt = Receipt(version, digests_by_name) if last else None
            announcement = Announcement(
                self._stream,
                version,
                sequence_number,
                self._serial,
                chunk,
                last,
                () if sequence_number else log,
                receipt,
            )
            sequence_number += 1
            return announcement, wait_written

        for name, tensor in tensors:
            is_frozen = self._delta != "off" and name in frozen and name not in self._moved
            if is_frozen and (count := _changes_in_place(tensor)) != self._frozen_counts.setdefault(name, count):
                self._moved.add(name)  # a moving average, for example
                is_frozen = False
            elif is_frozen and name in sent_frozen:
                continue
            update: torch.Tensor | Elements | None = self._gathered(tensor)
            assert isinstance(update, torch.Tensor)
            undigested.append((name, update))
            if self._delta == "elements" and not is_frozen:
                prove()  # the delta may be empty, so the digests must not wait for it
                update = self._shadow.changes(name, update)
            if update is None:
                continue
            bucket = frozen_bucket if is_frozen else trained_bucket
            if bucket.entries and bucket.nbytes + _size(update) > self._part_bytes:
                yield announce(bucket, last=False)
                bucket = _Bucket()
                frozen_bucket, trained_bucket = (bucket, trained_bucket) if is_frozen else (frozen_bucket, bucket)
            bucket.add(name, update)
        if frozen_bucket.entries and trained_bucket.entries:
            yield announce(frozen_bucket, last=False)
            frozen_bucket = _Bucket()
        yield announce(
            frozen_bucket if frozen_bucket.entries else trained_bucket if trained_bucket.entries else None, last=True
        )
        if sum(part.nbytes for part in self._changes) > sum(part.nbytes for part in self._base):
            self._compact()

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor in the form in which it is written: on its device, unless elements are compared."""
        if tensor.is_cpu:
            tensor = tensor.detach() if tensor.requires_grad else tensor
            return tensor if tensor.is_contiguous() else tensor.contiguous()
        if self._delta != "elements":
            self._carrier = self._carrier or Carrier.of(self._pool, tensor.device.type)
            return tensor.detach().contiguous()
        return tensor.detach().cpu().contiguous()

    def _write(
        self, bucket: _Bucket, *, keep: bool, readers: int, serial: int | None = None, fixed: bool = False
    ) -> tuple[WeightChunk, Callable[[], None] | None]:
        """Returns a part, and a function that waits until it is fully written; None if it is."""
        cargo = None if keep or self._roads is None or serial is not None else self._roads.carry(bucket.tensors)
        if cargo is not None:
            self._serial += 1
            path = cargo.path if isinstance(cargo, Crossing) else ""
            names = tuple(tensor_entry[0] for tensor_entry in bucket.entries)
            return WeightChunk(
                self._stream, self._serial, path, (0, 0), False, bucket.nbytes, cargo=(cargo, names)
            ), None
        table, wait_written = pickle.dumps(bucket.entries), None
        if self._carrier is not None:
            path, span, wait_written = self._carrier.begin(bucket.tensors, table, readers, keep=keep)
        else:
            path, spans = self._pool.write([*map(_memory, bucket.tensors), table], readers, keep=keep)
            span = spans[-1]
        if serial is None:
            self._serial += 1
        return WeightChunk(
            self._stream, self._serial if serial is None else serial, path, span, keep, bucket.nbytes, fixed
        ), wait_written

    def again(self, announcement: Announcement, tensors: Sequence[torch.Tensor]) -> Announcement:
        """Announces a part again from the data that was sent. It was in no segment, and some receivers did not get it."""
        lost_chunk, bucket = announcement.part, _Bucket()
        assert lost_chunk is not None and lost_chunk.cargo is not None
        for name, tensor in zip(lost_chunk.cargo[1], tensors, strict=True):
            bucket.add(name, self._gathered(tensor))
        chunk, wait_written = self._write(bucket, keep=False, readers=self._readers, serial=lost_chunk.serial)
        if wait_written is not None:
            wait_written()
        return replace(announcement, part=chunk)

    # -- the log ----------------------------------------------------------------------------------------------------

    def _compact(self) -> None:
        """Replaces the old copy of the weights and its changes by a new copy. Only receivers that join later read it:
        the present ones have, or are about to have, everything in it.
        """
        base: list[WeightChunk] = []
        bucket = _Bucket()

        def write() -> None:
            chunk, wait_written = self._write(bucket, keep=True, readers=0, serial=self._serial)
            if wait_written is not None:
                wait_written()
            base.append(chunk)

        for name, tensor in self._shadow.tensors():
            if bucket.entries and bucket.nbytes + _size(tensor) > self._part_bytes:
                write()
                bucket = _Bucket()
            bucket.add(name, tensor)
        write()
        self._dropping += [*self._base, *self._changes]
        self._base, self._changes = base, []

    def _settle(self) -> None:
        """Drops what compaction has replaced, once no announcement that names it is in transit: every receiver has read
        the last part of it or, if it was restarted, something newer.
        """
        if not self._dropping:
            return
        newer = [self._dropping[-1], *self._changes]
        if not any(all(states) for states in zip(*(self._pool.awaited(chunk.path) for chunk in newer), strict=True)):
            for chunk in self._dropping:
                self._pool.drop(chunk.path)
            self._dropping = []


def _changes_in_place(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _size(value: torch.Tensor | Elements) -> int:
    return value.index.nbytes + value.values.nbytes if isinstance(value, Elements) else value.nbytes
