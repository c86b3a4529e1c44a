"""Channel: a named FIFO with keys between any processes of a run.

Each key has a home: the process that stores the key's queue. Metadata and data of less than 32 KiB go through the home.
Larger data goes directly from producer to consumer: through shared memory on one host, which the consumer maps without a
copy, and over TCP between hosts. `entrust` sends data of any size to the home, so that the item outlives its producer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
import queue
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rlhpc.runtime.comm.background import AsyncWork, in_background
from rlhpc.runtime.comm.context import Context, current, installed_context
from rlhpc.runtime.comm.device_memory import address
from rlhpc.runtime.comm.payload import Packed, copy_shared
from rlhpc.runtime.comm.queues import ChannelRefused, ConsumerLocation, Item, PutEstimate
from rlhpc.runtime.comm.service import DEFAULT_MAX_BYTES
from rlhpc.runtime.comm.zmq_sockets import choose
from rlhpc.runtime.errors import ChannelError, RegistryError
from rlhpc.runtime.former_names import former_keywords
from rlhpc.runtime.host import process_key
from rlhpc.runtime.trace_recorder import span

DEFAULT_KEY = "default_queue"
_CONFIRM_INTERVAL = 64
#: Seconds that a channel's home may take to open it.
_OPEN_TIMEOUT_S = 60.0


def _context() -> Context:
    """Returns this process's context; a process that belongs to no run becomes the driver of a new run."""
    context = installed_context()
    if context is None:
        from rlhpc.runtime.session import (
            current_context,
        )  # the driver's part of the runtime, which a rank does not need

        context = current_context()
    return context


class QueueFull(queue.Full, asyncio.QueueFull):
    """Error raised by `put_nowait` on a full channel."""


class QueueEmpty(queue.Empty, asyncio.QueueEmpty):
    """Error raised by `get_nowait` and `take_nowait` on an empty channel."""


class LeasedItem(NamedTuple):
    """Item that a consumer has leased and has not acknowledged yet.

    Attributes:
        item: The item.
        number: The item's number at the home of its key.
        key: Key of the item's queue.
    """

    item: Any
    number: int
    key: str = DEFAULT_KEY


class Channel:
    """Picklable handle of a channel, for the driver and all workers; `create` and `connect` return one."""

    def __init__(self, name: str, homes: list[dict[str, str]], maxsize: int) -> None:
        self.name, self._homes, self._maxsize = name, homes, maxsize
        self._num_posted = 0
        self._consumers: dict[str, ConsumerLocation] = {}  # each key's last consumer

    @classmethod
    def create(
        cls,
        name: str,
        maxsize: int = 0,
        distributed: bool = False,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        home: str | None = None,
        ranks: Sequence[int] | None = None,
    ) -> Channel:
        """Creates a channel; closes and replaces an existing channel of the same name.

        Args:
            name: Unique name in the run.
            maxsize: Maximum number of items per key before `put` blocks; 0 is unbounded.
            distributed: Distribute the keys over n processes: the ranks of group `home`, or by default all workers of the
                run. The home of a numeric key k is the process with index k modulo n; other keys are hashed. If the calling
                process is a key's home, puts and gets of this key need no socket. Without `distributed`, the calling process
                is the home of all keys.
            max_bytes: Maximum number of bytes at each home before `put` blocks.
            home: Group whose ranks are the homes of the keys; implies `distributed`.
            ranks: Ranks of group `home` over which the keys are distributed; by default all ranks of the group's launch.

        Raises:
            ChannelError: One of the processes over which the keys are distributed has ended.
        """
        context = _context()
        if distributed or home:
            groups = [home] if home else context.group_names()
            addresses = [
                (group, rank)
                for group in groups
                for rank in (range(context.group_size(group)) if ranks is None else ranks)
            ]
        else:
            addresses = []
        homes = [context.rank_record(*home_address)["data"] for home_address in addresses] or [context.service.endpoint]
        if context.service.endpoint in homes:
            context.service.open_channel(name, maxsize, max_bytes)
        arguments, peers = pickle.dumps((name, maxsize, max_bytes)), context.service.peers
        requests = {}  # sent to all homes before waiting for any: there may be thousands
        for home_address, record in zip(addresses, homes, strict=False):
            if record != context.service.endpoint and (endpoint := choose(record)) not in requests:
                wait_purpose = f"the home of channel {name!r}"
                requests[endpoint] = (
                    home_address,
                    peers.begin(endpoint, b"OPEN", [arguments], wait_purpose, _OPEN_TIMEOUT_S),
                )
        for home_address, request in requests.values():
            peers.reply_to(request, _OPEN_TIMEOUT_S, functools.partial(context.has_left, *home_address))
        context.registry.put("channels", name, {"homes": homes, "maxsize": maxsize})
        return cls(name, homes, maxsize)

    @classmethod
    def connect(cls, name: str, timeout: float = 60.0) -> Channel:
        """Attaches to a channel that another process creates.

        Raises:
            ChannelError: The channel did not exist after `timeout` seconds.
        """
        context = _context()
        try:
            record = context.registry.wait_for("channels", name, timeout, f"a Channel.create({name!r})", context.check)
        except RegistryError as error:
            raise ChannelError(str(error)) from None
        return cls(name, record["homes"], record["maxsize"])

    def __reduce__(self) -> tuple[Any, ...]:
        return Channel, (self.name, self._homes, self._maxsize)

    def _find_home(self, key: str) -> dict[str, str]:
        if len(self._homes) == 1:
            return self._homes[0]
        index = int(key) if key.isdigit() else zlib.crc32(key.encode())
        return self._homes[index % len(self._homes)]

    # -- put ------------------------------------------------------------------------------------------------------

    @former_keywords(gone="has_home_left")
    def put(
        self,
        item: Any,
        weight: float = 0,
        key: str = DEFAULT_KEY,
        async_op: bool = False,
        has_home_left: Callable[[], bool] = lambda: False,
    ) -> AsyncWork | None:
        """Appends `item`; blocks while the channel is full.

        With `async_op` the item is copied at once, and the returned `AsyncWork` completes when the channel has admitted the
        item. `has_home_left` returns whether the channel's home is known to have ended: if a process on another host ends, its
        connections may stay open.

        Raises:
            DeadlineExceeded: The channel stayed full until the session's wait deadline.
            ChannelError: The channel's home has ended.
        """
        context, key = current(), str(key)
        consumer, holders = self._consumers.get(key), [process_key(self._find_home(key))]
        with span(self.name, "send", key=key) as send_span:
            if consumer is None:
                payload = context.service.pack(item, holders=holders, about=self.name)
            else:
                lend = not async_op and consumer.host != context.host
                payload = context.service.pack(item, lend=lend, consumers=[consumer], holders=holders, about=self.name)
            send_span.add(bytes=payload.nbytes)
            if async_op:
                payload.copy_inline()
                return in_background(
                    f"put-{self.name}", lambda: self._put(context, payload, weight, key, True, confirm=True)
                )
            self._put(context, payload, weight, key, True, has_home_left=has_home_left)
        return None

    def entrust(self, item: Any, key: str = DEFAULT_KEY) -> None:
        """Appends `item` and returns once the channel's home has all data of the item, so that it outlives this process.

        For large items this is slower than `put`, which keeps the data on this host until the consumer fetches it.
        """
        context = current()
        with span(self.name, "send", key=key):
            payload = context.service.pack(item, inline=True, about=self.name)
            self._put(context, payload, 0, str(key), True, confirm=True)

    def put_nowait(self, item: Any, weight: float = 0, key: str = DEFAULT_KEY) -> None:
        """Appends `item` without waiting.

        Raises:
            QueueFull: The channel is full.
        """
        context = current()
        payload = context.service.pack(item, holders=[process_key(self._find_home(str(key)))], about=self.name)
        self._put(context, payload, weight, str(key), False)

    def _put(
        self,
        context: Context,
        payload: Packed,
        weight: float,
        key: str,
        wait_for_room: bool,
        confirm: bool = False,
        has_home_left: Callable[[], bool] = lambda: False,
    ) -> None:
        service, home = context.service, self._find_home(key)
        wait_purpose = f"room in channel {self.name!r}, key {key!r}"
        try:
            if home["ipc"] == service.endpoint["ipc"]:
                frames = copy_shared(payload.frames())

                estimate = PutEstimate("", "", False)

                def put_item(answer: Any) -> bool:
                    nonlocal estimate
                    channel_state = service.channel(self.name)
                    estimate = channel_state.estimate(key)
                    return channel_state.put(
                        key, frames, payload.nbytes, weight, payload.segment or "", answer if wait_for_room else None
                    )

                if wait_for_room:
                    with span(self.name, "wait", key=key):
                        service.wait_local(put_item, context.wait_deadline, wait_purpose)
                else:
                    with service.lock:
                        is_admitted = put_item(None)
                    if not is_admitted:
                        context.check()
                        raise QueueFull(wait_purpose)
                self._settle_sent(context, payload, key, estimate)
                return
            header = pickle.dumps((self.name, key, payload.nbytes, weight, payload.segment or "", wait_for_room))
            self._num_posted += 1
            if (
                wait_for_room
                and not confirm
                and self._maxsize == 0
                and payload.segment is None
                and self._num_posted % _CONFIRM_INTERVAL
            ):
                # Small items for an unbounded channel need not all be confirmed: the socket keeps their order, and every
                # 64th is confirmed, which bounds the number in flight when the byte limit is reached.
                frames = [header, *payload.frames()]
                service.peers.post(choose(home), b"PUT", frames, context.wait_deadline, wait_purpose, process_key(home))
                return
            request = service.peers.begin(
                choose(home), b"PUT", [header, *payload.frames()], wait_purpose, context.wait_deadline
            )
            with span(self.name, "wait", key=key):
                reply = service.peers.reply_to(request, context.wait_deadline, has_home_left)
            self._settle_sent(context, payload, key, PutEstimate(*pickle.loads(reply[0])))
        except BaseException as error:
            payload.discard()
            if isinstance(error, ChannelRefused):
                context.check()
                raise QueueFull(wait_purpose) from None
            raise

    def _settle_sent(self, context: Context, payload: Packed, key: str, estimate: PutEstimate) -> None:
        if estimate.host:
            self._consumers[key] = estimate.consumer
        payload.finish_reads(estimate.waiting, context.check)

    # -- get ------------------------------------------------------------------------------------------------------

    def get(self, key: str = DEFAULT_KEY, async_op: bool = False, timeout: float | None = None) -> Any:
        """Removes and returns the oldest item; blocks while the channel is empty.

        Raises:
            DeadlineExceeded: No item arrived within `timeout` seconds (default: the session's wait deadline).
        """
        context, key = current(), str(key)
        if async_op:
            return in_background(f"get-{self.name}-{key}", lambda: self._get(context, key, None, True, timeout)[0])
        return self._get(context, key, None, True, timeout)[0]

    def get_nowait(self, key: str = DEFAULT_KEY) -> Any:
        """Removes and returns the oldest item without waiting.

        Raises:
            QueueEmpty: The channel is empty.
        """
        return self._get(current(), str(key), None, False, None)[0]

    def take_nowait(self, key: str = DEFAULT_KEY) -> LeasedItem:
        """Leases the oldest item until this process acknowledges the item with `done`. If the process ends before that, the
        item returns to the front of its queue.

        The process that stores the channel (its home) must be another one than this. If the driver stores the channel, it
        notices the end of ranks on any host.

        Raises:
            QueueEmpty: The channel is empty.
        """
        context = current()
        consumer, timeout_s = ConsumerLocation(context.host, address()), context.wait_deadline
        ((item, item_id),) = self._fetch(context, str(key), None, False, timeout_s, consumer, keep_leases=True)
        return LeasedItem(item, item_id, str(key))

    @former_keywords(taken="lease")
    def done(self, lease: LeasedItem) -> None:
        """Acknowledges a leased item, so that the item is not requeued if this process ends."""
        home = choose(self._find_home(lease.key))
        current().service.peers.post(home, b"ACK", [pickle.dumps((self.name, [lease.number]))])

    def get_batch(self, target_weight: float, key: str = DEFAULT_KEY, async_op: bool = False) -> Any:
        """Removes and returns the oldest items whose weights add up to at most `target_weight`, but at least one item.

        Waits until the queued items reach `target_weight` or the queue is full. With `async_op` returns an `AsyncWork` at
        once.
        """
        context, key, target = current(), str(key), float(target_weight)
        if async_op:
            return in_background(f"get-{self.name}-{key}", lambda: self._get(context, key, target, True, None))
        return self._get(context, key, target, True, None)

    def _get(
        self, context: Context, key: str, target: float | None, wait_for_items: bool, timeout: float | None
    ) -> list[Any]:
        service, home = context.service, self._find_home(key)
        timeout = context.wait_deadline if timeout is None else timeout
        consumer = ConsumerLocation(context.host, address())
        service.device_channel.free_read_buffers()
        if home["ipc"] == service.endpoint["ipc"]:
            wait_purpose = f"an item in channel {self.name!r}, key {key!r}"

            def get_items(answer: Any) -> bool:
                channel_state = service.channel(self.name)
                channel_state.record_consumer(key, consumer)
                return bool(wait_for_items or channel_state.count(key)) and channel_state.get(key, (), target, answer)

            try:
                with span(self.name, "wait", key=key) if wait_for_items else contextlib.nullcontext():
                    items = service.wait_local(get_items, timeout, wait_purpose)
            except queue.Empty:
                context.check()  # a loop that polls also waits for another process
                raise QueueEmpty(wait_purpose) from None
            with span(self.name, "receive", key=key):
                return [service.unpack(item.frames) for item in items]
        return [item for item, _ in self._fetch(context, key, target, wait_for_items, timeout, consumer)]

    def _fetch(
        self,
        context: Context,
        key: str,
        target: float | None,
        wait: bool,
        timeout: float,
        consumer: ConsumerLocation,
        keep_leases: bool = False,
    ) -> list[tuple[Any, int]]:
        """Returns items with their numbers from a home in another process; acknowledges them unless `keep_leases`."""
        service, home = context.service, self._find_home(key)
        wait_purpose = f"an item in channel {self.name!r}, key {key!r}"
        header = pickle.dumps((self.name, key, target, wait, tuple(consumer), process_key(service.endpoint)))
        try:
            with span(self.name, "wait", key=key) if wait else contextlib.nullcontext():
                reply = service.peers.request(choose(home), b"GET", [header], timeout, wait_purpose)
        except ChannelRefused:
            context.check()
            raise QueueEmpty(wait_purpose) from None
        leased_items, frame_offset = list[tuple[Any, int]](), 1
        releases: list[Callable[[], None]] = []
        with span(self.name, "receive", key=key):
            for item_id, num_frames in pickle.loads(reply[0]):
                leased_items.append(
                    (service.unpack(reply[frame_offset : frame_offset + num_frames], releases=releases), item_id)
                )
                frame_offset += num_frames
        if not keep_leases:
            item_ids = [item_id for _, item_id in leased_items]
            service.peers.post(choose(home), b"ACK", [pickle.dumps((self.name, item_ids))])
        for release in releases:
            release()
        return leased_items

    # -- inspection -----------------------------------------------------------------------------------------------

    def _count_and_fullness(self, key: str) -> tuple[int, bool]:
        context, home = current(), self._find_home(key)
        context.check()
        if home["ipc"] == context.service.endpoint["ipc"]:
            with context.service.lock:
                channel_state = context.service.channel(self.name)
                return channel_state.count(key), channel_state.full(key)
        request = pickle.dumps((self.name, key))
        reply = context.service.peers.request(
            choose(home), b"STAT", [request], 60, f"the home of channel {self.name!r}"
        )
        count_and_full: tuple[int, bool] = pickle.loads(reply[0])
        return count_and_full

    def qsize(self, key: str = DEFAULT_KEY) -> int:
        """Returns the number of items queued under `key`."""
        return self._count_and_fullness(str(key))[0]

    def empty(self, key: str = DEFAULT_KEY) -> bool:
        return self._count_and_fullness(str(key))[0] == 0

    def full(self, key: str = DEFAULT_KEY) -> bool:
        return self._count_and_fullness(str(key))[1]

    def __repr__(self) -> str:
        return f"Channel({self.name!r})"


__all__ = ["AsyncWork", "Channel", "Item", "LeasedItem", "QueueEmpty", "QueueFull"]
