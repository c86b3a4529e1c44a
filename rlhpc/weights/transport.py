"""Weight sync by broadcast: one copy per host, written from the sender's tensors and mapped by all receivers.

Announcements go to every receiver's inbox. Receivers map the parts, or fetch them from the sender's host.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from rlhpc.runtime.comm import p2p
from rlhpc.runtime.comm.context import Context, current
from rlhpc.runtime.comm.device_memory import DevicePool
from rlhpc.runtime.comm.payload import Above, Origin, Share
from rlhpc.runtime.comm.shared_memory import HEADER, SegmentGone, SegmentPool, discard, map_private
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.registry import MEMBERS
from rlhpc.weights.base import NamedTensors, Update
from rlhpc.weights.process_group import GroupLost
from rlhpc.weights.receiver import Piece, Subscriber, entries_of
from rlhpc.weights.sender import PART_BYTES, PARTS, Announcement, ChunkWindow, Publisher, WeightChunk
from rlhpc.weights.transport_select import AUTO, GLOO, HOST, IPC, NCCL, Bucket, Receiving, Sending

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker


T = TypeVar("T")


class ConsumerClosed(Exception):
    """Signal that the consumer stopped iterating."""


class Prefetcher:
    """Prefetching iterator: runs an iterator in a thread, a bounded number of items ahead. One iterator at a time.

    Args:
        depth: Number of items that are built in advance, besides the one in use.
        after: Called in the thread when it ends.
    """

    def __init__(self, depth: int = 1, after: Callable[[], None] = lambda: None) -> None:
        self._depth, self._after = depth, after
        self._stopping = threading.Event()

    def check(self) -> None:
        """Raises if the consumer has stopped; an iterator that waits calls it.

        Raises:
            ConsumerClosed: The consumer has stopped, and waits for the thread.
        """
        if self._stopping.is_set():
            raise ConsumerClosed

    def __call__(self, items: Iterator[T]) -> Iterator[T]:
        """Yields the items, or raises the error of the next one. Closing it ends the thread after its current item."""
        self._stopping.clear()
        slots, prefetched = threading.Semaphore(self._depth + 1), queue.SimpleQueue[tuple[Any, BaseException | None]]()

        def run() -> None:
            try:
                while slots.acquire():
                    self.check()
                    prefetched.put((next(items), None))
            except BaseException as error:
                prefetched.put((None, error))
            finally:
                self._after()

        thread = threading.Thread(target=run, name="rlhpc-ahead", daemon=True)
        thread.start()
        try:
            while True:
                built, error = prefetched.get()
                if isinstance(error, StopIteration):
                    return
                if error is not None:
                    raise error
                yield built
                del built  # its memory may be needed for the next item but one
                slots.release()
        finally:
            self._stopping.set()
            slots.release()
            thread.join()


#: Number of hosts that a host forwards a part to.
_BRANCHES = 2


class ReaderSlot(NamedTuple):
    """A receiver's position among the readers of a part.

    Attributes:
        reader: Number of the receiver among all readers.
        number, of: On a host other than the sender's, its number among the receivers there, and their count: the first of
            them fetches for all.
        above: Address from which the first receiver of another host fetches; empty for the sender.
        below: Number of other hosts to which this one forwards the data.
    """

    reader: int
    number: int
    of: int
    above: str = ""
    below: int = 0


class WeightSender:
    """Sender of versions; every receiver reads each version with a `WeightReceiver`.

    Args:
        worker: The sending worker.
        receivers: Groups and ranks that receive.
        delta: `rollout.weight_delta`.
        part_bytes: Size of a part.
        road: Transport, one of those of `transport_select`.

    Attributes:
        roads: The sender's side of the transport.
    """

    def __init__(
        self,
        worker: Worker,
        receivers: list[tuple[str, list[int]]],
        delta: str,
        part_bytes: int = PART_BYTES,
        road: str = AUTO,
    ) -> None:
        self._src, self._receivers, self._delta = (worker.group_name, worker.rank), receivers, delta
        self._part_bytes = part_bytes
        self._publisher: Publisher | None = None
        self.roads = Sending(self._src, road)

    def forget(self) -> None:
        """Makes the next version a complete one, for when weights that are not trained have been replaced."""
        self.roads.forget()
        if self._publisher is not None:
            self._publisher.forget()

    def send(self, version: int, tensors: NamedTensors, *, frozen: Container[str] = ()) -> None:
        """Sends one version.

        Args:
            version: Version of the weights.
            tensors: Names and tensors; each is dropped before the next part begins.
            frozen: Names of tensors that are not trained.
        """
        context = current()
        names = [(group, rank) for group, ranks in self._receivers for rank in ranks if (group, rank) != self._src]
        if self._publisher is None:
            self._publisher = Publisher(
                context.service.pool, len(names), self._delta, self._part_bytes, roads=self.roads
            )
        slots, depth = _places(context, names)
        window = _window(context, [*slots], PARTS + depth)
        self.roads.open([*slots], window.all_started)
        reach_all: Callable[[], None] | None = None  # waits until every receiver has the last announcement
        unannounced: str | None = None  # a part that is written but not announced yet
        try:
            for announcement in self._with_lost(self._publisher.publish(version, tensors, frozen, window)):
                chunk = announcement.part
                unannounced = chunk.path or None if chunk is not None and not chunk.retained else None
                if reach_all is not None:  # only now: it was in transit while the next part was written
                    wait_reached, reach_all = reach_all, None
                    wait_reached()
                message = (announcement, tuple(context.service.origin), slots if announcement.number == 0 else None)
                announced, unannounced = unannounced, None
                reach_all = p2p.begin_broadcast(message, *self._src, self._receivers, segment=announced)
                if chunk is not None and chunk.cargo is not None:
                    self.roads.depart()
            if reach_all is not None:
                wait_reached, reach_all = reach_all, None
                wait_reached()
        except BaseException:
            if reach_all is not None:
                with contextlib.suppress(RlhpcError):  # the first failure is the one to report
                    reach_all()
            for reader in range(len(names) if unannounced else 0):
                discard(str(unannounced), reader)
            self.roads.forget(tell=True)
            self.forget()  # the changes that were found did not reach every receiver
            raise

    def _with_lost(self, announcements: Iterator[Announcement]) -> Iterator[Announcement]:
        """Yields the announcements, and repeats that of a bucket that some receivers did not get, before any later one."""
        last_sent: Announcement | None = None
        for announcement in itertools.chain(announcements, [None]):
            self.roads.settle()
            if (
                last_sent is not None
                and self._publisher is not None
                and (retry := self.roads.pop_lost_bucket()) is not None
            ):
                bucket, flat = retry
                yield self._publisher.again(last_sent, bucket.tensors(flat))
            if announcement is not None:
                last_sent = announcement
                yield announcement


def _places(context: Context, names: list[tuple[str, int]]) -> tuple[dict[tuple[str, int], ReaderSlot], int]:
    """Returns the receivers' positions, and the maximum number of hosts that a part passes before it reaches one.

    The sender's data goes to two other hosts, and each forwards it to two more. So no host sends more, however many there are.
    """
    readers = p2p.readers_of(context, names)
    hosts = [host_readers for host_readers in readers if context.member(*host_readers[0])["host"] != context.host]
    slots: dict[tuple[str, int], ReaderSlot] = {}
    for index, host_readers in enumerate(readers):
        source, num_forwards = "", 0
        if index < len(hosts):
            source = context.member(*hosts[index // 2 - 1][0])["data"]["bulk"] if index >= _BRANCHES else ""
            num_forwards = len(range(2 * index + 2, min(2 * index + 4, len(hosts))))
        for reader_index, receiver in enumerate(host_readers):
            slots[receiver] = ReaderSlot(len(slots), reader_index, len(host_readers), source, num_forwards)
    return slots, max(len(hosts) + 1, 2).bit_length() - 2


class _ChunkStore(NamedTuple):
    """Stores of parts: shared memory, or memory of an accelerator."""

    host: SegmentPool
    card: DevicePool

    def awaited(self, path: str) -> list[bool]:
        """Returns which readers have not read a part (`ChunkLocation.awaited`)."""
        return self.host.awaited(path) or self.card.awaited(path)


def _window(context: Context, names: list[tuple[str, int]], parts: int) -> ChunkWindow:
    """Builds the flow control for receivers. It does not wait for a restarted receiver, which has no part of the version."""
    reader_names = [f"{group}-{rank}" for group, rank in names]
    versions = [context.registry.version(MEMBERS, name) for name in reader_names]
    return ChunkWindow(
        _ChunkStore(context.service.pool, context.service.lane.pool),
        reader_names,
        check=context.check,
        is_present=lambda reader: (
            context.registry.version(MEMBERS, reader_names[reader]) == versions[reader]
            and not context.has_left(*names[reader])
        ),
        deadline=context.wait_deadline,
        parts=parts,
    )


def _never() -> None:
    """Does nothing: the check of a wait that nothing interrupts."""


class WeightReceiver:
    """Receiver of versions from a `WeightSender`.

    Args:
        worker: The receiving worker.
        src: Group and rank of the sender.
        complete_updates: See `Subscriber`.
        road: Transport, one of those of `transport_select`.
    """

    def __init__(
        self, worker: Worker, src: tuple[str, int], *, complete_updates: bool = False, road: str = AUTO
    ) -> None:
        self._me, self._src = (worker.group_name, worker.rank), src
        self._subscriber = Subscriber(complete_updates)
        self._place, self._origin = ReaderSlot(0, 0, 1), Origin("", "")
        self._above = Above("")
        self._ahead = Prefetcher(after=lambda: current().service.peers.close())
        self._giving_up: Callable[[], None] = _never
        self._roads = Receiving(self._me, road)

    def forget(self) -> None:
        """Makes the next update a complete one (`Subscriber.forget`)."""
        self._roads.forget()
        self._subscriber.forget()

    def receive(self) -> Update:
        """Waits for the next version, which is read while its tensors are iterated."""
        self._giving_up = _never
        self._roads.tell()
        return self._subscriber.receive(self._following, self._read, self._prefetched, self._skip)

    def _prefetched(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Prefetches the next part while one is in use; a sender on this host needs no fetch."""
        if self._origin.host == current().service.endpoint["host"]:
            return pieces
        self._giving_up = self._ahead.check
        return self._ahead(pieces)

    def _following(self) -> Announcement:
        announcement: Announcement
        announcement, origin, slots = p2p.follow_broadcast(self._src, self._giving_up)
        self._origin = Origin(*origin)
        if slots is not None:
            self._place = slots[self._me]
            self._above = Above(self._place.above)
        return announcement

    def _skip(self, part: WeightChunk) -> None:
        if part.cargo is not None and isinstance(part.cargo[0], Bucket):
            self._roads.refuse(part.cargo[0])
        else:
            self._read(part, False)

    def _again(self, part: WeightChunk) -> list[Any]:
        """Returns the tensors of a part that was lost in transit, from its second announcement."""
        repeated = self._following().part
        if repeated is None or repeated.serial != part.serial:
            raise RlhpcError("a part of the weights that was lost on its way was not sent again")
        memory = memoryview(self._read(repeated, False))
        return [tensor for _, tensor in entries_of(memory, repeated.table)]

    def _read(self, part: WeightChunk, is_late: bool) -> Any:
        """Returns the memory of a part; `is_late` if the other receivers on this host have it already."""
        service, slot = current().service, self._place
        if part.cargo is not None:
            try:
                return self._roads.take(part.cargo[0], self._origin, slot.reader)
            except GroupLost:
                return self._again(part)
        if self._origin.host != service.endpoint["host"]:
            shares_fetch = slot.of > 1 and not is_late
            share = Share(f"{part.name}-{slot.reader - slot.number}", slot.number, slot.of) if shares_fetch else None
            # Each receiver reports its own arrival, so that the log keeps every part that one of them still needs.
            # Kept parts are fetched at any time: a receiver that joins later gets them from the sender only.
            is_forwarded = not (part.retained and is_late)
            upstream = (self._above, part.name) if is_forwarded and slot.above else None
            memory = service.fetch(
                self._origin,
                part.path,
                part.size,
                slot.reader,
                share,
                in_place=not part.retained,
                later=[],
                above=upstream,
                lock=not part.retained,
            )
            if is_forwarded and slot.below and not slot.number:
                chunk_bytes = memory[HEADER : HEADER + part.size]
                # A kept part of trained tensors changes in place after its arrival, so a copy is forwarded.
                chunk_bytes = (
                    np.frombuffer(chunk_bytes, np.uint8).copy().data
                    if part.retained and not part.fixed
                    else chunk_bytes
                )
                service.offers.put(part.name, chunk_bytes, slot.below)
            service.peers.release(self._origin.bulk, part.path, slot.reader)
            return memory
        try:
            if not part.retained:
                memory = service.mappings.lease(part.path, slot.reader)
                service.mappings.lock(part.path)
                return memory
            mapped = map_private(part.path)
        except SegmentGone:
            raise RlhpcError(
                f"a part of the weights of {self._src[0]}-{self._src[1]} is gone: it has begun anew since"
            ) from None
        discard(part.path, slot.reader)
        return mapped


class BroadcastSync:
    """Built-in strategy of weight sync.

    Args:
        worker: The worker that sends or receives.
        src: Group and rank of the sender.
        receivers: Groups and ranks that receive.
        delta: `rollout.weight_delta`.
        complete_updates: Make every update complete, with tensors only.

    Attributes:
        road: Transport, one of those of `transport_select`.
        part_bytes: Size of a part.
    """

    road = AUTO
    part_bytes = PART_BYTES

    def __init__(
        self,
        worker: Worker,
        src: tuple[str, int],
        receivers: list[tuple[str, list[int]]],
        delta: str = "frozen",
        complete_updates: bool = False,
    ) -> None:
        is_sender = (worker.group_name, worker.rank) == tuple(src)
        self._sender = WeightSender(worker, receivers, delta, self.part_bytes, self.road) if is_sender else None
        self._receiver = (
            None if is_sender else WeightReceiver(worker, src, complete_updates=complete_updates, road=self.road)
        )

    def send(self, version: int, tensors: NamedTensors, *, frozen: Container[str] = ()) -> None:
        """Sends a version to all receivers (`WeightSync.send`)."""
        assert self._sender is not None
        self._sender.send(version, tensors, frozen=frozen)

    def receive(self) -> Update:
        """Waits for the next version (`WeightSync.receive`)."""
        assert self._receiver is not None
        return self._receiver.receive()

    def forget(self) -> None:
        """Makes the next version a complete one (`WeightSync.forget`)."""
        for endpoint in (self._sender, self._receiver):
            if endpoint is not None:
                endpoint.forget()


class HostSync(BroadcastSync):
    """Weight sync through shared memory and TCP alone."""

    road = HOST


class IpcSync(BroadcastSync):
    """Weight sync between processes that compute on one accelerator."""

    road = IPC


class NcclSync(BroadcastSync):
    """Weight sync between accelerators, by NCCL."""

    road = NCCL


class GlooSync(BroadcastSync):
    """Weight sync between accelerators, by gloo through host memory."""

    road = GLOO
