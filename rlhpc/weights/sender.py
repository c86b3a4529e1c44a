"""Sender of weight updates: writes the changes once per host, in chunks, and announces each chunk.

A chunk is a shared-memory segment with a table of its contents. Chunks that later versions build upon are retained. Together
they form a log, from which a receiver without valid weights reads all weights without a request to another rank. The
delta mode (`rollout.weight_delta`) determines what a version contains:

    off         every version contains all tensors; nothing is retained
    frozen      frozen tensors are written once and retained; every version contains all others
    elements    the first version contains all tensors and is retained; later ones contain changed tensors or elements

When the deltas in the log are larger than the weights, a new copy of the weights replaces both (compaction).
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
import time
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from rlhpc.runtime.comm.device_memory import DeviceMessage, dtype_name
from rlhpc.runtime.comm.shared_memory import ALIGN, HEADER, SegmentPool, ShmSegment, spans_of
from rlhpc.runtime.devices import SideCopies, locked_tensor
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.runtime.trace_recorder import IdleSpan, span
from rlhpc.weights.base import NamedTensors, VersionDigests
from rlhpc.weights.delta import Elements, Shadow
from rlhpc.weights.device_sharing import CHUNK_BYTES, device_chunk_bytes
from rlhpc.weights.transport_select import DevicePayload, TransportSender
from rlhpc.weights.verification import COST, digests


class DeviceChunkWriter:
    """Writer of chunks from tensors on an accelerator.

    Args:
        pool: Segment pool of this process.
        copies: Asynchronous copies to host memory. The tensors must not change until the copies are complete.
    """

    def __init__(self, pool: SegmentPool, copies: SideCopies) -> None:
        self._pool, self._copies = pool, copies

    def begin(
        self, tensors: Sequence[torch.Tensor], table: bytes, num_readers: int, *, is_retained: bool
    ) -> tuple[str, tuple[int, int], Callable[[], None]]:
        """Starts to write a segment with the contents that `SegmentPool.write` would write.

        Args:
            tensors: Contiguous tensors.
            table: Bytes that follow the tensors.
            num_readers: Number of readers.
            is_retained: See `keep` of `SegmentPool.write`.

        Returns:
            Path of the segment, (offset, size) of the table, and a function that waits until the segment is written.
        """
        spans = spans_of([*(tensor.nbytes for tensor in tensors), len(table)])
        segment = self._pool.reserve(
            sum(span_bytes + -span_bytes % ALIGN for _, span_bytes in spans), num_readers, keep=is_retained
        )
        memory = _lock_pages(segment)
        table_start, table_bytes = spans[-1]
        segment.memory[table_start : table_start + table_bytes] = table
        flat_tensors = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
        destinations = [memory[span_start : span_start + span_bytes] for span_start, span_bytes in spans[:-1]]
        return segment.path, spans[-1], self._copies.begin(list(zip(destinations, flat_tensors, strict=True)))


def _lock_pages(segment: ShmSegment) -> torch.Tensor:
    """Page-locks a segment and returns its memory. It stays locked while it is in the pool, because segments are reused."""
    if segment.locked is None:
        segment.locked = locked_tensor(segment.memory)
    memory: torch.Tensor = segment.locked
    return memory


#: Maximum number of unread chunks of a reader that has started: one in transit, and one being written. With fewer, the sender
#: would wait for readers of a chunk that it has not announced yet.
MAX_UNREAD_CHUNKS = 2
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.0005, 0.02
#: Seconds between two checks whether lagging readers are still present. Each check reads two files of each of them.
_PRESENCE_S = 1.0


class ChunkWindow:
    """Flow control of a version's chunks: bounds the number of unread chunks.

    Args:
        find_awaited: Returns, for the chunk at a path, whether each reader still has to read it; empty once all have read it.
        readers: Names of the readers, by number.
        check: Function called while waiting; raises if the run has failed.
        is_present: Returns whether a reader is still the process that the version was announced to.
        deadline: Timeout of a wait, in seconds.
        max_unread: Maximum number of unread chunks of a reader that has started.
    """

    def __init__(
        self,
        find_awaited: Callable[[str], list[bool]],
        readers: Sequence[str],
        *,
        check: Callable[[], None] = lambda: None,
        is_present: Callable[[int], bool] = lambda reader: True,
        deadline: float = 1800.0,
        max_unread: int = MAX_UNREAD_CHUNKS,
    ) -> None:
        self._find_awaited, self._readers, self._max_unread = find_awaited, list(readers), max_unread
        self._check, self._is_present, self._deadline = check, is_present, deadline
        self._unread_paths: list[str] = []
        self._started_readers: set[int] = set()

    def start_all(self) -> None:
        """Treats all readers as started, so that the bound applies to them from the first chunk on."""
        self._started_readers.update(range(len(self._readers)))

    def record(self, path: str) -> None:
        """Counts a newly written chunk as unread by all readers."""
        if path in self._unread_paths:  # all readers have read the previous chunk of this path
            self._unread_paths.remove(path)
            self._started_readers.update(range(len(self._readers)))
        self._unread_paths.append(path)

    def wait(self) -> None:
        """Waits until another chunk may be written.

        Raises:
            DeadlineExceeded: The wait took too long; the message names the readers that did not read.
        """
        start_time, pause_s, idle_span = time.monotonic(), _MIN_PAUSE_S, IdleSpan("readers of the weights")
        next_presence_check_at = start_time + _PRESENCE_S
        while lagging_readers := self._lagging_readers():
            self._check()
            if time.monotonic() >= next_presence_check_at:
                next_presence_check_at = time.monotonic() + _PRESENCE_S
                replaced_readers = {reader for reader in lagging_readers if not self._is_present(reader)}
                if replaced_readers:
                    self._started_readers -= replaced_readers
                    continue
            if time.monotonic() - start_time > self._deadline:
                reader_names = ", ".join(self._readers[reader] for reader in sorted(lagging_readers))
                raise DeadlineExceeded(
                    f"waited {self._deadline:.0f} s for {reader_names} to take in a part of the weights"
                )
            idle_span.begin()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        idle_span.end()

    def all_started(self) -> bool:
        """Returns whether all readers have started to read the version."""
        self._lagging_readers()
        return len(self._started_readers) == len(self._readers)

    def _lagging_readers(self) -> set[int]:
        """Returns the numbers of the readers that have started and have the maximum number of unread chunks."""
        unread_by_path = {path: self._find_awaited(path) for path in self._unread_paths}
        self._unread_paths = [path for path in self._unread_paths if any(unread_by_path[path])]
        for is_unread in unread_by_path.values():
            started_readers = (reader for reader in range(len(self._readers)) if not (is_unread and is_unread[reader]))
            self._started_readers.update(started_readers)
        num_unread_by_reader = [
            sum(unread_by_path[path][reader] for path in self._unread_paths) for reader in range(len(self._readers))
        ]
        return {reader for reader in self._started_readers if num_unread_by_reader[reader] >= self._max_unread}


#: Allowed values of `rollout.weight_delta`.
_DELTAS = ("off", "frozen", "elements")


class TensorPiece(NamedTuple):
    """Position of a chunk's bytes in a tensor that is larger than a chunk.

    Attributes:
        name: Name of the tensor.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor, without "torch.".
        start: Offset of the chunk's bytes.
        nbytes: Bytes of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class WeightChunk:
    """Chunk of a weight update: a segment, or data that another transport carries.

    Attributes:
        stream: Identifier of the stream that the chunk belongs to.
        serial: Number in the stream; a receiver that has read all chunks up to a number needs only those after it.
        path: Path of the segment.
        table: (offset, size) of the pickled table of `Entry`.
        retained: Whether other receivers may need the chunk later, so that every reader maps it privately.
        nbytes: Bytes of the tensors.
        fixed: Whether the chunk contains only frozen tensors, which never change after a receiver has loaded them.
        payload: Location of the tensors and their names, if they are in no segment (`transport_select`).
        piece: If set, the chunk contains a piece of one tensor, as bytes. The pieces of a tensor are sent in order.
    """

    stream: str
    serial: int
    path: str
    table: tuple[int, int]
    retained: bool
    nbytes: int
    fixed: bool = False
    payload: tuple[DevicePayload, tuple[str, ...]] | None = None
    piece: TensorPiece | None = None

    @property
    def name(self) -> str:
        """Unique name of the chunk."""
        return f"{self.stream}-{self.serial}"

    @property
    def size(self) -> int:
        """Bytes of the segment's data, which ends with the table."""
        return sum(self.table) - HEADER


#: Table entry of a tensor: name, shape, dtype without "torch.", sizes in bytes of its buffers (the tensor, or index and
#: values of changed elements), and the index's dtype ("" for a full tensor).
Entry = tuple[str, tuple[int, ...], str, tuple[int, ...], str]


@dataclass(frozen=True)
class Announcement:
    """Announcement of a chunk of one version; announcements are sent in order.

    Attributes:
        stream: Identifier of the stream; serials of different streams are unrelated.
        version: Version of the weights.
        number: Number of the announcement within the version, from 0.
        serial: Serial of the stream's newest chunk.
        chunk: The new chunk; None if there is no new chunk.
        last: Whether this is the version's last announcement.
        log: Retained chunks of earlier versions, in order; in the first announcement only.
        version_digests: Digests of the version; in the last announcement only.
        elapsed_s: Seconds from the version's first byte until the announcement was sent.
    """

    stream: str
    version: int
    number: int
    serial: int
    chunk: WeightChunk | None
    last: bool
    log: tuple[WeightChunk, ...] = ()
    version_digests: VersionDigests | None = None
    elapsed_s: float = 0.0


class _Bucket:
    """Tensors to be written to one chunk."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.nbytes = 0
        self.padded_bytes = 0
        self.tensors: list[torch.Tensor] = []
        self.piece: TensorPiece | None = None

    def add(self, name: str, value: torch.Tensor | Elements) -> None:
        spec_sizes: tuple[int, ...]
        if isinstance(value, Elements):
            index_dtype, spec_sizes = dtype_name(value.index.dtype), (value.index.nbytes, value.values.nbytes)
            self.tensors += [value.index, value.values]
        else:
            index_dtype, spec_sizes = "", (value.nbytes,)
            self.tensors.append(value)
        self.entries.append((name, tuple(value.shape), dtype_name(value.dtype), spec_sizes, index_dtype))
        self.nbytes += sum(spec_sizes)
        self.padded_bytes += _padded_bytes(value)

    @classmethod
    def of_piece(cls, tensor_piece: TensorPiece, piece_values: torch.Tensor) -> _Bucket:
        """Builds a bucket with a piece of a tensor.

        Args:
            tensor_piece: Position of the piece.
            piece_values: Bytes of the piece.
        """
        bucket = cls()
        bucket.add(tensor_piece.name, piece_values)
        bucket.piece = tensor_piece
        return bucket


def _as_ctypes(tensor: torch.Tensor) -> Any:
    """Returns a contiguous tensor's memory as a ctypes array; for hundreds of tensors this is ten times as fast as numpy."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""


class Publisher:
    """Writer of versions for a fixed set of receivers.

    Args:
        pool: Segment pool of this process.
        num_readers: Number of receivers.
        delta: Delta mode, `rollout.weight_delta`.
        chunk_bytes: Size of a chunk in bytes.
        device_writer: Writes chunks while the next tensors are gathered; created by default for tensors on an accelerator.
        transport: Transport that can stage chunks on the accelerator if they are not retained.

    Raises:
        ValueError: `delta` has an unknown value.
    """

    def __init__(
        self,
        pool: SegmentPool,
        num_readers: int,
        delta: str = "frozen",
        chunk_bytes: int = CHUNK_BYTES,
        device_writer: DeviceChunkWriter | None = None,
        transport: TransportSender | None = None,
    ) -> None:
        if delta not in _DELTAS:
            raise ValueError(f"delta is {delta!r}; allowed: {', '.join(_DELTAS)}")
        self._pool, self._readers, self._delta, self._chunk_bytes = pool, num_readers, delta, chunk_bytes
        self._device_writer, self._transport = device_writer, transport
        self._first_write_s: float | None = None
        self._frozen_chunks: list[WeightChunk] = []
        self._base: list[WeightChunk] = []
        self._changes: list[WeightChunk] = []
        self._replaced_chunks: list[WeightChunk] = []
        self.forget()

    def forget(self) -> None:
        """Starts a new stream, so that the next version contains all tensors."""
        for chunk in [*self._frozen_chunks, *self._base, *self._changes, *self._replaced_chunks]:
            self._pool.drop(chunk.path)
        self._stream, self._serial = uuid.uuid4().hex, -1
        self._frozen_chunks, self._base, self._changes, self._replaced_chunks = [], [], [], []
        #: torch's count of in-place changes of each frozen tensor that was sent, and the frozen tensors that have changed.
        self._frozen_counts: dict[str, int] = {}
        self._changed_frozen: set[str] = set()
        self._shadow = Shadow()

    def publish(
        self, version: int, tensors: NamedTensors, frozen_names: Container[str] = (), window: ChunkWindow | None = None
    ) -> Iterator[Announcement]:
        """Writes one version and yields its announcements. When the caller requests announcement n, all receivers must have
        received announcement n − 2.

        Args:
            version: Version of the weights.
            tensors: Names and tensors; each tensor is released before the next chunk begins. Tensors in `frozen_names`
                that the stream already contains may be omitted.
            frozen_names: Names of tensors that are not trained. In-place changes of these tensors are detected.
            window: Flow control; without it, writing never waits for readers.
        """
        self._first_write_s = None
        pending_chunk: tuple[Announcement, Callable[[], None]] | None = None  # chunk whose writing has started
        try:
            announcements = self._iter_announcements(version, tensors, frozen_names, window)
            for announcement, wait_written in itertools.chain(announcements, [(None, None)]):
                if pending_chunk is not None:
                    (current_announcement, wait_started), pending_chunk = pending_chunk, None
                    wait_started()
                    yield current_announcement
                if announcement is not None and wait_written is not None:
                    pending_chunk = announcement, wait_written
                elif announcement is not None:
                    yield announcement
        finally:
            if pending_chunk is not None:  # the version was aborted: this chunk is not announced
                pending_chunk[1]()
                if (chunk := pending_chunk[0].chunk) is not None and not chunk.retained:
                    for reader in range(self._readers):
                        self._pool.release(chunk.path, reader)

    def _iter_announcements(
        self, version: int, tensors: NamedTensors, frozen_names: Container[str], window: ChunkWindow | None
    ) -> Iterator[tuple[Announcement, Callable[[], None] | None]]:
        """Yields each announcement and a function that waits until its chunk is written; None if it is already written."""
        self._drop_replaced_chunks()
        log, sent_frozen = (*self._frozen_chunks, *self._base, *self._changes), set(self._frozen_counts)
        sequence_number = 0
        buckets = {is_frozen: _Bucket() for is_frozen in (True, False)}
        budget = 0 if self._transport is None or self._delta == "elements" else self._transport.device_budget
        max_device_bytes = device_chunk_bytes(budget, self._chunk_bytes) if budget else 0
        max_bytes = max_device_bytes or self._chunk_bytes
        # Digests are computed in batches, since there are hundreds of small tensors.
        undigested_tensors: list[tuple[str, torch.Tensor]] = []
        digests_by_name: dict[str, int] = {}

        @COST.measure()
        def compute_digests() -> None:
            digests_by_name.update(digests(undigested_tensors, version))
            undigested_tensors.clear()

        def announce(is_frozen: bool, is_last: bool) -> tuple[Announcement, Callable[[], None] | None]:
            """Writes a bucket's tensors, if any, to a chunk, starts a new bucket, and returns the announcement."""
            nonlocal sequence_number
            chunk, wait_written = None, None
            compute_digests()
            bucket, buckets[is_frozen] = buckets[is_frozen], _Bucket()
            if bucket.entries:
                if window is not None:
                    window.wait()
                chunk, wait_written = self._write_bucket(
                    bucket,
                    is_retained=is_frozen or self._delta == "elements",
                    num_readers=self._readers,
                    is_fixed=is_frozen,
                )
                if window is not None and chunk.path:
                    window.record(chunk.path)
                if is_frozen:
                    self._frozen_chunks.append(chunk)
                elif self._delta == "elements":
                    (self._changes if log else self._base).append(chunk)
            version_digests = VersionDigests(version, digests_by_name) if is_last else None
            announcement = Announcement(
                self._stream,
                version,
                sequence_number,
                self._serial,
                chunk,
                is_last,
                () if sequence_number else log,
                version_digests,
            )
            sequence_number += 1
            return announcement, wait_written

        for name, tensor in tensors:
            is_frozen = self._delta != "off" and name in frozen_names and name not in self._changed_frozen
            if is_frozen and (num_changes := _count_in_place_changes(tensor)) != self._frozen_counts.setdefault(
                name, num_changes
            ):
                self._changed_frozen.add(name)  # for example, a moving average
                is_frozen = False
            elif is_frozen and name in sent_frozen:
                continue
            update: torch.Tensor | Elements | None = self._prepare(tensor)
            assert isinstance(update, torch.Tensor)
            undigested_tensors.append((name, update))
            if self._delta == "elements" and not is_frozen:
                compute_digests()  # `changes` may return None, but the digest is needed in any case
                update = self._shadow.changes(name, update)
            if update is None:
                continue
            if buckets[is_frozen].entries and buckets[is_frozen].padded_bytes + _padded_bytes(update) > max_bytes:
                yield announce(is_frozen, is_last=False)
            if not max_device_bytes or is_frozen or isinstance(update, Elements) or update.nbytes <= max_bytes:
                buckets[is_frozen].add(name, update)
                continue
            for tensor_piece, piece_values in _pieces_of(name, update, max_bytes):
                buckets[False] = _Bucket.of_piece(tensor_piece, piece_values)
                yield announce(False, is_last=False)
        if buckets[True].entries and buckets[False].entries:
            yield announce(True, is_last=False)
        yield announce(bool(buckets[True].entries), is_last=True)
        if sum(chunk.nbytes for chunk in self._changes) > sum(chunk.nbytes for chunk in self._base):
            self._compact()

    def _prepare(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor detached and contiguous; copies it to the CPU if elements are compared there."""
        if tensor.is_cpu:
            tensor = tensor.detach() if tensor.requires_grad else tensor
            return tensor if tensor.is_contiguous() else tensor.contiguous()
        if self._delta != "elements":
            self._device_writer = self._device_writer or DeviceChunkWriter(self._pool, SideCopies(tensor.device.type))
            return tensor.detach().contiguous()
        return tensor.detach().cpu().contiguous()

    def _write_bucket(
        self, bucket: _Bucket, *, is_retained: bool, num_readers: int, serial: int | None = None, is_fixed: bool = False
    ) -> tuple[WeightChunk, Callable[[], None] | None]:
        """Writes a bucket. Returns its chunk and a function that waits until it is written; None if it is already written."""
        if self._first_write_s is None:
            self._first_write_s = time.monotonic()
        payload = (
            None
            if is_retained or self._transport is None or serial is not None
            else self._transport.stage(bucket.tensors)
        )
        if payload is not None:
            self._serial += 1
            path = payload.path if isinstance(payload, DeviceMessage) else ""
            tensor_names = tuple(tensor_entry[0] for tensor_entry in bucket.entries)
            return WeightChunk(
                self._stream,
                self._serial,
                path,
                (0, 0),
                False,
                bucket.nbytes,
                payload=(payload, tensor_names),
                piece=bucket.piece,
            ), None
        table, wait_written = pickle.dumps(bucket.entries), None
        with span("chunk", "weights", bytes=bucket.nbytes):
            if self._device_writer is not None:
                path, table_span, wait_written = self._device_writer.begin(
                    bucket.tensors, table, num_readers, is_retained=is_retained
                )
            else:
                path, spans = self._pool.write([*map(_as_ctypes, bucket.tensors), table], num_readers, keep=is_retained)
                table_span = spans[-1]
        if serial is None:
            self._serial += 1
        return WeightChunk(
            self._stream, self._serial if serial is None else serial, path, table_span, is_retained, bucket.nbytes, is_fixed,
            piece=bucket.piece,
        ), wait_written  # fmt: skip

    def elapsed_s(self) -> float:
        """Returns the seconds since the first byte of the current version was written."""
        return 0.0 if self._first_write_s is None else time.monotonic() - self._first_write_s

    def republish(self, announcement: Announcement, tensors: Sequence[torch.Tensor]) -> Announcement:
        """Writes a chunk that some receivers did not get to a segment, and returns its new announcement.

        Args:
            announcement: Announcement of the lost chunk, which was in no segment.
            tensors: Tensors of the chunk, as they were sent.
        """
        lost_chunk, bucket = announcement.chunk, _Bucket()
        assert lost_chunk is not None and lost_chunk.payload is not None
        for name, tensor in zip(lost_chunk.payload[1], tensors, strict=True):
            bucket.add(name, self._prepare(tensor))
        chunk, wait_written = self._write_bucket(
            bucket, is_retained=False, num_readers=self._readers, serial=lost_chunk.serial
        )
        if wait_written is not None:
            wait_written()
        return replace(announcement, chunk=chunk)

    # -- the log ----------------------------------------------------------------------------------------------------

    def _compact(self) -> None:
        """Replaces the old copy of the weights and its deltas by a new copy. Only receivers that join later read it; current
        receivers already have its contents or are about to receive them.
        """
        base_chunks: list[WeightChunk] = []
        bucket = _Bucket()

        def write() -> None:
            chunk, wait_written = self._write_bucket(bucket, is_retained=True, num_readers=0, serial=self._serial)
            if wait_written is not None:
                wait_written()
            base_chunks.append(chunk)

        for name, tensor in self._shadow.tensors():
            if bucket.entries and bucket.padded_bytes + _padded_bytes(tensor) > self._chunk_bytes:
                write()
                bucket = _Bucket()
            bucket.add(name, tensor)
        write()
        self._replaced_chunks += [*self._base, *self._changes]
        self._base, self._changes = base_chunks, []

    def _drop_replaced_chunks(self) -> None:
        """Drops the chunks that compaction replaced, once no announcement that lists them can be in transit: every receiver
        has read the last of them or, if it was restarted, a newer chunk.
        """
        if not self._replaced_chunks:
            return
        newer_chunks = [self._replaced_chunks[-1], *self._changes]
        if not any(
            all(reader_states)
            for reader_states in zip(
                *(self._pool.list_pending_readers(chunk.path) for chunk in newer_chunks), strict=True
            )
        ):
            for chunk in self._replaced_chunks:
                self._pool.drop(chunk.path)
            self._replaced_chunks = []


def _count_in_place_changes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _pieces_of(name: str, tensor: torch.Tensor, max_bytes: int) -> Iterator[tuple[TensorPiece, torch.Tensor]]:
    """Yields the bytes of a contiguous tensor in pieces of at most `max_bytes`."""
    flat_bytes, shape, dtype = tensor.reshape(-1).view(torch.uint8), tuple(tensor.shape), dtype_name(tensor.dtype)
    for piece_start in range(0, tensor.nbytes, max_bytes):
        yield (
            TensorPiece(name, shape, dtype, piece_start, tensor.nbytes),
            flat_bytes[piece_start : piece_start + max_bytes],
        )


def _padded_bytes(tensor_update: torch.Tensor | Elements) -> int:
    """Returns the bytes of a tensor, or of changed elements, with the padding of a chunk."""
    buffers = (tensor_update.index, tensor_update.values) if isinstance(tensor_update, Elements) else (tensor_update,)
    return sum(buffer.nbytes + -buffer.nbytes % ALIGN for buffer in buffers)
