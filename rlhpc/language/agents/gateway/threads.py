"""Worker threads for an event loop: blocking calls of environments, templates and tokenizers."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Threads:
    """Calls functions in threads. One that whoever asked no longer waits for is given up, and another takes its place.

    Args:
        most: How many.
        name: Of each thread.
    """

    def __init__(self, most: int, name: str = "rlhpc-environment") -> None:
        self._asked: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._most, self._threads, self._idle, self._name = most, 0, 0, name

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns what a function returns."""
        loop = asyncio.get_running_loop()
        call = _Call(function, args, loop, loop.create_future())
        self._asked.put(call)
        self._enlist()
        try:
            return await call.result
        except asyncio.CancelledError:
            self._give_up(call)
            raise

    async def call_to_end(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns what a function gives. Who is cancelled meanwhile waits for its end nevertheless, so that a lock which the
        caller holds bounds how many calls there are."""
        task = asyncio.ensure_future(self.call(function, *args))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
            raise

    def close(self) -> None:
        """Ends the threads that wait."""
        for _ in range(self._threads):
            self._asked.put(None)

    def _enlist(self) -> None:
        with self._lock:
            if not self._idle and self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _give_up(self, call: _Call) -> None:
        with self._lock:
            call.given_up = True
            self._threads -= call.begun
        if call.begun:
            self._enlist()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            call = self._asked.get()
            with self._lock:
                self._idle -= 1
                if call is None:
                    return
                if call.given_up:
                    continue
                call.begun = True
            call.make()
            with self._lock:
                if call.given_up:
                    return  # somebody else has this thread's place
                call.begun = False


@dataclass
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Any]
    begun: bool = False
    given_up: bool = False

    def make(self) -> None:
        try:
            value, error = self.function(*self.args), None
        except Exception as found:
            value, error = None, found
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self._settle, value, error)

    def _settle(self, value: Any, error: Exception | None) -> None:
        if self.result.done():
            return
        if error is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(value)
