"""Plays an episode: has the model and the world answer each other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhpc.language.environments.base import Environment, Message, Said, Step, Task, step_of

#: Most seconds that a world has to release what it holds.
_CLOSE_S = 5.0
#: The model's next message: asked with a role, its conversation and its tools; None if it may say no more.
Ask = Callable[[str, list[Message], Sequence[Any]], Awaitable["Message | None"]]
#: Calls a function that may take a while.
Call = Callable[..., Awaitable[Any]]


@dataclass
class Earned:
    """What the turns of an episode were worth.

    Attributes:
        roles: Who spoke, by turn.
        rewards: Of each turn.
        metrics: Sums of what the world counted.
    """

    roles: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, step: Step) -> None:
        """Takes in what the world said to the last turn."""
        if self.rewards:
            self.rewards[-1] += step.reward
        for name, value in step.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        for role, reward in step.rewards.items():
            last = next((at for at in reversed(range(len(self.roles))) if self.roles[at] == role), None)
            if last is not None:  # who has not spoken cannot have earned it
                self.rewards[last] += reward

    def outcome(self) -> dict[str, Any]:
        """As an agent outside says it."""
        found: dict[str, Any] = {"turn_rewards": self.rewards, "metrics": self.metrics}
        if not any(self.roles):
            return {**found, "reward": float(sum(self.rewards))}
        each = dict.fromkeys(self.roles, 0.0)
        for role, reward in zip(self.roles, self.rewards, strict=True):
            each[role] += reward
        return {**found, "rewards": each}


class Conversations:
    """What each role has read and said."""

    def __init__(self, task: Task) -> None:
        self._begin = [message for message in task.messages if message["role"] == "system"]
        self._whole = list(task.messages)
        self._known: dict[str, list[Message]] = {}

    def of(self, step: Step) -> list[Message]:
        """That of who speaks next, with what it has just been told."""
        if step.afresh or step.role not in self._known:
            self._known[step.role] = self._whole[:] if step.said is None else self._begin[:]
        messages = self._known[step.role]
        if isinstance(step.said, str):
            messages.append({"role": "user", "content": step.said})
        elif step.said is not None:
            messages += step.said
        return messages


async def play(environment: Environment, task: Task, ask: Ask, call: Call) -> dict[str, Any]:
    """Plays an episode to its end.

    Returns:
        What an agent outside says of it; `cut` where the model might say no more.
    """
    conversations, earned, cut = Conversations(task), Earned(), False
    try:
        said: Said = await call(environment.reset, task)
        step = step_of(said)
        while not step.done:
            messages = conversations.of(step)
            reply = await ask(step.role, messages, environment.tools)
            if reply is None:
                cut, step = True, step_of(await call(environment.cut))
                earned.add(step)
                break
            messages.append(reply)
            earned.roles.append(step.role)
            earned.rewards.append(0.0)
            step = step_of(await call(environment.step, reply))
            earned.add(step)
    finally:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(call(environment.close), _CLOSE_S)
    return {**earned.outcome(), "cut": cut}
