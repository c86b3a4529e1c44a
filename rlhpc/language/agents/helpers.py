"""Threads that call an agent in the rollout rank."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

E = TypeVar("E")


class Helpers(Generic[E]):
    """Threads that call an agent. One that does not come back is given up, and another takes its place.

    Args:
        respond: What they call: with an episode, and the text of a turn.
        timeout_s: Longest time for one answer.
        threads: How many.

    Attributes:
        answers: Of the agent, or what it raised, with the ticket.
    """

    def __init__(self, respond: Callable[[E, str], Any], timeout_s: float, threads: int) -> None:
        self._respond, self._timeout_s = respond, timeout_s
        self._asked: queue.SimpleQueue[tuple[int, E, str] | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._since: dict[int, float] = {}
        self._threads = 0
        self._most = threads

    def ask(self, ticket: int, episode: E, text: str) -> None:
        """Has a turn answered, as soon as a thread is free."""
        self._asked.put((ticket, episode, text))
        self._enlist()

    def _enlist(self) -> None:
        if self._threads < self._most and not self._asked.empty():
            self._threads += 1
            threading.Thread(target=self._work, name="rlhpc-agent", daemon=True).start()

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            ticket, episode, text = asked
            self._since[ticket] = time.monotonic()
            try:
                answer: Any = self._respond(episode, text)
                if not isinstance(answer, (str, dict, type(None))):
                    raise TypeError(f"respond gave a {type(answer).__name__}; allowed: str, dict, None")
            except Exception as error:
                answer = error
            if self._since.pop(ticket, None) is None:
                return  # given up meanwhile: somebody else has this thread's place
            self.answers.put((ticket, answer))

    def overdue(self) -> list[int]:
        """Tickets whose answer takes too long; they are forgotten."""
        late = time.monotonic() - self._timeout_s
        tickets = [ticket for ticket, since in list(self._since.items()) if since < late]
        found = [ticket for ticket in tickets if self._since.pop(ticket, None) is not None]
        self._threads -= len(found)
        for _ in found:
            self._enlist()
        return found

    def close(self) -> None:
        """Ends the threads that wait."""
        for _ in range(self._threads):
            self._asked.put(None)
