"""Updates between worker groups: announcements go to every receiver's inbox; parts are mapped, or fetched remotely."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhpc.runtime.comm import p2p
from rlhpc.runtime.comm.payload import Origin
from rlhpc.runtime.comm.segments import SegmentGone, discard, map_private
from rlhpc.runtime.comm.share import Share
from rlhpc.runtime.context import current
from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.publish import Announcement, Part, Publisher
from rlhpc.weights.strategy import NamedTensors, Update
from rlhpc.weights.subscribe import Subscriber

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker


class Place(NamedTuple):
    """A receiver's place among the readers of a part.

    Attributes:
        reader: Number of the receiver among all readers.
        number, of: On a host other than the sender's, its number among the receivers there, and how many there are: the
            first of them fetches for all.
    """

    reader: int
    number: int
    of: int


class WeightSender:
    """Sends versions; every receiver takes each version with a `WeightReceiver`.

    Args:
        worker: The sending worker.
        receivers: Groups and ranks that receive.
        delta: `rollout.weight_delta`.
    """

    def __init__(self, worker: Worker, receivers: list[tuple[str, list[int]]], delta: str) -> None:
        self._src, self._receivers, self._delta = (worker.group_name, worker.rank), receivers, delta
        self._publisher: Publisher | None = None

    def forget(self) -> None:
        """Makes the next version a complete one, for when weights that are not trained have been replaced."""
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
            self._publisher = Publisher(context.service.pool, len(names), self._delta)
        places: dict[tuple[str, int], Place] = {}
        for together in p2p.readers_of(context, names):
            for number, who in enumerate(together):
                places[who] = Place(len(places), number, len(together))
        reach_all: Callable[[], None] | None = None  # waits until every receiver has the last announcement
        loose: str | None = None  # a part that is written but not announced yet
        try:
            for announcement in self._publisher.publish(version, tensors, frozen):
                part = announcement.part
                loose = part.path if part is not None and not part.kept else None
                if reach_all is not None:  # only now: it was in transit while the next part was written
                    waited, reach_all = reach_all, None
                    waited()
                message = (announcement, tuple(context.service.origin), places if announcement.number == 0 else None)
                announced, loose = loose, None
                reach_all = p2p.begin_broadcast(message, *self._src, self._receivers, segment=announced)
            if reach_all is not None:
                waited, reach_all = reach_all, None
                waited()
        except BaseException:
            if reach_all is not None:
                with contextlib.suppress(RlhpcError):  # the first failure is the one to report
                    reach_all()
            for number in range(len(names) if loose else 0):
                discard(str(loose), number)
            self.forget()  # the changes that were found did not reach every receiver
            raise


class WeightReceiver:
    """Receives versions from a `WeightSender`.

    Args:
        worker: The receiving worker.
        src: Group and rank of the sender.
        whole: See `Subscriber`.
    """

    def __init__(self, worker: Worker, src: tuple[str, int], *, whole: bool = False) -> None:
        self._me, self._src = (worker.group_name, worker.rank), src
        self._subscriber = Subscriber(whole)
        self._place, self._origin = Place(0, 0, 1), Origin("", "")

    def forget(self) -> None:
        """Makes the next update a complete one (`Subscriber.forget`)."""
        self._subscriber.forget()

    def receive(self) -> Update:
        """Waits for the next version, and takes it in while its tensors are iterated."""
        return self._subscriber.receive(self._following, self._read)

    def _following(self) -> Announcement:
        announcement: Announcement
        announcement, origin, places = p2p.broadcast(None, *self._me, [], self._src)
        self._origin = Origin(*origin)
        if places is not None:
            self._place = places[self._me]
        return announcement

    def _read(self, part: Part, late: bool) -> Any:
        """The memory of a part; `late` if the other receivers on this host have it already."""
        service, place = current().service, self._place
        if self._origin.host != service.endpoint["host"]:
            together = place.of > 1 and not late
            share = Share(f"{part.name}-{place.reader - place.number}", place.number, place.of) if together else None
            # Each receiver reports its own arrival, so that nothing is dropped from the log that one of them still needs.
            memory = service.fetch(self._origin, part.path, part.size, place.reader, share, own=not part.kept, later=[])
            service.peers.release(self._origin.bulk, part.path, place.reader)
            return memory
        try:
            if not part.kept:
                return service.mappings.lease(part.path, place.reader)
            mapped = map_private(part.path)
        except SegmentGone:
            raise RlhpcError(
                f"a part of the weights of {self._src[0]}-{self._src[1]} is gone: it has begun anew since"
            ) from None
        discard(part.path, place.reader)
        return mapped
