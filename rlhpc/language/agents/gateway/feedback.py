"""Rewards that come when an episode has ended: by the id of a completion, from whoever holds the scorer's key."""

from __future__ import annotations

import asyncio
import collections
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhpc.language.agents.gateway.sessions import same_key
from rlhpc.language.agents.turn_tree import AgentTurn, RequestError

#: In the registry: where each rollout rank takes rewards, and the key.
FEEDBACK = "feedback"
#: Rewards that are remembered, for a scorer that says one again.
_KEPT = 10_000


@dataclass
class _Awaited:
    """An episode: which of its completions have no reward yet, what the others were worth, and who is told."""

    left: dict[str, AgentTurn]
    total: float
    done: Callable[[float | None], None]
    timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """Nobody waits for its time to pass."""
        if self.timer is not None:
            self.timer.cancel()


class Feedback:
    """Rewards of a gateway's completions. On its loop.

    Args:
        turns: All turns of the episodes that have not ended.

    Attributes:
        key: The scorer's. It opens nothing else, and no other key opens this.
    """

    def __init__(self, turns: Callable[[], list[AgentTurn]]) -> None:
        self.key = f"rf-{secrets.token_urlsafe(24)}"
        self._turns = turns
        self._awaited: dict[str, _Awaited] = {}
        self._given: collections.OrderedDict[str, float] = collections.OrderedDict()

    def expect(self, turns: Mapping[str, AgentTurn], patience_s: float, done: Callable[[float | None], None]) -> None:
        """Awaits the rewards of an episode that has ended.

        Args:
            turns: Those that are to be rewarded, by a name of theirs.
            patience_s: How long to wait for the last one.
            done: Called with their sum; with None if not all came in time.
        """
        loop = asyncio.get_running_loop()
        awaited = _Awaited({}, 0.0, done)
        awaited.timer = loop.call_later(patience_s, self._over, awaited)
        for name, turn in turns.items():
            if turn.feedback is None:
                awaited.left[name] = turn
                self._awaited.update(dict.fromkeys(turn.names, awaited))
            else:  # it came before the agent was done
                awaited.total += turn.feedback
        self._look(awaited)

    def check(self, key: str) -> None:
        """Raises:
        Refused: It is not the scorer's key."""
        if not same_key(key, self.key):
            raise RequestError("this key gives no rewards", 401, "invalid_api_key")

    def take(self, body: Mapping[str, Any]) -> None:
        """Takes a reward.

        Args:
            body: `id`, the completion's, and `reward` (`bodies.FEEDBACK`).

        Raises:
            Refused: There is nothing that the reward could be for.
        """
        name, reward = body["id"], float(body["reward"])
        if self._given.get(name, reward) != reward:
            raise RequestError(f"{name} has its reward already: {self._given[name]:g}", 409, "rewarded")
        if name in self._given:
            return
        self._reward(name, reward)
        self._given[name] = reward
        while len(self._given) > _KEPT:
            self._given.popitem(last=False)

    def forget(self) -> None:
        """Nothing is awaited any more."""
        for awaited in self._awaited.values():
            awaited.stop()
        self._awaited.clear()

    def _reward(self, name: str, reward: float) -> None:
        awaited = self._awaited.get(name)
        turns = self._turns() if awaited is None else awaited.left.values()
        turn = next((turn for turn in turns if name in turn.names), None)
        if turn is None:
            raise RequestError(f"no completion {name} awaits a reward here", 404, "not_found")
        turn.feedback = turn.reward = reward
        if awaited is not None:
            awaited.total += reward
            awaited.left = {known: other for known, other in awaited.left.items() if other is not turn}
            for known in turn.names:
                self._awaited.pop(known, None)
            self._look(awaited)

    def _look(self, awaited: _Awaited) -> None:
        if not awaited.left:
            awaited.stop()
            awaited.done(awaited.total)

    def _over(self, awaited: _Awaited) -> None:
        self._awaited = {name: other for name, other in self._awaited.items() if other is not awaited}
        awaited.done(None)


def awaited_turns(turns: list[AgentTurn], later: bool | list[str]) -> dict[str, AgentTurn]:
    """The turns whose rewards come later, by name.

    Args:
        turns: Of an episode.
        later: Ids of completions; True means the last one.

    Raises:
        Refused: The model has made no such completion.
    """
    named = [turn for turn in turns if turn.received and turn.names]
    wanted = ([named[-1].names[0]] if named else ["any"]) if later is True else list(later or ())
    found = {name: turn for name in wanted for turn in named if name in turn.names}
    if missing := [name for name in wanted if name not in found]:
        raise RequestError(f"`later` is about a completion that nobody received in this episode: {missing[0]}")
    return found
