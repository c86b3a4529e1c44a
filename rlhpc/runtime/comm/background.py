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


_Operation = tuple["Future[Any]", Callable[[], Any]]
_queues: dict[str, queue.SimpleQueue[_Operation]] = {}
_queues_lock = threading.Lock()


def in_background(queue_name: str, function: Callable[[], Any]) -> AsyncWork:
    """Runs `function` on the single thread of the queue named `queue_name`, so that operations of one queue keep their order.

    `function` must return only once the other side has confirmed the operation, because the next operation may use another
    thread and connection.
    """
    future: Future[Any] = Future()
    with _queues_lock:
        operations = _queues.get(queue_name)
        if operations is None:
            operations = _queues[queue_name] = queue.SimpleQueue()
            threading.Thread(
                target=_run, args=(queue_name, operations), name=f"rlhpc-{queue_name}", daemon=True
            ).start()
        operations.put((future, function))
    return AsyncWork(future)


def _run(queue_name: str, operations: queue.SimpleQueue[_Operation]) -> None:
    try:
        while (operation := _next_operation(queue_name, operations)) is not None:
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


def _next_operation(queue_name: str, operations: queue.SimpleQueue[_Operation]) -> _Operation | None:
    """Returns the queue's next operation; if none arrives for `LINGER_S` seconds, removes the queue and returns None."""
    try:
        return operations.get(timeout=LINGER_S)
    except queue.Empty:
        with _queues_lock:
            if not operations.empty():
                return operations.get()
            del _queues[queue_name]
            return None
