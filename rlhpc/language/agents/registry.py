"""Agents by name, and episodes as a configuration describes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from rlhpc.config.typed import plain
from rlhpc.language.agents.episodes import Agent, Episode, Episodes
from rlhpc.language.agents.tools import ToolAgent
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.engines.base import Request, RolloutBackend
from rlhpc.language.environments.registry import find_environment
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.lookup import Registry

if TYPE_CHECKING:
    from rlhpc.language.agents.harnesses import Program
    from rlhpc.language.agents.outside import Options, OutsideEpisodes
    from rlhpc.language.agents.parsers import Parsers
    from rlhpc.language.agents.played import World
    from rlhpc.language.config import LanguageConfig

#: Episodes on an engine, whoever answers the model or asks it.
Generation: TypeAlias = Union[Episodes, "OutsideEpisodes"]
#: The kind of agent that is in the rollout rank.
INLINE = "inline"
#: That which has an environment answer the model.
ENVIRONMENT = "environment"

__all__ = [
    "Agent",
    "Episode",
    "Episodes",
    "Generation",
    "ToolAgent",
    "check_agent",
    "configured_agent",
    "make_agent",
    "make_generation",
    "outside_agent",
    "register_agent",
    "roles_of",
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


def make_generation(cfg: LanguageConfig, backend: RolloutBackend, tokenizer: Any) -> Generation:
    """Episodes as sections `rollout` and `agent` describe them: of one turn, with `rollout.agent`, or of an agent outside.

    Raises:
        ConfigError: See `configured_agent` and `outside_agent`.
    """
    inside = configured_agent(cfg)
    if cfg.agent.kind == INLINE:
        return Episodes(backend, tokenizer, inside, cfg.rollout.max_turns)
    from rlhpc.language.agents.outside import OutsideEpisodes

    parsers, program, options = outside_agent(cfg, tokenizer)
    context = int(getattr(backend, "context", sys.maxsize))
    return OutsideEpisodes(backend, tokenizer, parsers, context, program, options)


def outside_agent(cfg: LanguageConfig, tokenizer: Any) -> tuple[Parsers, Program | World, Options]:
    """What section `agent` says: how replies are read, what is run, and its limits.

    Raises:
        ConfigError: The model has no chat template, there is no such parser, or a package is missing.
    """
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise ConfigError(f"agent.kind={cfg.agent.kind} needs aiohttp: pip install 'rlhpc[llm]'") from None
    from rlhpc.language.agents.harnesses import Program
    from rlhpc.language.agents.outside import Options
    from rlhpc.language.agents.parsers import Parsers
    from rlhpc.language.agents.sessions import Limits

    agent = cfg.agent
    if not tokenizer.chat_template:
        raise ConfigError(
            f"agent.kind is {agent.kind}, but the tokenizer of {cfg.actor.model.model_path} has no chat template, by which "
            "what an agent asks becomes tokens: use a model that has one, or put one into its tokenizer_config.json"
        )
    roles, kwargs = roles_of(cfg), plain(agent.kwargs)
    program: Program | World
    if agent.kind == ENVIRONMENT:
        from rlhpc.language.agents.played import World

        environment = find_environment(str(agent.target), kwargs)
        program = World(partial(environment, **kwargs), agent.episodes_per_rank)
    else:
        program = Program(agent.kind, agent.target, tuple(agent.command), agent.python, agent.episodes_per_rank)
    options = Options(Limits(agent.max_turns, agent.max_tokens, roles), agent.timeout_s, kwargs)
    return Parsers(tokenizer, agent.tool_parser, agent.reasoning_parser), program, options


def roles_of(cfg: LanguageConfig) -> tuple[str, ...]:
    """Who speaks in an episode, where several do."""
    if cfg.agent.kind == ENVIRONMENT:
        return tuple(find_environment(str(cfg.agent.target), plain(cfg.agent.kwargs)).roles)
    return tuple(cfg.agent.roles)


def check_agent(cfg: LanguageConfig, tokenizer: Any) -> None:
    """Tries what answers the model, or asks it.

    Raises:
        ConfigError: It cannot be had.
    """
    if cfg.agent.kind == INLINE:
        configured_agent(cfg)
        return
    from rlhpc.language.agents.harnesses import Harnesses, Program

    _, program, _ = outside_agent(cfg, tokenizer)
    if not isinstance(program, Program):
        program.environment().close()
        return
    Harnesses(program, lambda number, outcome: None).close()
