"""Prompts of language models: problems with reference answers, sampling order, and prompt templates."""

from __future__ import annotations

import dataclasses
import random
import re
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rlhpc.runtime.errors import ConfigError


@dataclass(frozen=True)
class Prompt:
    """One problem.

    Attributes:
        id: Row or number of the problem in its source.
        messages: The conversation before the response, in the form of chat templates: `[{"role": "user", "content": ...}]`,
            and possibly further keys such as `tool_calls` and `reasoning_content`. A prompt without a chat template is one
            message with role "raw" and the prompt as content. `content` is always a text.
        answer: Reference answer for rewards, as text; "" if there is no reference.
        meta: Further data for rewards, such as unit tests, JSON-serializable.
        response: Demonstration for SFT; "" if there is no demonstration.
        level: Difficulty or category, for evaluation tables.
        images: Contents of image files (PNG, JPEG), in the order of `<image>` in the messages; without these placeholders,
            images come before the last user message.
        tools: Definitions of the tools that the template shows to the model.
        turn: The demonstration as a message if it has tool calls or reasoning; `response` is then the message as JSON. None
            for a plain text.
        place: File and line, for messages; "" if unknown.
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
        """File and line of the problem for messages, or its id if they are unknown."""
        return self.place or f"prompt {self.id}"

    @property
    def question(self) -> str:
        """Content of the last user message or raw prompt."""
        return next(
            (message["content"] for message in reversed(self.messages) if message["role"] in ("user", "raw")), ""
        )


class PromptDataset(Protocol):
    """Dataset of problems. An index refers to the same problem in every process and after every restart."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...


@runtime_checkable
class HasPlaces(Protocol):
    """Dataset of problems that come from rows of files."""

    def place(self, index: int) -> str:
        """Returns the file and row of a problem, for messages."""


@runtime_checkable
class ChecksAnswers(Protocol):
    """Dataset that can check for missing reference answers."""

    def require_answers(self, reason: str) -> None:
        """Checks that each problem has a reference answer; `reason` names the reward that needs it.

        Raises:
            ConfigError: A problem has no answer; the message names its file and row.
        """


@runtime_checkable
class ChecksResponses(Protocol):
    """Dataset that can check for missing demonstrations."""

    def require_responses(self) -> None:
        """Checks that each problem has a demonstration.

        Raises:
            ConfigError: A problem has no demonstration; the message names its file and row.
        """


class PromptSampler:
    """Sampler that shuffles the problems in each epoch and divides the sequence of epochs into the batches of steps.

    Problem i of the sequence depends only on (num_problems, seed, i), not on the process, restarts or the batch size.

    Args:
        num_problems: Number of problems.
        batch_size: Number of problems of a step.
        seed: Seed of the order.

    Raises:
        ConfigError: `num_problems` or `batch_size` is below 1.
    """

    def __init__(self, num_problems: int, batch_size: int, seed: int = 0) -> None:
        if num_problems < 1 or batch_size < 1:
            raise ConfigError(
                f"a sampler needs problems and a batch size; it was given {num_problems} and {batch_size}"
            )
        self._num_problems = num_problems
        self._batch_size = batch_size
        self._seed = seed
        self._order: tuple[int, list[int]] | None = None

    def of_step(self, step: int, rank: int = 0, num_ranks: int = 1) -> list[int]:
        """Returns the dataset indices of a step's problems on one rank; `step` counts from 1."""
        return [self.at((step - 1) * self._batch_size + index) for index in range(rank, self._batch_size, num_ranks)]

    def at(self, index: int) -> int:
        """Returns the dataset index of problem `index` of the sequence; `index` counts from 0."""
        epoch, index_in_epoch = divmod(index, self._num_problems)
        if self._order is None or self._order[0] != epoch:
            problem_order = list(range(self._num_problems))
            # The standard library's shuffle with a text seed gives the same order on every machine and Python version.
            random.Random(f"order {self._seed} {epoch}").shuffle(problem_order)
            self._order = (epoch, problem_order)
        return self._order[1][index_in_epoch]


_FIELD = re.compile(r"\{(\w+)\}")


class PromptTemplate:
    """Template of the last user message or raw prompt, and system prompt.

    In the template, `{prompt}` stands for the question, and `{name}` for a value of the problem's `meta`, such as another
    column of its file. Other braces are text: `\\boxed{}` needs no escape.

    Args:
        template: `data.….prompt_template`.
        system_prompt: `data.….system_prompt`; replaces a conversation's system message.
        key: Name of the section in messages.

    Raises:
        ConfigError: The template has no placeholder for the question.
    """

    def __init__(
        self, template: str = "{prompt}", system_prompt: str | None = None, *, key: str = "data.train"
    ) -> None:
        if "{prompt}" not in template:
            raise ConfigError(
                f"{key}.prompt_template is {template!r}; it must contain {{prompt}}, the question's place"
            )
        self.template = template
        self.system_prompt = system_prompt

    def __call__(self, prompt: Prompt) -> Prompt:
        messages = [dict(message) for message in prompt.messages]
        if self.template != "{prompt}":
            for message in reversed(messages):
                if message["role"] in ("user", "raw"):
                    message["content"] = self._fill_template(message["content"], prompt)
                    break
        if self.system_prompt:
            if messages[0]["role"] == "raw":
                messages[0]["content"] = f"{self.system_prompt}\n{messages[0]['content']}"
            else:
                messages = [m for m in messages if m["role"] != "system"]
                messages.insert(0, {"role": "system", "content": self.system_prompt})
        return dataclasses.replace(prompt, messages=tuple(messages))

    def _fill_template(self, question: str, prompt: Prompt) -> str:
        field_values = {**prompt.meta, "prompt": question}
        return _FIELD.sub(lambda field_match: str(field_values.get(field_match[1], field_match[0])), self.template)


class TemplatedDataset:
    """Problems of a source, with `prompt_template` and `system_prompt` applied."""

    def __init__(self, problems: PromptDataset, prompt_template: PromptTemplate) -> None:
        self.problems = problems
        self.prompt_template = prompt_template

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompt_template(self.problems[index])
