"""Agents by name, and episodes as a configuration describes them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points
from typing import Any

from rlhpc.language.agents.episodes import Agent, Episode, Episodes
from rlhpc.language.agents.tools import ToolAgent
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.engines.base import Request, RolloutBackend, SamplingParams
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.lookup import load_attribute

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
ENTRY_POINTS = "rlhpc.agents"
_registered: dict[str, Callable[..., Agent]] = {"tools": ToolAgent}


def register_agent(name: str) -> Callable[[Callable[..., Agent]], Callable[..., Agent]]:
    """Decorator for a class of agents; twice is an error."""

    def add(factory: Callable[..., Agent]) -> Callable[..., Agent]:
        if name.lower() in _registered:
            raise ConfigError(f"agent {name!r} is registered twice")
        _registered[name.lower()] = factory
        return factory

    return add


def make_agent(name: str) -> Agent:
    """The agent of `rollout.agent`: a registered name, an entry point of group `rlhpc.agents`, or `module:Class`.

    Raises:
        ConfigError: Unknown, or it cannot be built.
    """
    factory = find_agent(name)
    try:
        agent = factory()
    except TypeError as error:
        raise ConfigError(f"rollout.agent is {name!r}, which cannot be built without arguments: {error}") from None
    if not hasattr(agent, "respond"):
        raise ConfigError(f"rollout.agent is {name!r}, which is no agent: it has no method respond(episode, text)")
    return agent


def agent_names() -> list[str]:
    """All names."""
    return sorted({*_registered, *(entry.name.lower() for entry in entry_points(group=ENTRY_POINTS))})


def find_agent(name: str) -> Callable[..., Agent]:
    """The class of an agent.

    Raises:
        ConfigError: Unknown; names the nearest and all allowed ones.
    """
    if name.lower() in _registered:
        return _registered[name.lower()]
    offered = {entry.name.lower(): entry for entry in entry_points(group=ENTRY_POINTS)}
    if name.lower() in offered:
        loaded: Callable[..., Agent] = offered[name.lower()].load()
        return loaded
    if ":" not in name:
        names = agent_names()
        near = difflib.get_close_matches(name.lower(), names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ConfigError(
            f"rollout.agent is {name!r}, which is unknown{hint} allowed: {', '.join(names)}, or module:Class"
        )
    found: Callable[..., Agent] = load_attribute(name, "rollout.agent")
    return found


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


def configured_agent(cfg: Any) -> Agent | None:
    """The agent of `rollout.agent`; None for episodes of one turn.

    Raises:
        ConfigError: It is unknown, or `rollout.max_turns` does not go with it.
    """
    name, turns = cfg.rollout.agent, int(cfg.rollout.max_turns)
    if name is None:
        if turns != 1:
            raise ConfigError(
                f"rollout.max_turns is {turns}, but rollout.agent is not set; who is to answer the model?"
            )
        return None
    if turns < 2:
        raise ConfigError(f"rollout.max_turns is {turns}; with rollout.agent {name!r} it must be at least 2")
    return make_agent(str(name))


def make_generation(
    cfg: Any, backend: RolloutBackend, tokenizer: Any, sampling: SamplingParams | None = None
) -> Episodes:
    """Episodes as section `rollout` describes them: of one turn, or with `rollout.agent`.

    Raises:
        ConfigError: See `configured_agent`.
    """
    del sampling  # requests bring their own
    return Episodes(backend, tokenizer, configured_agent(cfg), int(cfg.rollout.max_turns))
