"""What a process has received and passes on: others ask it, by name, instead of the process that wrote it."""

from __future__ import annotations

import collections
import threading
import time

#: Most that is offered at a time; the oldest is withdrawn for the next.
_MOST = 8
#: Names of what was withdrawn that are remembered.
_REMEMBERED = 1024


class Withdrawn(Exception):
    """It was offered, and is no longer."""


class Offers:
    """Memory that others may read, by name. Any thread may call any method."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: collections.OrderedDict[str, tuple[memoryview, int]] = collections.OrderedDict()
        self._gone: collections.deque[str] = collections.deque(maxlen=_REMEMBERED)

    def put(self, name: str, memory: memoryview, times: int) -> None:
        """Offers memory that stays as it is, until it has been read so many times. A reader keeps it beyond that."""
        withdrawn = []
        with self._changed:
            self._held[name] = memory, times
            while len(self._held) > _MOST:
                withdrawn.append(self._held.popitem(last=False))
                self._gone.append(withdrawn[-1][0])
            self._changed.notify_all()
        # Only now may memory return to where it came from, which has locks of its own.

    def find(self, name: str, timeout: float) -> memoryview | None:
        """What is offered by that name, if it is within `timeout` seconds.

        Raises:
            Withdrawn: It was offered before.
        """
        end = time.monotonic() + timeout
        with self._changed:
            while name not in self._held:
                if name in self._gone:
                    raise Withdrawn(name)
                if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    return None
            return self._held[name][0]

    def taken(self, name: str) -> None:
        """One of those for whom it is offered has read it all."""
        last = None
        with self._changed:
            memory, times = self._held.get(name, (None, 0))
            if memory is not None and times > 1:
                self._held[name] = memory, times - 1
            elif memory is not None:
                last = self._held.pop(name)
                self._gone.append(name)
        del last, memory
