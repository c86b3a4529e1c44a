"""Signals of commands that move a robot or write data: the command ends in order."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


def restore_handlers(previous_handlers: dict[signal.Signals, Any]) -> None:
    """Restores the handlers of signals, and clears the mapping; outside of the main thread it only clears it."""
    if threading.current_thread() is threading.main_thread():
        for signum, handler in previous_handlers.items():
            # None stands for a handler of C code, which Python cannot restore
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
    previous_handlers.clear()


class Interrupts:
    """Handler with which SIGTERM, SIGHUP and SIGUSR2 end a command like Ctrl-C, by KeyboardInterrupt.

    Only the first signal counts, because a second one would interrupt the end, in which a robot is stopped and data are
    written. SIGQUIT still ends the process at once. Use the object as a context manager, or call `install()` and `restore()`.
    Outside of the main thread it does nothing.
    """

    def __init__(self) -> None:
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._is_deferred = self._is_pending = self._is_ending = False

    def install(self) -> Interrupts:
        """Installs the handler; returns this object."""
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, or a job in the background of a script
                    self._previous_handlers[signum] = signal.signal(signum, self._handle)
        return self

    def restore(self) -> None:
        """Restores the previous handlers."""
        restore_handlers(self._previous_handlers)

    def __enter__(self) -> Interrupts:
        return self.install()

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Delays a signal in the block until `check`."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def check(self) -> None:
        """Raises KeyboardInterrupt if a signal was delayed."""
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        if self._is_deferred:
            self._is_pending = True
            return
        raise KeyboardInterrupt
