"""Mailbox: arrays between two processes of one host through shared memory, without a system call on the way.

A channel costs two socket operations and a wake-up a message, some 150 µs; where a simulator step takes 60 µs, that
decides the speed of a run. A mailbox holds one array per direction and its reader polls a counter: a few microseconds.
It is for peers in lockstep, such as a simulator and the policy that acts on it; everything else belongs into a channel.
"""

from __future__ import annotations

import ast
import mmap
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlhpc.runtime.errors import ChannelError, DeadlineExceeded

_HEADER = 512
_WRITTEN, _TAKEN, _FORM, _FORM_SIZE = range(4)  # 64-bit counters at the start of a direction's header
_TEXT = 64  # where dtype and shape stand, as text
#: Longest poll before sleeping; a peer that takes longer is not worth a core.
_POLL_S = 0.0005
_NAP_S = (0.00005, 0.001)


def available() -> bool:
    """Whether this machine orders stores as the counters need it: data first, then the counter. x86 does."""
    return platform.machine() in ("x86_64", "AMD64")


class Mailbox:
    """One end. Both ends open the same file, in any order; one gives `first=True`.

    Args:
        path: In a folder that only this user can enter; the file is made if it is missing, and must be new to the pair.
        capacity: Bytes of the largest array; both ends give the same. Memory is used as it is touched.
        first: Which end this is.
        peer: Who the other end is, for messages.
        deadline: Seconds after which a wait gives up.
        check: Called during a long wait; raises to end it.
    """

    def __init__(
        self,
        path: Path,
        capacity: int,
        *,
        first: bool,
        peer: str,
        deadline: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self._peer, self._deadline, self._check = path, peer, deadline, check
        size = _HEADER + (capacity + 63) // 64 * 64
        self._capacity = capacity
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, 2 * size)
            memory = memoryview(mmap.mmap(fd, 2 * size))
        finally:
            os.close(fd)
        out, inbound = (0, size) if first else (size, 0)
        self._out, self._in = memory[out : out + size], memory[inbound : inbound + size]
        self._out_counters, self._in_counters = (half[:_TEXT].cast("Q") for half in (self._out, self._in))
        self._sent = self._got = 0
        self._out_form, self._in_form = "", 0
        self._out_array = self._in_array = np.empty(0)
        self._poll = _POLL_S

    def put(self, array: np.ndarray) -> None:
        """Leaves an array for the peer, once it has taken the one before.

        Raises:
            ChannelError: It is larger than the mailbox.
            DeadlineExceeded: The peer did not take the last one.
        """
        counters = self._out_counters
        if counters[_TAKEN] != self._sent:
            self._wait(counters, _TAKEN, self._sent, "to take an array from")
        form = f"({array.dtype.str!r}, {array.shape})"
        if form != self._out_form:
            self._announce(array, form)
        np.copyto(self._out_array, array)
        self._sent += 1
        counters[_WRITTEN] = self._sent

    def get(self) -> np.ndarray:
        """The peer's next array; a copy.

        Raises:
            DeadlineExceeded: None came.
        """
        counters = self._in_counters
        expected = self._got + 1
        if counters[_WRITTEN] != expected:
            self._wait(counters, _WRITTEN, expected, "for an array from")
        if counters[_FORM] != self._in_form:
            self._in_form = counters[_FORM]
            dtype, shape = ast.literal_eval(bytes(self._in[_TEXT : _TEXT + counters[_FORM_SIZE]]).decode())
            self._in_array = self._view(self._in, np.dtype(dtype), shape)
        array = self._in_array.copy()
        self._got = expected
        counters[_TAKEN] = expected
        return array

    def unlink(self) -> None:
        """Removes the file; ends that have it open keep working."""
        self.path.unlink(missing_ok=True)

    def _announce(self, array: np.ndarray, form: str) -> None:
        text = form.encode()
        if array.nbytes > self._capacity or array.dtype.hasobject or len(text) > _HEADER - _TEXT:
            raise ChannelError(f"mailbox to {self._peer}: {form} does not fit into {self._capacity} bytes")
        self._out[_TEXT : _TEXT + len(text)] = text
        self._out_counters[_FORM_SIZE] = len(text)
        self._out_counters[_FORM] += 1
        self._out_form, self._out_array = form, self._view(self._out, array.dtype, array.shape)

    @staticmethod
    def _view(half: memoryview, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(half, dtype, count, _HEADER).reshape(shape)

    def _wait(self, counters: memoryview, index: int, value: int, what: str) -> None:
        """Polls, giving way to other processes, then naps; learns whether polling pays with this peer."""
        started = time.perf_counter()
        end, nap = started + self._poll, _NAP_S[0]
        while True:
            for _ in range(20):
                if counters[index] == value:
                    waited = time.perf_counter() - started
                    self._poll = _POLL_S if waited < 2 * _POLL_S else max(0.8 * self._poll, 0.00002)
                    return
            os.sched_yield()
            now = time.perf_counter()
            if now > end:
                if now - started > self._deadline:
                    raise DeadlineExceeded(f"waited {self._deadline:.0f} s {what} {self._peer}")
                self._check()
                time.sleep(nap)
                nap = min(nap * 1.2, _NAP_S[1])
