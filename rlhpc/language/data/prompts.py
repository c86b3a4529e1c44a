"""What a task asks, and what its answer is checked against."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Prompt:
    """One problem.

    Attributes:
        id: Its place in its dataset, or its seed.
        messages: The conversation so far, as chat templates take it: `[{"role": "user", "content": ...}]`, where a
            message may also have `tool_calls`, `reasoning_content` and the like; or one entry with role "raw", whose content
            is the prompt as it stands. `content` is always a text.
        answer: What rewards compare with, as text; "" where there is none.
        meta: Whatever else a reward wants to know (the procedural task's entry, unit tests), JSON-able.
        response: A demonstration, for SFT; "" where there is none.
        level: Difficulty or category, for evaluation tables.
        images: Pictures as files have them (PNG, JPEG), in the order in which `<image>` stands in the messages; where it
            stands in none, they come before the last question.
        tools: Definitions of the tools that the template shows to the model.
        turn: The demonstration as a message, where it has more than a text (calls, reasoning), which `response` then
            shows as JSON; None otherwise.
        place: File and line, for messages; "" where there are none.
    """

    id: int
    messages: tuple[dict[str, Any], ...]
    answer: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    level: str = ""
    images: tuple[bytes, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    turn: dict[str, Any] | None = None
    place: str = field(default="", compare=False)

    @property
    def where(self) -> str:
        """File and line of the problem, or its number."""
        return self.place or f"prompt {self.id}"

    @property
    def question(self) -> str:
        """The last thing that the user said."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] in ("user", "raw")), "")


class PromptDataset(Protocol):
    """Problems by position. Pure: position i is the same problem in every process and at every start."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...


@runtime_checkable
class Located(Protocol):
    """A dataset whose problems come from rows of files."""

    def place(self, index: int) -> str:
        """Returns file and row of a problem, for messages."""


@runtime_checkable
class Answering(Protocol):
    """A dataset that can itself say where a reference answer is missing."""

    def require_answers(self, why: str) -> None:
        """Sees to it that each problem has a reference answer, which `why` compares with.

        Raises:
            ConfigError: One has none; names file and row.
        """


@runtime_checkable
class Demonstrating(Protocol):
    """A dataset that can itself say where a demonstration is missing."""

    def require_responses(self) -> None:
        """Sees to it that each problem has a demonstration.

        Raises:
            ConfigError: One has none; names file and row.
        """
