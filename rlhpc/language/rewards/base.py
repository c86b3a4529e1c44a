"""The interface of a reward on a text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


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
    """

    prompt: str
    response: str
    answer: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    finished: bool = True


class Reward(Protocol):
    """Judges one sample. It may raise, hang or die: the pool that calls it gives such a sample its `reward.failed`."""

    def __call__(self, sample: Sample) -> float: ...
