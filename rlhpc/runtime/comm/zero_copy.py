"""Zero-copy sending: other hosts read directly from the sender's tensors, instead of from a copy, while the sender waits.

This is faster if a receiver is already waiting. Before the sender continues, `finish_reads` waits for active readers and
copies the data to a segment for readers that have not started. Until every reader has released the data, the data exists
in the sender's tensors or in that segment, so the failure of a reader loses no data.

The second half of the module stores data that a process has received and forwards to further hosts.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlhpc.runtime.comm.shared_memory import SegmentPool, layout
from rlhpc.runtime.host import process_id

PREFIX = "loan:"
#: Minimum bytes for zero-copy sending: below this size, a copy takes less time than the wait for readers.
LEND_LIMIT = 1 << 20
#: Seconds that a reader that was waiting for the message may take to start, or to release the data after reading it.
_READER_TIMEOUT_S = 2.0
#: Assumed bytes per second of a copy: a reader that was not waiting has half the copy's duration to start.
_COPY_RATE = 10e9
_CHECK_S = 0.2
_PADDING = memoryview(bytes(64))
_numbers = itertools.count()


class LentBuffers:
    """Buffers of a sender that other hosts read in place, addressed with the layout of a segment.

    Attributes:
        name: Name that readers use in place of a segment's path.
        spans: (offset, length) of each buffer.
        size: Total bytes of the buffers, with padding.
        segment: Path of the segment with a copy; None if there is no copy.
        pending_readers: Numbers of the readers that have not released the data.
        holders: For each reader, a process; when this process ends, the data is released for the reader. See
            `shared_memory.ShmSegment`.
    """

    def __init__(
        self, buffers: Sequence[Any], num_readers: int, condition: threading.Condition, holders: Sequence[str] = ()
    ) -> None:
        self.name = f"{PREFIX}{process_id()}-{next(_numbers)}"
        self.spans, self.size = layout(buffers)
        self._views: list[memoryview] | None = [memoryview(buffer).cast("B") for buffer in buffers]
        self.segment: str | None = None
        self.pending_readers, self._readers, self.holders = set(range(num_readers)), num_readers, holders
        self._condition = condition
        self._reading, self._has_started, self._has_failed, self._last_activity = 0, False, False, 0.0

    @contextlib.contextmanager
    def reading(self) -> Iterator[list[memoryview] | None]:
        """Yields the buffers, which do not change inside the block; yields None if `finish_reads` has ended the access."""
        with self._condition:
            lent_views = self._views
            if lent_views is not None:
                self._reading += 1
                self._has_started = True
        try:
            yield lent_views
        except OSError:
            self._has_failed = True
            raise
        finally:
            with self._condition:
                self._reading -= lent_views is not None
                self._last_activity = time.monotonic()
                self._condition.notify_all()

    def pieces(self, views: list[memoryview], start: int, count: int) -> list[memoryview]:
        """Returns bytes `start` to `start + count` of the equivalent segment, as views of the buffers and of padding."""
        buffer_pieces = []
        for (offset, span_length), lent_view in zip(self.spans, views, strict=True):
            for view_offset, source_view in (
                (offset, lent_view),
                (offset + span_length, _PADDING[: -span_length % 64]),
            ):
                first_byte, last_byte = max(start - view_offset, 0), min(start + count - view_offset, len(source_view))
                if first_byte < last_byte:
                    buffer_pieces.append(source_view[first_byte:last_byte])
        return buffer_pieces

    def finish_reads(self, is_delivered: bool, pool: SegmentPool, check: Callable[[], None]) -> None:
        """Waits for readers, and copies the data to a segment for the remaining readers. Then no reader uses the buffers.

        Args:
            is_delivered: Whether all readers were already waiting for the message.
            pool: Pool in which the copy is made.
            check: Called while waiting; raises when the run has failed.
        """
        self._last_activity = time.monotonic()
        while True:
            with self._condition:
                patience_s = _READER_TIMEOUT_S if is_delivered or self._has_started else self.size / _COPY_RATE / 2
                remaining_s = 0.0 if self._has_failed else self._last_activity + patience_s - time.monotonic()
                if not self.pending_readers or not (self._reading or remaining_s > 0):
                    break
                self._condition.wait(_CHECK_S if self._reading else min(remaining_s, _CHECK_S))
            check()
        with self._condition:
            lent_views, self._views = self._views, None
            if self.pending_readers and lent_views is not None:
                self.segment, _ = pool.write(lent_views, self._readers, holders=self.holders)
                for reader in set(range(self._readers)) - self.pending_readers:
                    pool.release(self.segment, reader)


class Lender:
    """Registry of the buffers of this process that other hosts read in place. Any thread may call any method."""

    def __init__(self, pool: SegmentPool) -> None:
        self._pool = pool
        self._condition = threading.Condition()
        self._lent_buffers: dict[str, LentBuffers] = {}

    def lend(self, buffers: Sequence[Any], num_readers: int, holders: Sequence[str] = ()) -> LentBuffers:
        """Registers buffers that other hosts read in place; see `LentBuffers`."""
        lent_buffers = LentBuffers(buffers, num_readers, self._condition, holders)
        self._lent_buffers[lent_buffers.name] = lent_buffers
        return lent_buffers

    def find(self, name: str) -> LentBuffers | None:
        """Returns the buffers with this name; None if all readers have released them."""
        return self._lent_buffers.get(name)

    def memory(self, path: str) -> mmap.mmap | None:
        """Returns the mapped memory of a segment of this process; None if the pool does not track it."""
        return self._pool.memory(path)

    def forget_process(self, process_id: str) -> None:
        """Releases the buffers of a process (`host.process_key`) that has ended."""
        for name, lent_buffers in list(self._lent_buffers.items()):
            for reader, holder in enumerate(lent_buffers.holders):
                if holder == process_id:
                    self.release(name, reader)

    def release(self, path: str, reader: int) -> None:
        """Registers that a reader has released zero-copy buffers or a segment of this process."""
        lent_buffers = self._lent_buffers.get(path)
        if lent_buffers is None:
            self._pool.release(path, reader)
            return
        with self._condition:
            lent_buffers.pending_readers.discard(reader)
            if lent_buffers.segment is not None:
                self._pool.release(lent_buffers.segment, reader)
            if not lent_buffers.pending_readers:
                self._lent_buffers.pop(path, None)
            self._condition.notify_all()


#: Maximum number of concurrent offers; a further offer withdraws the oldest.
_MAX_OFFERS = 8
#: Maximum number of withdrawn names that are remembered.
_MAX_WITHDRAWN = 1024


class Withdrawn(Exception):
    """Error: the data is no longer offered."""


class ForwardedData:
    """Registry of received data that this process offers to other hosts, by name. Any thread may call any method."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._offers: dict[str, tuple[memoryview, int]] = {}
        self._withdrawn_names: collections.deque[str] = collections.deque(maxlen=_MAX_WITHDRAWN)

    def put(self, name: str, memory: memoryview, count: int) -> None:
        """Offers memory until `count` readers have read it. The memory must not change; a reader may use it longer."""
        expired_offers = []
        with self._condition:
            self._offers[name] = memory, count
            while len(self._offers) > _MAX_OFFERS:
                expired_offers.append(self._end_offer(next(iter(self._offers))))
            self._condition.notify_all()
        # `expired_offers` keeps the withdrawn memory until this lock is released, because its pool has another lock.

    def find(self, name: str, timeout: float) -> memoryview | None:
        """Returns the memory offered under a name; waits up to `timeout` seconds for the offer, then returns None.

        Raises:
            Withdrawn: The data is no longer offered.
        """
        deadline = time.monotonic() + timeout
        with self._condition:
            while name not in self._offers:
                if name in self._withdrawn_names:
                    raise Withdrawn(name)
                if not self._condition.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    return None
            return self._offers[name][0]

    def finish_read(self, name: str) -> None:
        """Registers that a reader has read all data of a lent buffer."""
        memory: memoryview | None  # keeps the memory until the lock is released, as in `put`
        with self._condition:
            memory, num_reads = self._offers.get(name, (None, 0))
            if memory is not None and num_reads > 1:
                self._offers[name] = memory, num_reads - 1
            elif memory is not None:
                self._end_offer(name)

    def _end_offer(self, name: str) -> memoryview:
        """Withdraws a lent buffer; returns its memory."""
        self._withdrawn_names.append(name)
        return self._offers.pop(name)[0]
