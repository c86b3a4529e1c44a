"""Interface of user-defined environments for language models. Each episode has a separate object: `reset` returns the first
observation, and `step` handles a reply of the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import re
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from rlhpc.language.data.prompts import Prompt
from rlhpc.language.policy_text import parse_json
from rlhpc.runtime.former_names import former_attributes, former_members

Message = dict[str, Any]
Tool = TypeVar("Tool", bound=Callable[..., Any])
#: Maximum length of a tool's result, in characters.
_MAX_RESULT_CHARACTERS = 4000
_TEXT_CALL = re.compile(r"^\s*(\w+)\s*:\s*(.*)$", re.DOTALL)
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


class Task(Protocol):
    """Task of an episode.

    Attributes:
        messages: Initial conversation.
        question: Last user message of the initial conversation.
        answer: Reference answer, as text.
        meta: Additional columns of the problem.
        seed: Seed of this episode, for the environment's random choices.
    """

    messages: Sequence[Message]
    question: str
    answer: str
    meta: Mapping[str, Any]
    seed: int


@former_members(said="observation")
@dataclass
class Step:
    """Response of an environment to a turn.

    Attributes:
        observation: Observation for the next role, as a text or as messages. None adds no message; in the first step, None
            stands for the task's messages.
        reward: Reward of the last turn.
        done: Whether the episode is over.
        role: Next role, in environments with several roles.
        rewards: Additional rewards by role name, such as the payoffs of all players when a game ends. Each is added to the
            role's last turn.
        afresh: Whether the next role starts with a new context, without its earlier turns.
        metrics: Metrics, summed over an episode and logged as `agent/<name>`.
    """

    observation: str | list[Message] | None = None
    reward: float = 0.0
    done: bool = False
    role: str = ""
    rewards: dict[str, float] = field(default_factory=dict)
    afresh: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


#: Return value of an environment. A text is the next observation; a number is the last turn's reward and ends the episode.
EnvResponse: TypeAlias = "Step | str | float | None"

if not typing.TYPE_CHECKING:
    __getattr__ = former_attributes(__name__)


def step_of(response: EnvResponse) -> Step:
    """Converts the return value of an environment to a `Step`.

    Raises:
        TypeError: The value has an unsupported type.
    """
    if isinstance(response, Step):
        return response
    if isinstance(response, str) or response is None:
        return Step(response)
    if isinstance(response, (bool, int, float)):
        return Step(reward=float(response), done=True)
    raise TypeError(f"an environment gave a {type(response).__name__}; allowed: Step, a text, a number, None")


class Environment:
    """Environment of one episode; each episode has a separate object. The constructor takes `agent.kwargs`.

    `reset` and `step` are called in a thread, one after the other, while the engine continues with other episodes. An
    exception in them excludes the episode from training.

    Attributes:
        tools: Tools that the model may call, in OpenAI's format.
        roles: Names of the roles, in environments with several roles.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    roles: Sequence[str] = ()

    def reset(self, task: Task) -> EnvResponse:
        """Starts an episode; returns the first observation, where None stands for the task's messages."""
        raise NotImplementedError

    def step(self, reply: Message) -> EnvResponse:
        """Handles a turn of the model.

        Args:
            reply: Message of the model: `content`, and optionally `tool_calls`.

        Returns:
            Next observation as a text, a reward that ends the episode, or a `Step`.
        """
        raise NotImplementedError

    def cut(self) -> EnvResponse:
        """Returns the final response for an episode that has reached a limit (`agent.max_turns`, `agent.max_tokens`, the
        context), such as a last reward.
        """
        return Step(done=True)

    def close(self) -> None:
        """Releases the episode's resources."""

    # -- problems, for the source `environment` -------------------------------------------------------------------

    @classmethod
    def count(cls, *args: Any, **kwargs: Any) -> int:
        """Returns the number of problems."""
        return 1 << 30

    @classmethod
    def problem(cls, number: int, *args: Any, **kwargs: Any) -> Prompt:
        """Creates a problem; the same number gives the same problem.

        Args:
            number: Number of the problem, from 0 to `count` − 1.
            args: Always empty.
            kwargs: `data.train.kwargs` without `name`.
        """
        raise NotImplementedError(f"{cls.__name__} makes no problems: give data.train another source")

    def demonstrate(self, rng: random.Random) -> str:
        """Returns a good reply to the last observation, for SFT demonstrations."""
        raise NotImplementedError(f"{type(self).__name__} has no demonstrations")


def tool(function: Tool) -> Tool:
    """Marks a method of a `ToolEnvironment` as a tool for the model. The method's docstring and argument types become the
    tool's description.
    """
    function.is_tool = True  # type: ignore[attr-defined]
    return function


class ToolEnvironment(Environment):
    """Environment whose tools are its methods marked with `tool`. A reply without a tool call is the answer.

    Tool calls have the format of the model's template and `agent.tool_parser`. A model without such a format calls a tool
    by the text `name: argument`; the observation is then a text.
    """

    def __init__(self) -> None:
        tool_names = [name for name in dir(type(self)) if getattr(getattr(type(self), name), "is_tool", False)]
        self._methods: dict[str, Callable[..., Any]] = {name: getattr(self, name) for name in tool_names}
        self.tools = [describe_tool(name, method) for name, method in self._methods.items()]

    def answer(self, text: str) -> EnvResponse:
        """Handles a reply without a tool call; usually returns a reward, which ends the episode."""
        raise NotImplementedError

    def step(self, reply: Message) -> EnvResponse:
        """Runs the tool calls of a reply and returns their results, or handles the answer."""
        calls = reply.get("tool_calls")
        if not calls:
            call_match = _TEXT_CALL.match(str(reply.get("content") or ""))
            if call_match is None or call_match[1] not in self._methods:
                return self.answer(str(reply.get("content") or ""))
            return Step(self._call_tool(call_match[1], call_match[2].strip()))
        return Step(
            [
                {"role": "tool", "tool_call_id": call["id"], "content": self._call_tool(**call["function"])}
                for call in calls
            ]
        )

    def _call_tool(self, name: str, arguments: str) -> str:
        method = self._methods.get(name)
        if method is None:
            return f"error: there is no tool {name}; there are: {', '.join(self._methods)}"
        try:
            argument_values = parse_json(arguments)
        except ValueError:
            argument_values = arguments
        try:
            output_text = str(
                method(**argument_values) if isinstance(argument_values, dict) else method(*filter(None, [arguments]))
            )
        except Exception as error:  # the model gets the error message of its call
            output_text = f"error: {error}"
        return output_text if len(output_text) <= _MAX_RESULT_CHARACTERS else output_text[:_MAX_RESULT_CHARACTERS] + "…"


def describe_tool(name: str, method: Callable[..., Any]) -> dict[str, Any]:
    """Returns a function's tool description in OpenAI's format, from its docstring and argument types."""
    type_hints, parameters = typing.get_type_hints(method), inspect.signature(method).parameters
    properties = {key: {"type": _JSON_TYPES.get(type_hints.get(key, str), "string")} for key in parameters}
    required_names = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    schema = {"type": "object", "properties": properties, "required": required_names}
    tool_schema = {"name": name, "description": inspect.getdoc(method) or "", "parameters": schema}
    return {"type": "function", "function": tool_schema}


#: Time limit of `Environment.close`, in seconds.
_CLOSE_S = 5.0
#: Returns the model's next message for a role, its conversation and its tools; None if a limit is reached.
_Ask = Callable[[str, list[Message], Sequence[Any]], Awaitable["Message | None"]]
#: Calls a blocking function without blocking the event loop.
_Call = Callable[..., Awaitable[Any]]


@dataclass
class _EpisodeRewards:
    """Rewards of the turns of an episode.

    Attributes:
        roles: Role of each turn.
        rewards: Reward of each turn.
        metrics: Sums of the environment's metrics.
    """

    roles: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, step: Step) -> None:
        """Records the environment's response to the last turn."""
        if self.rewards:
            self.rewards[-1] += step.reward
        for name, metric_value in step.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + metric_value
        for role, reward in step.rewards.items():
            last_turn = next(
                (turn_index for turn_index in reversed(range(len(self.roles))) if self.roles[turn_index] == role), None
            )
            if last_turn is not None:  # a role without turns gets no reward
                self.rewards[last_turn] += reward

    def outcome(self) -> dict[str, Any]:
        """Returns the outcome in the format of external agents."""
        episode_outcome: dict[str, Any] = {"turn_rewards": self.rewards, "metrics": self.metrics}
        if not any(self.roles):
            return {**episode_outcome, "reward": float(sum(self.rewards))}
        role_rewards = dict.fromkeys(self.roles, 0.0)
        for role, reward in zip(self.roles, self.rewards, strict=True):
            role_rewards[role] += reward
        return {**episode_outcome, "rewards": role_rewards}


class Conversations:
    """Conversations of the roles of an episode."""

    def __init__(self, task: Task) -> None:
        self._system_messages = [message for message in task.messages if message["role"] == "system"]
        self._task_messages = list(task.messages)
        self._messages_by_role: dict[str, list[Message]] = {}

    def next_messages(self, step: Step) -> list[Message]:
        """Returns the conversation of the next role, including the new observation."""
        if step.afresh or step.role not in self._messages_by_role:
            self._messages_by_role[step.role] = (
                self._task_messages[:] if step.observation is None else self._system_messages[:]
            )
        messages = self._messages_by_role[step.role]
        if isinstance(step.observation, str):
            messages.append({"role": "user", "content": step.observation})
        elif step.observation is not None:
            messages += step.observation
        return messages


async def play(environment: Environment, task: Task, ask: _Ask, call: _Call) -> dict[str, Any]:
    """Runs an episode until it ends or reaches a limit.

    Returns:
        Outcome in the format of external agents; `cut` is True if the episode has reached a limit.
    """
    conversations, episode_rewards, is_truncated = Conversations(task), _EpisodeRewards(), False
    try:
        observation: EnvResponse = await call(environment.reset, task)
        step = step_of(observation)
        while not step.done:
            messages = conversations.next_messages(step)
            reply = await ask(step.role, messages, environment.tools)
            if reply is None:
                is_truncated, step = True, step_of(await call(environment.cut))
                episode_rewards.add(step)
                break
            messages.append(reply)
            episode_rewards.roles.append(step.role)
            episode_rewards.rewards.append(0.0)
            step = step_of(await call(environment.step, reply))
            episode_rewards.add(step)
    finally:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(call(environment.close), _CLOSE_S)
    return {**episode_rewards.outcome(), "cut": is_truncated}
