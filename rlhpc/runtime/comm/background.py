"""Background operations: each named queue has a thread that runs the queue's operations in order and ends when it is idle.

The threads are daemons, so a script that ends does not wait for unfinished operations.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rlhpc.runtime.comm.context import installed

#: Seconds that a thread waits for another operation of its queue before it ends.
LINGER_S = 5.0


class AsyncWork:
    """Channel, send or recv operation that runs in the background."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until the operation is done; returns its result or raises its error."""
        return self._future.result(timeout)

    def done(self) -> bool:
        return self._future.done()

    async def async_wait(self) -> Any:
        """Waits like `wait`, for coroutines: other tasks of the event loop run during the wait."""
        return await asyncio.wrap_future(self._future)


_Work = tuple["Future[Any]", Callable[[], Any]]
_lanes: dict[str, queue.SimpleQueue[_Work]] = {}
_lanes_lock = threading.Lock()


def in_background(lane: str, function: Callable[[], Any]) -> AsyncWork:
    """Runs `function` on the single thread of the queue named `lane`, so that operations of one queue keep their order.

    `function` must return only once the other side has confirmed the operation, because the next operation may use another
    thread and connection.
    """
    future: Future[Any] = Future()
    with _lanes_lock:
        work = _lanes.get(lane)
        if work is None:
            work = _lanes[lane] = queue.SimpleQueue()
            threading.Thread(target=_run, args=(lane, work), name=f"rlhpc-{lane}", daemon=True).start()
        work.put((future, function))
    return AsyncWork(future)


def _run(lane: str, work: queue.SimpleQueue[_Work]) -> None:
    try:
        while (operation := _next(lane, work)) is not None:
            future, function = operation
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del future, function, operation  # a waiting thread must not keep the operation alive
    finally:
        if (context := installed()) is not None:
            context.service.peers.close()


def _next(lane: str, work: queue.SimpleQueue[_Work]) -> _Work | None:
    """Returns the queue's next operation; if none arrives for `LINGER_S` seconds, removes the queue and returns None."""
    try:
        return work.get(timeout=LINGER_S)
    except queue.Empty:
        with _lanes_lock:
            if not work.empty():
                return work.get()
            del _lanes[lane]
            return None
