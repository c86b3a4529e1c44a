"""The sender's side of an update: what changed is written once per host, in parts, and each part is announced.

A part is a shared-memory segment with a table of its contents. Parts that later versions build upon are kept. Together
they form a log, from which a receiver with no weights yet, or none that fit, takes all weights without asking anybody.

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
from rlhpc.weights.base import DELTAS, NamedTensors
from rlhpc.weights.delta import Elements, Shadow
from rlhpc.weights.transport_select import Cargo, Carries
from rlhpc.weights.verification import COST
from rlhpc.weights.version_digest import Receipt, digests

#: Where to and where from: flat, uint8, of one size.
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class HostCopies(Protocol):
    """Copies into host memory beside whatever else is done."""

    def begin(self, pairs: Pairs) -> Callable[[], None]:
        """Begins to copy; what it returns waits until all has been copied. Until then nobody changes the sources."""


class Carrier:
    """Writes parts from tensors that are not on the CPU.

    Args:
        pool: Of this process.
        copies: What copies.
    """

    def __init__(self, pool: SegmentPool, copies: HostCopies) -> None:
        self._pool, self._copies = pool, copies

    @classmethod
    def of(cls, pool: SegmentPool, device: str) -> Carrier:
        """For tensors of a kind of device."""
        return cls(pool, SideCopies(device))

    def begin(
        self, tensors: Sequence[torch.Tensor], table: bytes, readers: int, *, keep: bool
    ) -> tuple[str, tuple[int, int], Callable[[], None]]:
        """Begins to write a segment, as `SegmentPool.write` would.

        Args:
            tensors: Contiguous.
            table: What comes behind them.
            readers: How many will read it.
            keep: See `SegmentPool.write`.

        Returns:
            Path of the segment, (offset, size) of the table, and what waits until all is there.
        """
        spans = spans_of([*(tensor.nbytes for tensor in tensors), len(table)])
        segment = self._pool.reserve(sum(size + -size % ALIGN for _, size in spans), readers, keep=keep)
        memory = _locked(segment)
        start, size = spans[-1]
        segment.memory[start : start + size] = table
        flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
        places = [memory[start : start + size] for start, size in spans[:-1]]
        return segment.path, spans[-1], self._copies.begin(list(zip(places, flat, strict=True)))


def _locked(segment: ShmSegment) -> torch.Tensor:
    """A segment's memory, its pages locked for as long as the pool has it: it goes from part to part."""
    if segment.locked is None:
        segment.locked = locked(segment.memory)
    found: torch.Tensor = segment.locked
    return found


#: Parts that a reader who has begun need not have come for: one on its way, and one that is written meanwhile. With fewer, a
#: sender would wait for readers to come for what it has not announced yet.
PARTS = 2
_SHORTEST_S, _LONGEST_S = 0.0005, 0.02


class ChunkLocation(Protocol):
    """Where parts are."""

    def awaited(self, path: str) -> list[bool]:
        """Which readers of a part have not come yet; empty once none is to come."""


class ChunkWindow:
    """The parts of a version that somebody has yet to come for.

    Args:
        pool: Holds the parts.
        readers: Names of the readers, by number.
        check: Called while waiting; raises when the run has failed.
        there: Whether a reader is still the one that the version was announced to.
        deadline: Seconds after which a wait gives up.
        parts: How many parts may be there for a reader that has begun.
    """

    def __init__(
        self,
        pool: ChunkLocation,
        readers: Sequence[str],
        *,
        check: Callable[[], None] = lambda: None,
        there: Callable[[int], bool] = lambda reader: True,
        deadline: float = 1800.0,
        parts: int = PARTS,
    ) -> None:
        self._pool, self._readers, self._parts = pool, list(readers), parts
        self._check, self._there, self._deadline = check, there, deadline
        self._open: list[str] = []
        self._begun: set[int] = set()

    def wrote(self, path: str) -> None:
        """Counts a part that was written for all readers."""
        if path in self._open:  # all had come for what was there before
            self._open.remove(path)
            self._begun.update(range(len(self._readers)))
        self._open.append(path)

    def wait(self) -> None:
        """Returns when there is room for another part.

        Raises:
            DeadlineExceeded: There was none for too long; names those who did not come.
        """
        started, pause = time.monotonic(), _SHORTEST_S
        while late := self._late():
            self._check()
            gone = {reader for reader in late if not self._there(reader)}
            if gone:
                self._begun -= gone
                continue
            if time.monotonic() - started > self._deadline:
                names = ", ".join(self._readers[reader] for reader in sorted(late))
                raise DeadlineExceeded(f"waited {self._deadline:.0f} s for {names} to take in a part of the weights")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)

    def begun(self) -> bool:
        """Whether all have begun, and go on to the version's end."""
        self._late()
        return len(self._begun) == len(self._readers)

    def _late(self) -> set[int]:
        """Those who have begun and have yet to come for as many parts as may be there."""
        awaited = {path: self._pool.awaited(path) for path in self._open}
        self._open = [path for path in self._open if any(awaited[path])]
        for states in awaited.values():
            came = (reader for reader in range(len(self._readers)) if not (states and states[reader]))
            self._begun.update(came)
        counts = [sum(awaited[path][reader] for path in self._open) for reader in range(len(self._readers))]
        return {reader for reader in self._begun if counts[reader] >= self._parts}


#: Bytes of a part: large enough to make its fixed costs negligible, small enough for two of them to be no burden.
PART_BYTES = 256 << 20


@dataclass(frozen=True)
class WeightChunk:
    """One segment of weights.

    Attributes:
        stream: The stream it belongs to.
        serial: Number in the stream; a receiver that has taken in all parts up to a number needs those beyond it.
        path: Path of the segment.
        table: (offset, size) of the pickled table of `Entry`.
        kept: Others may want the part later, so every reader maps it privately.
        nbytes: Bytes of the tensors.
        fixed: Nobody ever changes it where it has landed: its tensors are not trained.
        cargo: Where its tensors are if they are in no segment (`roads`), and their names.
    """

    stream: str
    serial: int
    path: str
    table: tuple[int, int]
    kept: bool
    nbytes: int
    fixed: bool = False
    cargo: tuple[Cargo, tuple[str, ...]] | None = None

    @property
    def name(self) -> str:
        """A unique name."""
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
    """Announces a piece of one version; pieces come in order.

    Attributes:
        stream: The stream it belongs to; serials of two streams have nothing in common.
        version: Version of the weights.
        number: Number of the piece within the version, from 0.
        serial: Serial of the stream's newest part.
        part: The new part; None if there is nothing new.
        last: Whether this is the version's last piece.
        log: The kept parts from before this version, in order; in the first announcement only.
        receipt: What the version is; in the last announcement only.
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

    def add(self, name: str, what: torch.Tensor | Elements) -> None:
        sizes: tuple[int, ...]
        if isinstance(what, Elements):
            index, sizes = _name(what.index.dtype), (what.index.nbytes, what.values.nbytes)
            self.tensors += [what.index, what.values]
        else:
            index, sizes = "", (what.nbytes,)
            self.tensors.append(what)
        self.entries.append((name, tuple(what.shape), _name(what.dtype), sizes, index))
        self.nbytes += sum(sizes)


def _memory(tensor: torch.Tensor) -> Any:
    """A contiguous tensor's memory; ten times as fast as through views and numpy, and there are hundreds of tensors."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Publisher:
    """Writes versions for a fixed set of receivers.

    Args:
        pool: This process's pool.
        readers: Number of receivers.
        delta: One of `DELTAS`.
        part_bytes: Size of a part.
        carrier: Writes parts beside what is gathered next; by default where tensors are on an accelerator.
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
        """Begins a new stream: whatever the receivers hold, the next version contains all tensors."""
        for part in [*self._frozen, *self._base, *self._changes, *self._dropping]:
            self._pool.drop(part.path)
        self._stream, self._serial = uuid.uuid4().hex, -1
        self._frozen, self._base, self._changes, self._dropping = [], [], [], []
        #: Frozen tensors that were sent, with torch's count of in-place changes; and those that did change after all.
        self._known: dict[str, int] = {}
        self._moved: set[str] = set()
        self._shadow = Shadow()

    def publish(
        self, version: int, tensors: NamedTensors, frozen: Container[str] = (), window: ChunkWindow | None = None
    ) -> Iterator[Announcement]:
        """Writes one version; each announcement must have reached all receivers before the next but one is requested.

        Args:
            version: Version of the weights.
            tensors: Names and tensors; each is dropped before the next part begins. Tensors in `frozen` that have been
                in the stream before may be left out.
            frozen: Names of tensors that are not trained. If one is changed in place all the same, this is noticed.
            window: Says when there is room for a part; always, without one.
        """
        late: tuple[Announcement, Callable[[], None]] | None = None  # written, but not all there
        try:
            for announcement, landed in self._announcements(version, tensors, frozen, window):
                if late is not None:
                    (due, wait), late = late, None
                    wait()
                    yield due
                if landed is None:
                    yield announcement
                else:
                    late = announcement, landed
            if late is not None:
                (due, wait), late = late, None
                wait()
                yield due
        finally:
            if late is not None:  # the version broke off: nobody is told of this part
                late[1]()
                if (part := late[0].part) is not None and not part.kept:
                    for reader in range(self._readers):
                        self._pool.release(part.path, reader)

    def _announcements(
        self, version: int, tensors: NamedTensors, frozen: Container[str], window: ChunkWindow | None
    ) -> Iterator[tuple[Announcement, Callable[[], None] | None]]:
        """What to announce, and what to wait for before; None if nothing."""
        self._settle()
        log, sent = (*self._frozen, *self._base, *self._changes), set(self._known)
        number = 0
        fixed, moving = _Bucket(), _Bucket()
        given: list[tuple[str, torch.Tensor]] = []  # not proven yet: together, for there are hundreds of small ones
        proven: dict[str, int] = {}

        @COST.proving()
        def prove() -> None:
            proven.update(digests(given, version))
            given.clear()

        def announce(bucket: _Bucket | None, last: bool) -> tuple[Announcement, Callable[[], None] | None]:
            nonlocal number
            part, landed = None, None
            prove()
            if bucket is not None:
                kept = bucket is fixed or self._delta == "elements"
                if window is not None:
                    window.wait()
                part, landed = self._write(bucket, kept=kept, readers=self._readers, fixed=bucket is fixed)
                if window is not None and part.path:
                    window.wrote(part.path)
                if bucket is fixed:
                    self._frozen.append(part)
                elif self._delta == "elements":
                    (self._changes if log else self._base).append(part)
            receipt = Receipt(version, proven) if last else None
            made = Announcement(self._stream, version, number, self._serial, part, last, () if number else log, receipt)
            number += 1
            return made, landed

        for name, tensor in tensors:
            still = self._delta != "off" and name in frozen and name not in self._moved
            if still and (count := _changes_in_place(tensor)) != self._known.setdefault(name, count):
                self._moved.add(name)  # a moving average, for example
                still = False
            elif still and name in sent:
                continue
            what: torch.Tensor | Elements | None = self._gathered(tensor)
            assert isinstance(what, torch.Tensor)
            given.append((name, what))
            if self._delta == "elements" and not still:
                prove()  # it may leave nothing to be sent, and is not kept for that
                what = self._shadow.changes(name, what)
            if what is None:
                continue
            bucket = fixed if still else moving
            if bucket.entries and bucket.nbytes + _size(what) > self._part_bytes:
                yield announce(bucket, last=False)
                bucket = _Bucket()
                fixed, moving = (bucket, moving) if still else (fixed, bucket)
            bucket.add(name, what)
        if fixed.entries and moving.entries:
            yield announce(fixed, last=False)
            fixed = _Bucket()
        yield announce(fixed if fixed.entries else moving if moving.entries else None, last=True)
        if sum(part.nbytes for part in self._changes) > sum(part.nbytes for part in self._base):
            self._compact()

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """As it is written: from where it is, unless it is looked at element by element."""
        if tensor.is_cpu:
            tensor = tensor.detach() if tensor.requires_grad else tensor
            return tensor if tensor.is_contiguous() else tensor.contiguous()
        if self._delta != "elements":
            self._carrier = self._carrier or Carrier.of(self._pool, tensor.device.type)
            return tensor.detach().contiguous()
        return tensor.detach().cpu().contiguous()

    def _write(
        self, bucket: _Bucket, *, kept: bool, readers: int, serial: int | None = None, fixed: bool = False
    ) -> tuple[WeightChunk, Callable[[], None] | None]:
        """A part, and what waits until it is all there; None if it is."""
        cargo = None if kept or self._roads is None or serial is not None else self._roads.carry(bucket.tensors)
        if cargo is not None:
            self._serial += 1
            path = cargo.path if isinstance(cargo, Crossing) else ""
            names = tuple(entry[0] for entry in bucket.entries)
            return WeightChunk(
                self._stream, self._serial, path, (0, 0), False, bucket.nbytes, cargo=(cargo, names)
            ), None
        table, landed = pickle.dumps(bucket.entries), None
        if self._carrier is not None:
            path, span, landed = self._carrier.begin(bucket.tensors, table, readers, keep=kept)
        else:
            path, spans = self._pool.write([*map(_memory, bucket.tensors), table], readers, keep=kept)
            span = spans[-1]
        if serial is None:
            self._serial += 1
        return WeightChunk(
            self._stream, self._serial if serial is None else serial, path, span, kept, bucket.nbytes, fixed
        ), landed

    def again(self, announcement: Announcement, tensors: Sequence[torch.Tensor]) -> Announcement:
        """Announces a part again that was in no segment, from what was sent: not all have got it."""
        old, bucket = announcement.part, _Bucket()
        assert old is not None and old.cargo is not None
        for name, tensor in zip(old.cargo[1], tensors, strict=True):
            bucket.add(name, self._gathered(tensor))
        part, landed = self._write(bucket, kept=False, readers=self._readers, serial=old.serial)
        if landed is not None:
            landed()
        return replace(announcement, part=part)

    # -- the log ----------------------------------------------------------------------------------------------------

    def _compact(self) -> None:
        """Replaces the old copy of the weights and its changes by a new copy. Only receivers that come later read it:
        the present ones have, or are about to have, everything in it."""
        base: list[WeightChunk] = []
        bucket = _Bucket()

        def write() -> None:
            part, landed = self._write(bucket, kept=True, readers=0, serial=self._serial)
            if landed is not None:
                landed()
            base.append(part)

        for name, tensor in self._shadow.tensors():
            if bucket.entries and bucket.nbytes + _size(tensor) > self._part_bytes:
                write()
                bucket = _Bucket()
            bucket.add(name, tensor)
        write()
        self._dropping += [*self._base, *self._changes]
        self._base, self._changes = base, []

    def _settle(self) -> None:
        """Drops what compaction has replaced, once no announcement that names it is under way: every receiver has taken
        the last part of it or, if it was restarted, something newer."""
        if not self._dropping:
            return
        newer = [self._dropping[-1], *self._changes]
        if not any(all(states) for states in zip(*(self._pool.awaited(part.path) for part in newer), strict=True)):
            for part in self._dropping:
                self._pool.drop(part.path)
            self._dropping = []


def _changes_in_place(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _size(what: torch.Tensor | Elements) -> int:
    return what.index.nbytes + what.values.nbytes if isinstance(what, Elements) else what.nbytes
