"""Interface of reward functions on texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Sample:
    """Response of the model with its problem, as input of a reward function.

    Attributes:
        prompt: The last user message.
        response: The model's text, without special tokens.
        answer: The reference answer, as text.
        meta: Metadata of the problem in its dataset.
        tokens: Length of the response.
        finished: False if the response was truncated at the length limit.
        messages: Conversation before the response, in the form of chat templates.
        tools: Definitions of the tools in the prompt.
    """

    prompt: str
    response: str
    answer: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    finished: bool = True
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


class Reward(Protocol):
    """Reward function of a sample. If it raises, hangs or crashes, the reward pool gives the sample `reward.failed`."""

    def __call__(self, sample: Sample) -> float: ...


# Optional declarations of reward classes.


@runtime_checkable
class DeclaresInline(Protocol):
    """Reward that declares whether it is cheap and safe enough to run without a separate process.

    `inline` is a bool, or a function that returns a bool for the reward's arguments.
    """

    inline: bool | Callable[..., bool]


@runtime_checkable
class ChecksProblems(Protocol):
    """Reward that can check before the start of a run whether it can score a problem."""

    @staticmethod
    def check_problem(meta: Mapping[str, Any]) -> None:
        """Rejects a problem that the reward cannot score.

        Raises:
            ValueError: The problem cannot be scored; the message gives the reason.
        """


@runtime_checkable
class NeedsAnswer(Protocol):
    """Reward that declares whether it needs the reference answer of a problem."""

    needs_answer: bool


@runtime_checkable
class HasMemoryLimit(Protocol):
    """Reward with a memory limit for its process, in MiB."""

    memory_mb: int


@runtime_checkable
class HasPreload(Protocol):
    """Reward with modules that the pool's server imports before it forks the reward processes."""

    preload: Sequence[str]
