"""What another process may do between two lines of a function: it is tried at each of them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

State = TypeVar("State")


def at_each_line(
    prepare: Callable[[], State], act: Callable[[State], Any], interfere: Callable[[State], Any], *modules: str
) -> Iterator[tuple[State, int]]:
    """Runs `act` once for each line that it executes, and `interfere` completely before that line.

    Args:
        prepare: Makes the state of a run: folders of its own.
        act: The function under test.
        interfere: What the other process does.
        modules: Ends of the names of the files whose lines count.

    Yields:
        The state after each run, and the number of the line before which the other process acted.
    """
    for at_line in itertools.count(1):
        state, lines = prepare(), 0

        def trace(frame: FrameType, event: str, _: Any, state: State = state, at_line: int = at_line) -> Any:
            nonlocal lines
            if not frame.f_code.co_filename.endswith(modules):
                return None
            if event == "line":
                lines += 1
                if lines == at_line:
                    sys.settrace(None)
                    interfere(state)
                    sys.settrace(trace)
            return trace

        sys.settrace(trace)
        try:
            act(state)
        finally:
            sys.settrace(None)
        if lines < at_line:
            assert at_line > 5, "hardly a line was executed"
            return
        yield state, at_line
