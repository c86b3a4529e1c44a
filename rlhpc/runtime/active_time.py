"""Clock that stands still while the process is stopped, as by `scontrol suspend`: for training time, rates and estimates."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable

#: How often the clock is looked at, and how much later than that a look must be for the process to have been stopped.
_LOOK_S, _STOPPED_S = 1.0, 10.0
#: Share of a gap during which a running process computed and blocked all other threads.
_BUSY_SHARE = 0.1


class ActiveClock:
    """Seconds in which this process was not stopped, from an arbitrary moment on.

    A stopped process looks at no clock and computes nothing. A gap between two looks is left out if it is longer than any
    that a busy machine makes, and the process had next to no processor time in it. Shorter stops count.

    Args:
        look_s: Seconds between two looks.
        stopped_s: How much longer a gap must be.
        source: The clock with the stops in it.
        processor: Processor time of this process.
    """

    def __init__(
        self,
        look_s: float = _LOOK_S,
        stopped_s: float = _STOPPED_S,
        source: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] = time.process_time,
    ) -> None:
        self._look_s, self._stopped_s = look_s, stopped_s
        self._source, self._processor = source, processor
        self._lock = threading.Lock()
        self._last, self._last_processor, self._stopped = source(), processor(), 0.0

    def start(self) -> ActiveClock:
        """Looks at the clock from now on, in a thread that ends with the process."""
        threading.Thread(target=self._run, name="rlhpc-active-time", daemon=True).start()
        return self

    def __call__(self) -> float:
        with self._lock:
            now, processor = self._source(), self._processor()
            gap = now - self._last - self._look_s
            if gap > self._stopped_s and processor - self._last_processor < _BUSY_SHARE * gap:
                self._stopped += gap
            self._last, self._last_processor = now, processor
            return now - self._stopped

    def _run(self) -> None:
        while True:
            time.sleep(self._look_s)
            self()


@functools.cache
def _clock() -> ActiveClock:
    return ActiveClock().start()


os.register_at_fork(after_in_child=_clock.cache_clear)  # a child has none of its parent's threads


def active_s() -> float:
    """Returns the seconds of this process's `ActiveClock`: like `time.perf_counter`, less the time in which it was stopped."""
    return _clock()()
