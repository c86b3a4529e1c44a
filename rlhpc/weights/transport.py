"""Weight sync by broadcast: the sender's tensors are copied once per host, and all receivers on the host map the copy.

Announcements are sent to every receiver's inbox. Receivers map the chunks, or fetch them from the sender's host.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from rlhpc.runtime.comm import p2p
from rlhpc.runtime.comm.context import Context, current
from rlhpc.runtime.comm.device_memory import DeviceMessage
from rlhpc.runtime.comm.payload import ForwardingProcess, HostReader, Origin
from rlhpc.runtime.comm.shared_memory import HEADER, SegmentGone, discard, map_private
from rlhpc.runtime.errors import RendezvousTimeout, RlhpcError
from rlhpc.runtime.trace_recorder import traced
from rlhpc.weights.base import NamedTensors, Transfer, Update
from rlhpc.weights.device_sharing import CHUNK_BYTES
from rlhpc.weights.process_group import GroupLost
from rlhpc.weights.receiver import ReceivedChunk, Subscriber, entries_of, note_announcement
from rlhpc.weights.sender import MAX_UNREAD_CHUNKS, Announcement, ChunkWindow, Publisher, WeightChunk
from rlhpc.weights.transport_select import AUTO, GLOO, HOST, IPC, NCCL, Bucket, TransportReceiver, TransportSender

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker


T = TypeVar("T")


class ConsumerClosed(Exception):
    """Exception that ends the prefetching thread when the consumer has stopped iterating."""


class Prefetcher:
    """Prefetching iterator: runs an iterator in a thread, a bounded number of items ahead. It runs one iterator at a time.

    Args:
        depth: Number of items to prefetch, in addition to the one in use.
        on_end: Function called in the thread when it ends.
    """

    def __init__(self, depth: int = 1, on_end: Callable[[], None] = lambda: None) -> None:
        self._depth, self._on_end = depth, on_end
        self._stopping = threading.Event()

    def check(self) -> None:
        """Raises an error if the consumer has stopped; the prefetched iterator calls it while it waits.

        Raises:
            ConsumerClosed: The consumer has stopped, and waits for the thread.
        """
        if self._stopping.is_set():
            raise ConsumerClosed

    def __call__(self, items: Iterator[T]) -> Iterator[T]:
        """Yields the items of an iterator that runs in a thread, and raises its errors. Closing the generator ends the
        thread after its current item."""
        self._stopping.clear()
        slots, prefetch_queue = (
            threading.Semaphore(self._depth + 1),
            queue.SimpleQueue[tuple[Any, BaseException | None]](),
        )

        def run() -> None:
            try:
                while slots.acquire():
                    self.check()
                    prefetch_queue.put((next(items), None))
            except BaseException as error:
                prefetch_queue.put((None, error))
            finally:
                self._on_end()

        thread = threading.Thread(target=run, name="rlhpc-ahead", daemon=True)
        thread.start()
        try:
            while True:
                item, error = prefetch_queue.get()
                if isinstance(error, StopIteration):
                    return
                if error is not None:
                    raise error
                yield item
                del item  # release its memory before the thread builds another item
                slots.release()
        finally:
            self._stopping.set()
            slots.release()
            thread.join()


#: Number of streams whose slots a receiver remembers: the current one, and some of earlier senders.
_MAX_STREAMS = 8
#: Number of hosts that a host forwards a chunk to.
_BRANCHES = 2


class ReaderSlot(NamedTuple):
    """Receiver's position among the readers of a chunk.

    Attributes:
        reader: Number of the receiver among all readers.
        host_index, num_host_readers: Number of the receiver among the receivers on its host, and their count. On a host other
            than the sender's, the first receiver fetches for all.
        upstream: Address of the host to fetch from; empty to fetch from the sender.
        num_downstream: Number of hosts that this receiver's host forwards data to.
    """

    reader: int
    host_index: int
    num_host_readers: int
    upstream: str = ""
    num_downstream: int = 0


class WeightSender:
    """Sender of versions; every receiver reads each version with a `WeightReceiver`.

    Args:
        worker: The sending worker.
        receivers: Groups and ranks that receive.
        delta: `rollout.weight_delta`.
        chunk_bytes: Size of a chunk in bytes.
        transport: Name of a transport in `transport_select`.

    Attributes:
        transport: Sender side of the transport.
    """

    def __init__(
        self,
        worker: Worker,
        receivers: list[tuple[str, list[int]]],
        delta: str,
        chunk_bytes: int = CHUNK_BYTES,
        transport: str = AUTO,
    ) -> None:
        self._src, self._receivers, self._delta = (worker.group_name, worker.rank), receivers, delta
        self._chunk_bytes = chunk_bytes
        self._publisher: Publisher | None = None
        self.transport = TransportSender(self._src, transport)
        #: Slots that were last sent to the receivers, with their stream, membership and recovery.
        self._sent_slots: tuple[str, dict[tuple[str, int], ReaderSlot], int, int] | None = None

    def forget(self) -> None:
        """Makes the next version complete; call it after frozen weights have been replaced."""
        self.transport.forget()
        if self._publisher is not None:
            self._publisher.forget()

    @traced("send weights", "weights")
    def send(
        self,
        version: int,
        tensors: NamedTensors,
        *,
        frozen: Container[str] = (),
        requires_readers: bool = False,
    ) -> None:
        """Sends one version.

        Args:
            version: Version of the weights.
            tensors: Names and tensors; each tensor is released before the next chunk begins.
            frozen: Names of tensors that are not trained.
            requires_readers: Whether the receivers read the version while it is sent, so that the sender may wait for them.
        """
        context = current()
        receivers = [(group, rank) for group, ranks in self._receivers for rank in ranks if (group, rank) != self._src]
        if self._publisher is None:
            self._publisher = Publisher(
                context.service.pool, len(receivers), self._delta, self._chunk_bytes, transport=self.transport
            )
        slots, depth = _assign_slots(context, receivers)
        window = _build_window(context, [*slots], MAX_UNREAD_CHUNKS + depth)
        if requires_readers:
            window.start_all()
        self.transport.begin_version([*slots], window.all_started)
        pending_waits: list[Callable[[], None]] = []  # wait until all receivers have the announcement
        unannounced_path: str | None = None  # path of a chunk that is written but not announced yet
        try:
            for announcement in self._with_retries(self._publisher.publish(version, tensors, frozen, window)):
                chunk = announcement.chunk
                unannounced_path = chunk.path or None if chunk is not None and not chunk.retained else None
                while pending_waits:  # after the next chunk was written, so that both overlap
                    pending_waits.pop()()
                announcement = replace(announcement, elapsed_s=self._publisher.elapsed_s())
                # All slots go to all receivers, which is much for thousands of receivers. They are sent again only if a
                # receiver may lack them: after a change of the membership, and after a recovery, which drops messages.
                latest_slots = announcement.stream, slots, context.service.epoch, context.service.last_recovery
                sends_slots = announcement.number == 0 and latest_slots != self._sent_slots
                message = (announcement, tuple(context.service.origin), slots if sends_slots else None)
                announced_path, unannounced_path = unannounced_path, None
                self._sent_slots = latest_slots
                pending_waits.append(p2p.begin_broadcast(message, *self._src, self._receivers, segment=announced_path))
                if chunk is not None and chunk.payload is not None:
                    self.transport.broadcast_bucket()
            while pending_waits:
                pending_waits.pop()()
        except BaseException:
            with contextlib.suppress(RlhpcError):  # report the first failure only
                while pending_waits:
                    pending_waits.pop()()
            for reader in range(len(receivers) if unannounced_path else 0):
                discard(str(unannounced_path), reader)
            self.transport.forget(notifies=True)
            self._sent_slots = None
            self.forget()  # some receivers did not get the delta of this version
            raise

    def _with_retries(self, announcements: Iterator[Announcement]) -> Iterator[Announcement]:
        """Yields the announcements. If some receivers did not get a bucket, yields its new announcement before later ones."""
        last_announcement: Announcement | None = None
        for announcement in itertools.chain(announcements, [None]):
            self.transport.wait_delivered()
            if last_announcement is not None and (retry := self.transport.pop_lost_bucket()) is not None:
                assert self._publisher is not None
                bucket, flat_bucket = retry
                yield self._publisher.republish(last_announcement, bucket.tensors(flat_bucket))
            if announcement is not None:
                last_announcement = announcement
                yield announcement


def _assign_slots(context: Context, receivers: list[tuple[str, int]]) -> tuple[dict[tuple[str, int], ReaderSlot], int]:
    """Returns the receivers' positions, and the maximum number of hosts that forward a chunk on its way to a receiver.

    The sender sends data to two other hosts, and each host forwards it to two more. So each host sends at most two copies,
    however many hosts there are.
    """
    readers = p2p.readers_of(context, receivers)
    hosts = [host_readers for host_readers in readers if context.rank_record(*host_readers[0])["host"] != context.host]
    slots: dict[tuple[str, int], ReaderSlot] = {}
    for index, host_readers in enumerate(readers):
        source, num_forwards = "", 0
        if index < len(hosts):
            source = context.rank_record(*hosts[index // 2 - 1][0])["data"]["bulk"] if index >= _BRANCHES else ""
            num_forwards = len(range(2 * index + 2, min(2 * index + 4, len(hosts))))
        for reader_index, receiver in enumerate(host_readers):
            slots[receiver] = ReaderSlot(len(slots), reader_index, len(host_readers), source, num_forwards)
    return slots, max(len(hosts) + 1, 2).bit_length() - 2


def _incarnation(context: Context, address: tuple[str, int]) -> str:
    """Returns the incarnation of a rank; "" while it is restarting. Reads a file only after a change of the membership."""
    try:
        return str(context.rank_record(*address, timeout=0.0)["incarnation"])
    except RendezvousTimeout:
        return ""


def _build_window(context: Context, receivers: list[tuple[str, int]], max_unread: int) -> ChunkWindow:
    """Builds the flow control of a version. It does not wait for restarted receivers, which do not read this version."""
    reader_names = [f"{group}-{rank}" for group, rank in receivers]
    incarnations = [_incarnation(context, receiver) for receiver in receivers]
    return ChunkWindow(
        lambda path: (
            context.service.pool.list_pending_readers(path)
            or context.service.device_channel.pool.list_pending_readers(path)
        ),
        reader_names,
        check=context.check,
        is_present=lambda reader: (
            _incarnation(context, receivers[reader]) == incarnations[reader]
            and not context.has_left(*receivers[reader])
        ),
        deadline=context.wait_deadline,
        max_unread=max_unread,
    )


def _used_here(chunk: ReceivedChunk) -> ReceivedChunk:
    """Returns a chunk that another thread has received, for use in this thread. Engines compute on a stream of their own: the
    accelerator's memory must not be allocated again, in the other thread, while this thread's stream still reads it.
    """
    import torch

    for tensor in chunk[1] if isinstance(chunk[1], list) else ():
        if not tensor.is_cpu:
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))
    return chunk


class WeightReceiver:
    """Receiver of versions from a `WeightSender`.

    Args:
        worker: The receiving worker.
        src: Group and rank of the sender.
        complete_updates: See `Subscriber`.
        transport: Name of a transport in `transport_select`.
    """

    def __init__(
        self, worker: Worker, src: tuple[str, int], *, complete_updates: bool = False, transport: str = AUTO
    ) -> None:
        self._address, self._src = (worker.group_name, worker.rank), src
        self._subscriber = Subscriber(complete_updates)
        #: Slots of this receiver by stream of the sender: another sender of the same rank may have other receivers.
        self._slots: dict[str, ReaderSlot] = {}
        self._slot, self._origin = ReaderSlot(0, 0, 1), Origin("", "")
        self._upstream_process = ForwardingProcess("")
        self._prefetcher = Prefetcher(on_end=lambda: current().service.peers.close())
        self._check_abort: Callable[[], None] = lambda: None
        self._transport = TransportReceiver(self._address, transport)
        self._transfer, self._lost_bucket = Transfer(), False

    def forget(self) -> None:
        """Makes the next update complete (`Subscriber.forget`)."""
        self._transport.forget()
        self._subscriber.forget()

    def receive(self) -> Update:
        """Waits for the next version and returns it; its chunks are read while its tensors are iterated."""
        self._check_abort = lambda: None
        self._transport.publish_device()
        update = self._subscriber.receive(self._next_announcement, self._open_chunk, self._prefetch_chunks, self._skip)
        return replace(update, transfer=self._transfer)

    def _prefetch_chunks(self, chunks: Iterator[ReceivedChunk]) -> Iterator[ReceivedChunk]:
        """Prefetches the next chunk while one is in use, unless the sender is on this host."""
        if self._origin.host == current().service.endpoint["host"]:
            return chunks
        self._check_abort = self._prefetcher.check
        return map(_used_here, self._prefetcher(chunks))

    def _next_announcement(self) -> Announcement:
        announcement: Announcement
        announcement, origin, slots = p2p.follow_broadcast(self._src, self._check_abort)
        self._origin = Origin(*origin)
        if announcement.number == 0:
            self._transfer = Transfer()
        note_announcement(self._transfer, announcement.elapsed_s)
        if slots is not None:
            self._slots = dict([*self._slots.items()][1 - _MAX_STREAMS :]) | {announcement.stream: slots[self._address]}
        if announcement.number == 0:
            if announcement.stream not in self._slots:
                raise RlhpcError(
                    f"weights of {self._src[0]}-{self._src[1]} came without this rank's place among the readers"
                )
            self._slot = self._slots[announcement.stream]
            self._upstream_process = ForwardingProcess(self._slot.upstream)
        return announcement

    def _skip(self, chunk: WeightChunk) -> None:
        if chunk.payload is not None and isinstance(chunk.payload[0], Bucket):
            self._transport.refuse(chunk.payload[0])
        else:
            self._read_chunk(chunk, False)

    def _receive_again(self, chunk: WeightChunk) -> list[Any]:
        """Waits for the repeated announcement of a chunk that was lost in transit, and returns the chunk's tensors."""
        repeated_chunk = self._next_announcement().chunk
        if repeated_chunk is None or repeated_chunk.serial != chunk.serial:
            raise RlhpcError("a part of the weights that was lost on its way was not sent again")
        memory = memoryview(self._read_chunk(repeated_chunk, False))
        return [tensor for _, tensor in entries_of(memory, repeated_chunk.table)]

    def _open_chunk(self, chunk: WeightChunk, is_late: bool) -> Any:
        """Reads a chunk (`_read_chunk`) and counts its bytes."""
        device_channel = current().service.device_channel
        num_host_copies, payload = device_channel.num_host_copies, None if chunk.payload is None else chunk.payload[0]
        self._lost_bucket = False
        memory = self._read_chunk(chunk, is_late)
        transport = HOST
        if isinstance(payload, Bucket) and not self._lost_bucket:
            transport = payload.kind
        elif isinstance(payload, DeviceMessage) and device_channel.num_host_copies == num_host_copies:
            transport = IPC
        self._transfer.bytes_by_transport[transport] += chunk.nbytes
        return memory

    def _read_chunk(self, chunk: WeightChunk, is_late: bool) -> Any:
        """Returns the memory of a chunk, or the tensors of a chunk that is in no segment.

        Args:
            chunk: The announced chunk.
            is_late: Whether the chunk belongs to an earlier version, so that other receivers on this host already have it.
        """
        service, slot = current().service, self._slot
        if chunk.payload is not None:
            try:
                return self._transport.receive(chunk.payload[0], self._origin, slot.reader)
            except GroupLost:
                self._lost_bucket = True
                return self._receive_again(chunk)
        if self._origin.host != service.endpoint["host"]:
            shares_fetch = slot.num_host_readers > 1 and not is_late
            share = (
                HostReader(f"{chunk.name}-{slot.reader - slot.host_index}", slot.host_index, slot.num_host_readers)
                if shares_fetch
                else None
            )
            # Each receiver reports that it has read the chunk, so that the log keeps chunks that some receiver still needs.
            # Retained chunks may be fetched at any time; a receiver that joins later gets them from the sender only.
            is_forwarded = not (chunk.retained and is_late)
            upstream = (self._upstream_process, chunk.name) if is_forwarded and slot.upstream else None
            memory = service.fetch(
                self._origin,
                chunk.path,
                chunk.size,
                slot.reader,
                share,
                in_place=not chunk.retained,
                releases=[],
                forwarder=upstream,
                lock=not chunk.retained,
            )
            if is_forwarded and slot.num_downstream and not slot.host_index:
                chunk_bytes = memory[HEADER : HEADER + chunk.size]
                if chunk.retained and not chunk.fixed:  # forward a copy, because deltas are applied to it in place
                    chunk_bytes = np.frombuffer(chunk_bytes, np.uint8).copy().data
                service.forwarded_data.put(chunk.name, chunk_bytes, slot.num_downstream)
            service.peers.release(self._origin.bulk, chunk.path, slot.reader)
            return memory
        try:
            if not chunk.retained:
                memory = service.mappings.lease(chunk.path, slot.reader)
                service.mappings.lock(chunk.path)
                return memory
            mapping = map_private(chunk.path)
        except SegmentGone:
            raise RlhpcError(
                f"a part of the weights of {self._src[0]}-{self._src[1]} is gone: it has begun anew since"
            ) from None
        discard(chunk.path, slot.reader)
        return mapping


class BroadcastSync:
    """Built-in weight sync strategy: one sender broadcasts full tensors.

    Args:
        worker: The worker that sends or receives.
        src: Group and rank of the sender.
        receivers: Groups and ranks that receive.
        delta: `rollout.weight_delta`.
        complete_updates: Make every update complete, with full tensors only.

    Attributes:
        transport: Name of a transport in `transport_select`.
        chunk_bytes: Size of a chunk in bytes.
    """

    transport = AUTO
    chunk_bytes = CHUNK_BYTES

    def __init__(
        self,
        worker: Worker,
        src: tuple[str, int],
        receivers: list[tuple[str, list[int]]],
        delta: str = "frozen",
        complete_updates: bool = False,
    ) -> None:
        self._endpoint: Any
        self._requires_readers = False
        if (worker.group_name, worker.rank) == tuple(src):
            self._endpoint = WeightSender(worker, receivers, delta, self.chunk_bytes, self.transport)
        else:
            self._endpoint = WeightReceiver(worker, src, complete_updates=complete_updates, transport=self.transport)

    def send(self, version: int, tensors: NamedTensors, *, frozen: Container[str] = ()) -> None:
        """Sends a version to all receivers (`WeightSync.send`)."""
        self._endpoint.send(version, tensors, frozen=frozen, requires_readers=self._requires_readers)

    def receive(self) -> Update:
        """Waits for the next version (`WeightSync.receive`)."""
        update: Update = self._endpoint.receive()
        return update

    def forget(self) -> None:
        """Makes the next version complete (`WeightSync.forget`)."""
        self._endpoint.forget()

    def require_readers(self, is_required: bool = True) -> None:
        """Makes a sender wait for receivers that have not begun to read, instead of writing the complete version first."""
        self._requires_readers = is_required


class HostSync(BroadcastSync):
    """Weight sync through shared memory and TCP only."""

    transport = HOST


class IpcSync(BroadcastSync):
    """Weight sync by IPC between processes on one host that can open the sender's accelerator memory."""

    transport = IPC


class NcclSync(BroadcastSync):
    """Weight sync between accelerators over NCCL."""

    transport = NCCL


class GlooSync(BroadcastSync):
    """Weight sync between accelerators over gloo, through host memory."""

    transport = GLOO
