"""Section `agent` of the configuration. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from rlhpc.config.constraints import COUNT, FREE, NOT_NEGATIVE, POSITIVE, Choices


@dataclass
class ToolServerConfig:
    """A server of tools, in the Model Context Protocol, by a command or a URL; or a shell."""

    command: list[str] = field(default_factory=list)
    """Command that starts the server for each episode; it speaks over its standard streams."""
    url: str | None = None
    """Address of the server for all episodes; `{name}` in it is the address of a service."""
    shell: bool = False
    """A bash for each episode, in `agent.sandbox`: its folder and variables are those that the last command left."""


@dataclass
class ServiceConfig:
    """A program that agents need beside the model, which runs as long as those that run agents."""

    name: str = MISSING
    """`{name}` is its address (`127.0.0.1:port`) in `agent.servers`, `agent.framework` and `agent.command`, and so is the
    environment variable `RLHPC_SERVICE_<NAME>` of agents."""
    command: list[str] = field(default_factory=list)
    """argv; `{port}` in it is the port where it is to listen, as is the environment variable `PORT`."""
    ready: str = "port"
    """Sign that it is ready: `port`, it listens there; `/path`, it answers a GET there with a status below 400; `line:
    text`, it has printed that."""
    timeout_s: Annotated[float, POSITIVE] = 120.0
    """Longest time until it is ready."""


@dataclass
class AgentConfig:
    """Source of the answers to a prompt: the model directly, or an agent that calls the model, possibly often, and works
    with its replies."""

    kind: Annotated[str, Choices("inline", "python", "command", "environment", "mcp", "verifiers", "openenv")] = (
        "inline"
    )
    """`inline`: the model, or what `rollout.agent` names, in the rollout rank. `python`: a function, `agent.target`.
    `command`: any program, `agent.command`. These two ask the model over an endpoint in the form of OpenAI's, of which
    they find URL and key in the environment. `environment`: a world that the model acts in, `agent.target`, in the rollout
    rank. `mcp`: the model with the tools of `agent.servers`. `verifiers`, `openenv`: an environment of these frameworks,
    `agent.framework`, with its rewards."""
    target: str | None = None
    """`module:function` of kind `python`: gets the task and the model, and returns the reward, or more; a coroutine, too.
    Of kind `environment`: `search`, `guess`, `mastermind`, `kuhn_poker`, `proposer`, `sql`, `micro_swe`, a registered name, or
    `module:Class`."""
    command: list[str] = field(default_factory=list)
    """argv of kind `command`; `{question}` in it is the question. What it prints is the response that is judged."""
    servers: list[ToolServerConfig] = field(default_factory=list)
    """Servers of tools, of kind `mcp`."""
    framework: dict[str, Any] = field(default_factory=dict)
    """Of kind `verifiers`: its environment's configuration, such as `{taskset: {id: my_taskset}}`. Of kind `openenv`:
    `base_url`, and if wanted `action` (which key of an action is what the model writes; by default `message`), `observation`
    (which key of an observation the model reads; by default all of it) and `reset` (arguments)."""
    sandbox: Annotated[str | None, Choices("bubblewrap", "unshare", "none")] = None
    """Sandbox of `agent.command` and shells: `bubblewrap` (no network; of the files the system's programs, the
    interpreter and what `agent.command` names, read-only, and a folder of the episode), `unshare` (no network; the files are
    the user's, all of them), or `none`. A command finds the model at `127.0.0.1:8000`."""
    sandbox_read: Annotated[list[str], FREE] = field(default_factory=list)
    """Further files and folders that bubblewrap shows, read-only; `~` is the home folder. What lies in them is readable for
    the model, too, except the run folder and the files of `data`: these are hidden, unless they are named here themselves."""
    memory_mb: Annotated[int, COUNT, FREE] = 8192
    """Maximum memory of all processes of an episode in a sandbox. Measured about four times a second: in between an episode
    may use more, and each process may map four times as much. Memory files (`memfd_create`) count where they are mapped."""
    disk_mb: Annotated[int, COUNT, FREE] = 8192
    """Maximum disk space of an episode in a sandbox, its `/tmp` included, and the largest file. Measured about four times a
    second, less often where there are many files; a file that is open and has been deleted counts alone."""
    services: list[ServiceConfig] = field(default_factory=list)
    """Programs that agents need: once on each node of the group `agent`, or else once for each engine."""
    python: Annotated[str | None, FREE] = None
    """Interpreter of the agent, with its packages; null is rlhpc's."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """For the agent, as `task.kwargs`; of kind `environment`, its constructor's arguments."""
    episodes_per_rank: Annotated[int, COUNT, FREE] = 8
    """Episodes that run at a time on each rank that runs them, each in a separate process."""
    timeout_s: Annotated[float, POSITIVE, FREE] = 900.0
    """Longest time of an episode, from its start to its reward. One that takes longer is ended, with all that it has started,
    and is left out."""
    max_turns: Annotated[int, COUNT] = 40
    """Maximum number of calls of the model in an episode."""
    max_tokens: Annotated[int, COUNT] = 32768
    """Maximum number of tokens that the model writes in an episode; `rollout.max_new_tokens` bounds each turn."""
    roles: list[str] = field(default_factory=list)
    """Where several speak in an episode: names by which the agent calls the model, one for each. Each is a context of its own,
    and is compared with its own kind. An environment brings its own."""
    untrained_roles: list[str] = field(default_factory=list)
    """Roles that speak by the policy as it is, and whose tokens are not trained on, such as an opponent or a judge."""
    tool_parser: str | None = "hermes"
    """Parser of tool calls in the model's text: `hermes`, any of vLLM's where that is installed, or null."""
    reasoning_parser: str | None = "think"
    """Parser that separates reasoning from the answer: `think` (`<think>…</think>`), any of vLLM's, or null."""


@dataclass
class TrainedAgentConfig(AgentConfig):
    """The same, of a run that trains on its episodes."""

    policies: dict[str, str] = field(default_factory=dict)
    """Several policies, such as a proposer's and a solver's: the name of each role's, `{proposer: asks, solver: answers}`.
    Each is a LoRA adapter of `actor.model` (`actor.lora`) with an optimizer of its own, and is trained on what its roles
    say. Empty: all roles speak by one policy."""
    feedback_timeout_s: Annotated[float, NOT_NEGATIVE, FREE] = 0.0
    """Of kind `python`, where rewards come after an episode has ended (`{"later": True}`): longest time until they have come.
    Without a reward by then an episode is left out. 0: no reward comes later."""
    feedback_ahead: Annotated[int, NOT_NEGATIVE, FREE] = 16
    """Prompts on each rollout rank that may wait for such rewards while others take their places in the step."""
