"""Background operations: each named queue has a thread that runs the queue's operations in order and ends when it is idle.

The threads are daemons, so a script that ends does not wait for unfinished operations.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rlhpc.runtime.comm.context import installed_context

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

    def then(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncWork:
        """Calls `function(*args, **kwargs)` when the operation has succeeded, on any thread.

        Returns:
            The call's `AsyncWork`; if the operation fails, `function` is not called, and this `AsyncWork` fails, too.
        """
        future: Future[Any] = Future()

        def call(done: Future[Any]) -> None:
            try:
                done.result()
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._future.add_done_callback(call)
        return AsyncWork(future)


class JoinedWork(AsyncWork):
    """Several concurrent operations with one result.

    Args:
        works: The operations.
        finish: Called once with the results of all operations, in order; returns the joint result.
    """

    def __init__(self, works: Sequence[AsyncWork], finish: Callable[[list[Any]], Any]) -> None:
        super().__init__(Future())
        self._lock, self._num_pending = threading.Lock(), len(works)
        self._works, self._finish = list(works), finish
        if not works:
            self._complete()
        for async_work in works:
            async_work._future.add_done_callback(self._count)

    def _count(self, _: Future[Any]) -> None:
        with self._lock:
            self._num_pending -= 1
            is_last = self._num_pending == 0
        if is_last:
            self._complete()

    def _complete(self) -> None:
        try:
            self._future.set_result(self._finish([async_work.wait() for async_work in self._works]))
        except BaseException as error:
            self._future.set_exception(error)
        self._works = []


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
        queued_operations = _queues.get(queue_name)
        if queued_operations is None:
            queued_operations = _queues[queue_name] = queue.SimpleQueue()
            threading.Thread(
                target=_run, args=(queue_name, queued_operations), name=f"rlhpc-{queue_name}", daemon=True
            ).start()
        queued_operations.put((future, function))
    return AsyncWork(future)


def _run(queue_name: str, queued_operations: queue.SimpleQueue[_Operation]) -> None:
    try:
        while (operation := _take_next_operation(queue_name, queued_operations)) is not None:
            future, function = operation
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del future, function, operation  # a waiting thread must not keep the operation alive
    finally:
        if (context := installed_context()) is not None:
            context.service.peers.close()


def _take_next_operation(queue_name: str, queued_operations: queue.SimpleQueue[_Operation]) -> _Operation | None:
    """Returns the queue's next operation; if none arrives for `LINGER_S` seconds, removes the queue and returns None."""
    try:
        return queued_operations.get(timeout=LINGER_S)
    except queue.Empty:
        with _queues_lock:
            if not queued_operations.empty():
                return queued_operations.get()
            del _queues[queue_name]
            return None
