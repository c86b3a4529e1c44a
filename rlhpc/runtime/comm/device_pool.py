"""The sender's side of the lane: buffers on its accelerator, each exported once, that go from message to message."""

from __future__ import annotations

import itertools
import logging
import mmap
import threading
from collections.abc import Sequence
from typing import Any

from rlhpc.runtime.comm import crossings
from rlhpc.runtime.comm.crossings import Crossing
from rlhpc.runtime.comm.devices import Device, DeviceEvent, own
from rlhpc.runtime.comm.segments import FREE, WRITTEN, capacity_of, unlink
from rlhpc.runtime.errors import ChannelError
from rlhpc.runtime.host import process_id
from rlhpc.runtime.scratch import Scratch

log = logging.getLogger(__name__)

#: Buffers of a process; beyond them messages take the host's road.
_MOST = 64
_counter = itertools.count()


class _Buffer:
    """A buffer as its sender knows it."""

    def __init__(self, device: Device, path: str, memory: Any, exported: bytes, event: DeviceEvent) -> None:
        self.device, self.path, self.memory, self.exported, self.event = device, path, memory, exported, event
        self.lease: mmap.mmap = crossings.make_lease(path)
        self.readers = self.size = 0
        self.holders: Sequence[str] = ()

    @property
    def capacity(self) -> int:
        """Bytes that fit."""
        return int(self.memory.numel())

    def free(self) -> bool:
        return crossings.is_free(self.lease, self.readers)


class DevicePool:
    """The buffers that this process writes. Any thread may call any method.

    Args:
        scratch: The session's folders on this host.
        endpoint: This process's service.

    Attributes:
        crossed: Messages whose tensors stayed on the accelerator.
    """

    def __init__(self, scratch: Scratch, endpoint: dict[str, str]) -> None:
        self._scratch, self._endpoint = scratch, endpoint
        self._lock = threading.Lock()
        self._buffers: dict[str, _Buffer] = {}
        self._shut = False
        self.crossed = 0

    @property
    def bytes(self) -> int:
        """Device memory that the buffers take."""
        return sum(buffer.capacity for buffer in list(self._buffers.values()))

    def reaches(self, host: str, address: str) -> bool:
        """Whether a process of that host that computes on that accelerator can be sent tensors by it."""
        device = None if self._shut or not address or host != self._endpoint["host"] else own()
        return device is not None and device.address == address

    def write(self, tensors: Sequence[Any], readers: int = 1, holders: Sequence[str] = ()) -> Crossing | None:
        """Asks the accelerator to copy tensors of its own into a buffer, and lends that to readers, numbered from 0.

        Returns:
            None where there is no room: all buffers are lent, or the budget is spent.
        """
        device = own()
        if device is None or readers > crossings.MOST:
            return None
        parts, size = crossings.layout([(_name(one.dtype), tuple(one.shape), one.element_size()) for one in tensors])
        with self._lock:
            buffer = self._take(device, max(size, 1))
            if buffer is None:
                return None
            for part, tensor in zip(parts, tensors, strict=True):
                if part.nbytes:
                    into = buffer.memory[part.offset : part.offset + part.nbytes]
                    device.copy(into.view(tensor.dtype).reshape(part.shape), tensor.detach())
            buffer.event.record()
            buffer.readers, buffer.size, buffer.holders = readers, size, holders
            crossings.lend(buffer.lease, readers)
            self.crossed += 1
        handle = buffer.event.handle
        return Crossing(self._endpoint, buffer.path, device.address, buffer.exported, handle, size, parts)

    def awaited(self, path: str) -> list[bool]:
        """Which readers of a buffer have not come yet; empty for one that is not here."""
        buffer = self._buffers.get(path)
        return [] if buffer is None else [state == WRITTEN[0] for state in buffer.lease[: buffer.readers]]

    def local(self, path: str) -> tuple[Any, DeviceEvent] | None:
        """Memory and event of a buffer of this process: it cannot open what it exported itself."""
        buffer = self._buffers.get(path)
        return None if buffer is None else (buffer.memory, buffer.event)

    def to_host(self, path: str, reader: int, why: str) -> Any:
        """A copy on the host for a reader that cannot read the buffer, uint8; the buffer is not lent to it any more.

        Args:
            path: The buffer.
            reader: Number of the reader.
            why: What keeps it from opening the buffer; empty if it is on another accelerator. No message after this one
                is sent to anybody this way.

        Raises:
            ChannelError: The message was forgotten.
        """
        with self._lock:
            buffer = self._buffers.get(path)
            if buffer is None or buffer.lease[reader : reader + 1] == FREE:
                raise ChannelError("a message was forgotten before its reader came")
            buffer.event.wait()
            copied = buffer.device.to_host(buffer.memory[: buffer.size])
            crossings.end(buffer.lease, reader)
        if why:
            self._give_up(f"another process cannot open it ({why})")
        return copied

    def forget_process(self, process: str) -> None:
        """Ends the buffers that were lent to a process that has ended (`host.process_key`) and to no other."""
        with self._lock:
            for buffer in list(self._buffers.values()):
                slots = [slot for slot, holder in enumerate(buffer.holders) if holder == process]
                for slot in slots:
                    crossings.end(buffer.lease, slot)
                if slots and buffer.free():
                    self._drop(buffer)

    def park(self) -> int:
        """Gives device memory back; returns how much is still lent, and stays."""
        with self._lock:
            for buffer in list(self._buffers.values()):
                if buffer.free():
                    self._drop(buffer)
        return self.bytes

    def forget(self) -> None:
        """Ends all buffers, also those whose readers have not come; for when what was sent counts no longer."""
        with self._lock:
            for buffer in list(self._buffers.values()):
                self._drop(buffer)

    # -- finding one ----------------------------------------------------------------------------------------------

    def _take(self, device: Device, size: int) -> _Buffer | None:
        free = [buffer for buffer in self._buffers.values() if buffer.free()]
        fitting = [buffer for buffer in free if size <= buffer.capacity <= 2 * size]
        if fitting:
            return min(fitting, key=lambda buffer: buffer.capacity)
        capacity = capacity_of(size)
        while free and (len(self._buffers) >= _MOST or self.bytes + capacity > device.budget):
            self._drop(free.pop(0))
        if len(self._buffers) >= _MOST or self.bytes + capacity > device.budget:
            return None
        return self._make(device, capacity)

    def _make(self, device: Device, capacity: int) -> _Buffer | None:
        try:
            memory, event = device.allocate(capacity), device.event()
        except RuntimeError:  # its memory is full
            return None
        try:
            exported = device.export(memory)
        except RuntimeError as error:
            self._give_up(str(error))
            return None
        path = str(self._scratch.shm / f"lease-{process_id()}-{next(_counter)}")
        buffer = self._buffers[path] = _Buffer(device, path, memory, exported, event)
        return buffer

    def _drop(self, buffer: _Buffer) -> None:
        del self._buffers[buffer.path]
        unlink(buffer.path)

    def _give_up(self, why: str) -> None:
        if not self._shut:
            self._shut = True
            log.warning("tensors cannot stay on the accelerator on their way, and are copied through the host: %s", why)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
