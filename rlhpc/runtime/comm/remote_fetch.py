"""Receiving side of large data: segments of other hosts, and tensors on accelerators of this host.

A process receives data of another host into a private receive buffer, or into a segment that processes of its host share.
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
from rlhpc.runtime.devices import locked_tensor, locks_pages
from rlhpc.runtime.errors import ChannelError
from rlhpc.runtime.scratch import Scratch

_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


class ReceiveBuffers:
    """Pool of receive buffers, which return to the pool when their last view is deleted. Any thread may call any method.

    Args:
        max_idle: Bytes of free memory that the pool retains.
    """

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        # Reentrant, because garbage collection during `take` may return memory on the same thread.
        self._lock = threading.RLock()
        #: By capacity: memory, and the tensor that keeps its pages locked, or None.
        self._idle_buffers: dict[int, list[tuple[mmap.mmap, Any]]] = {}
        self._idle_bytes = 0

    def take(self, size: int, *, lock: bool = False) -> memoryview:
        """Returns writable memory of `size` bytes, which returns to the pool when its last view is deleted.

        Args:
            size: Number of bytes.
            lock: Page-lock the memory, if this process has an accelerator, so that the accelerator can copy from it by DMA.
        """
        capacity = capacity_of(size)
        with self._lock:
            idle_memory = self._idle_buffers.get(capacity)
            memory, pages = idle_memory.pop() if idle_memory else (None, None)
            self._idle_bytes -= capacity if memory is not None else 0
        if memory is None:
            memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if _HUGE_PAGES is not None:
                with contextlib.suppress(OSError):  # the kernel has no huge pages
                    memory.madvise(_HUGE_PAGES)
        if lock and pages is None and locks_pages():
            pages = locked_tensor(memory)
        memory_view = np.frombuffer(memory, np.uint8, size)
        weakref.finalize(memory_view, self._give_back, capacity, memory, pages).atexit = False
        return memory_view.data

    def _give_back(self, capacity: int, memory: mmap.mmap, pages: Any) -> None:
        with self._lock:
            if self._idle_bytes + capacity <= self._max_idle:
                self._idle_buffers.setdefault(capacity, []).append((memory, pages))
                self._idle_bytes += capacity


#: Seconds that a forwarding process may take to receive the data, before it counts as lost.
_FORWARDER_TIMEOUT_S = 10.0


class Fetching:
    """Client that fetches segments from their owners on other hosts, or from processes that forward them.

    Args:
        scratch: The session's folders on this host.
        pool: Pool for data that this process fetches for several processes of this host.
        mappings: Mappings for data that another process of this host has fetched.
        peers: Connections to other hosts.
        check: Called while waiting; raises when the run has failed.
    """

    def __init__(
        self, scratch: Scratch, pool: SegmentPool, mappings: Mappings, peers: Peers, check: Callable[[], None]
    ) -> None:
        self._scratch, self._pool, self._mappings, self._peers, self._check = scratch, pool, mappings, peers, check
        self._receive_buffers = ReceiveBuffers(default_idle(scratch))

    def fetch(
        self,
        origin: Origin,
        path: str,
        size: int,
        reader: int,
        share: HostReader | None,
        *,
        in_place: bool,
        releases: list[Callable[[], None]] | None = None,
        forwarder: tuple[ForwardingProcess, str] | None = None,
        lock: bool = False,
    ) -> memoryview:
        """Fetches a segment of another host; returns a view with the segment's layout.

        Args:
            origin: Owner of the segment.
            path: Path of the segment.
            size: Bytes of the segment's data.
            reader: Number of this reader.
            share: Index of this process, if several processes of this host share a copy and are one reader.
            in_place: For shared data, as in `Mappings.lease`.
            releases: List for the function that releases the segment at its owner; the caller calls this function. By default
                the segment is released as soon as the data has been received.
            forwarder: Process from which the data is requested first, and the name of the data in that process.
            lock: Page-lock the memory, if this process has an accelerator, so that the accelerator can copy from it by DMA.
        """

        def receive(memory: memoryview) -> None:
            target = memory[HEADER : HEADER + size]
            if forwarder is None or not self._fetch_from_forwarder(*forwarder, target):
                self._peers.fetch(origin.bulk, path, HEADER, target)

            def release() -> None:
                self._peers.release(origin.bulk, path, reader)

            release() if releases is None else releases.append(release)

        if share is None:
            buffer_view = self._receive_buffers.take(HEADER + size, lock=lock)
            receive(buffer_view)
            return buffer_view

        def receive_for_all() -> str:
            segment = self._pool.reserve(size, share.num_receivers, holders=share.holders)
            try:
                receive(memoryview(segment.memory))
            except BaseException:
                for reader_index in range(share.num_receivers):
                    discard(segment.path, reader_index)
                raise
            return segment.path

        shared_path = fetch_once_per_host(self._scratch.shm, share, receive_for_all, self._check)
        buffer_view = self._mappings.lease(shared_path, share.number, in_place=in_place)
        if lock and in_place:
            self._mappings.lock(shared_path)
        return buffer_view

    def _fetch_from_forwarder(self, forwarder: ForwardingProcess, name: str, target: memoryview) -> bool:
        """Fetches the data from a process that forwards it; returns False if it must be fetched from its owner."""
        deadline = time.monotonic() + _FORWARDER_TIMEOUT_S
        try:
            while not forwarder.is_lost:
                if self._peers.fetch(forwarder.bulk, name, 0, target, forwarded=True):
                    return True
                forwarder.is_lost = time.monotonic() > deadline
                self._check()
        except Withdrawn:  # this process asked too late, but the forwarder is still usable
            return False
        except ChannelError:
            forwarder.is_lost = True
        return False


#: Seconds that the sender's service may take to copy a message to the host.
_HOST_COPY_TIMEOUT_S = 60.0

#: Function (origin, path, size) that returns the contents of a segment, with its layout.
ReadSegment = Callable[[Origin, str, int], memoryview]


class DeviceChannel:
    """Sending and receiving side of the device channel in this process.

    Args:
        scratch: The session's folders on this host.
        endpoint: Endpoints of this process's service.
        peers: Connections to other processes.
        read: Reads a segment of this host or of another one.

    Attributes:
        pool: Buffers from which this process sends.
        consumers: Host and accelerator of each (group, rank) to which this process has sent.
        num_host_copies: Number of messages that this process could not read, and received as a copy on the host.
    """

    def __init__(self, scratch: Scratch, endpoint: dict[str, str], peers: Peers, read: ReadSegment) -> None:
        self.pool = DevicePool(scratch, endpoint)
        self._mappings = DeviceMappings(self.pool.local)
        self._peers, self._read = peers, read
        self.consumers: dict[tuple[str, int], ConsumerLocation] = {}
        self.num_host_copies = 0

    @property
    def num_device_messages(self) -> int:
        """Number of messages of this process whose tensors stayed on the accelerator."""
        return self.pool.num_device_messages

    def to(self, consumers: Collection[ConsumerLocation]) -> DevicePool | None:
        """Returns the pool if all consumers are known to compute on this process's accelerator, else None."""
        return self.pool if consumers and all(self.pool.reaches(*consumer) for consumer in consumers) else None

    def free_read_buffers(self) -> None:
        """Releases other processes' buffers after this process's copies from them are complete. Called before a wait."""
        if not self._mappings.reading:
            return
        with contextlib.suppress(RuntimeError):  # the accelerator has failed; code that uses it will report that
            self._mappings.free_read_buffers()

    def park(self) -> None:
        """Frees accelerator memory: closes other processes' buffers, and drops unused buffers of this process."""
        self._mappings.park()
        self.pool.park()

    def forget(self) -> None:
        """Drops all buffers and known locations after the failure of other ranks, because ranks may restart on other hosts."""
        self.pool.forget()
        self.consumers.clear()

    def close(self) -> None:
        """Closes other processes' buffers and drops all buffers of this process."""
        with contextlib.suppress(RuntimeError):
            self._mappings.park()
        self.pool.forget()

    def land(self, device_message: DeviceMessage, origin: Origin, reader: int) -> list[Any]:
        """Returns a message's tensors on this process's accelerator, or on the CPU if this process uses no accelerator.

        If this process cannot open the buffer, it requests a copy on the host from the sender's service.

        Raises:
            SegmentGone: The sender has ended or has dropped the message.
            ChannelError: The sender has ended or has dropped the message, and a copy was requested from its service.
        """
        try:
            return self._mappings.take(device_message, reader)
        except NotReadable as error:
            return self._request_host_copy(device_message, origin, reader, str(error))

    def _request_host_copy(self, device_message: DeviceMessage, origin: Origin, reader: int, reason: str) -> list[Any]:
        self.num_host_copies += 1
        request = pickle.dumps((device_message.path, reader, reason))
        wait_purpose = "the sender of a message to copy it from its accelerator"
        (reply,) = self._peers.request(
            choose(device_message.endpoint), b"TO_HOST", [request], _HOST_COPY_TIMEOUT_S, wait_purpose
        )
        path, copy_start = pickle.loads(reply)
        host_copy = self._read(origin, path, device_message.size)[copy_start:]
        return [
            rebuild_tensor(
                host_copy[tensor_part.offset : tensor_part.offset + tensor_part.nbytes],
                tensor_part.dtype,
                tensor_part.shape,
                "",
                False,
                False,
            )
            for tensor_part in device_message.parts
        ]
