"""Section `agent` of the configuration. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from rlhpc.config.constraints import COUNT, FREE, NOT_NEGATIVE, POSITIVE, Choices


@dataclass
class ToolServerConfig:
    """A tool server: an MCP server started by a command or reached by a URL, or a shell."""

    command: list[str] = field(default_factory=list)
    """Command that starts the server for each episode; the server communicates over its standard streams."""
    url: str | None = None
    """URL of a server that all episodes use; `{name}` in it stands for the address of a service."""
    shell: bool = False
    """A bash shell for each episode, in `agent.sandbox`; it keeps its working folder and variables between commands."""


@dataclass
class ServiceConfig:
    """A program that agents need in addition to the model; it runs as long as the processes that run agents."""

    name: str = MISSING
    """Name of the service. `{name}` in `agent.servers`, `agent.framework` and `agent.command`, and the environment variable
    `RLHPC_SERVICE_<NAME>` of agents, give its address (`127.0.0.1:port`)."""
    command: list[str] = field(default_factory=list)
    """Command and its arguments; `{port}` in them, and the environment variable `PORT`, give the port to listen on."""
    ready: str = "port"
    """Sign that the service is ready: `port`, it listens on the port; `/path`, it answers a GET of this path with a status
    below 400; `line: text`, it has printed the text."""
    timeout_s: Annotated[float, POSITIVE] = 120.0
    """Maximum time in seconds until the service is ready."""


@dataclass
class AgentConfig:
    """Source of the answers to a prompt: the model itself, or an agent that calls the model one or more times."""

    kind: Annotated[str, Choices("inline", "python", "command", "environment", "mcp", "verifiers", "openenv")] = (
        "inline"
    )
    """`inline`: the model, or the agent named by `rollout.agent`, in the rollout rank. `python`: a function, `agent.target`.
    `command`: any program, `agent.command`. These two call the model through an OpenAI-compatible endpoint, whose URL and key
    are in their environment variables. `environment`: an environment in which the model acts, `agent.target`, in the rollout
    rank. `mcp`: the model with the tools of `agent.servers`. `verifiers`, `openenv`: an environment of one of these
    frameworks, `agent.framework`, with its rewards."""
    target: str | None = None
    """For kind `python`: `module:function`, a function or coroutine that gets the task and the model and returns the reward,
    or more. For kind `environment`: `search`, `guess`, `mastermind`, `kuhn_poker`, `proposer`, `sql`, `micro_swe`, `tools`, a
    registered name, or `module:Class`."""
    command: list[str] = field(default_factory=list)
    """For kind `command`: command and its arguments; `{question}` in them stands for the question. Its output is the response
    that is scored."""
    servers: list[ToolServerConfig] = field(default_factory=list)
    """For kind `mcp`: tool servers."""
    framework: dict[str, Any] = field(default_factory=dict)
    """For kind `verifiers`: the environment's configuration, such as `{taskset: {id: my_taskset}}`. For kind `openenv`:
    `base_url`, and optionally `action` (key of an action that holds the model's text; default `message`), `observation` (key
    of an observation that the model reads; default all of it) and `reset` (arguments)."""
    sandbox: Annotated[str | None, Choices("bubblewrap", "unshare", "none")] = None
    """Sandbox of `agent.command` and shells: `bubblewrap` (no network; read-only access to the system's programs, the
    interpreter and files named in `agent.command`, and a writable folder per episode), `unshare` (no network; access to all
    files of the user), or `none`. A command reaches the model at `127.0.0.1:8000`."""
    sandbox_read: Annotated[list[str], FREE] = field(default_factory=list)
    """Further files and folders that bubblewrap makes readable; `~` is the home folder. The model can read their contents,
    too, except the run folder and the files of `data`, which are hidden unless they are named here themselves."""
    memory_mb: Annotated[int, COUNT, FREE] = 8192
    """Maximum memory in MB of all processes of an episode in a sandbox. It is measured about four times a second; in between,
    an episode may use more, and each process may map four times as much. Memory files (`memfd_create`) count where they are
    mapped."""
    disk_mb: Annotated[int, COUNT, FREE] = 8192
    """Maximum disk space in MB of an episode in a sandbox, including its `/tmp`, and maximum size of a file. It is measured
    about four times a second, or less often with many files; a deleted file that is still open counts alone."""
    services: list[ServiceConfig] = field(default_factory=list)
    """Programs that agents need; they run once per node of the group `agent`, or without this group once per engine."""
    python: Annotated[str | None, FREE] = None
    """Python interpreter with the agent's packages; null uses the interpreter of rlhpc."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments that the agent gets as `task.kwargs`; for kind `environment`, arguments of its constructor."""
    episodes_per_rank: Annotated[int, COUNT, FREE] = 8
    """Number of concurrent episodes on each rank that runs episodes, each in a separate process."""
    timeout_s: Annotated[float, POSITIVE, FREE] = 900.0
    """Maximum time in seconds of an episode, from its start to its reward. A longer episode is terminated with all processes
    that it started, and omitted."""
    max_turns: Annotated[int, COUNT] = 40
    """Maximum number of model calls in an episode."""
    max_tokens: Annotated[int, COUNT] = 32768
    """Maximum number of tokens that the model writes in an episode; `rollout.max_new_tokens` limits each turn."""
    roles: list[str] = field(default_factory=list)
    """Names of the roles of a multi-role episode, by which the agent calls the model. Each role has a separate context, and
    its rewards are compared only with those of the same role. An environment defines its roles itself."""
    untrained_roles: list[str] = field(default_factory=list)
    """Roles that use the current policy but whose tokens are not trained, such as an opponent or a judge."""
    tool_parser: str | None = "hermes"
    """Parser of tool calls in the model's text: `hermes`, any parser of vLLM if it is installed, or null."""
    reasoning_parser: str | None = "think"
    """Parser that separates reasoning from the answer: `think` (`<think>…</think>`), any parser of vLLM, or null."""


@dataclass
class TrainedAgentConfig(AgentConfig):
    """Section `agent` of a run that trains on its episodes."""

    policies: dict[str, str] = field(default_factory=dict)
    """Several policies, such as a proposer and a solver: role → name of its policy, `{proposer: asks, solver: answers}`. Each
    policy is a LoRA adapter of `actor.model` (`actor.lora`) with a separate optimizer, and is trained on the tokens of its
    roles. Empty: all roles use one policy."""
    feedback_timeout_s: Annotated[float, NOT_NEGATIVE, FREE] = 0.0
    """For kind `python` with delayed rewards (`{"later": True}`): maximum time in seconds from the end of an episode to its
    reward. An episode without a reward by then is omitted. 0: no delayed rewards."""
    feedback_ahead: Annotated[int, NOT_NEGATIVE, FREE] = 16
    """Number of prompts per rollout rank that may wait for delayed rewards while other prompts fill the step."""
