"""Updates between worker groups: announcements go to every receiver's inbox; parts are mapped, or fetched remotely."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlhpc.runtime.comm import p2p
from rlhpc.runtime.comm.device_memory import DevicePool
from rlhpc.runtime.comm.payload import Origin, Share
from rlhpc.runtime.comm.remote_fetch import Above
from rlhpc.runtime.comm.shared_memory import HEADER, SegmentGone, SegmentPool, discard, map_private
from rlhpc.runtime.context import Context, current
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.registry import MEMBERS
from rlhpc.weights.base import NamedTensors, Update
from rlhpc.weights.process_group import GroupLost
from rlhpc.weights.receiver import Piece, Subscriber, entries_of
from rlhpc.weights.sender import PART_BYTES, PARTS, Announcement, ChunkWindow, Publisher, WeightChunk
from rlhpc.weights.transport_select import AUTO, Bucket, Receiving, Sending

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker
import queue
import threading
from typing import TypeVar

T = TypeVar("T")


class GivenUp(Exception):
    """Nobody takes what is being waited for."""


class Ahead:
    """Runs an iterator in a thread, a bounded number of items before whoever takes them. One iterator at a time.

    Args:
        depth: Items that are made, or being made, beyond the one in use.
        after: Called in the thread when it ends.
    """

    def __init__(self, depth: int = 1, after: Callable[[], None] = lambda: None) -> None:
        self._depth, self._after = depth, after
        self._stopping = threading.Event()

    def check(self) -> None:
        """To be called by an iterator that waits.

        Raises:
            GivenUp: Whoever took the items has stopped; the thread is awaited.
        """
        if self._stopping.is_set():
            raise GivenUp

    def __call__(self, items: Iterator[T]) -> Iterator[T]:
        """The items, or what was raised instead of the next one. Closing it ends the thread, after the item in the making."""
        self._stopping.clear()
        slots, made = threading.Semaphore(self._depth + 1), queue.SimpleQueue[tuple[Any, BaseException | None]]()

        def run() -> None:
            try:
                while slots.acquire():
                    self.check()
                    made.put((next(items), None))
            except BaseException as error:
                made.put((None, error))
            finally:
                self._after()

        thread = threading.Thread(target=run, name="rlhpc-ahead", daemon=True)
        thread.start()
        try:
            while True:
                item, error = made.get()
                if isinstance(error, StopIteration):
                    return
                if error is not None:
                    raise error
                yield item
                del item  # its memory may be wanted for the next but one
                slots.release()
        finally:
            self._stopping.set()
            slots.release()
            thread.join()


#: To how many hosts a host passes a part on.
_BRANCHES = 2


class ReaderSlot(NamedTuple):
    """A receiver's place among the readers of a part.

    Attributes:
        reader: Number of the receiver among all readers.
        number, of: On a host other than the sender's, its number among the receivers there, and how many there are: the
            first of them fetches for all.
        above: Where the first receiver of another host passes on what it has fetched; empty if the sender is asked.
        below: To how many other hosts this one passes on what it has fetched.
    """

    reader: int
    number: int
    of: int
    above: str = ""
    below: int = 0


class WeightSender:
    """Sends versions; every receiver takes each version with a `WeightReceiver`.

    Args:
        worker: The sending worker.
        receivers: Groups and ranks that receive.
        delta: `rollout.weight_delta`.
        part_bytes: Size of a part.
        road: One of `roads`, or what that chooses.

    Attributes:
        roads: What it sends by.
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
        places, depth = _places(context, names)
        window = _window(context, [*places], PARTS + depth)
        self.roads.open([*places], window.begun)
        reach_all: Callable[[], None] | None = None  # waits until every receiver has the last announcement
        loose: str | None = None  # a part that is written but not announced yet
        try:
            for announcement in self._with_lost(self._publisher.publish(version, tensors, frozen, window)):
                part = announcement.part
                loose = part.path or None if part is not None and not part.kept else None
                if reach_all is not None:  # only now: it was in transit while the next part was written
                    waited, reach_all = reach_all, None
                    waited()
                message = (announcement, tuple(context.service.origin), places if announcement.number == 0 else None)
                announced, loose = loose, None
                reach_all = p2p.begin_broadcast(message, *self._src, self._receivers, segment=announced)
                if part is not None and part.cargo is not None:
                    self.roads.depart()
            if reach_all is not None:
                waited, reach_all = reach_all, None
                waited()
        except BaseException:
            if reach_all is not None:
                with contextlib.suppress(RlhpcError):  # the first failure is the one to report
                    reach_all()
            for number in range(len(names) if loose else 0):
                discard(str(loose), number)
            self.roads.forget(tell=True)
            self.forget()  # the changes that were found did not reach every receiver
            raise

    def _with_lost(self, announcements: Iterator[Announcement]) -> Iterator[Announcement]:
        """Announcements, and once more that of a bucket which was lost on its way to some, before any that follow it."""
        sent: Announcement | None = None
        for announcement in itertools.chain(announcements, [None]):
            self.roads.settle()
            if sent is not None and self.roads.lost is not None and self._publisher is not None:
                (bucket, flat), self.roads.lost = self.roads.lost, None
                yield self._publisher.again(sent, bucket.tensors(flat))
            if announcement is not None:
                sent = announcement
                yield announcement


def _places(context: Context, names: list[tuple[str, int]]) -> tuple[dict[tuple[str, int], ReaderSlot], int]:
    """The receivers' places, and how many hosts a part passes through at most before it reaches one.

    The sender's data goes to two other hosts, and each passes it on to two: however many hosts there are, nobody sends more.
    """
    readers = p2p.readers_of(context, names)
    hosts = [together for together in readers if context.member(*together[0])["host"] != context.host]
    places: dict[tuple[str, int], ReaderSlot] = {}
    for index, together in enumerate(readers):
        above, below = "", 0
        if index < len(hosts):
            above = context.member(*hosts[index // 2 - 1][0])["data"]["bulk"] if index >= _BRANCHES else ""
            below = len(range(2 * index + 2, min(2 * index + 4, len(hosts))))
        for number, who in enumerate(together):
            places[who] = ReaderSlot(len(places), number, len(together), above, below)
    return places, max(len(hosts) + 1, 2).bit_length() - 2


class _ChunkStore(NamedTuple):
    """Where parts are: in shared memory, or on an accelerator."""

    host: SegmentPool
    card: DevicePool

    def awaited(self, path: str) -> list[bool]:
        """See `window.Holds`."""
        return self.host.awaited(path) or self.card.awaited(path)


def _window(context: Context, names: list[tuple[str, int]], parts: int) -> ChunkWindow:
    """For receivers by their numbers. One that is started again is no longer waited for: it has nothing of the version."""
    shown = [f"{group}-{rank}" for group, rank in names]
    known = [context.registry.version(MEMBERS, name) for name in shown]
    return ChunkWindow(
        _ChunkStore(context.service.pool, context.service.lane.pool),
        shown,
        check=context.check,
        there=lambda reader: (
            context.registry.version(MEMBERS, shown[reader]) == known[reader] and not context.has_left(*names[reader])
        ),
        deadline=context.wait_deadline,
        parts=parts,
    )


def _never() -> None:
    """Gives nothing up."""


class WeightReceiver:
    """Receives versions from a `WeightSender`.

    Args:
        worker: The receiving worker.
        src: Group and rank of the sender.
        whole: See `Subscriber`.
        road: One of `roads`, or what that chooses.
    """

    def __init__(self, worker: Worker, src: tuple[str, int], *, whole: bool = False, road: str = AUTO) -> None:
        self._me, self._src = (worker.group_name, worker.rank), src
        self._subscriber = Subscriber(whole)
        self._place, self._origin = ReaderSlot(0, 0, 1), Origin("", "")
        self._above = Above("")
        self._ahead = Ahead(after=lambda: current().service.peers.close())
        self._giving_up: Callable[[], None] = _never
        self._roads = Receiving(self._me, road)

    def forget(self) -> None:
        """Makes the next update a complete one (`Subscriber.forget`)."""
        self._roads.forget()
        self._subscriber.forget()

    def receive(self) -> Update:
        """Waits for the next version, and takes it in while its tensors are iterated."""
        self._giving_up = _never
        self._roads.tell()
        return self._subscriber.receive(self._following, self._read, self._prefetched, self._skip)

    def _prefetched(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Has the next part fetched while one is in use; where the sender is on this host, there is nothing to fetch."""
        if self._origin.host == current().service.endpoint["host"]:
            return pieces
        self._giving_up = self._ahead.check
        return self._ahead(pieces)

    def _following(self) -> Announcement:
        announcement: Announcement
        announcement, origin, places = p2p.follow_broadcast(self._src, self._giving_up)
        self._origin = Origin(*origin)
        if places is not None:
            self._place = places[self._me]
            self._above = Above(self._place.above)
        return announcement

    def _skip(self, part: WeightChunk) -> None:
        if part.cargo is not None and isinstance(part.cargo[0], Bucket):
            self._roads.refuse(part.cargo[0])
        else:
            self._read(part, False)

    def _again(self, part: WeightChunk) -> list[Any]:
        """The tensors of a part that was lost on its way, as its sender announces it again."""
        found = self._following().part
        if found is None or found.serial != part.serial:
            raise RlhpcError("a part of the weights that was lost on its way was not sent again")
        memory = memoryview(self._read(found, False))
        return [what for _, what in entries_of(memory, found.table)]

    def _read(self, part: WeightChunk, late: bool) -> Any:
        """The memory of a part; `late` if the other receivers on this host have it already."""
        service, place = current().service, self._place
        if part.cargo is not None:
            try:
                return self._roads.take(part.cargo[0], self._origin, place.reader)
            except GroupLost:
                return self._again(part)
        if self._origin.host != service.endpoint["host"]:
            together = place.of > 1 and not late
            share = Share(f"{part.name}-{place.reader - place.number}", place.number, place.of) if together else None
            # Each receiver reports its own arrival, so that nothing is dropped from the log that one of them still needs.
            # What is kept is asked for at any time: only the sender gives it to who comes late.
            passes = not (part.kept and late)
            above = (self._above, part.name) if passes and place.above else None
            memory = service.fetch(
                self._origin, part.path, part.size, place.reader, share, own=not part.kept, later=[], above=above,
                lock=not part.kept,
            )  # fmt: skip
            if passes and place.below and not place.number:
                data = memory[HEADER : HEADER + part.size]
                # What is kept, and is trained, changes where it has landed: others get it as it came.
                data = np.frombuffer(data, np.uint8).copy().data if part.kept and not part.fixed else data
                service.offers.put(part.name, data, place.below)
            service.peers.release(self._origin.bulk, part.path, place.reader)
            return memory
        try:
            if not part.kept:
                memory = service.mappings.lease(part.path, place.reader)
                service.mappings.lock(part.path)
                return memory
            mapped = map_private(part.path)
        except SegmentGone:
            raise RlhpcError(
                f"a part of the weights of {self._src[0]}-{self._src[1]} is gone: it has begun anew since"
            ) from None
        discard(part.path, place.reader)
        return mapped
