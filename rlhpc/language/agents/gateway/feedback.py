"""Delayed rewards: a client with the scorer's key sends them after the end of an episode, by the id of a completion."""

from __future__ import annotations

import asyncio
import collections
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhpc.language.agents.gateway.sessions import is_same_key
from rlhpc.language.agents.turn_tree import AgentTurn, RequestError

#: Registry name of the rollout ranks' addresses and keys for delayed rewards.
FEEDBACK = "feedback"
#: Maximum number of rewards that are remembered, so that a repeated request has no effect.
_MAX_REWARDS = 10_000


@dataclass
class _DelayedRewards:
    """Episode with delayed rewards: its completions without a reward, the sum of the received rewards, and the
    callback.
    """

    pending_turns: dict[str, AgentTurn]
    total: float
    on_complete: Callable[[float | None], None]
    timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """Cancels the timer of the episode."""
        if self.timer is not None:
            self.timer.cancel()


class Feedback:
    """Delayed rewards of a gateway's completions. Runs on the gateway's event loop.

    Args:
        list_turns: Function that returns all turns of the episodes that have not ended.

    Attributes:
        key: Key of the scorer. It is valid only for rewards, and no other key is valid for them.
    """

    def __init__(self, list_turns: Callable[[], list[AgentTurn]]) -> None:
        self.key = f"rf-{secrets.token_urlsafe(24)}"
        self._turns = list_turns
        self._pending_episodes: dict[str, _DelayedRewards] = {}
        self._rewards: collections.OrderedDict[str, float] = collections.OrderedDict()

    def expect(
        self, turns: Mapping[str, AgentTurn], timeout_s: float, on_complete: Callable[[float | None], None]
    ) -> None:
        """Registers the turns with delayed rewards of an episode that has ended.

        Args:
            turns: Turns to be rewarded, by completion id.
            timeout_s: Time limit of the last reward, in seconds.
            on_complete: Callback with the sum of the rewards, or with None if a reward did not arrive in time.
        """
        loop = asyncio.get_running_loop()
        delayed_episode = _DelayedRewards({}, 0.0, on_complete)
        delayed_episode.timer = loop.call_later(timeout_s, self._on_timeout, delayed_episode)
        for name, turn in turns.items():
            if turn.feedback is None:
                delayed_episode.pending_turns[name] = turn
                self._pending_episodes.update(dict.fromkeys(turn.names, delayed_episode))
            else:  # the reward arrived before the episode ended
                delayed_episode.total += turn.feedback
        self._finish_if_complete(delayed_episode)

    def check(self, key: str) -> None:
        """Checks the scorer's key.

        Raises:
            RequestError: The key is not the scorer's.
        """
        if not is_same_key(key, self.key):
            raise RequestError("this key gives no rewards", 401, "invalid_api_key")

    def take(self, body: Mapping[str, Any]) -> None:
        """Records the reward of a completion.

        Args:
            body: `id` of the completion, and `reward` (`request_schema.FEEDBACK`).

        Raises:
            RequestError: No completion with this id awaits a reward, or it has received a different reward.
        """
        name, reward = body["id"], float(body["reward"])
        if self._rewards.get(name, reward) != reward:
            raise RequestError(f"{name} has its reward already: {self._rewards[name]:g}", 409, "rewarded")
        if name in self._rewards:
            return
        self._record_reward(name, reward)
        self._rewards[name] = reward
        while len(self._rewards) > _MAX_REWARDS:
            self._rewards.popitem(last=False)

    def forget(self) -> None:
        """Drops all pending rewards."""
        for delayed_episode in self._pending_episodes.values():
            delayed_episode.stop()
        self._pending_episodes.clear()

    def _record_reward(self, name: str, reward: float) -> None:
        delayed_episode = self._pending_episodes.get(name)
        turns = self._turns() if delayed_episode is None else delayed_episode.pending_turns.values()
        turn = next((turn for turn in turns if name in turn.names), None)
        if turn is None:
            raise RequestError(f"no completion {name} awaits a reward here", 404, "not_found")
        turn.feedback = turn.reward = reward
        if delayed_episode is not None:
            delayed_episode.total += reward
            delayed_episode.pending_turns = {
                completion_id: pending_turn
                for completion_id, pending_turn in delayed_episode.pending_turns.items()
                if pending_turn is not turn
            }
            for completion_id in turn.names:
                self._pending_episodes.pop(completion_id, None)
            self._finish_if_complete(delayed_episode)

    def _finish_if_complete(self, delayed_episode: _DelayedRewards) -> None:
        if not delayed_episode.pending_turns:
            delayed_episode.stop()
            delayed_episode.on_complete(delayed_episode.total)

    def _on_timeout(self, delayed_episode: _DelayedRewards) -> None:
        self._pending_episodes = {
            name: episode for name, episode in self._pending_episodes.items() if episode is not delayed_episode
        }
        delayed_episode.on_complete(None)


def awaited_turns(turns: list[AgentTurn], delayed_turns: bool | list[str]) -> dict[str, AgentTurn]:
    """Returns the turns with delayed rewards, by completion id.

    Args:
        turns: Turns of an episode.
        delayed_turns: Ids of completions; True for the last completion.

    Raises:
        RequestError: The episode has no such completion.
    """
    named_turns = [turn for turn in turns if turn.received and turn.names]
    ids = (
        ([named_turns[-1].names[0]] if named_turns else ["any"]) if delayed_turns is True else list(delayed_turns or ())
    )
    turns_by_id = {name: turn for name in ids for turn in named_turns if name in turn.names}
    if missing_ids := [name for name in ids if name not in turns_by_id]:
        raise RequestError(f"`later` is about a completion that nobody received in this episode: {missing_ids[0]}")
    return turns_by_id
