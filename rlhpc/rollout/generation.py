"""From requests to whole episodes: one response each, or several turns with tools in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhpc.data.prompts import Prompt
from rlhpc.rollout.base import Completion, Request, RolloutBackend, SamplingParams


@dataclass
class Episode:
    """What followed a prompt.

    Attributes:
        id: Of its request.
        token_ids: What the model wrote, and what tools wrote in between.
        logprobs: One a token; 0 where a tool wrote it.
        versions: One a token; -1 where a tool wrote it.
        loss_mask: One a token: whether the model wrote it.
        finish_reason: `stop`, `length`, or `abort`.
    """

    id: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    loss_mask: list[bool]
    finish_reason: str


class Generation(Protocol):
    """Makes episodes on a rollout backend; nothing waits for the slowest."""

    def add(self, requests: Sequence[Request], prompt: Prompt) -> None:
        """Queues the requests of one prompt."""

    def step(self) -> list[Episode]:
        """Advances by a token or more; what ended."""

    def unfinished(self) -> int:
        """Episodes under way."""

    def abort(self) -> None:
        """Drops all that is under way."""


class SingleTurn:
    """One response a prompt."""

    def __init__(self, backend: RolloutBackend) -> None:
        self._backend = backend

    def add(self, requests: Sequence[Request], prompt: Prompt) -> None:
        """See `Generation`."""
        self._backend.add(requests)

    def step(self) -> list[Episode]:
        """See `Generation`."""
        return [_episode(completion) for completion in self._backend.step()]

    def unfinished(self) -> int:
        """See `Generation`."""
        return self._backend.unfinished()

    def abort(self) -> None:
        """See `Generation`."""
        self._backend.abort()


def _episode(made: Completion) -> Episode:
    mask = [True] * len(made.token_ids)
    return Episode(made.id, made.token_ids, made.logprobs, made.versions, mask, made.finish_reason)


def make_generation(cfg: Any, backend: RolloutBackend, tokenizer: Any, sampling: SamplingParams) -> Generation:
    """What `rollout.agent` and `rollout.max_turns` ask for."""
    if not cfg.rollout.agent:
        return SingleTurn(backend)
    from rlhpc.rollout.agents import AgentEpisodes, make_agent

    episodes: Generation = AgentEpisodes(backend, make_agent(cfg), tokenizer, sampling, int(cfg.rollout.max_turns))
    return episodes
