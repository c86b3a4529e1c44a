"""Inline agents and environments: episodes within the rollout rank, without a process or a connection."""

from __future__ import annotations

import asyncio
import collections
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhpc.language.agents.episodes import Agent, Episode
from rlhpc.language.agents.gateway.sessions import OVER
from rlhpc.language.agents.gateway.threads import Threads
from rlhpc.language.agents.runner.task import AgentTask, describe
from rlhpc.language.agents.turn_tree import RequestError
from rlhpc.language.envs.base import Environment, play
from rlhpc.language.envs.tools import PythonTool, Tool, calculator
from rlhpc.language.policy_text import valid_text
from rlhpc.runtime.trace_recorder import span

if TYPE_CHECKING:
    from rlhpc.language.agents.gateway.server import Gateway

#: Number of threads that call environments.
_THREADS = 16


@dataclass(frozen=True)
class InlineEnvironment:
    """Inline environment of `agent.kind: environment`.

    Attributes:
        environment: Builds the environment of an episode.
        episodes: Maximum number of concurrent episodes.
    """

    environment: Callable[[], Environment]
    episodes: int


class InlineAgents:
    """Runner of environment episodes within the rollout rank, with the interface of `AgentProcesses`.

    Args:
        environment: Environment of the episodes.
        gateway: Gateway that answers the model calls; the episodes run on its event loop.
        on_outcome: Callback with the ticket's id and the outcome.
    """

    def __init__(
        self,
        environment: InlineEnvironment,
        gateway: Gateway,
        on_outcome: Callable[[int, dict[str, Any]], None],
    ) -> None:
        self._environment, self._gateway, self._on_outcome = environment, gateway, on_outcome
        self._threads = Threads(_THREADS)
        self._queued_tickets: collections.deque[dict[str, Any]] = collections.deque()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def run(self, ticket: dict[str, Any]) -> None:
        """Queues a ticket; its episode starts as soon as the limit of concurrent episodes allows it."""
        self._gateway.loop.call_soon_threadsafe(self._add_episode, ticket)

    def abort(self) -> None:
        """Ends all running episodes and removes queued tickets, without reporting outcomes."""
        self._gateway.loop.call_soon_threadsafe(self._cancel_all)

    def close(self) -> None:
        """Ends all episodes."""
        self.abort()
        self._threads.close()

    # -- on the gateway's loop ------------------------------------------------------------------------------------

    def _cancel_all(self) -> None:
        self._queued_tickets.clear()
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    def _add_episode(self, ticket: dict[str, Any]) -> None:
        self._queued_tickets.append(ticket)
        self._start_queued()

    def _start_queued(self) -> None:
        while self._queued_tickets and len(self._tasks) < self._environment.episodes:
            ticket = self._queued_tickets.popleft()
            self._tasks[ticket["id"]] = self._gateway.loop.create_task(self._run_episode(ticket))

    async def _run_episode(self, ticket: dict[str, Any]) -> None:
        try:
            episode_outcome = await asyncio.wait_for(self._run_agent(ticket), ticket["timeout_s"])
        except TimeoutError:
            episode_outcome = {"error": f"it took longer than agent.timeout_s ({ticket['timeout_s']:g} s)"}
        except asyncio.CancelledError:
            return
        except Exception as error:
            episode_outcome = {"error": describe(error)}
        del self._tasks[ticket["id"]]
        self._on_outcome(ticket["id"], episode_outcome)
        self._start_queued()

    async def _run_agent(self, ticket: dict[str, Any]) -> dict[str, Any]:
        async def ask(role: str, messages: list[dict[str, Any]], tools: Sequence[Any]) -> dict[str, Any] | None:
            try:
                return await self._gateway.chat(ticket["api_key"], role, list(messages), list(tools))
            except RequestError as error:
                if error.code == OVER:
                    return None
                raise

        return await play(self._environment.environment(), AgentTask(**ticket["task"]), ask, self._threads.call)


class ToolAgent(Agent):
    """Agent that runs tool calls such as `<tool>calculator: 12 * 7</tool>` and answers with `<result>84</result>`. It returns
    an image as a message with role `tool`.

    Args:
        tools: Tools by name; None for `calculator` and `python`.
        longest: Maximum number of characters of a result.
    """

    stop = ("</tool>",)
    _CALL = re.compile(r"<tool>\s*([\w.-]+)\s*:(.*?)</tool>", re.DOTALL)

    def __init__(self, tools: Mapping[str, Tool] | None = None, longest: int = 1000) -> None:
        self.tools: dict[str, Tool] = (
            dict(tools) if tools is not None else {"calculator": calculator, "python": PythonTool()}
        )
        self._max_characters = longest

    def respond(self, episode: Episode, text: str) -> str | dict[str, Any] | None:
        """Runs the tool call that ends the turn; a turn without a call ends the episode."""
        if "</tool>" not in text:
            return None
        calls = self._CALL.findall(text)
        tool_output = self._call_tool(*calls[-1]) if calls else "error: write <tool>name: text</tool>"
        if not isinstance(tool_output, str):
            return {"role": "tool", "content": [{"type": "image", "image": tool_output}]}
        return f"<result>{tool_output}</result>\n"

    def _call_tool(self, name: str, text: str) -> Any:
        tool = self.tools.get(name)
        if tool is None:
            return f"error: there is no tool {name}; there are {', '.join(self.tools)}"
        try:
            with span(name, "tool"):
                output = tool(text.strip("\n"))
            if isinstance(output, bytes) or hasattr(output, "save"):
                return output
            output_text = valid_text(str(output))
        except Exception as error:  # the model gets the error of a call or of a tool as the result
            output_text = f"error: {error}"
        # Tags within a result would end the result early or call another tool.
        output_text = re.sub(r"</?(?:result|tool)>", "", output_text)
        return output_text if len(output_text) <= self._max_characters else output_text[: self._max_characters] + "..."
