"""Data sections of language runs, and the evaluation suites by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeVar

from rlhpc.config.constraints import COUNT, EVALUATION, FRACTION, NOT_NEGATIVE, Choices, OptionsOf, Registered
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import meant


class Named(Protocol):
    """A section of `data.eval`."""

    name: str


Section = TypeVar("Section", bound=Named)


def suite_named(sections: Sequence[Section], name: str) -> Section:
    """Returns the section of `data.eval` with a suite's name; `default` is the first one if none has that name.

    Raises:
        ConfigError: No suite has the name; the message names all suites.
    """
    suites = {section.name: section for section in sections}
    if not suites:
        raise ConfigError("data.eval is empty; an evaluation needs a suite, such as [{name: default, source: …}]")
    if name in suites:
        return suites[name]
    if name == "default":
        return next(iter(suites.values()))
    raise ConfigError(f"--suite is {name!r}; {meant(name, suites)}data.eval has: {', '.join(suites)}")


@dataclass
class SourceConfig:
    """Source of conversations, and their form as prompts."""

    source: Annotated[str, Registered("rlhpc.language.data.registry:SOURCES")] = "jsonl"
    """`jsonl`, `parquet`, `hdf5`, `hf` (a `datasets` folder on disk), `reasoning_gym`, `arithmetic`, `code`,
    `drawn` (pictures), `environment`, a registered name, or `module:Class`."""
    path: str | None = None
    """File or folder; a pattern takes all files it fits."""
    split: str | None = None
    """Part of an `hf` dataset, or a filter `column=value`."""
    prompt_key: str = "prompt"
    """Column of the question (a text, or a list of chat messages, which may have `tool_calls` and `reasoning_content`)."""
    tools_key: str | None = None
    """Column of the tools that the chat template shows to the model: a list of definitions, or that list as JSON text."""
    level_key: str | None = None
    """Column of the difficulty, for evaluation tables."""
    system_prompt: str | None = None
    """System prompt, put before every conversation."""
    prompt_template: str = "{prompt}"
    """Template of the question to the model; `{prompt}` is the question."""
    chat_template: bool = True
    """Formats the conversation with the tokenizer's template; false gives the model the bare text."""
    size: Annotated[int | None, COUNT] = None
    """Number of problems taken (procedural sources: made)."""
    seed: Annotated[int, NOT_NEGATIVE] = 0
    """Seed of procedural sources, and of the choice of `size` problems."""
    eval_fraction: Annotated[float, FRACTION] = 0.0
    """Part that belongs to evaluation: training leaves it out, and evaluation takes it alone."""
    kwargs: Annotated[dict[str, Any], OptionsOf("source", "rlhpc.language.data.registry:SOURCE_OPTIONS")] = field(
        default_factory=dict
    )
    """Options of the source: `reasoning_gym` has `task` and its arguments, or `tasks`; `environment` has `name`,
    `demonstrations` (true for rows of play, for sft) and the environment's."""


@dataclass
class DataSourceConfig(SourceConfig):
    """Problems of training, of one evaluation suite, or demonstrations."""

    answer_key: str | None = "answer"
    """Column of the reference answer; null without one."""
    response_key: str = "response"
    """Column of the demonstration (sft)."""
    images_key: str | None = None
    """Column of the pictures that a prompt shows: a file's path (relative ones begin at `path`'s folder), a data URL, bytes as
    `datasets` has them, or a list of these. `<image>` in the prompt says where each stands; by default they come first."""


@dataclass
class EvalDataConfig(DataSourceConfig):
    """One evaluation suite."""

    name: str = "default"
    """Name of the suite."""
    samples: Annotated[int, COUNT] = 1
    """Responses to each problem: pass@k for k up to this, and majority."""
    temperature: Annotated[float, NOT_NEGATIVE] = 0.0
    """Temperature of sampling; 0 is greedy."""


@dataclass
class DataConfig:
    """Training and evaluation data of language models."""

    train: DataSourceConfig = field(default_factory=DataSourceConfig)
    """Prompts of training, or demonstrations (sft)."""
    eval: Annotated[list[EvalDataConfig], EVALUATION] = field(default_factory=list)
    """Suites; `workflow.eval_suites` names those that the workflow and `runner.val_check_interval` evaluate on."""
    max_prompt_tokens: Annotated[int, COUNT] = 1024
    """Longest prompt, in tokens."""
    overlong_prompts: Annotated[str, Choices("error", "drop")] = "drop"
    """Treatment of longer ones, which are found before the start: `drop`, or `error`, which names file and line."""
    prompts_per_step: Annotated[int, COUNT] = 32
    """Prompts of a step; each gets `algorithm.group_size` responses (sft: demonstrations of a step)."""


@dataclass
class HoldoutConfig:
    """Rows of the held-out loss; what `data.train` says of its rows holds of them, too."""

    path: str | None = None
    """File or folder; null takes that of `data.train`, and of its rows those that `data.train.eval_fraction` keeps from
    training."""
    split: str | None = None
    """Part of an `hf` dataset, or a filter `column=value`, in place of that of `data.train`: all its rows are held out."""


@dataclass
class SftDataConfig(DataConfig):
    """Data of training, of the held-out loss and of evaluation."""

    holdout: Annotated[HoldoutConfig, EVALUATION] = field(default_factory=HoldoutConfig)
    """Rows of the held-out loss (`runner.val_check_interval`)."""


@dataclass
class PairSourceConfig(SourceConfig):
    """Pairs of responses to a prompt, one of which is preferred."""

    chosen_key: str = "chosen"
    """Column of the preferred response of a pair (a text, or chat messages that end with it)."""
    rejected_key: str = "rejected"
    """Column of the other one."""


@dataclass
class PreferenceSourceConfig(PairSourceConfig):
    """Pairs of responses to a prompt, one of which is preferred; or responses with a label each."""

    margin_key: str | None = None
    """Column of the margin by which the preferred one should be ahead; null without one."""
    response_key: str = "response"
    """Column of the response that has a label."""
    label_key: str = "label"
    """Column of its label, a number (`algorithm.loss_type: regression`)."""


@dataclass
class PreferenceSuiteConfig(PreferenceSourceConfig):
    """One evaluation suite."""

    name: str = "default"
    """Name of the suite."""


@dataclass
class PreferenceDataConfig:
    """Training and evaluation data of reward models."""

    train: PreferenceSourceConfig = field(default_factory=PreferenceSourceConfig)
    """Pairs, or responses with labels, of training."""
    eval: Annotated[list[PreferenceSuiteConfig], EVALUATION] = field(default_factory=list)
    """Suites; `workflow.eval_suites` names those that the workflow and `runner.val_check_interval` evaluate on."""
    max_prompt_tokens: Annotated[int, COUNT] = 1024
    """Longest prompt, in tokens."""
    overlong_prompts: Annotated[str, Choices("error", "drop")] = "drop"
    """Treatment of longer ones, and of rows that do not fit into `actor.max_tokens_per_micro_batch`: `drop`, or `error`,
    which names file and line."""
    prompts_per_step: Annotated[int, COUNT] = 32
    """Pairs, or responses with labels, of a step."""


@dataclass
class DpoDataConfig(SftDataConfig):
    """Pairs of training and of the held-out loss, and problems of evaluation."""

    train: PairSourceConfig = field(default_factory=PairSourceConfig)  # type: ignore[assignment]
    """Pairs of training."""
    prompts_per_step: int = 32
    """Pairs of a step."""
