"""An accelerator's stand-in for the lane's tests: its memory is shared memory of another kind, and it may lag behind.

What a device is asked for happens later, in order. A stand-in that lags does it when it is told to (`run`): whoever reads
memory without having waited for the event finds what was there before. One that does not lag does it at once; to wait for an
event is then to wait here, with a deadline.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_DEADLINE_S = 30.0
_COUNTS = struct.Struct("qq")
_numbers = itertools.count()


def _map(path: Path, size: int, make: bool) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if make else 0), 0o600)
    try:
        if make:
            os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


class StandInEvent:
    """How often it was recorded, and how far the device has come."""

    def __init__(self, device: StandIn, path: Path, make: bool) -> None:
        self._device, self._path, self._page = device, path, _map(path, _COUNTS.size, make)

    @property
    def handle(self) -> bytes:
        return str(self._path).encode()

    def _counts(self) -> tuple[int, int]:
        recorded, reached = _COUNTS.unpack_from(self._page)
        return recorded, reached

    def record(self) -> None:
        number = self._counts()[0] + 1
        _COUNTS.pack_into(self._page, 0, number, number - 1)
        self._device.ask(lambda: _COUNTS.pack_into(self._page, 0, number, number))

    def wait(self) -> None:
        number = self._counts()[0]
        self._device.ask(lambda: self._reach(number))

    def _reach(self, number: int) -> None:
        until = time.monotonic() + _DEADLINE_S
        while self._counts()[1] < number:
            assert time.monotonic() < until, "an event that nobody reached"
            time.sleep(0.0005)

    def done(self) -> bool:
        recorded, reached = self._counts()
        return reached >= recorded


class StandIn:
    """See `rlhpc.runtime.comm.device_memory.Device`.

    Args:
        folder: Where its memory is; the same for all processes.
        address: Which one it is.
        budget: See `Device.budget`.
        lags: Nothing happens before `run`.
        exports, opens: Whether it can.
        peers: Addresses of others whose memory it can open.
    """

    def __init__(
        self, folder: Path, address: str = "stand-in", budget: int = 64 << 20, *, lags: bool = False,
        exports: bool = True, opens: bool = True, peers: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._folder, self.address, self.budget, self.lags = folder, address, budget, lags
        self.exports, self.opens, self.reads = exports, opens, (address, *peers)
        self._asked: list[Callable[[], Any]] = []
        self._memory: dict[int, tuple[int, Path]] = {}

    def ask(self, what: Callable[[], Any]) -> None:
        self._asked.append(what)
        if not self.lags:
            self.run()

    def run(self) -> None:
        """Does what was asked for."""
        while self._asked:
            self._asked.pop(0)()

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor on it, whose values are there at once."""
        made = self.empty(max(values.nbytes, 1))[: values.nbytes].view(values.dtype).reshape(values.shape)
        return made.copy_(values)

    def holds(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return any(start <= at < start + size for start, (size, _) in list(self._memory.items()))

    def allocate(self, size: int) -> torch.Tensor:
        return self.empty(size)

    def empty(self, size: int) -> torch.Tensor:
        path = self._folder / f"memory-{os.getpid()}-{next(_numbers)}"
        return self._known(_map(path, max(size, 1), True), path)

    def _known(self, mapped: mmap.mmap, path: Path) -> torch.Tensor:
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._memory[memory.data_ptr()] = memory.nbytes, path
        weakref.finalize(mapped, self._memory.pop, memory.data_ptr()).atexit = False
        return memory

    def export(self, memory: torch.Tensor) -> bytes:
        if not self.exports:
            raise RuntimeError("this device shares nothing")
        return str(self._memory[memory.data_ptr()][1]).encode()

    def open(self, handle: bytes) -> torch.Tensor:
        if not self.opens:
            raise RuntimeError("operation not permitted")
        path = Path(os.fsdecode(handle))
        return self._known(_map(path, path.stat().st_size, False), path)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        self.ask(lambda: into.copy_(source))

    def to_host(self, memory: torch.Tensor) -> torch.Tensor:
        self.run()
        return memory.clone()

    def event(self) -> StandInEvent:
        return StandInEvent(self, self._folder / f"event-{os.getpid()}-{next(_numbers)}", True)

    def open_event(self, handle: bytes) -> StandInEvent:
        return StandInEvent(self, Path(os.fsdecode(handle)), False)
