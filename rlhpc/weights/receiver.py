"""The receiver's side of an update: takes in the parts it does not have yet."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlhpc.runtime.comm.shared_memory import spans_of
from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.base import NamedTensors, NamedUpdates, Update, WeightSync
from rlhpc.weights.delta import Elements, put
from rlhpc.weights.sender import Announcement, Entry, WeightChunk
from rlhpc.weights.verification import Proof
from rlhpc.weights.version_digest import Receipt

#: `(part, late) -> memory of its segment`, which lives as long as a view of it, or the tensors of its cargo. The memory of a
#: kept part may be written to. `late`: the part was announced to others with an earlier version.
Open = Callable[[WeightChunk, bool], Any]
#: Does without a part: of a version that was broken off, or one that has come already.
Skip = Callable[[WeightChunk], None]
#: An announcement, and the memory of its part.
Piece = tuple[Announcement, Any]


class Subscriber:
    """Tracks what one receiver holds of a stream.

    Args:
        whole: Make every update complete, with tensors only, for receivers that take in all weights at once. Tensors
            that did not change then stay mapped, and changes are made in the mapped memory.
    """

    def __init__(self, whole: bool = False) -> None:
        self._whole = whole
        self._held: dict[str, torch.Tensor] = {}
        self._receipt: Receipt | None = None
        self.forget()

    def forget(self) -> None:
        """Declares that the receiver's tensors belong to no version: the next update is complete."""
        self._stream, self._serial = "", -1
        self._held.clear()

    def receive(
        self,
        following: Callable[[], Announcement],
        read: Open,
        ahead: Callable[[Iterator[Piece]], Iterator[Piece]] = lambda pieces: pieces,
        skip: Skip | None = None,
    ) -> Update:
        """Waits for the next version.

        Args:
            following: Waits for the next announcement and returns it.
            read: Opens a part.
            ahead: Takes pieces while an earlier one is in use.
            skip: Does without a part, which otherwise is opened and let go.
        """
        skip = skip or (lambda part: read(part, False))
        first = following()
        while first.number:  # the rest of a version that this receiver did not take in to the end
            if first.part is not None:
                skip(first.part)
            first = following()
        known = self._serial if first.stream == self._stream else -1
        if known < 0:
            self.forget()
        complete = known < 0 or self._whole
        self._receipt = None
        pieces = _pieces(first, following, read, skip)
        pieces = pieces if first.last else ahead(pieces)
        return Update(first.version, complete, self._tensors(first, known, pieces, read), lambda: self._receipt)

    def _tensors(self, first: Announcement, known: int, pieces: Iterator[Piece], read: Open) -> NamedUpdates:
        assembles = self._whole or known < 0
        held, self._held = self._held, {}
        self.forget()  # until all of the version has been taken in
        for part in first.log:
            if part.serial > known:
                yield from _taken(part, read(part, True), held if assembles else None)
        now = first
        for now, memory in pieces:
            if now.part is not None:
                yield from _taken(now.part, memory, held if assembles else None)
            del memory  # before the next is waited for
        self._receipt = now.receipt
        if assembles:
            yield from held.items()
        self._held = held if self._whole else {}
        self._stream, self._serial = first.stream, now.serial


def _pieces(first: Announcement, following: Callable[[], Announcement], read: Open, skip: Skip) -> Iterator[Piece]:
    """The pieces of a version, each opened as it is announced."""
    now = first
    while True:
        yield now, None if now.part is None else read(now.part, False)
        if now.last:
            return
        before, now = now, following()
        while now.part is not None and (now.stream, now.version, now.number) == (
            before.stream,
            before.version,
            before.number,
        ):  # again, for others who have not got it
            skip(now.part)
            now = following()
        if (now.stream, now.version, now.number) != (before.stream, before.version, before.number + 1):
            raise RlhpcError(f"weights of version {before.version} were followed by a part of {now.version}")


def _taken(part: WeightChunk, memory: Any, held: dict[str, torch.Tensor] | None) -> NamedUpdates:
    """Yields the contents of a part or, given `held`, puts those of a kept part there instead."""
    if part.cargo is not None:
        for name, tensor in zip(part.cargo[1], memory, strict=True):
            if held is not None:
                held.pop(name, None)
            yield name, tensor
        return
    for name, what in entries_of(memoryview(memory), part.table):
        if held is None:
            yield name, what
        elif not part.kept:
            held.pop(name, None)
            yield name, what
        elif isinstance(what, Elements):
            put(held[name], what)
        else:
            held[name] = what


def entries_of(memory: Any, table: tuple[int, int]) -> NamedUpdates:
    """What is in the memory of a segment, by its table."""
    offset, size = table
    entries: list[Entry] = pickle.loads(memory[offset : offset + size])
    spans = spans_of(size for entry in entries for size in entry[3])
    dtypes = [dtype for entry in entries for dtype in (entry[4], entry[2]) if dtype]
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=offset)  # the table comes last and is aligned
    vectors = _vectors(flat, spans, dtypes)
    for name, shape, _, _, index in entries:
        if index:
            yield name, Elements(torch.Size(shape), next(vectors), next(vectors))
        else:
            vector = next(vectors)
            yield name, vector if len(shape) == 1 else vector.view(shape)


def _vectors(flat: torch.Tensor, spans: list[tuple[int, int]], dtypes: list[str]) -> Iterator[torch.Tensor]:
    """What is at places of a memory, each as a vector. One call cuts up all of a dtype: there are hundreds of small tensors,
    and acting waits for them."""
    found = {}
    for name in {*dtypes}:
        own = flat.view(getattr(torch, name))
        here = [span for span, dtype in zip(spans, dtypes, strict=True) if dtype == name]
        starts = [start // own.itemsize for start, _ in here]
        rooms = [end - start for start, end in itertools.pairwise([*starts, len(own)])]
        counts = [size // own.itemsize for _, size in here]
        pieces = zip(counts, rooms, own[starts[0] :].split(rooms), strict=True)
        found[name] = (piece if count == room else piece[:count] for count, room, piece in pieces)
    return map(next, (found[name] for name in dtypes))


def apply(sync: WeightSync, named_tensors: NamedTensors, *, adopt: torch.nn.Module | None = None) -> int:
    """Receives the next version into these tensors, in place.

    Args:
        sync: The receiving end.
        named_tensors: The tensors to fill.
        adopt: See `UpdateTarget`.

    Returns:
        The version.

    Raises:
        RlhpcError: The receiver's model is a different one; nothing was changed.
    """
    target = UpdateTarget(named_tensors, adopt)  # while the sender is still writing
    update = sync.receive()
    try:
        target.take(update)
    except BaseException:
        sync.forget()
        raise
    return update.version


class UpdateTarget:
    """The tensors that an update goes into.

    Args:
        named_tensors: The tensors to fill.
        adopt: A module that is only ever read. Its parameters and buffers of these names, if they are on the CPU, become
            views of what was received instead of copies: no byte is moved, and all receivers on a host share the memory.
    """

    def __init__(self, named_tensors: NamedTensors, adopt: torch.nn.Module | None = None) -> None:
        self._tensors = dict(named_tensors)
        self._own = {} if adopt is None else adopt.state_dict(keep_vars=True)

    @torch.no_grad()
    def take(self, update: Update) -> None:
        """Applies an update; nothing is changed unless all names, shapes and dtypes agree.

        Raises:
            RlhpcError: The receiver's model is a different one.
        """
        changes: list[tuple[str, torch.Tensor | Elements]] = []
        bad, proof = None, Proof(update, look=False)
        for name, change in proof.tensors():  # as they arrive: the sender is still writing the rest
            theirs = self._tensors.get(name)
            if theirs is None or theirs.shape != change.shape or theirs.dtype != change.dtype:
                bad = bad or name
            changes.append((name, change))
        if update.complete and bad is None and len(changes) != len(self._tensors):
            bad = next(iter(self._tensors.keys() - dict(changes).keys()))
        if bad is not None:
            raise RlhpcError(
                f"weights of version {update.version} do not fit the receiver: it has "
                f"{_described(bad, self._tensors.get(bad))}, got {_described(bad, dict(changes).get(bad))}"
            )
        for name, change in changes:
            mine = self._own.get(name)
            if mine is None:
                put(self._tensors[name], change)
            elif mine.is_cpu and not isinstance(change, Elements) and change.is_cpu:
                mine.data = change
            else:
                put(mine, change)
        proof.check(self._held)

    def _held(self, name: str) -> torch.Tensor:
        return self._own[name] if name in self._own else self._tensors[name]


def _described(name: str, tensor: torch.Tensor | Elements | None) -> str:
    return "None" if tensor is None else str((name, tuple(tensor.shape), str(tensor.dtype)))
