"""Guards for threads that receive reports: an exception in the handler of a report does not end the thread."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import ParamSpec

log = logging.getLogger(__name__)

P = ParamSpec("P")


@contextlib.contextmanager
def logged(message: str) -> Iterator[None]:
    """Logs an exception of the block with a message, and continues after the block."""
    try:
        yield
    except Exception:
        log.exception(message)


def guarded(handler: Callable[P, None]) -> Callable[P, None]:
    """Decorates the handler of a report, so that its exceptions are logged and its thread continues."""

    @functools.wraps(handler)
    def guard(*args: P.args, **kwargs: P.kwargs) -> None:
        with logged(f"a report could not be handled ({handler.__qualname__})"):
            handler(*args, **kwargs)

    return guard
