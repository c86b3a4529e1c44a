"""Worker threads of an event loop, for blocking calls of environments, templates and tokenizers."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Threads:
    """Pool of threads. A thread whose caller has stopped waiting is abandoned and replaced.

    Args:
        max_threads: Maximum number of threads.
        name: Name of each thread.
    """

    def __init__(self, max_threads: int, name: str = "rlhpc-environment") -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._max_threads, self._num_threads, self._num_idle, self._name = max_threads, 0, 0, name

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function in a thread, and returns its result."""
        call = _Call(function, args, asyncio.get_running_loop().create_future())
        self._calls.put(call)
        self._add_thread()
        try:
            return await call.result
        except asyncio.CancelledError:
            self._abandon(call)
            raise

    async def call_to_end(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function in a thread, and returns its result. A cancelled caller still waits until the call has ended, so
        that the caller's lock limits the number of concurrent calls.
        """
        task = asyncio.ensure_future(self.call(function, *args))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
            raise

    def close(self) -> None:
        """Ends the threads that wait for calls."""
        for _ in range(self._num_threads):
            self._calls.put(None)

    def _add_thread(self) -> None:
        with self._lock:
            if not self._num_idle and self._num_threads < self._max_threads:
                self._num_threads += 1
                threading.Thread(target=self._run_calls, name=self._name, daemon=True).start()

    def _abandon(self, call: _Call) -> None:
        with self._lock:
            call.is_abandoned = True
            self._num_threads -= call.has_started
        if call.has_started:
            self._add_thread()

    def _run_calls(self) -> None:
        while True:
            with self._lock:
                self._num_idle += 1
            call = self._calls.get()
            with self._lock:
                self._num_idle -= 1
                if call is None:
                    return
                if call.is_abandoned:
                    continue
                call.has_started = True
            call.run()
            with self._lock:
                if call.is_abandoned:
                    return  # another thread has replaced this one
                call.has_started = False


@dataclass
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    result: asyncio.Future[Any]
    has_started: bool = False
    is_abandoned: bool = False

    def run(self) -> None:
        try:
            call_result = self.function(*self.args)
        except Exception as error:
            call_result = error
        call_on_loop(self.result.get_loop(), set_outcome, self.result, call_result)


def call_on_loop(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> bool:
    """Schedules a call on an event loop of another thread; returns False if the loop has ended."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        return False
    return True


def set_outcome(future: asyncio.Future[Any], call_result: Any) -> None:
    """Sets the result or the exception of a future, unless the future is already done."""
    if future.done():
        return
    if isinstance(call_result, Exception):
        future.set_exception(call_result)
    else:
        future.set_result(call_result)
