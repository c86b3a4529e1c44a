"""Receiver of weight updates: opens the chunks that it does not have yet and yields their tensors."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from rlhpc.runtime.comm.shared_memory import spans_of
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.trace_recorder import span
from rlhpc.weights.base import NamedTensors, NamedUpdates, Transfer, Update, VersionDigests, WeightSync
from rlhpc.weights.delta import Elements, copy_update
from rlhpc.weights.sender import Announcement, Entry, TensorPiece, WeightChunk
from rlhpc.weights.transfer_metrics import GIGABYTES, RATE, SECONDS, SHARE
from rlhpc.weights.verification import UpdateVerification

#: `(chunk, is_late) -> memory of its segment`, which lives as long as a view of it, or the tensors of its payload. The memory
#: of a retained chunk is writable. `is_late`: the chunk was announced with an earlier version.
OpenChunk = Callable[[WeightChunk, bool], Any]
#: Skips a chunk of an aborted version, or one that was received before.
SkipChunk = Callable[[WeightChunk], None]
#: Announcement and the memory of its chunk.
ReceivedChunk = tuple[Announcement, Any]


class Subscriber:
    """State of one receiver: its position in a stream and the tensors that it holds.

    Args:
        complete_updates: Make every update complete, with tensors only, for receivers that load all weights at once.
            Tensors that did not change then stay mapped, and changes are made in the mapped memory.
    """

    def __init__(self, complete_updates: bool = False) -> None:
        self._complete_updates = complete_updates
        self._retained_tensors: dict[str, torch.Tensor] = {}
        self._version_digests: VersionDigests | None = None
        self.forget()

    def forget(self) -> None:
        """Marks the receiver's tensors as belonging to no version, so that the next update is complete."""
        self._stream, self._serial = "", -1
        self._retained_tensors.clear()

    def receive(
        self,
        next_announcement: Callable[[], Announcement],
        open_chunk: OpenChunk,
        prefetch: Callable[[Iterator[ReceivedChunk]], Iterator[ReceivedChunk]] = lambda chunks: chunks,
        skip: SkipChunk | None = None,
    ) -> Update:
        """Waits for the next version, and returns it as an update whose tensors are received while they are iterated.

        Args:
            next_announcement: Waits for the next announcement and returns it.
            open_chunk: Opens a chunk.
            prefetch: Prefetches chunks while an earlier one is in use.
            skip: Skips a chunk; by default the chunk is opened and released.
        """
        skip = skip or (lambda chunk: open_chunk(chunk, False))
        announcement = next_announcement()
        while announcement.number:  # the remainder of a version that this receiver did not iterate to the end
            if announcement.chunk is not None:
                skip(announcement.chunk)
            announcement = next_announcement()
        known_serial = self._serial if announcement.stream == self._stream else -1
        if known_serial < 0:
            self.forget()
        is_complete = known_serial < 0 or self._complete_updates
        self._version_digests = None
        chunks = _iter_chunks(announcement, next_announcement, open_chunk, skip)
        chunks = chunks if announcement.last else prefetch(chunks)
        return Update(
            announcement.version,
            is_complete,
            self._iter_tensors(announcement, known_serial, chunks, open_chunk),
            lambda: self._version_digests,
        )

    def _iter_tensors(
        self,
        first_announcement: Announcement,
        known_serial: int,
        chunks: Iterator[ReceivedChunk],
        open_chunk: OpenChunk,
    ) -> NamedUpdates:
        assembles = self._complete_updates or known_serial < 0
        retained_tensors, self._retained_tensors = self._retained_tensors, {}
        self.forget()  # until the complete version has been received
        for chunk in first_announcement.log:
            if chunk.serial > known_serial:
                yield from _iter_entries(chunk, open_chunk(chunk, True), retained_tensors if assembles else None)
        announcement = first_announcement
        tensor_pieces = _TensorPieces()
        for announcement, memory in chunks:
            if announcement.chunk is not None:
                chunk_entries = _iter_entries(announcement.chunk, memory, retained_tensors if assembles else None)
                yield from (
                    chunk_entries
                    if announcement.chunk.piece is None
                    else tensor_pieces.join(announcement.chunk.piece, chunk_entries)
                )
            del memory  # before waiting for the next
        self._version_digests = announcement.version_digests
        if assembles:
            yield from retained_tensors.items()
        self._retained_tensors = retained_tensors if self._complete_updates else {}
        self._stream, self._serial = first_announcement.stream, announcement.serial


def _iter_chunks(
    first_announcement: Announcement,
    next_announcement: Callable[[], Announcement],
    open_chunk: OpenChunk,
    skip: SkipChunk,
) -> Iterator[ReceivedChunk]:
    """Yields the chunks of a version, and opens each one when it is announced."""
    announcement = first_announcement
    while True:
        yield announcement, None if announcement.chunk is None else open_chunk(announcement.chunk, False)
        if announcement.last:
            return
        last_announcement, announcement = announcement, next_announcement()
        while announcement.chunk is not None and (announcement.stream, announcement.version, announcement.number) == (
            last_announcement.stream,
            last_announcement.version,
            last_announcement.number,
        ):  # repeated for receivers that missed it
            skip(announcement.chunk)
            announcement = next_announcement()
        if (announcement.stream, announcement.version, announcement.number) != (
            last_announcement.stream,
            last_announcement.version,
            last_announcement.number + 1,
        ):
            raise RlhpcError(
                f"weights of version {last_announcement.version} were followed by a chunk of {announcement.version}"
            )


class _TensorPieces:
    """Tensor that is assembled from the pieces of consecutive chunks."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def join(self, piece: TensorPiece, entries: NamedUpdates) -> NamedUpdates:
        """Adds a piece, whose bytes are the only entry of its chunk; yields the tensor after its last piece."""
        ((name, piece_values),) = entries
        assert isinstance(piece_values, torch.Tensor)
        end_byte = piece.start + piece_values.nbytes
        with torch.inference_mode(False):
            if piece.start == 0:
                self._buffer = torch.empty(piece.nbytes, dtype=torch.uint8, device=piece_values.device)
            assert self._buffer is not None, "the pieces of a tensor are sent in order"
            self._buffer[piece.start : end_byte].copy_(piece_values)
        del piece_values  # release its memory while the tensor is in use
        if end_byte == piece.nbytes:
            flat_tensor, self._buffer = self._buffer, None
            yield name, flat_tensor.view(getattr(torch, piece.dtype)).reshape(piece.shape)


def _iter_entries(chunk: WeightChunk, memory: Any, retained_tensors: dict[str, torch.Tensor] | None) -> NamedUpdates:
    """Yields the contents of a chunk. If `retained_tensors` is given, stores the contents of a retained chunk there
    instead.
    """
    if chunk.payload is not None:
        for name, tensor in zip(chunk.payload[1], memory, strict=True):
            if retained_tensors is not None:
                retained_tensors.pop(name, None)
            yield name, tensor
        return
    for name, entry_content in entries_of(memoryview(memory), chunk.table):
        if retained_tensors is None:
            yield name, entry_content
        elif not chunk.retained:
            retained_tensors.pop(name, None)
            yield name, entry_content
        elif isinstance(entry_content, Elements):
            copy_update(retained_tensors[name], entry_content)
        else:
            retained_tensors[name] = entry_content


def entries_of(memory: Any, table: tuple[int, int]) -> NamedUpdates:
    """Yields the names and contents (tensors or `Elements`) that a segment's table lists."""
    offset, table_bytes = table
    chunk_entries: list[Entry] = pickle.loads(memory[offset : offset + table_bytes])
    spans = spans_of(vector_bytes for tensor_entry in chunk_entries for vector_bytes in tensor_entry[3])
    dtypes = [dtype for tensor_entry in chunk_entries for dtype in (tensor_entry[4], tensor_entry[2]) if dtype]
    flat_bytes = torch.frombuffer(memory, dtype=torch.uint8, count=offset)  # the table comes last and is aligned
    vectors = _vectors(flat_bytes, spans, dtypes)
    for name, shape, _, _, index in chunk_entries:
        if index:
            yield name, Elements(torch.Size(shape), next(vectors), next(vectors))
        else:
            vector = next(vectors)
            yield name, vector if len(shape) == 1 else vector.view(shape)


def _vectors(flat_bytes: torch.Tensor, spans: list[tuple[int, int]], dtypes: list[str]) -> Iterator[torch.Tensor]:
    """Returns an iterator over the flat tensor of each span. The memory is split once per dtype, because one split per tensor
    is slow for hundreds of small tensors.
    """
    vectors_by_dtype = {}
    for name in {*dtypes}:
        typed_view = flat_bytes.view(getattr(torch, name))
        dtype_spans = [span for span, dtype in zip(spans, dtypes, strict=True) if dtype == name]
        vector_starts = [vector_start // typed_view.itemsize for vector_start, _ in dtype_spans]
        extents = [
            next_start - vector_start
            for vector_start, next_start in itertools.pairwise([*vector_starts, len(typed_view)])
        ]
        vector_counts = [vector_bytes // typed_view.itemsize for _, vector_bytes in dtype_spans]
        vectors = zip(vector_counts, extents, typed_view[vector_starts[0] :].split(extents), strict=True)
        vectors_by_dtype[name] = (
            vector if num_elements == extent else vector[:num_elements] for num_elements, extent, vector in vectors
        )
    return map(next, (vectors_by_dtype[name] for name in dtypes))


def apply(
    sync: WeightSync,
    named_tensors: NamedTensors,
    *,
    adopt: torch.nn.Module | None = None,
    totals: TransferTotals | None = None,
) -> int:
    """Receives the next version and writes it into tensors, in place.

    Args:
        sync: The receiving end.
        named_tensors: The tensors to fill.
        adopt: See `UpdateTarget`.
        totals: Sums to which the measurement of the transfer is added.

    Returns:
        The version.

    Raises:
        RlhpcError: The receiver's model does not have the sent names, shapes and dtypes; nothing was changed.
    """
    target = UpdateTarget(named_tensors, adopt)  # created while the sender is still writing
    update = sync.receive()
    try:
        with span("weights", "weights", version=update.version):
            target.apply(update)
    except BaseException:
        sync.forget()
        raise
    if totals is not None:
        totals.add(update.transfer)
    return update.version


class UpdateTarget:
    """Tensors that an update is applied to.

    Args:
        named_tensors: The tensors to fill.
        adopt: Module that is only read. Its parameters and buffers with these names become views of the received memory if
            they are on the CPU. This avoids copies, and all receivers on a host share the memory.
    """

    def __init__(self, named_tensors: NamedTensors, adopt: torch.nn.Module | None = None) -> None:
        self._tensors = dict(named_tensors)
        self._adopted_tensors = {} if adopt is None else adopt.state_dict(keep_vars=True)

    @torch.no_grad()
    def apply(self, update: Update) -> None:
        """Applies an update; nothing is changed unless all names, shapes and dtypes agree.

        Raises:
            RlhpcError: The receiver's model does not have the sent names, shapes and dtypes.
        """
        received_updates: list[tuple[str, torch.Tensor | Elements]] = []
        problem, verification = None, UpdateVerification(update, digests_on_arrival=False)
        for name, tensor_update in verification.tensors():  # checked on arrival, while the sender is still writing
            target = self._tensors.get(name)
            if target is None or target.shape != tensor_update.shape or target.dtype != tensor_update.dtype:
                problem = problem or name
            received_updates.append((name, tensor_update))
        if update.complete and problem is None and len(received_updates) != len(self._tensors):
            problem = next(iter(self._tensors.keys() - dict(received_updates).keys()))
        if problem is not None:
            raise RlhpcError(
                f"weights of version {update.version} do not fit the receiver: it has "
                f"{_describe(problem, self._tensors.get(problem))}, got "
                f"{_describe(problem, dict(received_updates).get(problem))}"
            )
        for name, tensor_update in received_updates:
            adopted_tensor = self._adopted_tensors.get(name)
            if adopted_tensor is None:
                copy_update(self._tensors[name], tensor_update)
            elif adopted_tensor.is_cpu and not isinstance(tensor_update, Elements) and tensor_update.is_cpu:
                adopted_tensor.data = tensor_update
            else:
                copy_update(adopted_tensor, tensor_update)
        verification.check(self._current_tensor)

    def _current_tensor(self, name: str) -> torch.Tensor:
        return self._adopted_tensors[name] if name in self._adopted_tensors else self._tensors[name]


def _describe(name: str, tensor: torch.Tensor | Elements | None) -> str:
    return "None" if tensor is None else str((name, tuple(tensor.shape), str(tensor.dtype)))


#: Keys of a receiver's report: versions, seconds, and the prefix of the bytes by transport.
_VERSIONS, _SECONDS, _BYTES = "weights/versions", "weights/s", "weights/bytes_by_"


def note_announcement(transfer: Transfer, elapsed_s: float) -> None:
    """Takes note of an announcement that was sent `elapsed_s` seconds after the sender's first byte.

    The clocks of sender and receiver are unrelated, so the earliest start that follows from an announcement counts. A receiver
    that begins late is thus not charged with its delay.
    """
    transfer.start_s = min(transfer.start_s, time.monotonic() - elapsed_s)


class TransferTotals:
    """Sums over the versions that this process has received since its last report."""

    def __init__(self) -> None:
        self._report: dict[str, float] = {}

    def add(self, transfer: Transfer | None) -> None:
        """Adds a version that has been received and checked; ignores None, from a strategy that measures nothing."""
        if transfer is None:
            return
        amounts = {_VERSIONS: 1.0, _SECONDS: max(0.0, transfer.end_s - transfer.start_s)}
        amounts |= {
            _BYTES + name: float(num_transported) for name, num_transported in transfer.bytes_by_transport.items()
        }
        for key, added_amount in amounts.items():
            self._report[key] = self._report.get(key, 0.0) + added_amount

    def pop(self) -> dict[str, float]:
        """Returns the report, and starts a new one; {} if no version was received."""
        report, self._report = self._report, {}
        return report


def transfer_metrics(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics of a step from the receivers' reports, which may contain other keys; {} if no version was sent.

    Bytes and seconds are those of a version: the bytes of the receiver that received most, and the seconds of the slowest one.
    """
    receivers = [report for report in reports if report.get(_VERSIONS)]
    if not receivers:
        return {}
    bytes_by_transport: dict[str, float] = {}
    num_bytes = []
    for report in receivers:
        amounts = {
            key.removeprefix(_BYTES): report_amount for key, report_amount in report.items() if key.startswith(_BYTES)
        }
        num_bytes.append(sum(amounts.values()) / report[_VERSIONS])
        for name, report_amount in amounts.items():
            bytes_by_transport[name] = bytes_by_transport.get(name, 0.0) + report_amount
    gigabytes, transfer_s = max(num_bytes) / 1e9, max(report[_SECONDS] / report[_VERSIONS] for report in receivers)
    row = {GIGABYTES: gigabytes, SECONDS: transfer_s}
    if gigabytes > 0 and transfer_s > 0:
        row[RATE] = gigabytes / transfer_s
    total_bytes = sum(bytes_by_transport.values())
    return row | {
        SHARE + name: num_transported / total_bytes
        for name, num_transported in sorted(bytes_by_transport.items())
        if num_transported
    }


def transfer_facts(row: Mapping[str, float]) -> dict[str, Any]:
    """Returns the fields of status.json for a step's row of metrics; {} for a step without weights."""
    transport_shares = {
        key.removeprefix(SHARE): transport_share for key, transport_share in row.items() if key.startswith(SHARE)
    }
    return {"weights_by": transport_shares, "weights_gb_per_s": row.get(RATE)} if transport_shares else {}
