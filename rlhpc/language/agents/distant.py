"""Harnesses on ranks of a group of their own, as a rollout rank sees them: one queue, from which those ranks take episodes.

What lies in the queue names an episode, and no more. Who takes it asks the rollout rank, and gets the ticket with a key that
was made for this one time: where a rank is lost, and another takes its episode, what is left of the first cannot speak for it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhpc.language.agents.harnesses import AgentReply, Ticket

log = logging.getLogger(__name__)
#: How often an episode is begun, each time on another rank than one that was lost with it.
_MOST = 3
#: Seconds beyond `agent.timeout_s` that an outcome may be on its way.
_GRACE_S = 4.0


class Post(Protocol):
    """What a rollout rank and those that run harnesses have of each other."""

    def offer(self, item: tuple[int, str, int]) -> None:
        """Puts an episode into the queue: the rollout rank, what it calls itself, and the episode's number."""

    def tell(self, rank: int, message: dict[str, Any]) -> None:
        """Tells a rank that runs harnesses something. Does not wait for it."""

    def heard(self) -> list[dict[str, Any]]:
        """What such ranks have said."""


@dataclass
class _Away:
    """An episode that others run.

    Attributes:
        ticket: What they get.
        begun: How often it was begun.
        by: The rank that has it, and what that calls it.
        until: When it must have ended; 0 before anybody has it.
    """

    ticket: Ticket
    begun: int = 0
    by: tuple[int, int] = field(default=(-1, -1))
    until: float = 0.0


class Distant:
    """Has a program run for each ticket, elsewhere.

    Args:
        post: To those who run it.
        done: Is called with the ticket's id and the outcome.
        again: Is called with the ticket's id where it is begun once more: a ticket with another key.
    """

    def __init__(self, post: Post, done: Callable[[int, AgentReply], None], again: Callable[[int], Ticket]) -> None:
        self._post, self._done, self._again = post, done, again
        self._away: dict[int, _Away] = {}
        #: Who was started again is another one, whatever its rank.
        self.ident = secrets.token_hex(8)

    def run(self, ticket: Ticket, rank: int) -> None:
        """Has the program run for a ticket, when there is room for one more.

        Args:
            ticket: What it gets.
            rank: The rollout rank that asks.
        """
        self._away[ticket["id"]] = _Away(ticket)
        self._post.offer((rank, self.ident, ticket["id"]))

    def poll(self) -> None:
        """Hears what those who run it say; and who says nothing."""
        for message in self._post.heard():
            if "take" in message:
                self._taken(message)
            elif message["ident"] == self.ident:
                self._came(message)
        now = time.monotonic()
        for number, away in [(n, a) for n, a in self._away.items() if a.until and now > a.until]:
            self._post.tell(away.by[0], {"kill": away.by[1]})
            limit = away.ticket["timeout_s"] + _GRACE_S
            self._end(number, {"error": f"agent-{away.by[0]}, which ran it, said nothing within {limit:g} s"})

    def abort(self) -> None:
        """Ends all that run, and forgets those that wait; none of them has an outcome."""
        for away in self._away.values():
            if away.begun:
                self._post.tell(away.by[0], {"kill": away.by[1]})
        self._away.clear()

    def close(self) -> None:
        """Ends everything."""
        self.abort()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _taken(self, message: dict[str, Any]) -> None:
        """Somebody has taken an episode, and wants its ticket; one that is over has none."""
        who, number = (message["agent"], message["take"]), message["number"]
        away = self._away.get(number) if message["ident"] == self.ident else None
        if away is not None and away.begun == _MOST:
            self._end(number, {"error": f"{_MOST} ranks of the group agent were lost while they ran it"})
            away = None
        ticket = None
        if away is not None:
            if away.begun:
                log.info("episode %d is begun again on agent-%d: agent-%d was lost", number, who[0], away.by[0])
                away.ticket = self._again(number)
            away.begun += 1
            away.by, ticket = who, away.ticket
            away.until = time.monotonic() + ticket["timeout_s"] + _GRACE_S
        self._post.tell(who[0], {"of": who[1], "ticket": ticket})

    def _came(self, message: dict[str, Any]) -> None:
        away = self._away.get(message["number"])
        if away is not None and away.by == (message["agent"], message["of"]):
            self._end(message["number"], message["outcome"])

    def _end(self, number: int, outcome: AgentReply) -> None:
        del self._away[number]
        self._done(number, outcome)
