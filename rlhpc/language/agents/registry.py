"""Registry of agents, and builders of episode runners from a configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from rlhpc.config.typed import plain, select
from rlhpc.language.agents.episodes import Agent, Episode, EpisodeRunner
from rlhpc.language.agents.inline_agents import ToolAgent
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.engines.base import Request, RolloutBackend
from rlhpc.language.envs.registry import find_environment
from rlhpc.language.multi_policy import ENVIRONMENT, policies_of, roles_of
from rlhpc.language.scoring.groups import AGENT, placed_groups
from rlhpc.runtime.comm.context import installed_context
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.plugins import Registry, require_package

if TYPE_CHECKING:
    from rlhpc.language.agents.agent_processes import Program
    from rlhpc.language.agents.external import AgentOptions, AgentRanks, ExternalEpisodes
    from rlhpc.language.agents.gateway.output_parsers import Parsers
    from rlhpc.language.agents.inline_agents import InlineEnvironment
    from rlhpc.language.config.run import LanguageConfig

#: Runner of episodes on an engine, with an inline or an external agent.
Generation: TypeAlias = Union[EpisodeRunner, "ExternalEpisodes"]
#: Kind of agent that runs in the rollout rank.
INLINE = "inline"

__all__ = [
    "Agent",
    "Episode",
    "EpisodeRunner",
    "Generation",
    "ToolAgent",
    "build_external_agent",
    "check_harness",
    "check_sandbox",
    "configured_agent",
    "make_agent",
    "make_generation",
    "register_agent",
    "roles_of",
    "run_episodes",
]
AGENTS: Registry[Callable[..., Agent]] = Registry(
    "agent", "rollout.agent", "rlhpc.agents", {"tools": "rlhpc.language.agents.inline_agents:ToolAgent"}
)
register_agent = AGENTS.register


def make_agent(name: str) -> Agent:
    """Builds the agent of `rollout.agent`: a registered name, an entry point of group `rlhpc.agents`, or
    `module:Class`.

    Raises:
        ConfigError: The name is unknown, or the agent cannot be built.
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
    backend: RolloutBackend,
    requests: Iterable[tuple[Request, Prompt | None]],
    agent: Agent | None,
    tokenizer: Any,
    max_turns: int,
) -> Iterator[Episode]:
    """Runs episodes and yields each episode when it ends."""
    episodes = EpisodeRunner(backend, tokenizer, agent, max_turns)
    try:
        for request, prompt in requests:
            episodes.add([request], prompt)
        while episodes.unfinished():
            yield from episodes.step()
    finally:
        episodes.close()


def configured_agent(cfg: LanguageConfig) -> Agent | None:
    """Returns the agent of `rollout.agent`; None for episodes of one turn.

    Raises:
        ConfigError: The agent is unknown.
    """
    name = cfg.rollout.agent
    return None if name is None else make_agent(name)


def make_generation(
    cfg: LanguageConfig,
    backend: RolloutBackend,
    tokenizer: Any,
    agent_ranks: AgentRanks | None = None,
    address: str = "",
) -> Generation:
    """Builds the runner of episodes from sections `rollout` and `agent`. The episodes have one turn, use the inline agent
    `rollout.agent`, or use an external agent.

    Args:
        cfg: Configuration of the run.
        backend: Engine.
        tokenizer: Tokenizer of the model.
        agent_ranks: Connection to the ranks that run external agents; None to run them from this process.
        address: Address of this host for processes on other hosts; "" to refuse them.

    Raises:
        ConfigError: See `configured_agent` and `build_external_agent`.
    """
    inline_agent = configured_agent(cfg)
    if cfg.agent.kind == INLINE:
        return EpisodeRunner(backend, tokenizer, inline_agent, cfg.rollout.max_turns)
    from rlhpc.language.agents.external import ExternalEpisodes

    parsers, options = build_external_agent(cfg, tokenizer)
    context = int(getattr(backend, "context", sys.maxsize))
    build_episodes = partial(ExternalEpisodes, backend, tokenizer, parsers, context, options=options)
    if agent_ranks is not None:
        return build_episodes(agent_ranks, address=address)
    if cfg.agent.kind == ENVIRONMENT:
        return build_episodes(build_inline_environment(cfg))
    from rlhpc.language.agents.services import Services

    services = Services(cfg.agent.services)
    try:
        program = program_of(cfg, services.addresses)
        return build_episodes(program, on_close=services.close, address=address, check=services.check)
    except BaseException:
        services.close()
        raise


def build_external_agent(cfg: LanguageConfig, tokenizer: Any) -> tuple[Parsers, AgentOptions]:
    """Builds the parsers of replies and the options of external agents from section `agent`.

    Raises:
        ConfigError: The model has no chat template, a parser is unknown, or a package is missing.
    """
    require_package("aiohttp", f"agent.kind={cfg.agent.kind} needs aiohttp")
    from rlhpc.language.agents.external import AgentOptions
    from rlhpc.language.agents.gateway.output_parsers import Parsers
    from rlhpc.language.agents.gateway.sessions import EpisodeLimits

    agent = cfg.agent
    if not tokenizer.chat_template:
        raise ConfigError(
            f"agent.kind is {agent.kind}, but the tokenizer of {cfg.actor.model.model_path} has no chat template, by which "
            "what an agent asks becomes tokens: use a model that has one, or put one into its tokenizer_config.json"
        )
    roles, kwargs = roles_of(cfg), plain(agent.kwargs)
    untrained_roles = tuple(agent.untrained_roles)
    if untrained_roles and not set(untrained_roles) < set(roles):
        role_names = ", ".join(roles) or "none"
        raise ConfigError(
            f"agent.untrained_roles is {list(untrained_roles)}; allowed: some of the roles, not all of them ({role_names})"
        )
    episode_limits = EpisodeLimits(agent.max_turns, agent.max_tokens, roles, untrained_roles, policies_of(cfg).by_role)
    feedback_s = float(select(cfg, "agent.feedback_timeout_s") or 0.0)
    options = AgentOptions(episode_limits, agent.timeout_s, kwargs, feedback_s)
    return Parsers(tokenizer, agent.tool_parser, agent.reasoning_parser), options


def program_of(cfg: LanguageConfig, addresses: Mapping[str, str] | None = None) -> Program:
    """Builds the program of section `agent`, which runs in a separate process for each episode.

    Args:
        cfg: Configuration of the run.
        addresses: Addresses of `agent.services`.
    """
    from rlhpc.language.agents.agent_processes import Program
    from rlhpc.language.agents.runner.shell import LIMITS
    from rlhpc.language.agents.services import fill_addresses

    agent, addresses = cfg.agent, addresses or {}
    servers = [{"command": plain(server.command), "url": server.url, "shell": server.shell} for server in agent.servers]
    options = plain(agent.framework) or {"servers": servers}
    command = tuple(fill_addresses(list(agent.command), addresses))
    environment = {f"RLHPC_SERVICE_{name.upper()}": address for name, address in addresses.items()}
    sandbox_limits = {name: int(getattr(agent, name)) for name in LIMITS}
    return Program(
        agent.kind,
        agent.target,
        command,
        agent.python,
        agent.episodes_per_rank,
        fill_addresses(options, addresses),
        environment,
        agent.sandbox,
        tuple(plain(agent.sandbox_read)),
        _find_private_paths(cfg),
        sandbox_limits,
    )


def _find_private_paths(cfg: LanguageConfig) -> tuple[str, ...]:
    """Returns the paths that sandboxes hide by default: the folder of runs, the registry, and files with reference
    answers.
    """
    paths = [expand_home(cfg.runner.run_dir).absolute() / cfg.runner.name]
    if (context := installed_context()) is not None:
        paths.append(context.registry.root)
    for section in (cfg.data.train, *cfg.data.eval):
        if section.path:
            path = expand_home(section.path).absolute()
            while has_magic(str(path)):  # for a glob pattern, the folder that contains all matches
                path = path.parent
            paths.append(path)
    return tuple(map(str, paths))


def build_inline_environment(cfg: LanguageConfig) -> InlineEnvironment:
    """Builds the inline environment of `agent.kind: environment`."""
    from rlhpc.language.agents.inline_agents import InlineEnvironment

    kwargs = plain(cfg.agent.kwargs)
    return InlineEnvironment(
        partial(find_environment(str(cfg.agent.target), kwargs), **kwargs), cfg.agent.episodes_per_rank
    )


def check_harness(cfg: LanguageConfig) -> None:
    """Checks the agent's program by starting and stopping its runner. Does not use the sandbox, which `check_sandbox` tests.

    Raises:
        ConfigError: The interpreter or the agent's module is not available.
    """
    from rlhpc.language.agents.agent_processes import AgentProcesses

    program = program_of(cfg)
    # Ranks of a group `agent` check the program on their nodes, which may have other software.
    if AGENT in placed_groups(cfg) and program.python is not None and not Path(program.python).exists():
        return
    AgentProcesses(replace(program, sandbox=None), lambda episode_number, raw_outcome: None).close()


def check_sandbox(cfg: LanguageConfig) -> None:
    """Tests the sandbox of agent programs on this machine, unless ranks of a group `agent` run the programs.

    Raises:
        ConfigError: The sandbox does not work here.
    """
    from rlhpc.language.agents.agent_processes import require_sandbox

    if AGENT not in placed_groups(cfg):
        require_sandbox(program_of(cfg))
