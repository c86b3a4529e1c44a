"""Sections `data` of language runs, and lookup of evaluation suites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeVar

from rlhpc.config.constraints import COUNT, EVALUATION, FRACTION, NOT_NEGATIVE, Choices, OptionsOf, Registered
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import suggest_name


class Named(Protocol):
    """A section of `data.eval`."""

    name: str


Section = TypeVar("Section", bound=Named)


def suite_named(sections: Sequence[Section], name: str) -> Section:
    """Returns the section of `data.eval` with the given name; for `default`, the first section if none has that name.

    Raises:
        ConfigError: No suite has the name; the message lists all suites.
    """
    suites = {section.name: section for section in sections}
    if not suites:
        raise ConfigError("data.eval is empty; an evaluation needs a suite, such as [{name: default, source: …}]")
    if name in suites:
        return suites[name]
    if name == "default":
        return next(iter(suites.values()))
    raise ConfigError(f"--suite is {name!r}; {suggest_name(name, suites)}data.eval has: {', '.join(suites)}")


@dataclass
class SourceConfig:
    """Source of conversations, and how they become prompts."""

    source: Annotated[str, Registered("rlhpc.language.data.registry:SOURCES")] = "jsonl"
    """`jsonl`, `parquet`, `hdf5`, `hf` (a `datasets` folder on disk), `reasoning_gym`, `arithmetic`, `code`,
    `drawn` (pictures), `environment`, a registered name, or `module:Class`."""
    path: str | None = None
    """File or folder; a pattern selects all matching files."""
    split: str | None = None
    """Split of an `hf` dataset, or a filter `column=value`."""
    prompt_key: str = "prompt"
    """Column of the question (a text, or a list of chat messages, which may have `tool_calls` and `reasoning_content`)."""
    tools_key: str | None = None
    """Column of the tools that the chat template shows to the model: a list of definitions, or that list as JSON text."""
    level_key: str | None = None
    """Column of the difficulty, for evaluation tables."""
    system_prompt: str | None = None
    """System prompt of every conversation; it replaces a conversation's system message."""
    prompt_template: str = "{prompt}"
    """Template of the last user message; `{prompt}` stands for the question."""
    chat_template: bool = True
    """Whether to render the conversation with the tokenizer's chat template; false gives the model the bare text."""
    size: Annotated[int | None, COUNT] = None
    """Number of problems to select, or for procedural sources to generate."""
    seed: Annotated[int, NOT_NEGATIVE] = 0
    """Seed of procedural sources, and of the selection of `size` problems."""
    eval_fraction: Annotated[float, FRACTION] = 0.0
    """Fraction of the problems that belongs to evaluation: training excludes it, and evaluation uses only it."""
    kwargs: Annotated[dict[str, Any], OptionsOf("source", "rlhpc.language.data.registry:SOURCE_OPTIONS")] = field(
        default_factory=dict
    )
    """Options of the source: `reasoning_gym` has `task` and its arguments, or `tasks`; `environment` has `name`,
    `demonstrations` (true for episodes as demonstrations, for sft) and the environment's options."""


@dataclass
class DataSourceConfig(SourceConfig):
    """Source of training problems, of demonstrations, or of an evaluation suite."""

    answer_key: str | None = "answer"
    """Column of the reference answer; null if there is none."""
    response_key: str = "response"
    """Column of the demonstration (sft)."""
    images_key: str | None = None
    """Column of the prompt's images: a file's path (relative to the folder of `path`), a data URL, bytes in the form of
    `datasets`, or a list of these. `<image>` in the prompt marks the place of each image; without it they come first."""


@dataclass
class EvalDataConfig(DataSourceConfig):
    """One evaluation suite."""

    name: str = "default"
    """Name of the suite."""
    samples: Annotated[int, COUNT] = 1
    """Number of responses to each problem; pass@k is computed for k up to this number, and the majority vote."""
    temperature: Annotated[float, NOT_NEGATIVE] = 0.0
    """Temperature of sampling; 0 is greedy."""


@dataclass
class DataConfig:
    """Training and evaluation data of language models."""

    train: DataSourceConfig = field(default_factory=DataSourceConfig)
    """Training prompts, or demonstrations (sft)."""
    eval: Annotated[list[EvalDataConfig], EVALUATION] = field(default_factory=list)
    """Suites; `workflow.eval_suites` names those that the workflow and `runner.val_check_interval` evaluate on."""
    max_prompt_tokens: Annotated[int, COUNT] = 1024
    """Longest prompt, in tokens."""
    overlong_prompts: Annotated[str, Choices("error", "drop")] = "drop"
    """Treatment of longer prompts, which are detected before the start: `drop`, or `error`, which names file and line."""
    prompts_per_step: Annotated[int, COUNT] = 32
    """Number of prompts per step, each with `algorithm.group_size` responses; for sft, number of demonstrations per step."""


@dataclass
class HoldoutConfig:
    """Rows of the held-out loss, which are read with the settings of `data.train`."""

    path: str | None = None
    """File or folder; null takes the rows of `data.train` that `data.train.eval_fraction` excludes from training."""
    split: str | None = None
    """Split of an `hf` dataset, or a filter `column=value`, in place of `data.train.split`; all its rows are held out."""


@dataclass
class SftDataConfig(DataConfig):
    """Data for training, the held-out loss, and evaluation."""

    holdout: Annotated[HoldoutConfig, EVALUATION] = field(default_factory=HoldoutConfig)
    """Rows of the held-out loss (`runner.val_check_interval`)."""


@dataclass
class PairSourceConfig(SourceConfig):
    """Pairs of responses to a prompt, one of which is preferred."""

    chosen_key: str = "chosen"
    """Column of the preferred response (a text, or chat messages that end with it)."""
    rejected_key: str = "rejected"
    """Column of the rejected response."""


@dataclass
class PreferenceSourceConfig(PairSourceConfig):
    """Pairs of responses to a prompt, one of which is preferred; or responses with a label each."""

    margin_key: str | None = None
    """Column of the margin by which the preferred response's reward should be higher; null if there is none."""
    response_key: str = "response"
    """Column of the response that has a label."""
    label_key: str = "label"
    """Column of the label, a number (`algorithm.loss_type: regression`)."""


@dataclass
class PreferenceSuiteConfig(PreferenceSourceConfig):
    """One evaluation suite."""

    name: str = "default"
    """Name of the suite."""


@dataclass
class PreferenceDataConfig:
    """Training and evaluation data of reward models."""

    train: PreferenceSourceConfig = field(default_factory=PreferenceSourceConfig)
    """Training pairs, or training responses with labels."""
    eval: Annotated[list[PreferenceSuiteConfig], EVALUATION] = field(default_factory=list)
    """Suites; `workflow.eval_suites` names those that the workflow and `runner.val_check_interval` evaluate on."""
    max_prompt_tokens: Annotated[int, COUNT] = 1024
    """Longest prompt, in tokens."""
    overlong_prompts: Annotated[str, Choices("error", "drop")] = "drop"
    """Treatment of longer prompts, and of rows that do not fit into `actor.max_tokens_per_micro_batch`: `drop`, or `error`,
    which names file and line."""
    prompts_per_step: Annotated[int, COUNT] = 32
    """Number of pairs, or of responses with labels, per step."""


@dataclass
class DpoDataConfig(SftDataConfig):
    """Pairs for training and the held-out loss, and problems for evaluation."""

    train: PairSourceConfig = field(default_factory=PairSourceConfig)  # type: ignore[assignment]
    """Training pairs."""
    prompts_per_step: int = 32
    """Number of pairs per step."""
