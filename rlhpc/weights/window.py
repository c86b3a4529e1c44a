"""Flow control: how far a sender may be ahead of those who take in what it writes.

A part is in shared memory until all readers have come for it. Those who have begun with a version take it to its end as fast
as they can load it, so the sender waits for them. Those who have not begun may be busy with something that waits for the
sender, and take the version later, as where trainer and engine have the accelerator in turn: for them it is written whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from rlhpc.runtime.errors import DeadlineExceeded

#: Parts that a reader who has begun need not have come for: one on its way, and one that is written meanwhile. With fewer, a
#: sender would wait for readers to come for what it has not announced yet.
PARTS = 2
_SHORTEST_S, _LONGEST_S = 0.0005, 0.02


class Holds(Protocol):
    """Where parts are."""

    def awaited(self, path: str) -> list[bool]:
        """Which readers of a part have not come yet; empty once none is to come."""


class Window:
    """The parts of a version that somebody has yet to come for.

    Args:
        pool: Holds the parts.
        readers: Names of the readers, by number.
        check: Called while waiting; raises when the run has failed.
        there: Whether a reader is still the one that the version was announced to.
        deadline: Seconds after which a wait gives up.
        parts: How many parts may be there for a reader that has begun.
    """

    def __init__(
        self,
        pool: Holds,
        readers: Sequence[str],
        *,
        check: Callable[[], None] = lambda: None,
        there: Callable[[int], bool] = lambda reader: True,
        deadline: float = 1800.0,
        parts: int = PARTS,
    ) -> None:
        self._pool, self._readers, self._parts = pool, list(readers), parts
        self._check, self._there, self._deadline = check, there, deadline
        self._open: list[str] = []
        self._begun: set[int] = set()

    def wrote(self, path: str) -> None:
        """Counts a part that was written for all readers."""
        if path in self._open:  # all had come for what was there before
            self._open.remove(path)
            self._begun.update(range(len(self._readers)))
        self._open.append(path)

    def wait(self) -> None:
        """Returns when there is room for another part.

        Raises:
            DeadlineExceeded: There was none for too long; names those who did not come.
        """
        started, pause = time.monotonic(), _SHORTEST_S
        while late := self._late():
            self._check()
            gone = {reader for reader in late if not self._there(reader)}
            if gone:
                self._begun -= gone
                continue
            if time.monotonic() - started > self._deadline:
                names = ", ".join(self._readers[reader] for reader in sorted(late))
                raise DeadlineExceeded(f"waited {self._deadline:.0f} s for {names} to take in a part of the weights")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)

    def begun(self) -> bool:
        """Whether all have begun, and go on to the version's end."""
        self._late()
        return len(self._begun) == len(self._readers)

    def _late(self) -> set[int]:
        """Those who have begun and have yet to come for as many parts as may be there."""
        awaited = {path: self._pool.awaited(path) for path in self._open}
        self._open = [path for path in self._open if any(awaited[path])]
        for states in awaited.values():
            came = (reader for reader in range(len(self._readers)) if not (states and states[reader]))
            self._begun.update(came)
        counts = [sum(awaited[path][reader] for path in self._open) for reader in range(len(self._readers))]
        return {reader for reader in self._begun if counts[reader] >= self._parts}
