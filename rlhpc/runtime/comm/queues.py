"""State of a channel at its home process, and of a worker's inbox: plain data structures without sockets.

Callers of these methods hold the service's lock. A waiter is a callable that is called once with the answer. It returns False
if the waiting process has ended; the items then return to the front of the queue for the next waiter.
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
#: Maximum number of keys per channel whose last consumer is remembered.
_MAX_CONSUMERS = 4096


class Item(NamedTuple):
    """Queued object: its frames, its size for back pressure, its weight for batching, and the path of its segment, if any."""

    number: int
    frames: list[Any]
    nbytes: int
    weight: float
    segment: str


class ConsumerLocation(NamedTuple):
    """Location of a key's last consumer.

    Attributes:
        host: Host id; empty if there has been no consumer.
        device: Address of the accelerator that the consumer computes on; empty if it uses no accelerator.
    """

    host: str = ""
    device: str = ""


class PutEstimate(NamedTuple):
    """Expected consumer of an item that a producer puts.

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
    """Answer to a call that does not wait: the queue is full or empty."""

    __slots__ = ()


class ChannelRefused(ChannelError):
    """Error raised if a channel's home process refuses a put or get that does not wait (`Refusal`)."""


class TooEarly(ChannelError):
    """Error: a request was made too early and may be repeated later."""


Answer = Callable[[list[Item] | str], bool]


class KeyQueue:
    """FIFO of one key, with its waiting producers (`putters`) and consumers (`getters`)."""

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.getters: deque[tuple[tuple[str, ...], float | None, Answer]] = deque()
        self.putters: deque[tuple[Item, Answer]] = deque()


class ChannelState:
    """Queues of a channel by key, with a limit on the items per key and on the bytes of the channel.

    Args:
        maxsize: Maximum number of items per key; 0 is unbounded.
        max_bytes: Maximum number of bytes of all keys together; an empty queue always admits one item.
    """

    def __init__(self, maxsize: int, max_bytes: int) -> None:
        self.maxsize, self.max_bytes = maxsize, max_bytes
        self.nbytes = 0
        #: Queues with items or waiters. Idle queues are removed, because a caller may use most keys only once (`str(step)`).
        self.queues = collections.defaultdict[str, KeyQueue](KeyQueue)
        self._consumers: collections.OrderedDict[str, ConsumerLocation] = collections.OrderedDict()
        #: By item number: the item's key, the names of its consumer (process, connection, request), and the item.
        self.unacknowledged_items: dict[int, tuple[str, tuple[str, ...], Item]] = {}

    def count(self, key: str) -> int:
        """Returns the number of items queued under a key."""
        queue = self.queues.get(key)
        return 0 if queue is None else len(queue.items)

    def full(self, key: str, nbytes: int = 0) -> bool:
        """Returns whether a put of `nbytes` bytes under a key has to wait."""
        num_items = self.count(key)
        if self.maxsize and num_items >= self.maxsize:
            return True
        return bool(num_items) and self.nbytes + nbytes > self.max_bytes

    def record_consumer(self, key: str, consumer: ConsumerLocation) -> None:
        """Records the location of a key's last consumer."""
        self._consumers[key] = consumer
        self._consumers.move_to_end(key)
        if len(self._consumers) > _MAX_CONSUMERS:
            self._consumers.popitem(last=False)

    def _drop_idle(self, *queue_keys: str) -> None:
        for key in queue_keys:
            queue = self.queues.get(key)
            if queue is not None and not (queue.items or queue.getters or queue.putters):
                del self.queues[key]

    def estimate(self, key: str) -> PutEstimate:
        """Returns the expected consumer of the next item.

        A consumer that waits for a batch does not count as waiting, because it may not take the item at once.
        """
        queue = self.queues.get(key)
        is_consumer_waiting = queue is not None and bool(queue.getters) and queue.getters[0][1] is None
        return PutEstimate(*self._consumers.get(key, ConsumerLocation()), is_consumer_waiting)

    def put(self, key: str, frames: list[Any], nbytes: int, weight: float, segment: str, answer: Answer | None) -> bool:
        """Queues an item; if the queue is full, queues the producer, whose `answer` is called once the item is admitted.

        Returns:
            False if the queue is full and there is no `answer`.
        """
        queue, item = self.queues[key], Item(next(_ids), frames, nbytes, weight, segment)
        # A waiting consumer takes the item at once, so a full queue cannot have one.
        if queue.putters or self.full(key, nbytes):
            if answer is None:
                return False  # the queue has items or a waiting producer, so it need not be dropped
            queue.putters.append((item, answer))
            return True
        self._admit(queue, item)
        if answer:
            answer([])
        self._serve(key, queue)
        return True

    def get(self, key: str, owners: tuple[str, ...], target: float | None, answer: Answer) -> bool:
        """Delivers one item or a batch, at once or when it is available; returns True.

        Args:
            key: Key of the queue.
            owners: Names under which `consumer_died` may report the consumer; empty if the items need no acknowledgement.
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
        """Removes and returns the oldest items for one consumer; None if the consumer must wait.

        A batch ends before the item that would exceed `target`.
        """
        if not queue.items:
            return None
        if target is None:
            return [queue.items.popleft()]
        batch_weight, num_items = 0.0, 0
        for item in queue.items:
            if num_items and batch_weight + item.weight > target:
                break
            batch_weight, num_items = batch_weight + item.weight, num_items + 1
            if batch_weight >= target:
                break
        else:
            # All queued items together are below the target: wait for more, unless the queue is full.
            if not (queue.putters or (self.maxsize and len(queue.items) >= self.maxsize)):
                return None
        return [queue.items.popleft() for _ in range(num_items)]

    def _serve(self, key: str, queue: KeyQueue) -> None:
        self._match(key, queue)
        self._drop_idle(key)

    def _match(self, key: str, queue: KeyQueue) -> None:
        while True:
            while queue.putters and not self.full(key, queue.putters[0][0].nbytes):
                waiting_item, answer = queue.putters.popleft()
                self._admit(queue, waiting_item)
                answer([])
            if not queue.getters:
                return
            owners, target, answer = queue.getters[0]
            batch_items = self._take(queue, target)
            if batch_items is None:
                return
            queue.getters.popleft()
            for waiting_item in batch_items:
                self.nbytes -= waiting_item.nbytes
                if owners:
                    self.unacknowledged_items[waiting_item.number] = (key, owners, waiting_item)
            if not answer(batch_items):
                self._put_back(key, batch_items)

    def _put_back(self, key: str, items: Iterable[Item]) -> None:
        queue = self.queues[key]
        for item in reversed(list(items)):
            self.unacknowledged_items.pop(item.number, None)
            queue.items.appendleft(item)
            self.nbytes += item.nbytes

    def acknowledge(self, item_numbers: Iterable[int]) -> None:
        """Marks delivered items as received, so that a consumer's end does not requeue them."""
        for item_id in item_numbers:
            self.unacknowledged_items.pop(item_id, None)

    def consumer_died(self, consumer: str) -> int:
        """Returns unacknowledged items of a consumer to the front of their queues, and removes the consumer's waiters.

        Args:
            consumer: Name of the consumer's process, connection or request.

        Returns:
            Number of requeued items.
        """
        requeued_items: dict[str, list[Item]] = {}
        for key, owner, item in list(self.unacknowledged_items.values()):
            if consumer in owner:
                requeued_items.setdefault(key, []).append(item)
        for queue in self.queues.values():
            queue.getters = deque(g for g in queue.getters if consumer not in g[0])
        for key, items in requeued_items.items():
            self._put_back(key, sorted(items, key=lambda item: item.number))
            self._serve(key, self.queues[key])
        self._drop_idle(*self.queues)
        return sum(map(len, requeued_items.values()))

    def cancel(self, matches: Callable[[Answer], bool]) -> list[Item]:
        """Removes waiters for which `matches` returns True; returns the items of cancelled puts."""
        dropped_items = []
        for queue in self.queues.values():
            queue.getters = deque(g for g in queue.getters if not matches(g[2]))
            dropped_items += [waiting_item for waiting_item, waiter in queue.putters if matches(waiter)]
            queue.putters = deque(putter for putter in queue.putters if not matches(putter[1]))
        self._drop_idle(*self.queues)
        return dropped_items

    def close(self, reason: str) -> None:
        """Answers all waiters with the reason for closing the channel, and removes them."""
        for queue in self.queues.values():
            pending_answers = [getter[2] for getter in queue.getters] + [putter[1] for putter in queue.putters]
            queue.getters.clear()
            queue.putters.clear()
            for answer in pending_answers:
                answer(reason)


#: Function (peer, frames) that sends frames; the peer is a connection or a ZeroMQ identity.
Reply = Callable[[UnixConnection | bytes, list[Any]], None]


class RemoteAnswer:
    """Waiter that answers a request received over a socket.

    Attributes:
        number: The request's id; empty if its sender expects no reply.
        estimate: Reply to a put, if the request is one.
    """

    __slots__ = ("estimate", "number", "peer", "reply")

    def __init__(self, reply: Reply, peer: UnixConnection | bytes, number: bytes) -> None:
        self.reply, self.peer, self.number = reply, peer, number
        self.estimate: PutEstimate | None = None

    @property
    def connection_name(self) -> str:
        """Name of the connection. When the connection closes, its unacknowledged items return to their queues."""
        return self.peer.name if isinstance(self.peer, UnixConnection) else self.peer.hex()

    @property
    def request_name(self) -> str:
        """Name of the request. If the request is cancelled, the items of its reply return to their queue."""
        return f"{self.connection_name} {self.number.hex()}"

    def frames(self, *frames: Any) -> None:
        """Sends the reply with status `ok`."""
        self.reply(self.peer, [self.number, b"ok", *frames])

    def __call__(self, items: list[Item] | str) -> bool:
        if isinstance(self.peer, UnixConnection) and self.peer.closed:
            return False
        if not self.number:
            return True  # the sender expects no reply
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
    """Waiter that answers a thread of this process.

    Attributes:
        items: The answer: items, or the reason for closing the channel; None until the answer arrives.
        abandoned: Whether the thread has given up.
    """

    __slots__ = ("abandoned", "items", "wakes")

    def __init__(self) -> None:
        self.items: list[Item] | str | None = None
        self.abandoned = False
        #: Each element wakes the thread, which then checks `items`.
        self.wakes: SimpleQueue[None] = SimpleQueue()

    def __call__(self, items: list[Item] | str) -> bool:
        if self.abandoned:
            return False
        self.items = items
        self.wakes.put(None)
        return True
