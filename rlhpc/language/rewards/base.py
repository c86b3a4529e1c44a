"""Interface of reward functions on texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Sample:
    """Response to be scored.

    Attributes:
        prompt: The last user message.
        response: The model's text, without special tokens.
        answer: The reference answer, as text.
        meta: Metadata of the problem in its dataset.
        tokens: Length of the response.
        finished: False if it was truncated at the length limit.
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
    """Reward function of one sample. It may raise, hang or die: the pool that calls it gives such a sample `reward.failed`."""

    def __call__(self, sample: Sample) -> float: ...


# Optional declarations of reward classes.


@runtime_checkable
class SaysInline(Protocol):
    """Reward that declares whether it is so cheap and harmless that it needs no separate process.

    `inline` is a bool, or a function of the reward's arguments that returns one.
    """

    inline: bool | Callable[..., bool]


@runtime_checkable
class ChecksProblems(Protocol):
    """Reward that can check, without a response, whether it can score a problem."""

    @staticmethod
    def check_problem(meta: Mapping[str, Any]) -> None:
        """Rejects a problem that it cannot score.

        Raises:
            ValueError: The problem cannot be scored; the message gives the reason.
        """


@runtime_checkable
class Comparing(Protocol):
    """Reward that compares with the reference answer, so that it cannot score a problem without one."""

    needs_answer: bool


@runtime_checkable
class MemoryBound(Protocol):
    """Reward whose judge process is limited to this amount of memory (MiB)."""

    memory_mb: int


@runtime_checkable
class Preloading(Protocol):
    """Reward whose judge processes import these modules before they are forked."""

    preload: Sequence[str]
