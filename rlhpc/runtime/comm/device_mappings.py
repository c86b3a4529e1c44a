"""The reader's side of the lane: buffers of other processes, kept open, and copied from as soon as a message comes.

What a reader gets is memory of its own. A copy on the accelerator costs little, and a buffer is lent no longer than it takes.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from rlhpc.runtime.comm import crossings
from rlhpc.runtime.comm.crossings import Crossing
from rlhpc.runtime.comm.devices import Device, DeviceEvent, own
from rlhpc.runtime.comm.segments import SegmentGone, map_segment
from rlhpc.runtime.host import has_ended

#: How long copies that the accelerator was asked for may take.
_PATIENCE_S = 30.0
_LOOK_S = 0.0005
_PROCESS = re.compile(r"-(\d+\.\d+)-\d+$")


class Elsewhere(Exception):
    """This process cannot read the buffer: its accelerator is no peer, or, where something is said, cannot open it."""


class _Opened:
    def __init__(self, device: Device, lease: mmap.mmap, memory: Any, written: DeviceEvent) -> None:
        self.lease, self.memory, self.written, self.read = lease, memory, written, device.event()


#: Memory and event of a buffer that is this process's own.
Local = Callable[[str], tuple[Any, DeviceEvent] | None]


class DeviceMappings:
    """The buffers of other processes that this one has opened. Any thread may call any method.

    Args:
        local: See `DevicePool.local`.

    Attributes:
        reading: Buffers that are still copied from.
    """

    def __init__(self, local: Local = lambda path: None) -> None:
        self._local = local
        self._lock = threading.Lock()
        self._opened: dict[str, _Opened] = {}
        self.reading: list[tuple[_Opened, int]] = []

    def take(self, crossing: Crossing, reader: int) -> list[Any]:
        """The tensors of a message, on this process's accelerator; they are its own.

        Raises:
            Elsewhere: The buffer cannot be read here.
            SegmentGone: Its sender has ended, or has forgotten the message.
        """
        import torch

        device = own()
        if device is None or crossing.address not in device.reads:
            raise Elsewhere
        self.settle()
        with self._lock:
            opened = self._open(device, crossing)
            if not crossings.begin(opened.lease, reader):
                raise SegmentGone(crossing.path)
            try:
                arrived = device.empty(crossing.size)
                opened.written.wait()
                device.copy(arrived, opened.memory[: crossing.size])
                opened.read.record()
            except BaseException:  # of a device that is full, say
                crossings.end(opened.lease, reader)
                raise
            self.reading.append((opened, reader))
        return [
            arrived[part.offset : part.offset + part.nbytes].view(getattr(torch, part.dtype)).reshape(part.shape)
            for part in crossing.parts
        ]

    def _open(self, device: Device, crossing: Crossing) -> _Opened:
        sender = _PROCESS.search(crossing.path)
        # An event of a process that has ended must not be waited for.
        if sender is not None and has_ended(sender[1]):
            raise SegmentGone(crossing.path)
        if crossing.path in self._opened:
            return self._opened[crossing.path]
        self._sweep()
        lease = map_segment(crossing.path, mmap.MAP_SHARED)
        found = self._local(crossing.path)
        if found is None:
            try:
                found = device.open(crossing.memory), device.open_event(crossing.event)
            except RuntimeError as error:
                raise Elsewhere(str(error) or type(error).__name__) from None
        opened = self._opened[crossing.path] = _Opened(device, lease, *found)
        return opened

    def settle(self) -> None:
        """Gives back the buffers that have been copied by now."""
        with self._lock:
            still = []
            for opened, reader in self.reading:
                if opened.read.done():
                    crossings.end(opened.lease, reader)
                else:
                    still.append((opened, reader))
            self.reading = still

    def park(self) -> None:
        """Closes everything, once what was to be copied has been."""
        until = time.monotonic() + _PATIENCE_S
        while self.reading and time.monotonic() < until:
            self.settle()
            time.sleep(_LOOK_S if self.reading else 0)
        with self._lock:
            self._opened.clear()

    def _sweep(self) -> None:
        """Closes buffers that their senders have given up."""
        busy = {id(opened) for opened, _ in self.reading}
        self._opened = {
            path: opened for path, opened in self._opened.items() if id(opened) in busy or os.path.exists(path)
        }
