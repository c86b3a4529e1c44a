"""Takes the next items while one is in use: a receiver fetches the next part from another host while it loads one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class GivenUp(Exception):
    """Nobody takes what is being waited for."""


class Ahead:
    """Runs an iterator in a thread, a bounded number of items before whoever takes them. One iterator at a time.

    Args:
        depth: Items that are made, or being made, beyond the one in use.
        after: Called in the thread when it ends.
    """

    def __init__(self, depth: int = 1, after: Callable[[], None] = lambda: None) -> None:
        self._depth, self._after = depth, after
        self._stopping = threading.Event()

    def check(self) -> None:
        """To be called by an iterator that waits.

        Raises:
            GivenUp: Whoever took the items has stopped; the thread is awaited.
        """
        if self._stopping.is_set():
            raise GivenUp

    def __call__(self, items: Iterator[T]) -> Iterator[T]:
        """The items, or what was raised instead of the next one. Closing it ends the thread, after the item in the making."""
        self._stopping.clear()
        slots, made = threading.Semaphore(self._depth + 1), queue.SimpleQueue[tuple[Any, BaseException | None]]()

        def run() -> None:
            try:
                while slots.acquire():
                    self.check()
                    made.put((next(items), None))
            except BaseException as error:
                made.put((None, error))
            finally:
                self._after()

        thread = threading.Thread(target=run, name="rlhpc-ahead", daemon=True)
        thread.start()
        try:
            while True:
                item, error = made.get()
                if isinstance(error, StopIteration):
                    return
                if error is not None:
                    raise error
                yield item
                del item  # its memory may be wanted for the next but one
                slots.release()
        finally:
            self._stopping.set()
            slots.release()
            thread.join()
