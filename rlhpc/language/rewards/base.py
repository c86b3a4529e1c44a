"""The interface of a reward on a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Sample:
    """One response to be judged.

    Attributes:
        prompt: The last user message.
        response: What the model wrote, without special tokens.
        answer: The reference, as text.
        meta: What the dataset knows of the problem.
        tokens: Length of the response.
        finished: Whether it ended by itself, rather than at the length limit.
        messages: The whole conversation before it, as chat templates take it.
        tools: Definitions of the tools that the model was shown.
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
    """Judges one sample. It may raise, hang or die: the pool that calls it gives such a sample its `reward.failed`."""

    def __call__(self, sample: Sample) -> float: ...


# What some classes of rewards say of themselves.


@runtime_checkable
class SaysInline(Protocol):
    """Whether a reward is so cheap and harmless that no process is needed: yes or no, or a function of its arguments
    that says so."""

    inline: bool | Callable[..., bool]


@runtime_checkable
class ChecksProblems(Protocol):
    """A reward that can tell, without a response, whether it can judge a problem."""

    @staticmethod
    def check_problem(meta: Mapping[str, Any]) -> None:
        """Refuses a problem that it cannot judge.

        Raises:
            ValueError: Says what is wrong with it.
        """


@runtime_checkable
class Comparing(Protocol):
    """A reward that compares with the reference answer, so that a problem without one cannot be judged."""

    needs_answer: bool


@runtime_checkable
class MemoryBound(Protocol):
    """A reward whose judge gets no more memory than this (MiB)."""

    memory_mb: int


@runtime_checkable
class Preloading(Protocol):
    """A reward whose judges are to find these modules imported."""

    preload: Sequence[str]
