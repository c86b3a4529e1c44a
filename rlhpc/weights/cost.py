"""What proving weights takes of the processor, by this process's own clock: `time/proof_s` in a run's metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Cost:
    """Seconds of the processor, of this process, since somebody last asked."""

    def __init__(self) -> None:
        self._proof, self._since, self._at_it = 0.0, time.process_time(), False

    @contextlib.contextmanager
    def proving(self, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
        """Counts what the block takes; within another such block, nothing twice.

        Args:
            clock: Of this thread, which digests alone; `time.process_time` where torch's threads help.
        """
        if self._at_it:
            yield
            return
        self._at_it, start = True, clock()
        try:
            yield
        finally:
            self._at_it = False
            self._proof += clock() - start

    def pop(self) -> dict[str, float]:
        """proof_s and, for all that the process did, cpu_s."""
        now = time.process_time()
        found = {"proof_s": self._proof, "cpu_s": now - self._since}
        self._proof, self._since = 0.0, now
        return found


#: Of this process.
COST = Cost()
