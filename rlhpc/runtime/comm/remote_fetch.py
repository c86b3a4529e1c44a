"""Receiving side of large data: segments of other hosts, and tensors on accelerators of this host.

Data of another host arrives in a receive buffer of this process, or in a segment that several processes of this host share.
"""

from __future__ import annotations

import contextlib
import mmap
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from rlhpc.runtime.comm.device_memory import DeviceMappings, DeviceMessage, DevicePool, NotReadable
from rlhpc.runtime.comm.payload import ForwardingProcess, HostReader, Origin, fetch_once_per_host, rebuild_tensor
from rlhpc.runtime.comm.queues import ConsumerLocation
from rlhpc.runtime.comm.shared_memory import HEADER, Mappings, SegmentPool, capacity_of, default_idle, discard
from rlhpc.runtime.comm.zero_copy import Withdrawn
from rlhpc.runtime.comm.zmq_sockets import Peers, choose
from rlhpc.runtime.devices import locked, locks_pages
from rlhpc.runtime.errors import ChannelError
from rlhpc.runtime.scratch import Scratch

_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


class ReceiveBuffers:
    """Pool of receive buffers that return to it when their last view is gone. Any thread may call any method.

    Args:
        max_idle: Bytes of free memory that the pool retains.
    """

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        # Reentrant: memory may return while this thread collects garbage in `take`.
        self._lock = threading.RLock()
        #: Memory, and the tensor that keeps its pages locked, if they are.
        self._idle: dict[int, list[tuple[mmap.mmap, Any]]] = {}
        self._idle_bytes = 0

    def take(self, size: int, *, lock: bool = False) -> memoryview:
        """Returns writable memory of `size` bytes, which returns to the pool when its last view is gone.

        Args:
            size: Bytes.
            lock: Lock the pages, so that an accelerator of this process, if there is one, can copy without the CPU's help.
        """
        capacity = capacity_of(size)
        with self._lock:
            idle_memory = self._idle.get(capacity)
            memory, pages = idle_memory.pop() if idle_memory else (None, None)
            self._idle_bytes -= capacity if memory is not None else 0
        if memory is None:
            memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if _HUGE_PAGES is not None:
                with contextlib.suppress(OSError):  # a kernel without them
                    memory.madvise(_HUGE_PAGES)
        if lock and pages is None and locks_pages():
            pages = locked(memory)
        view = np.frombuffer(memory, np.uint8, size)
        weakref.finalize(view, self._back, capacity, memory, pages).atexit = False
        return view.data

    def _back(self, capacity: int, memory: mmap.mmap, pages: Any) -> None:
        with self._lock:
            if self._idle_bytes + capacity <= self._max_idle:
                self._idle.setdefault(capacity, []).append((memory, pages))
                self._idle_bytes += capacity


#: Seconds that a host has to receive the data it forwards, before it is no longer asked.
_PATIENCE_S = 10.0


class Fetching:
    """Gets segments from the processes that wrote them.

    Args:
        scratch: The session's folders on this host.
        pool: Pool for data that this process fetches for other processes, too.
        mappings: Mappings of data that another process fetched.
        peers: Connections to other hosts.
        check: Called while waiting; raises when the run has failed.
    """

    def __init__(
        self, scratch: Scratch, pool: SegmentPool, mappings: Mappings, peers: Peers, check: Callable[[], None]
    ) -> None:
        self._scratch, self._pool, self._mappings, self._peers, self._check = scratch, pool, mappings, peers, check
        self._landing = ReceiveBuffers(default_idle(scratch))

    def fetch(
        self,
        origin: Origin,
        path: str,
        size: int,
        reader: int,
        share: HostReader | None,
        *,
        in_place: bool,
        later: list[Callable[[], None]] | None = None,
        forwarder: tuple[ForwardingProcess, str] | None = None,
        lock: bool = False,
    ) -> memoryview:
        """Returns the data of a segment of another host, which stays in use by this process until the last view of it is gone.

        Args:
            origin: The segment's owner.
            path: The segment.
            size: Bytes of its data.
            reader: Number of this reader.
            share: Index among the processes of this host that together are this reader.
            in_place: As for `Mappings.lease`, for shared data.
            later: List that gets the functions to call once the reader is done with the data; by default they are called now.
            forwarder: Process that is asked first, and its name for the data.
            lock: Lock the pages, so that an accelerator of this process, if there is one, can copy without the CPU's help.
        """

        def receive(memory: memoryview) -> None:
            target = memory[HEADER : HEADER + size]
            if forwarder is None or not self._fetch_from_forwarder(*forwarder, target):
                self._peers.fetch(origin.bulk, path, HEADER, target)

            def release() -> None:
                self._peers.release(origin.bulk, path, reader)

            release() if later is None else later.append(release)

        if share is None:
            view = self._landing.take(HEADER + size, lock=lock)
            receive(view)
            return view

        def receive_for_all() -> str:
            segment = self._pool.reserve(size, share.of, holders=share.holders)
            try:
                receive(memoryview(segment.memory))
            except BaseException:
                for reader_index in range(share.of):
                    discard(segment.path, reader_index)
                raise
            return segment.path

        shared_path = fetch_once_per_host(self._scratch.shm, share, receive_for_all, self._check)
        view = self._mappings.lease(shared_path, share.number, in_place=in_place)
        if lock and in_place:
            self._mappings.lock(shared_path)
        return view

    def _fetch_from_forwarder(self, forwarder: ForwardingProcess, name: str, target: memoryview) -> bool:
        """Returns whether the data came from a process that forwards it."""
        deadline = time.monotonic() + _PATIENCE_S
        try:
            while not forwarder.is_lost:
                if self._peers.fetch(forwarder.bulk, name, 0, target, forwarded=True):
                    return True
                forwarder.is_lost = time.monotonic() > deadline
                self._check()
        except Withdrawn:  # this process came late, and will catch up
            return False
        except ChannelError:
            forwarder.is_lost = True
        return False


#: Seconds for the sender's service to copy a message to the host.
_DEADLINE_S = 60.0

#: `(origin, path, bytes)` -> memory laid out as a segment.
Read = Callable[[Origin, str, int], memoryview]


class DeviceChannel:
    """This process's ends of the device channel.

    Args:
        scratch: The session's folders on this host.
        endpoint: This process's service.
        peers: Connections to other processes.
        read: Reads a segment, of this host or another.

    Attributes:
        pool: Buffers that this process sends from.
        consumers: Host and accelerator of the ranks that this process has sent to.
    """

    def __init__(self, scratch: Scratch, endpoint: dict[str, str], peers: Peers, read: Read) -> None:
        self.pool = DevicePool(scratch, endpoint)
        self._mappings = DeviceMappings(self.pool.local)
        self._peers, self._read = peers, read
        self.consumers: dict[tuple[str, int], ConsumerLocation] = {}

    @property
    def num_device_messages(self) -> int:
        """Number of messages of this process whose tensors stayed on the accelerator."""
        return self.pool.num_device_messages

    def to(self, consumers: Collection[ConsumerLocation]) -> DevicePool | None:
        """Returns the pool to send from to these consumers; None if it does not reach all of them, as far as is known."""
        return self.pool if consumers and all(self.pool.reaches(*consumer) for consumer in consumers) else None

    def settle(self) -> None:
        """Releases buffers whose copies are complete; called before this process waits."""
        if not self._mappings.reading:
            return
        with contextlib.suppress(RuntimeError):  # of an accelerator that has failed; who uses it will say so
            self._mappings.settle()

    def park(self) -> None:
        """Releases the accelerator memory of messages, and closes other processes' buffers."""
        self._mappings.park()
        self.pool.park()

    def forget(self) -> None:
        """Drops all unread messages and known locations after other ranks have died: ranks may restart elsewhere."""
        self.pool.forget()
        self.consumers.clear()

    def close(self) -> None:
        """Closes other processes' buffers, and drops all messages."""
        with contextlib.suppress(RuntimeError):
            self._mappings.park()
        self.pool.forget()

    def land(self, device_message: DeviceMessage, origin: Origin, reader: int) -> list[Any]:
        """Returns the tensors of a message, on this process's accelerator, or on the CPU if it has none.

        Raises:
            SegmentGone: The sender has ended, or has forgotten the message.
            ChannelError: As above, when the sender was asked for a copy on the host.
        """
        try:
            return self._mappings.take(device_message, reader)
        except NotReadable as error:
            return self._through_the_host(device_message, origin, reader, str(error))

    def _through_the_host(self, device_message: DeviceMessage, origin: Origin, reader: int, why: str) -> list[Any]:
        request = pickle.dumps((device_message.path, reader, why))
        purpose = "the sender of a message to copy it from its accelerator"
        (reply,) = self._peers.request(choose(device_message.endpoint), b"TO_HOST", [request], _DEADLINE_S, purpose)
        path, start = pickle.loads(reply)
        host_copy = self._read(origin, path, device_message.size)[start:]
        return [
            rebuild_tensor(host_copy[view.offset : view.offset + view.nbytes], view.dtype, view.shape, "", False, False)
            for view in device_message.parts
        ]
