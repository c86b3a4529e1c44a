"""Receiver of weight updates: opens the chunks that it does not have yet and yields their tensors."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlhpc.runtime.comm.shared_memory import spans_of
from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.base import NamedTensors, NamedUpdates, Receipt, Update, WeightSync
from rlhpc.weights.delta import Elements, put
from rlhpc.weights.sender import Announcement, Entry, WeightChunk
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
        self._retained: dict[str, torch.Tensor] = {}
        self._receipt: Receipt | None = None
        self.forget()

    def forget(self) -> None:
        """Marks the receiver's tensors as belonging to no version, so that the next update is complete."""
        self._stream, self._serial = "", -1
        self._retained.clear()

    def receive(
        self,
        next_announcement: Callable[[], Announcement],
        open_chunk: OpenChunk,
        prefetch: Callable[[Iterator[ReceivedChunk]], Iterator[ReceivedChunk]] = lambda chunks: chunks,
        skip: SkipChunk | None = None,
    ) -> Update:
        """Waits for the next version.

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
        complete = known_serial < 0 or self._complete_updates
        self._receipt = None
        chunks = _iter_chunks(announcement, next_announcement, open_chunk, skip)
        chunks = chunks if announcement.last else prefetch(chunks)
        return Update(
            announcement.version,
            complete,
            self._iter_tensors(announcement, known_serial, chunks, open_chunk),
            lambda: self._receipt,
        )

    def _iter_tensors(
        self,
        first_announcement: Announcement,
        known_serial: int,
        chunks: Iterator[ReceivedChunk],
        open_chunk: OpenChunk,
    ) -> NamedUpdates:
        assembles = self._complete_updates or known_serial < 0
        retained, self._retained = self._retained, {}
        self.forget()  # until the complete version has been received
        for chunk in first_announcement.log:
            if chunk.serial > known_serial:
                yield from _iter_entries(chunk, open_chunk(chunk, True), retained if assembles else None)
        announcement = first_announcement
        for announcement, memory in chunks:
            if announcement.chunk is not None:
                yield from _iter_entries(announcement.chunk, memory, retained if assembles else None)
            del memory  # before waiting for the next
        self._receipt = announcement.receipt
        if assembles:
            yield from retained.items()
        self._retained = retained if self._complete_updates else {}
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
        previous, announcement = announcement, next_announcement()
        while announcement.chunk is not None and (announcement.stream, announcement.version, announcement.number) == (
            previous.stream,
            previous.version,
            previous.number,
        ):  # repeated for receivers that missed it
            skip(announcement.chunk)
            announcement = next_announcement()
        if (announcement.stream, announcement.version, announcement.number) != (
            previous.stream,
            previous.version,
            previous.number + 1,
        ):
            raise RlhpcError(
                f"weights of version {previous.version} were followed by a chunk of {announcement.version}"
            )


def _iter_entries(chunk: WeightChunk, memory: Any, retained: dict[str, torch.Tensor] | None) -> NamedUpdates:
    """Yields the contents of a chunk. If `retained` is given, stores the contents of a retained chunk there instead."""
    if chunk.payload is not None:
        for name, tensor in zip(chunk.payload[1], memory, strict=True):
            if retained is not None:
                retained.pop(name, None)
            yield name, tensor
        return
    for name, content in entries_of(memoryview(memory), chunk.table):
        if retained is None:
            yield name, content
        elif not chunk.retained:
            retained.pop(name, None)
            yield name, content
        elif isinstance(content, Elements):
            put(retained[name], content)
        else:
            retained[name] = content


def entries_of(memory: Any, table: tuple[int, int]) -> NamedUpdates:
    """Yields the names and contents (tensors or `Elements`) that a segment's table lists."""
    offset, size = table
    entries: list[Entry] = pickle.loads(memory[offset : offset + size])
    spans = spans_of(size for tensor_entry in entries for size in tensor_entry[3])
    dtypes = [dtype for tensor_entry in entries for dtype in (tensor_entry[4], tensor_entry[2]) if dtype]
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=offset)  # the table comes last and is aligned
    vectors = _vectors(flat, spans, dtypes)
    for name, shape, _, _, index in entries:
        if index:
            yield name, Elements(torch.Size(shape), next(vectors), next(vectors))
        else:
            vector = next(vectors)
            yield name, vector if len(shape) == 1 else vector.view(shape)


def _vectors(flat: torch.Tensor, spans: list[tuple[int, int]], dtypes: list[str]) -> Iterator[torch.Tensor]:
    """Returns an iterator over the flat tensor of each span. The memory is split once per dtype, because one split per tensor
    is slow for hundreds of small tensors.
    """
    vectors_by_dtype = {}
    for name in {*dtypes}:
        typed_view = flat.view(getattr(torch, name))
        dtype_spans = [span for span, dtype in zip(spans, dtypes, strict=True) if dtype == name]
        starts = [start // typed_view.itemsize for start, _ in dtype_spans]
        extents = [end - start for start, end in itertools.pairwise([*starts, len(typed_view)])]
        counts = [size // typed_view.itemsize for _, size in dtype_spans]
        vectors = zip(counts, extents, typed_view[starts[0] :].split(extents), strict=True)
        vectors_by_dtype[name] = (vector if count == extent else vector[:count] for count, extent, vector in vectors)
    return map(next, (vectors_by_dtype[name] for name in dtypes))


def apply(sync: WeightSync, named_tensors: NamedTensors, *, adopt: torch.nn.Module | None = None) -> int:
    """Receives the next version and writes it into tensors, in place.

    Args:
        sync: The receiving end.
        named_tensors: The tensors to fill.
        adopt: See `UpdateTarget`.

    Returns:
        The version.

    Raises:
        RlhpcError: The receiver's model does not have the sent names, shapes and dtypes; nothing was changed.
    """
    target = UpdateTarget(named_tensors, adopt)  # created while the sender is still writing
    update = sync.receive()
    try:
        target.apply(update)
    except BaseException:
        sync.forget()
        raise
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
        self._adopted = {} if adopt is None else adopt.state_dict(keep_vars=True)

    @torch.no_grad()
    def apply(self, update: Update) -> None:
        """Applies an update; nothing is changed unless all names, shapes and dtypes agree.

        Raises:
            RlhpcError: The receiver's model does not have the sent names, shapes and dtypes.
        """
        changes: list[tuple[str, torch.Tensor | Elements]] = []
        misfit, verification = None, UpdateVerification(update, digest_on_arrival=False)
        for name, change in verification.tensors():  # checked on arrival, while the sender is still writing
            target = self._tensors.get(name)
            if target is None or target.shape != change.shape or target.dtype != change.dtype:
                misfit = misfit or name
            changes.append((name, change))
        if update.complete and misfit is None and len(changes) != len(self._tensors):
            misfit = next(iter(self._tensors.keys() - dict(changes).keys()))
        if misfit is not None:
            raise RlhpcError(
                f"weights of version {update.version} do not fit the receiver: it has "
                f"{_describe(misfit, self._tensors.get(misfit))}, got {_describe(misfit, dict(changes).get(misfit))}"
            )
        for name, change in changes:
            adopted = self._adopted.get(name)
            if adopted is None:
                put(self._tensors[name], change)
            elif adopted.is_cpu and not isinstance(change, Elements) and change.is_cpu:
                adopted.data = change
            else:
                put(adopted, change)
        verification.check(self._current_tensor)

    def _current_tensor(self, name: str) -> torch.Tensor:
        return self._adopted[name] if name in self._adopted else self._tensors[name]


def _describe(name: str, tensor: torch.Tensor | Elements | None) -> str:
    return "None" if tensor is None else str((name, tuple(tensor.shape), str(tensor.dtype)))
