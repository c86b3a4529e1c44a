"""State of a channel at its home process, and of a worker's inbox: plain data structures, no sockets.

All methods are called with the service's lock held. A waiter is a callable that gets the answer once; it returns False if
the waiting process is gone, and the answer goes to the next waiter.
"""

from __future__ import annotations

import collections
import itertools
import pickle
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, NamedTuple

from rlhpc.runtime.comm.unix_sockets import UnixConnection
from rlhpc.runtime.errors import ChannelError

_ids = itertools.count(1)
#: Maximum of keys of a channel whose last consumer is remembered.
_MAX_CONSUMERS = 4096


class Item(NamedTuple):
    """A queued object: its transport frames, and its size and weight for back pressure and batching."""

    number: int
    frames: list[Any]
    nbytes: int
    weight: float
    segment: str


class ConsumerLocation(NamedTuple):
    """Location of a key's last consumer.

    Attributes:
        host: Its host; empty before the first.
        device: Address of the accelerator that it computes on; empty for none.
    """

    host: str = ""
    device: str = ""


class PutEstimate(NamedTuple):
    """Location of the consumer that a producer can expect for its item.

    Attributes:
        host, device: Location of the key's last consumer, see `ConsumerLocation`.
        waiting: Whether a consumer will take the item at once.
    """

    host: str
    device: str
    waiting: bool

    @property
    def consumer(self) -> ConsumerLocation:
        return ConsumerLocation(self.host, self.device)


class Refusal(str):
    """Reason why a call that does not wait got nothing: the queue was full, or empty."""

    __slots__ = ()


class ChannelRefused(ChannelError):
    """Refusal of a request by the home of a channel (`Refusal`)."""


class TooEarly(ChannelError):
    """Refusal of a request that came too early and may be repeated."""


Answer = Callable[[list[Item] | str], bool]


class KeyQueue:
    """FIFO of one key, with blocked producers and blocked consumers."""

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.getters: deque[tuple[tuple[str, ...], float | None, Answer]] = deque()
        self.putters: deque[tuple[Item, Answer]] = deque()


class ChannelState:
    """A channel's queues by key; bounded by items (a key) and bytes (the channel).

    Args:
        maxsize: Items that each key may hold; 0 is unbounded.
        max_bytes: Bytes that all keys together may hold; one item is always admitted into an empty queue.
    """

    def __init__(self, maxsize: int, max_bytes: int) -> None:
        self.maxsize, self.max_bytes = maxsize, max_bytes
        self.nbytes = 0
        #: Of keys that have items or waiters; most keys may be used once (`str(step)`).
        self.queues = collections.defaultdict[str, KeyQueue](KeyQueue)
        self._consumers: collections.OrderedDict[str, ConsumerLocation] = collections.OrderedDict()
        #: By number: the key, who has it (the process, and the connection it came by), and the item.
        self.unacknowledged: dict[int, tuple[str, tuple[str, ...], Item]] = {}

    def count(self, key: str) -> int:
        """Returns how many items a key holds."""
        queue = self.queues.get(key)
        return 0 if queue is None else len(queue.items)

    def full(self, key: str, nbytes: int = 0) -> bool:
        count = self.count(key)
        if self.maxsize and count >= self.maxsize:
            return True
        return bool(count) and self.nbytes + nbytes > self.max_bytes

    def record_consumer(self, key: str, consumer: ConsumerLocation) -> None:
        """Records the location of a key's last consumer."""
        self._consumers[key] = consumer
        self._consumers.move_to_end(key)
        if len(self._consumers) > _MAX_CONSUMERS:
            self._consumers.popitem(last=False)

    def _drop_idle(self, *keys: str) -> None:
        for key in keys:
            queue = self.queues.get(key)
            if queue is not None and not (queue.items or queue.getters or queue.putters):
                del self.queues[key]

    def estimate(self, key: str) -> PutEstimate:
        """Returns an estimate for a producer before it puts; a consumer that waits for a batch may not take the item at
        once.
        """
        queue = self.queues.get(key)
        is_consumer_waiting = queue is not None and bool(queue.getters) and queue.getters[0][1] is None
        return PutEstimate(*self._consumers.get(key, ConsumerLocation()), is_consumer_waiting)

    def put(self, key: str, frames: list[Any], nbytes: int, weight: float, segment: str, answer: Answer | None) -> bool:
        """Queues an item, or the producer that waits with it. Without an `answer`, a full queue refuses and returns False."""
        queue, item = self.queues[key], Item(next(_ids), frames, nbytes, weight, segment)
        # A waiting consumer takes the item at once, so a full queue cannot have one.
        if queue.putters or self.full(key, nbytes):
            if answer is None:
                return False  # there are items, or one that waits
            queue.putters.append((item, answer))
            return True
        self._admit(queue, item)
        if answer:
            answer([])
        self._serve(key, queue)
        return True

    def get(self, key: str, owners: tuple[str, ...], target: float | None, answer: Answer) -> bool:
        """Delivers one item (`target` None) or a batch of weight `target`, now or once there is one; returns True.

        Args:
            key: Key of the queue.
            owners: Names under which the end of the consumer may be reported; empty if the items need no acknowledgement.
            target: Weight of the batch; None for one item.
            answer: Called with the items.
        """
        queue = self.queues[key]
        queue.getters.append((owners, target, answer))
        self._serve(key, queue)
        return True

    def _admit(self, queue: KeyQueue, item: Item) -> None:
        queue.items.append(item)
        self.nbytes += item.nbytes

    def _take(self, queue: KeyQueue, target: float | None) -> list[Item] | None:
        """Returns items for one consumer, or None while it must wait; FIFO. A batch stops before the item that would exceed
        its target.
        """
        if not queue.items:
            return None
        if target is None:
            return [queue.items.popleft()]
        total, count = 0.0, 0
        for item in queue.items:
            if count and total + item.weight > target:
                break
            total, count = total + item.weight, count + 1
            if total >= target:
                break
        else:
            # Everything queued is below the target: wait for more, unless the queue cannot take any more.
            if not (queue.putters or (self.maxsize and len(queue.items) >= self.maxsize)):
                return None
        return [queue.items.popleft() for _ in range(count)]

    def _serve(self, key: str, queue: KeyQueue) -> None:
        self._match(key, queue)
        self._drop_idle(key)

    def _match(self, key: str, queue: KeyQueue) -> None:
        while True:
            while queue.putters and not self.full(key, queue.putters[0][0].nbytes):
                item, answer = queue.putters.popleft()
                self._admit(queue, item)
                answer([])
            if not queue.getters:
                return
            owners, target, answer = queue.getters[0]
            items = self._take(queue, target)
            if items is None:
                return
            queue.getters.popleft()
            for item in items:
                self.nbytes -= item.nbytes
                if owners:
                    self.unacknowledged[item.number] = (key, owners, item)
            if not answer(items):
                self._put_back(key, items)

    def _put_back(self, key: str, items: Iterable[Item]) -> None:
        queue = self.queues[key]
        for item in reversed(list(items)):
            self.unacknowledged.pop(item.number, None)
            queue.items.appendleft(item)
            self.nbytes += item.nbytes

    def acknowledge(self, numbers: Iterable[int]) -> None:
        """Removes items whose data the consumer has."""
        for item_id in numbers:
            self.unacknowledged.pop(item_id, None)

    def consumer_died(self, consumer: str) -> int:
        """Puts the items that `consumer` had not acknowledged back to the front; returns how many."""
        requeued: dict[str, list[Item]] = {}
        for key, owner, item in list(self.unacknowledged.values()):
            if consumer in owner:
                requeued.setdefault(key, []).append(item)
        for queue in self.queues.values():
            queue.getters = deque(g for g in queue.getters if consumer not in g[0])
        for key, items in requeued.items():
            self._put_back(key, sorted(items, key=lambda item: item.number))
            self._serve(key, self.queues[key])
        self._drop_idle(*self.queues)
        return sum(map(len, requeued.values()))

    def cancel(self, matches: Callable[[Answer], bool]) -> list[Item]:
        """Forgets a waiter that gave up; returns the items of cancelled puts."""
        dropped = []
        for queue in self.queues.values():
            queue.getters = deque(g for g in queue.getters if not matches(g[2]))
            dropped += [item for item, answer in queue.putters if matches(answer)]
            queue.putters = deque(putter for putter in queue.putters if not matches(putter[1]))
        self._drop_idle(*self.queues)
        return dropped

    def close(self, reason: str) -> None:
        """Answers all waiters that the channel has been closed."""
        for queue in self.queues.values():
            pending_answers = [getter[2] for getter in queue.getters] + [putter[1] for putter in queue.putters]
            queue.getters.clear()
            queue.putters.clear()
            for answer in pending_answers:
                answer(reason)


#: Sends frames to a peer: over its connection, or by its ZeroMQ identity.
Reply = Callable[[UnixConnection | bytes, list[Any]], None]


class RemoteAnswer:
    """Answers a request that came over a socket."""

    __slots__ = ("estimate", "number", "peer", "reply")

    def __init__(self, reply: Reply, peer: UnixConnection | bytes, number: bytes) -> None:
        self.reply, self.peer, self.number = reply, peer, number
        self.estimate: PutEstimate | None = None

    @property
    def connection_name(self) -> str:
        """The connection's name: when the connection closes, items that were not acknowledged over it return to the queue."""
        return self.peer.name if isinstance(self.peer, UnixConnection) else self.peer.hex()

    @property
    def request_name(self) -> str:
        """Name of the request: when it is cancelled, the items that were delivered to it return to the queue."""
        return f"{self.connection_name} {self.number.hex()}"

    def frames(self, *frames: Any) -> None:
        self.reply(self.peer, [self.number, b"ok", *frames])

    def __call__(self, items: list[Item] | str) -> bool:
        if isinstance(self.peer, UnixConnection) and self.peer.closed:
            return False
        if not self.number:
            return True  # posted: no process waits for an answer
        if isinstance(items, str):
            status = b"refused" if isinstance(items, Refusal) else b"error"
            self.reply(self.peer, [self.number, status, items.encode()])
            return True
        if self.estimate is not None:
            self.frames(pickle.dumps(tuple(self.estimate)))
            return True
        frame_counts = pickle.dumps([(item.number, len(item.frames)) for item in items])
        self.frames(frame_counts, *(frame for item in items for frame in item.frames))
        return True


class LocalAnswer:
    """Answers a thread of this process."""

    __slots__ = ("abandoned", "items", "wakes")

    def __init__(self) -> None:
        self.items: list[Item] | str | None = None
        self.abandoned = False
        #: An item here tells the thread to check again.
        self.wakes: SimpleQueue[None] = SimpleQueue()

    def __call__(self, items: list[Item] | str) -> bool:
        if self.abandoned:
            return False
        self.items = items
        self.wakes.put(None)
        return True
