"""Device channel: accelerator buffers and events that another process of the same host can open.

`cuda_device` implements it for CUDA. This module never initializes a driver: the process has no device until other code has
initialized one.
"""

from __future__ import annotations

import itertools
import logging
import math
import mmap
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rlhpc.runtime.comm.shared_memory import (
    ALIGN,
    FREE,
    HEADER,
    MAX_TRACKED,
    SegmentGone,
    await_readers,
    awaited_readers,
    begin_use,
    capacity_of,
    end_use,
    free_ended,
    map_segment,
    unlink,
)
from rlhpc.runtime.errors import ChannelError
from rlhpc.runtime.host import has_ended, process_id
from rlhpc.runtime.scratch import Scratch

if TYPE_CHECKING:
    import torch


class _DeviceEvent(Protocol):
    """Event in the sequence of operations on a device."""

    @property
    def handle(self) -> bytes:
        """Handle of the event, with which another process can open it."""

    def record(self) -> None:
        """Records this event after all operations that this process has enqueued on the device so far."""

    def wait(self) -> None:
        """Makes the device wait for the event before it runs later operations of this process. Does not block the host.

        The event may have been recorded by another process.
        """

    def done(self) -> bool:
        """Returns whether the device has reached the event."""


class _Device(Protocol):
    """Accelerator of this process. It runs enqueued operations in order, asynchronously.

    Attributes:
        address: Identity of the accelerator on the host, independent of its index in this process.
        budget: Bytes of device memory that messages in transit may use, per sending process.
        reads: Addresses of the accelerators whose memory this process can open: this one and its peers.
    """

    address: str
    budget: int
    reads: tuple[str, ...]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is in the device's memory."""

    def allocate(self, size: int) -> torch.Tensor:
        """Allocates memory that can be exported; returns a uint8 tensor."""

    def export(self, memory: torch.Tensor) -> bytes:
        """Returns the handle with which another process opens memory from `allocate`.

        Raises:
            RuntimeError: The device cannot share memory.
        """

    def open(self, handle: bytes) -> torch.Tensor:
        """Opens another process's memory; returns a uint8 tensor. The memory is closed when the tensor has no more references.

        Raises:
            RuntimeError: This process cannot open the memory.
        """

    def empty(self, size: int) -> torch.Tensor:
        """Allocates private memory of this process; returns a uint8 tensor."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueues a copy of `source` into `target`."""

    def to_host(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns a copy on the host; blocks until the copy is complete."""

    def event(self) -> _DeviceEvent:
        """Creates an event."""

    def open_event(self, handle: bytes) -> _DeviceEvent:
        """Opens another process's event.

        Raises:
            RuntimeError: This process cannot open the event.
        """


_current_device: _Device | None = None


def use(device: _Device | None) -> None:
    """Sets the device of this process, for device types other than `cuda`."""
    global _current_device
    _current_device = device


def current_device() -> _Device | None:
    """Returns the device that this process computes on; None until the process has initialized one."""
    global _current_device
    if _current_device is None:
        module: Any = sys.modules.get("torch.cuda")
        if module is not None and module.is_initialized():
            from rlhpc.runtime.comm.cuda_device import CudaDevice  # imports torch

            _current_device = CudaDevice()
    return _current_device


def address() -> str:
    """Returns the address of the accelerator that this process computes on; empty if it uses no accelerator."""
    device = current_device()
    return "" if device is None else device.address


#: Maximum number of readers of a message.
_MAX_READERS = MAX_TRACKED


class TensorView(NamedTuple):
    """Offset, dtype, shape and size in bytes of a tensor in a buffer."""

    offset: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class DeviceMessage(NamedTuple):
    """Descriptor of tensors in a buffer on the sender's accelerator.

    Attributes:
        endpoint: Endpoints of the sender's service.
        path: Path of the buffer's lease file, which identifies the buffer.
        address: Address of the accelerator.
        memory: Handle of the buffer.
        event: Handle of the event that the device reaches once the tensors have been written.
        size: Bytes of the tensors, with padding.
        parts: The tensors' positions in the buffer.
    """

    endpoint: dict[str, str]
    path: str
    address: str
    memory: bytes
    event: bytes
    size: int
    parts: list[TensorView]


def dtype_name(dtype: Any) -> str:
    """Returns a dtype's name in torch, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def layout_tensors(tensors: list[tuple[str, tuple[int, ...], int]]) -> tuple[list[TensorView], int]:
    """Returns the position of each tensor (dtype, shape, bytes per element) in a buffer, and the total size in bytes."""
    tensor_views, offset = [], 0
    for dtype, shape, itemsize in tensors:
        num_bytes = math.prod(shape) * itemsize
        tensor_views.append(TensorView(offset, dtype, shape, num_bytes))
        offset += num_bytes + -num_bytes % ALIGN
    return tensor_views, offset


def _make_lease(path: str) -> mmap.mmap:
    """Creates and maps a lease file: one page with the readers' states, laid out as the first page of a segment."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, HEADER)
        return mmap.mmap(fd, HEADER)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


#: Maximum seconds to wait for enqueued copies on the accelerator.
_COPY_TIMEOUT_S = 30.0
_CHECK_S = 0.0005
_PROCESS = re.compile(r"-(\d+\.\d+)-\d+$")


class NotReadable(Exception):
    """Error: this process cannot read the buffer.

    Without a message, this process's accelerator is not a peer of the sender's accelerator. With a message, opening the buffer
    has failed.
    """


class _OpenedBuffer:
    def __init__(self, device: _Device, lease: mmap.mmap, memory: Any, written_event: _DeviceEvent) -> None:
        self.lease, self.memory, self.written_event, self.read_event = lease, memory, written_event, device.event()


#: Function that returns the memory and event for a buffer's path; None if another process created the buffer.
_Local = Callable[[str], tuple[Any, _DeviceEvent] | None]


class DeviceMappings:
    """Buffers of other processes that this process has opened. Any thread may call any method.

    Args:
        find_local: See `DevicePool.local`.

    Attributes:
        reading: Buffers from which copies are not complete, each with the reader's number.
    """

    def __init__(self, find_local: _Local = lambda path: None) -> None:
        self._find_local = find_local
        self._lock = threading.Lock()
        self._buffers_by_path: dict[str, _OpenedBuffer] = {}
        self.reading: list[tuple[_OpenedBuffer, int]] = []

    def take(self, device_message: DeviceMessage, reader: int) -> list[Any]:
        """Returns copies of a message's tensors on this process's accelerator.

        Raises:
            NotReadable: This process cannot read the buffer.
            SegmentGone: The sender has ended or has dropped the message.
        """
        import torch

        device = current_device()
        if device is None or device_message.address not in device.reads:
            raise NotReadable
        self.free_read_buffers()
        with self._lock:
            opened_buffer = self._open(device, device_message)
            if opened_buffer.lease[reader : reader + 1] == FREE:  # the sender no longer waits for this reader
                raise SegmentGone(device_message.path)
            begin_use(opened_buffer.lease, reader)
            try:
                copied_buffer = device.empty(device_message.size)
                opened_buffer.written_event.wait()
                device.copy(copied_buffer, opened_buffer.memory[: device_message.size])
                opened_buffer.read_event.record()
            except BaseException:  # for example, the device's memory is full
                end_use(opened_buffer.lease, reader)
                raise
            self.reading.append((opened_buffer, reader))
        return [
            copied_buffer[tensor_part.offset : tensor_part.offset + tensor_part.nbytes]
            .view(getattr(torch, tensor_part.dtype))
            .reshape(tensor_part.shape)
            for tensor_part in device_message.parts
        ]

    def _open(self, device: _Device, device_message: DeviceMessage) -> _OpenedBuffer:
        sender = _PROCESS.search(device_message.path)
        # Never wait for an event of a process that has ended.
        if sender is not None and has_ended(sender[1]):
            raise SegmentGone(device_message.path)
        if device_message.path in self._buffers_by_path:
            return self._buffers_by_path[device_message.path]
        self._close_removed()
        lease = map_segment(device_message.path, mmap.MAP_SHARED)
        buffer = self._find_local(device_message.path)
        if buffer is None:
            try:
                buffer = device.open(device_message.memory), device.open_event(device_message.event)
            except RuntimeError as error:
                raise NotReadable(str(error) or type(error).__name__) from None
        opened_buffer = self._buffers_by_path[device_message.path] = _OpenedBuffer(device, lease, *buffer)
        return opened_buffer

    def free_read_buffers(self) -> None:
        """Frees, for this reader, the buffers whose copies are complete."""
        with self._lock:
            pending_reads = []
            for opened_buffer, reader in self.reading:
                if opened_buffer.read_event.done():
                    end_use(opened_buffer.lease, reader)
                else:
                    pending_reads.append((opened_buffer, reader))
            self.reading = pending_reads

    def park(self) -> None:
        """Closes all buffers once the pending copies are complete, or after `_COPY_TIMEOUT_S` seconds."""
        deadline = time.monotonic() + _COPY_TIMEOUT_S
        while self.reading and time.monotonic() < deadline:
            time.sleep(_CHECK_S)
            self.free_read_buffers()
        with self._lock:
            self._buffers_by_path.clear()

    def _close_removed(self) -> None:
        """Closes buffers whose senders have removed them."""
        in_use = {id(opened_buffer) for opened_buffer, _ in self.reading}
        self._buffers_by_path = {
            path: opened_buffer
            for path, opened_buffer in self._buffers_by_path.items()
            if id(opened_buffer) in in_use or os.path.exists(path)
        }


log = logging.getLogger(__name__)

#: Maximum number of buffers per process. If no buffer is free, a message's tensors are copied through the host.
_MAX_BUFFERS = 64
_counter = itertools.count()


class _SentBuffer:
    """Buffer of the sender, with its lease file."""

    def __init__(self, device: _Device, path: str, memory: Any, exported_handle: bytes, event: _DeviceEvent) -> None:
        self.device, self.path, self.memory, self.exported_handle, self.event = (
            device,
            path,
            memory,
            exported_handle,
            event,
        )
        self.lease: mmap.mmap = _make_lease(path)
        self.num_readers = self.size = 0
        self.holders: Sequence[str] = ()

    @property
    def capacity(self) -> int:
        """Number of bytes that fit into the buffer."""
        return int(self.memory.numel())

    def free(self) -> bool:
        """Releases the buffer from readers whose processes have ended; returns whether all readers have finished."""
        if self.lease[: self.num_readers] != FREE * self.num_readers:
            free_ended(self.lease, self.num_readers)
        return self.lease[: self.num_readers] == FREE * self.num_readers


class DevicePool:
    """Pool of the accelerator buffers that this process writes. Any thread may call any method.

    Args:
        scratch: The session's folders on this host.
        endpoint: Endpoints of this process's service.

    Attributes:
        num_device_messages: Number of messages whose tensors stayed on the accelerator.
    """

    def __init__(self, scratch: Scratch, endpoint: dict[str, str]) -> None:
        self._scratch, self._endpoint = scratch, endpoint
        self._lock = threading.Lock()
        self._buffers: dict[str, _SentBuffer] = {}
        self._is_stopped = False
        self.num_device_messages = 0

    @property
    def bytes(self) -> int:
        """Bytes of device memory that the buffers use."""
        return sum(buffer.capacity for buffer in list(self._buffers.values()))

    def reaches(self, host: str, address: str) -> bool:
        """Returns whether this process can send tensors on its accelerator to a process with this host and accelerator
        address.
        """
        device = None if self._is_stopped or not address or host != self._endpoint["host"] else current_device()
        return device is not None and device.address == address

    def write(self, tensors: Sequence[Any], num_readers: int = 1, holders: Sequence[str] = ()) -> DeviceMessage | None:
        """Enqueues copies of tensors into a buffer for readers numbered from 0.

        Args:
            tensors: Tensors on this process's accelerator.
            num_readers: Number of readers.
            holders: For each reader, a process; when this process ends, the buffer is free for the reader. See
                `shared_memory.ShmSegment`.

        Returns:
            Descriptor of the tensors; None if all buffers are in use or the budget is exhausted.
        """
        device = current_device()
        if device is None or num_readers > _MAX_READERS:
            return None
        tensor_views, num_bytes = layout_tensors(
            [
                (dtype_name(source_tensor.dtype), tuple(source_tensor.shape), source_tensor.element_size())
                for source_tensor in tensors
            ]
        )
        with self._lock:
            buffer = self._take_buffer(device, max(num_bytes, 1))
            if buffer is None:
                return None
            for tensor_view, tensor in zip(tensor_views, tensors, strict=True):
                if tensor_view.nbytes:
                    target = buffer.memory[tensor_view.offset : tensor_view.offset + tensor_view.nbytes]
                    device.copy(target.view(tensor.dtype).reshape(tensor_view.shape), tensor.detach())
            buffer.event.record()
            buffer.num_readers, buffer.size, buffer.holders = num_readers, num_bytes, holders
            await_readers(buffer.lease, num_readers)
            self.num_device_messages += 1
        event_handle = buffer.event.handle
        return DeviceMessage(
            self._endpoint, buffer.path, device.address, buffer.exported_handle, event_handle, num_bytes, tensor_views
        )

    def list_pending_readers(self, path: str) -> list[bool]:
        """Returns for each reader whether it still has to open the buffer; empty for an unknown buffer."""
        buffer = self._buffers.get(path)
        return [] if buffer is None else awaited_readers(buffer.lease, buffer.num_readers)

    def local(self, path: str) -> tuple[Any, _DeviceEvent] | None:
        """Returns memory and event of a buffer of this process; None if the buffer is unknown.

        A process cannot open handles that it has exported itself.
        """
        buffer = self._buffers.get(path)
        return None if buffer is None else (buffer.memory, buffer.event)

    def to_host(self, path: str, reader: int, reason: str) -> Any:
        """Returns a uint8 copy on the host for a reader that cannot read the buffer, and frees the buffer for that reader.

        Args:
            path: Path of the buffer's lease.
            reader: Number of the reader.
            reason: Reason why the reader cannot open the buffer; "" if its accelerator is not a peer of the sender's.
                With a reason, later messages no longer use accelerator buffers.

        Raises:
            ChannelError: The message was dropped.
        """
        with self._lock:
            buffer = self._buffers.get(path)
            if buffer is None or buffer.lease[reader : reader + 1] == FREE:
                raise ChannelError("a message was forgotten before its reader came")
            buffer.event.wait()
            host_copy = buffer.device.to_host(buffer.memory[: buffer.size])
            end_use(buffer.lease, reader)
        if reason:
            self._stop_sharing(f"another process cannot open it ({reason})")
        return host_copy

    def forget_process(self, process_id: str) -> None:
        """Frees buffers for a process that has ended (`host.process_key`), and drops buffers without other readers."""
        with self._lock:
            for buffer in list(self._buffers.values()):
                slots = [slot for slot, holder in enumerate(buffer.holders) if holder == process_id]
                for slot in slots:
                    end_use(buffer.lease, slot)
                if slots and buffer.free():
                    self._drop_buffer(buffer)

    def park(self) -> int:
        """Frees buffers that no reader uses; returns the size in bytes of the remaining buffers."""
        with self._lock:
            for buffer in list(self._buffers.values()):
                if buffer.free():
                    self._drop_buffer(buffer)
        return self.bytes

    def forget(self) -> None:
        """Drops all buffers, including unread ones, because their messages are no longer valid."""
        with self._lock:
            for buffer in list(self._buffers.values()):
                self._drop_buffer(buffer)

    # -- getting a buffer -----------------------------------------------------------------------------------------

    def _take_buffer(self, device: _Device, num_bytes: int) -> _SentBuffer | None:
        free_buffers = [buffer for buffer in self._buffers.values() if buffer.free()]
        fitting_buffers = [buffer for buffer in free_buffers if num_bytes <= buffer.capacity <= 2 * num_bytes]
        if fitting_buffers:
            return min(fitting_buffers, key=lambda buffer: buffer.capacity)
        capacity = capacity_of(num_bytes)
        while free_buffers and (len(self._buffers) >= _MAX_BUFFERS or self.bytes + capacity > device.budget):
            self._drop_buffer(free_buffers.pop(0))
        if len(self._buffers) >= _MAX_BUFFERS or self.bytes + capacity > device.budget:
            return None
        return self._make_buffer(device, capacity)

    def _make_buffer(self, device: _Device, capacity: int) -> _SentBuffer | None:
        try:
            memory, event = device.allocate(capacity), device.event()
        except RuntimeError:  # the device's memory is full
            return None
        try:
            memory_handle = device.export(memory)
        except RuntimeError as error:
            self._stop_sharing(str(error))
            return None
        path = str(self._scratch.shm / f"lease-{process_id()}-{next(_counter)}")
        buffer = self._buffers[path] = _SentBuffer(device, path, memory, memory_handle, event)
        return buffer

    def _drop_buffer(self, buffer: _SentBuffer) -> None:
        del self._buffers[buffer.path]
        unlink(buffer.path)

    def _stop_sharing(self, reason: str) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            log.warning(
                "tensors cannot stay on the accelerator on their way, and are copied through the host: %s", reason
            )
