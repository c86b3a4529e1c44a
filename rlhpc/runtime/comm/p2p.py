"""Point-to-point messages between ranks of any groups, and broadcasts to several ranks, through the receivers' inboxes."""

from __future__ import annotations

import contextlib
import functools
import pickle
import secrets
import time
from collections.abc import Callable
from typing import Any

from rlhpc.runtime.comm.background import AsyncWork, in_background
from rlhpc.runtime.comm.context import Context, current
from rlhpc.runtime.comm.device_memory import address
from rlhpc.runtime.comm.payload import HostReader, Packed, copy_shared, release_unread
from rlhpc.runtime.comm.queues import ChannelState, ConsumerLocation, Item, PutEstimate
from rlhpc.runtime.comm.service import DEFAULT_MAX_BYTES, INBOX, Service
from rlhpc.runtime.comm.shared_memory import SegmentGone, discard
from rlhpc.runtime.comm.zmq_sockets import Pending, choose
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded, RlhpcError
from rlhpc.runtime.host import process_key
from rlhpc.runtime.trace_recorder import record, recorder, span

#: Seconds that each other receiver gets to confirm a message after the message has failed to reach one receiver.
_AFTER_FAILURE_S = 1.0
#: Seconds between two checks of a receiver whether to give up.
_CHECK_S = 0.2
#: Seconds that the driver may take to notice that an unreachable rank has ended.
_DEPARTURE_NOTICE_S = 5.0


def _make_inbox_key(tag: str, group: str, rank: int) -> str:
    return f"{tag}/{group}/{rank}"


class _Transfer:
    """Transfer of a message to a rank's inbox. The constructor sends the message; `wait` raises an error if that failed.

    Args:
        context: Context of this process, the sender.
        target: Group and rank of the receiver.
        payload: The message.
        key: Key of the message's queue in the inbox.
        reader: Number of the reader.
        host_reader: Index of the receiving process, if several processes of another host share a copy.
    """

    def __init__(
        self,
        context: Context,
        target: tuple[str, int],
        payload: Packed,
        key: str,
        reader: int = 0,
        host_reader: HostReader | None = None,
    ) -> None:
        self._context, self._target = context, target
        #: The request to the receiver's service; None if the inbox belongs to this process.
        self._pending_put: Pending | None = None
        self._failure: ChannelError | None = None
        try:
            self._begin(payload, key, payload.frames(reader, host_reader))
        except ChannelError as error:
            self._failure = error

    def _begin(self, payload: Packed, key: str, frames: list[Any]) -> None:
        context, service = self._context, self._context.service
        wait_purpose = "{}-{} to take a message from {}".format(*self._target, context.name)
        receiver = context.rank_record(*self._target)["data"]
        service.device_channel.free_read_buffers()
        if receiver["ipc"] == service.endpoint["ipc"]:
            frames = copy_shared(frames)
            service.wait_local(
                lambda answer: service.channel(INBOX).put(
                    key, frames, payload.nbytes, 0, payload.segment or "", answer
                ),
                context.wait_deadline,
                wait_purpose,
            )
        else:
            frames = [pickle.dumps((INBOX, key, payload.nbytes, 0, payload.segment or "", True)), *frames]
            self._pending_put = service.peers.begin(
                choose(receiver), b"PUT", frames, wait_purpose, context.wait_deadline
            )

    def wait(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds until the inbox has the message; returns whether the rank was waiting for it."""
        if self._failure is not None:
            raise self._failure
        if self._pending_put is None:
            return False
        service, has_left = self._context.service, functools.partial(self._context.has_left, *self._target)
        estimate = PutEstimate(*pickle.loads(service.peers.reply_to(self._pending_put, timeout, has_left)[0]))
        if estimate.host:
            service.device_channel.consumers[self._target] = estimate.consumer
        return estimate.waiting

    def wait_unless_left(self, timeout_s: float) -> bool | None:
        """Waits like `wait`; returns None if the rank could not be reached and its group continues without this rank."""
        try:
            return self.wait(timeout_s)
        except ChannelError:
            if not self._context.has_left(*self._target, _DEPARTURE_NOTICE_S):
                raise
            return None


def _find_consumer(context: Context, group: str, rank: int) -> ConsumerLocation:
    """Returns the last known location of a rank; an empty one if the rank was restarted on another host."""
    consumer = context.service.device_channel.consumers.get((group, rank), ConsumerLocation())
    return consumer if consumer.host == context.rank_record(group, rank)["host"] else ConsumerLocation()


def send(
    obj: Any, group: str, rank: int, dst_group: str, dst_rank: int, *, tag: str = "o", async_op: bool = False
) -> AsyncWork | None:
    """Sends an object to one rank; `Worker.send` describes the arguments."""
    context = current()
    is_remote = context.rank_record(dst_group, dst_rank)["host"] != context.host
    consumer = _find_consumer(context, dst_group, dst_rank)
    holders = [process_key(context.rank_record(dst_group, dst_rank)["data"])]
    name = f"to {dst_group}-{dst_rank}"
    started_ns = time.monotonic_ns()
    lend = is_remote and not async_op
    payload = context.service.pack(obj, lend=lend, consumers=[consumer], holders=holders, about=name)
    if async_op:
        payload.copy_inline()

    def deliver() -> None:
        try:
            transfer = _Transfer(context, (dst_group, dst_rank), payload, _make_inbox_key(tag, group, rank))
            payload.finish_reads(transfer.wait(context.wait_deadline), context.check)
        except BaseException:
            payload.discard()
            raise
        finally:
            if recorder.is_on:
                record(name, "send", started_ns, time.monotonic_ns(), {"bytes": payload.nbytes})

    if async_op:
        return in_background(f"send-{dst_group}-{dst_rank}", deliver)
    deliver()
    return None


def _receive(tag: str, src_group: str, src_rank: int, borrow: bool = False) -> Any:
    context = current()
    item = _wait_for_next_item(tag, src_group, src_rank, context.wait_deadline)
    with span(f"from {src_group}-{src_rank}", "receive", bytes=item.nbytes):
        return context.service.unpack(item.frames, borrow=borrow)


def _wait_for_next_item(tag: str, src_group: str, src_rank: int, timeout_s: float) -> Item:
    service, key = current().service, _make_inbox_key(tag, src_group, src_rank)
    consumer = ConsumerLocation(current().host, address())
    service.device_channel.free_read_buffers()

    def get_item(answer: Any) -> bool:
        inbox_state = service.channel(INBOX)
        inbox_state.record_consumer(key, consumer)
        return inbox_state.get(key, (), None, answer)

    with span(f"from {src_group}-{src_rank}", "wait"):
        return service.wait_local(get_item, timeout_s, f"a message from {src_group}-{src_rank}")[0]


def recv(src_group: str, src_rank: int, *, tag: str = "o") -> Any:
    """Receives the next object from one rank; `Worker.recv` describes the arguments."""
    return _receive(tag, src_group, src_rank)


def post(obj: Any, key: str, dst_group: str, dst_rank: int) -> bool:
    """Puts an object, with all its data, into a rank's inbox; `poll` with the same key returns the object there.

    Returns:
        False if the rank has left and its group continues without this rank.
    """
    context = current()
    transfer = _Transfer(context, (dst_group, dst_rank), context.service.pack(obj, inline=True), key)
    return transfer.wait_unless_left(context.wait_deadline) is not None


def await_post(key: str, timeout_s: float, wait_purpose: str) -> Any:
    """Returns the next object that another rank posts to this rank under `key`; waits for the object.

    Raises:
        DeadlineExceeded: No object arrived within `timeout_s` seconds; the message has `wait_purpose`, the expected sender.
    """
    service = current().service
    inbox_items = service.wait_local(
        lambda answer: bool(service.channel(INBOX).get(key, (), None, answer)),
        timeout_s,
        f"a message from {wait_purpose}",
    )
    return service.unpack(inbox_items[0].frames)


def poll(key: str) -> Any:
    """Returns the next object that was posted to this rank under `key`, without waiting.

    Raises:
        queue.Empty: No object has arrived under `key`.
    """
    service = current().service
    current().check()

    def get_item(answer: Any) -> bool:
        inbox_state = service.channel(INBOX)
        return bool(inbox_state.count(key)) and inbox_state.get(key, (), None, answer)

    return service.unpack(service.wait_local(get_item, 0.0, key)[0].frames)


def copy_into(tensor: Any, received_tensor: Any) -> None:
    """Copies a received tensor into `tensor`.

    Raises:
        ValueError: Shape or dtype differ.
    """
    if tuple(tensor.shape) != tuple(received_tensor.shape) or tensor.dtype != received_tensor.dtype:
        raise ValueError(
            f"recv_tensor was given {tuple(tensor.shape)} {tensor.dtype}, "
            f"but {tuple(received_tensor.shape)} {received_tensor.dtype} was sent"
        )
    tensor.detach().copy_(received_tensor)


def broadcast(
    obj: Any,
    group: str,
    rank: int,
    groups: list[tuple[str, list[int]]],
    src: tuple[str, int],
    *,
    read_only: bool = False,
) -> Any:
    """Sends one object to several ranks, or receives it; `Worker.broadcast` describes the arguments."""
    if (group, rank) != tuple(src):
        return _receive("b", src[0], src[1], borrow=read_only)
    with span("broadcast", "send"):
        begin_broadcast(obj, group, rank, groups)()
    return obj


def follow_broadcast(src: tuple[str, int], check_alive: Callable[[], None]) -> Any:
    """Receives the next broadcast of a rank, with a check that can end the wait.

    Args:
        src: Group and rank of the sender.
        check_alive: Called repeatedly; raises an exception to end the wait. A later call still receives the broadcast.

    Raises:
        DeadlineExceeded: No broadcast arrived.
    """
    deadline = time.monotonic() + current().wait_deadline
    while True:
        check_alive()
        try:
            item = _wait_for_next_item("b", *src, min(_CHECK_S, max(0.0, deadline - time.monotonic())))
        except DeadlineExceeded:
            if time.monotonic() >= deadline:
                raise
        else:
            return current().service.unpack(item.frames)


def begin_broadcast(
    obj: Any, group: str, rank: int, groups: list[tuple[str, list[int]]], *, segment: str | None = None
) -> Callable[[], None]:
    """Starts sending to all receivers of a broadcast.

    Args:
        obj: The object to send; must not change before all receivers have received it.
        group: Worker group of the sender.
        rank: Rank of the sender.
        groups: Groups and ranks that receive; the sender is skipped.
        segment: Path of a segment to which the object refers. The k-th receiver is the segment's reader k. The segment is
            freed for receivers that the object does not reach.

    Returns:
        A function that waits until the object has reached all receivers; the same thread must call this function.
    """
    context = current()
    targets = [
        target for name, ranks in groups for target_rank in ranks if (target := (name, target_rank)) != (group, rank)
    ]
    readers = readers_of(context, targets)
    if not readers:
        return lambda: None
    is_remote = all(context.rank_record(*sharers[0])["host"] != context.host for sharers in readers)
    consumers = [_find_consumer(context, *target) for target in targets]
    # Ranks of another host that share a copy count as one reader, so the end of one rank must not free the data.
    holders = [
        process_key(context.rank_record(*on_host[0])["data"]) if len(on_host) == 1 else "" for on_host in readers
    ]
    payload = context.service.pack(
        obj, len(readers), lend=is_remote, consumers=consumers, holders=holders, about="broadcast"
    )
    key = _make_inbox_key("b", group, rank)
    broadcast_transfers: list[_Transfer] = []
    num_started = 0

    def finish() -> None:
        reached_targets: set[int] = set()
        try:
            payload.finish_reads(_await_all(broadcast_transfers, context.wait_deadline, reached_targets), context.check)
        finally:
            payload.discard(num_started)
            for target_index in range(len(targets) if segment else 0):
                if target_index not in reached_targets:
                    discard(str(segment), target_index)

    try:
        # Send to all receivers before waiting for any: waking them one after the other would take twice as long.
        for reader, sharers in enumerate(readers):
            name = secrets.token_hex(8) if len(sharers) > 1 else ""
            sharer_keys = tuple(process_key(context.rank_record(*target)["data"]) for target in sharers) if name else ()
            for index, target in enumerate(sharers):
                host_reader = HostReader(name, index, len(sharers), sharer_keys) if name else None
                broadcast_transfers.append(_Transfer(context, target, payload, key, reader, host_reader))
                num_started = reader + 1
    except BaseException:
        with contextlib.suppress(RlhpcError):  # raise the first failure
            finish()
        raise
    return finish


def _await_all(broadcast_transfers: list[_Transfer], timeout_s: float, reached_targets: set[int]) -> bool:
    """Waits for transfers, and adds the index of each completed transfer to `reached_targets`. Raises the first failure.

    Returns:
        Whether all reached receivers were already waiting for the message.
    """
    all_waiting, failure = True, None
    for target_index, transfer in enumerate(broadcast_transfers):
        try:
            was_waiting = transfer.wait_unless_left(timeout_s if failure is None else _AFTER_FAILURE_S)
            if was_waiting is not None:
                all_waiting = was_waiting and all_waiting
                reached_targets.add(target_index)
        except BaseException as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return all_waiting


def readers_of(context: Context, targets: list[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """Returns the readers of a segment of this process, each as a list of (group, rank).

    All receivers on another host together are one reader; each receiver on this host is a separate reader. The readers on
    other hosts come first.
    """
    local_readers, by_host = [], dict[str, list[tuple[str, int]]]()
    for target in targets:
        host = context.rank_record(*target)["host"]
        if host == context.host:
            local_readers.append([target])
        else:
            by_host.setdefault(host, []).append(target)
    return [*by_host.values(), *local_readers]


def clear_inbox(service: Service) -> None:
    """Drops the unread messages in this process's inbox."""
    with service.lock:
        inbox_state = service.channels[INBOX]
        service.channels[INBOX] = ChannelState(0, DEFAULT_MAX_BYTES)
    for unread_item in [unread_item for item_queue in inbox_state.queues.values() for unread_item in item_queue.items]:
        # Unpacking frees the payload for this reader; its sender and the other readers may still be alive.
        release_unread(unread_item.frames)
        with contextlib.suppress(RlhpcError, SegmentGone, OSError):
            service.unpack(unread_item.frames, borrow=True)
