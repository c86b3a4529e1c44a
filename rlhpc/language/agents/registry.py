"""Agents by name, and episodes as a configuration describes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rlhpc.language.agents.episodes import Agent, Episode, Episodes
from rlhpc.language.agents.tools import ToolAgent
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.engines.base import Request, RolloutBackend, SamplingParams
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.lookup import Registry

if TYPE_CHECKING:
    from rlhpc.language.config import LanguageConfig

__all__ = [
    "Agent",
    "Episode",
    "Episodes",
    "ToolAgent",
    "configured_agent",
    "make_agent",
    "make_generation",
    "register_agent",
    "run_episodes",
]
AGENTS: Registry[Callable[..., Agent]] = Registry(
    "agent", "rollout.agent", "rlhpc.agents", {"tools": "rlhpc.language.agents.tools:ToolAgent"}
)
register_agent = AGENTS.register


def make_agent(name: str) -> Agent:
    """The agent of `rollout.agent`: a registered name, an entry point of group `rlhpc.agents`, or `module:Class`.

    Raises:
        ConfigError: Unknown, or it cannot be built.
    """
    factory = AGENTS.find(name)
    try:
        agent = factory()
    except TypeError as error:
        raise ConfigError(f"rollout.agent is {name!r}, which cannot be built without arguments: {error}") from None
    if not hasattr(agent, "respond"):
        raise ConfigError(f"rollout.agent is {name!r}, which is no agent: it has no method respond(episode, text)")
    return agent


def run_episodes(
    backend: RolloutBackend, requests: Iterable[tuple[Request, Prompt | None]], agent: Agent | None, tokenizer: Any,
    max_turns: int,
) -> Iterator[Episode]:  # fmt: skip
    """Runs episodes to their end; each as soon as it is there."""
    episodes = Episodes(backend, tokenizer, agent, max_turns)
    try:
        for request, prompt in requests:
            episodes.add([request], prompt)
        while episodes.unfinished():
            yield from episodes.step()
    finally:
        episodes.close()


def configured_agent(cfg: LanguageConfig) -> Agent | None:
    """The agent of `rollout.agent`; None for episodes of one turn.

    Raises:
        ConfigError: It is unknown, or `rollout.max_turns` does not go with it.
    """
    name, turns = cfg.rollout.agent, cfg.rollout.max_turns
    if name is None:
        if turns != 1:
            raise ConfigError(
                f"rollout.max_turns is {turns}, but rollout.agent is not set; who is to answer the model?"
            )
        return None
    if turns < 2:
        raise ConfigError(f"rollout.max_turns is {turns}; with rollout.agent {name!r} it must be at least 2")
    return make_agent(name)


def make_generation(
    cfg: LanguageConfig, backend: RolloutBackend, tokenizer: Any, sampling: SamplingParams | None = None
) -> Episodes:
    """Episodes as section `rollout` describes them: of one turn, or with `rollout.agent`.

    Raises:
        ConfigError: See `configured_agent`.
    """
    del sampling  # requests bring their own
    return Episodes(backend, tokenizer, configured_agent(cfg), cfg.rollout.max_turns)
