"""Mailbox: exchange of arrays between two processes of one host through shared memory, without system calls.

A channel needs two socket operations and a wake-up per message, about 150 µs. If a simulator step takes 60 µs, this limits
the speed of the run. A mailbox holds one array per direction, and its reader polls a counter, which takes a few microseconds.
In a longer wait the reader sleeps on the counter (a futex) until it is woken. Mailboxes are for processes in lockstep, such as
a simulator and its policy; use a channel for everything else.
"""

from __future__ import annotations

import ast
import ctypes
import mmap
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlhpc.runtime.errors import ChannelError, DeadlineExceeded
from rlhpc.runtime.trace_recorder import recorder

_HEADER = 512
# 64-bit counters at the start of each direction's header. The two of `_AWAITS` are 1 while a process sleeps on the first or
# second; the last one is the time at which a traced array was sent, and 0 otherwise.
_WRITTEN, _CONSUMED, _FORM, _FORM_SIZE, _AWAITS_WRITTEN, _AWAITS_CONSUMED, _SENT_NS = range(7)
_TEXT = 64  # offset of dtype and shape, as text
#: Maximum seconds to poll before sleeping: polling keeps a core busy.
_POLL_S = 0.0005
#: Maximum nanoseconds to sleep between two checks of the run.
_NAP_NS = 100_000_000
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # on x86-64
_libc = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NAP = _Timespec(0, _NAP_NS)


def available() -> bool:
    """Returns whether this machine makes stores visible in program order (x86-64), so that a reader sees data before the
    counter.
    """
    return platform.machine() in ("x86_64", "AMD64")


class Mailbox:
    """One end of a mailbox. Both ends open the same file, in any order, and exactly one of them passes `first=True`. The end
    that receives the first array removes the file.

    Args:
        path: File in a folder that only this user can access; created if it is missing. Each pair needs a new file.
        capacity: Bytes of the largest array; the same at both ends. Memory that is never touched is not allocated.
        is_first: Whether this end writes to the first half of the file.
        peer: Rank at the other end, e.g. `env-0`, for error messages and traces.
        deadline: Seconds after which a wait gives up.
        check: Called during long waits; raises to end the wait.
    """

    def __init__(
        self,
        path: Path,
        capacity: int,
        *,
        is_first: bool,
        peer: str,
        deadline: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self._peer, self._deadline, self._check = path, peer, deadline, check
        half_size = _HEADER + (capacity + 63) // 64 * 64
        self._capacity = capacity
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, 2 * half_size)
            shared_mapping = mmap.mmap(fd, 2 * half_size)
        finally:
            os.close(fd)
        memory, address = memoryview(shared_mapping), ctypes.addressof(ctypes.c_char.from_buffer(shared_mapping))
        out_start, in_start = (0, half_size) if is_first else (half_size, 0)
        self._out_memory, self._in_memory = (
            memory[out_start : out_start + half_size],
            memory[in_start : in_start + half_size],
        )
        self._out_counters, self._in_counters = (
            buffer[:_TEXT].cast("Q") for buffer in (self._out_memory, self._in_memory)
        )
        self._out_address, self._in_address = address + out_start, address + in_start
        self._num_sent = self._num_received = 0
        self._in_form = 0
        self._out_array = self._in_array = np.empty(0)
        self._poll = _POLL_S

    def put(self, array: np.ndarray) -> None:
        """Waits until the peer has read the previous array, then sends it this one.

        Raises:
            ChannelError: The array is larger than the mailbox, or contains Python objects.
            DeadlineExceeded: The peer did not read the previous array in time.
        """
        counters = self._out_counters
        if counters[_CONSUMED] != self._num_sent:
            self._wait(counters, self._out_address, _CONSUMED, self._num_sent, "to take an array from")
        if array.shape != self._out_array.shape or array.dtype != self._out_array.dtype or not self._num_sent:
            self._announce(array)
        np.copyto(self._out_array, array)
        self._num_sent += 1
        counters[_SENT_NS] = time.monotonic_ns() if recorder.is_on else 0
        counters[_WRITTEN] = self._num_sent
        if counters[_AWAITS_WRITTEN]:
            _wake(counters, self._out_address, _WRITTEN)

    def ready(self) -> bool:
        """Returns whether the peer's next array has arrived."""
        return bool(self._in_counters[_WRITTEN] == self._num_received + 1)

    def get(self) -> np.ndarray:
        """Waits for the peer's next array; returns a copy.

        Raises:
            DeadlineExceeded: No array arrived in time.
        """
        counters = self._in_counters
        expected_count = self._num_received + 1
        is_ready = counters[_WRITTEN] == expected_count
        if not is_ready:
            self._wait(counters, self._in_address, _WRITTEN, expected_count, "for an array from")
        if counters[_FORM] != self._in_form:
            self._in_form = counters[_FORM]
            dtype, shape = ast.literal_eval(bytes(self._in_memory[_TEXT : _TEXT + counters[_FORM_SIZE]]).decode())
            self._in_array = self._view(self._in_memory, np.dtype(dtype), shape)
        array = self._in_array.copy()
        if not self._num_received:
            # Both ends have opened the file. Unlinked, its memory is freed when both have ended, however they end.
            self.path.unlink(missing_ok=True)
        self._num_received = expected_count
        if recorder.is_on and (sent_ns := counters[_SENT_NS]):
            # A reader of several mailboxes finds some arrays ready, and only the last one that arrived ended its wait.
            recorder.add_message("array", self._peer, sent_ns, sent_ns if is_ready else time.monotonic_ns())
        counters[_CONSUMED] = expected_count
        if counters[_AWAITS_CONSUMED]:
            _wake(counters, self._in_address, _CONSUMED)
        return array

    def _announce(self, array: np.ndarray) -> None:
        dtype_and_shape = f"({array.dtype.str!r}, {array.shape})"
        encoded_form = dtype_and_shape.encode()
        if array.nbytes > self._capacity or array.dtype.hasobject or len(encoded_form) > _HEADER - _TEXT:
            raise ChannelError(f"mailbox to {self._peer}: {dtype_and_shape} does not fit into {self._capacity} bytes")
        self._out_memory[_TEXT : _TEXT + len(encoded_form)] = encoded_form
        self._out_counters[_FORM_SIZE] = len(encoded_form)
        self._out_counters[_FORM] += 1
        self._out_array = self._view(self._out_memory, array.dtype, array.shape)

    @staticmethod
    def _view(mailbox_half: memoryview, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        num_elements = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(mailbox_half, dtype, num_elements, _HEADER).reshape(shape)

    def _wait(self, counters: memoryview, address: int, index: int, value: int, purpose: str) -> None:
        """Waits until a counter has a value: polls, yields to other processes, then sleeps.

        Polls for a shorter time after a long wait, and for the full time again after a short wait.
        """
        start_time = now = time.perf_counter()
        poll_until = start_time + self._poll
        while now < poll_until:
            for _ in range(20):
                if counters[index] == value:
                    self._poll = _POLL_S
                    return
            os.sched_yield()
            now = time.perf_counter()
        while True:
            counters[_AWAITS_WRITTEN + index] = 1
            counter = counters[index]
            if counter == value:
                break
            # The kernel compares the counter again, so no wake-up is missed; a late wake-up costs at most one nap.
            _libc.syscall(
                _SYS_FUTEX,
                ctypes.c_void_p(address + 8 * index),
                _FUTEX_WAIT,
                ctypes.c_uint32(counter),
                ctypes.byref(_NAP),
                None,
                0,
            )
            if counters[index] == value:
                break
            now = time.perf_counter()
            if now - start_time > self._deadline:
                raise DeadlineExceeded(f"waited {self._deadline:.0f} s {purpose} {self._peer}")
            self._check()
        counters[_AWAITS_WRITTEN + index] = 0
        waited_s = time.perf_counter() - start_time
        self._poll = _POLL_S if waited_s < 2 * _POLL_S else max(0.8 * self._poll, 0.00002)


def _wake(counters: memoryview, address: int, index: int) -> None:
    counters[_AWAITS_WRITTEN + index] = 0
    _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(address + 8 * index), _FUTEX_WAKE, 1, None, None, 0)
