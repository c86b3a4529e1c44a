"""Registry of data sources: built-in names, registered names, entry points of group `rlhpc.data`, and `module:Class`;
and the rows that a run on demonstrations or preferences holds out for its validation loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from rlhpc.config.constraints import Fail
from rlhpc.config.typed import with_value
from rlhpc.language.data.prompts import ChecksAnswers, ChecksResponses, PromptDataset, PromptTemplate, TemplatedDataset
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry

if TYPE_CHECKING:
    from rlhpc.language.config.data import DataSourceConfig, HoldoutConfig, SourceConfig

#: Data sources: classes or functions `(cfg, *, part, key) -> PromptDataset`.
SOURCES: Registry[Callable[..., PromptDataset]] = Registry(
    "data source", "data.train.source", "rlhpc.data",
    {
        "jsonl": "rlhpc.language.data.table_sources:jsonl",
        "parquet": "rlhpc.language.data.table_sources:parquet",
        "hdf5": "rlhpc.language.data.table_sources:hdf5",
        "hf": "rlhpc.language.data.table_sources:hf",
        "reasoning_gym": "rlhpc.language.data.reasoning_gym:ReasoningGymProblems",
        "arithmetic": "rlhpc.language.data.procedural:ArithmeticProblems",
        "code": "rlhpc.language.data.procedural:CodeProblems",
        "drawn": "rlhpc.language.data.drawn_images:DrawnProblems",
        "environment": "rlhpc.language.envs.problems:EnvironmentProblems",
    },
)  # fmt: skip
register_source = SOURCES.register
#: Dataclass of the options (`data.train.kwargs`) of each data source. Other sources check their options in the constructor.
SOURCE_OPTIONS = {
    **dict.fromkeys(("jsonl", "parquet", "hf"), "rlhpc.language.data.table_sources:NoOptions"),
    "hdf5": "rlhpc.language.data.table_sources:Hdf5Options",
    "arithmetic": "rlhpc.language.data.procedural:ArithmeticOptions",
    "code": "rlhpc.language.data.procedural:CodeOptions",
    "drawn": "rlhpc.language.data.drawn_images:DrawnOptions",
}
PARTS = ("train", "eval")
#: Sources that read files.
FILES = ("jsonl", "parquet", "hdf5", "hf")
#: Sources that generate problems.
PROCEDURAL = ("reasoning_gym", "arithmetic", "code", "drawn", "environment")


def make_dataset(
    cfg: DataSourceConfig, part: str = "train", *, requires_demonstrations: bool = False, key: str | None = None
) -> TemplatedDataset:
    """Builds the problems of a section `data.train` or `data.eval[i]`.

    Args:
        cfg: The section.
        part: "train" or "eval": the side of the split by `eval_fraction`, or of a procedural source. No problem is on both
            sides.
        requires_demonstrations: Whether every problem must have a `response` (SFT).
        key: Name of the section in messages.

    Raises:
        ConfigError: The dataset cannot be built, or is empty.
    """
    key = key or f"data.{part}"
    if part not in PARTS:
        raise ConfigError(f"part of {key} is {part!r}; allowed: {', '.join(PARTS)}")
    if not 0 <= cfg.eval_fraction < 1:
        raise ConfigError(f"{key}.eval_fraction is {cfg.eval_fraction}; allowed: from 0 to below 1")
    if cfg.size is not None and cfg.size < 1:
        raise ConfigError(f"{key}.size is {cfg.size}; allowed: 1 or more, or null")
    if cfg.images_key and cfg.source in PROCEDURAL:
        raise ConfigError(
            f"{key}.images_key is {cfg.images_key!r}, and source {cfg.source} makes its problems up, without columns: leave "
            "it out"
        )
    template = PromptTemplate(cfg.prompt_template, cfg.system_prompt, key=key)
    make_source = SOURCES.find(cfg.source, f"{key}.source")
    try:
        problems = make_source(cfg, part=part, key=key)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: source {cfg.source!r} cannot be made: {error}") from error
    if len(problems) == 0:
        raise ConfigError(f"{key}: the dataset is empty ({_describe_source(cfg, part)})")
    dataset = TemplatedDataset(problems, template)
    if requires_demonstrations:
        _require_responses(dataset, cfg, key)
    return dataset


def _require_answers(dataset: TemplatedDataset, reason: str, key: str) -> None:
    if isinstance(dataset.problems, ChecksAnswers):
        dataset.problems.require_answers(reason)
    elif not dataset[0].answer.strip():
        raise ConfigError(f"{key}: its problems have no reference answer, and {reason} compares with one")


def _require_responses(dataset: TemplatedDataset, cfg: DataSourceConfig, key: str) -> None:
    # Table sources check all rows and name the invalid one; for other sources only the first problem is checked.
    if isinstance(dataset.problems, ChecksResponses):
        dataset.problems.require_responses()
    elif not dataset[0].response:
        raise ConfigError(f"{key}: source {cfg.source!r} has no demonstrations; sft needs a response to every prompt")


def _describe_source(cfg: DataSourceConfig, split_part: str) -> str:
    source_phrases = [f"source {cfg.source}"]
    options = {"path": cfg.path, "split": cfg.split, "size": cfg.size}
    source_phrases += [f"{name} {option_value}" for name, option_value in options.items() if option_value is not None]
    if cfg.eval_fraction:
        source_phrases.append(f"the {split_part} side of eval_fraction {cfg.eval_fraction}")
    return ", ".join(source_phrases)


Source = TypeVar("Source", bound="SourceConfig")


def holdout_section(train_source: Source, holdout: HoldoutConfig) -> tuple[Source, str]:
    """Returns the data section from which the held-out rows are read (as part "eval"), and the section's name in messages.

    The held-out rows are all rows of `data.holdout.path` and `split`. If neither is set, they are the rows that
    `data.train.eval_fraction` excludes from training.

    Args:
        train_source: Section `data.train`, which sets how rows are read.
        holdout: Section `data.holdout`.
    """
    section = with_value(train_source, "size", None)
    if holdout.path is None and holdout.split is None:
        return section, "data.train"
    for name in ("path", "split"):
        if (holdout_value := getattr(holdout, name)) is not None:
            section = with_value(section, name, holdout_value)
    return with_value(section, "eval_fraction", 0.0), "data.holdout"


def check_holdout(eval_interval: int, train_source: SourceConfig, holdout: HoldoutConfig, fail: Fail) -> None:
    """Checks that held-out rows exist if the validation loss is turned on.

    Args:
        eval_interval: `runner.val_check_interval`.
        train_source, holdout: See `holdout_section`.
        fail: Function that creates the error from a key and a message.

    Raises:
        ConfigError: There are no held-out rows, or they are the training rows.
    """
    if eval_interval <= 0 or train_source.source not in FILES:
        return  # procedural sources generate separate problems for evaluation
    source_options = {name: getattr(holdout, name) for name in ("path", "split") if getattr(holdout, name) is not None}
    if not source_options and train_source.eval_fraction == 0:
        raise fail(
            "runner.val_check_interval",
            "the loss needs held-out rows: set data.train.eval_fraction, such as 0.05, or data.holdout.path",
        )
    if source_options and all(
        getattr(train_source, name) == train_value for name, train_value in source_options.items()
    ):
        name = next(iter(source_options))
        raise fail(
            f"data.holdout.{name}",
            f"data.train.{name} is the same, and so are the rows: name others, or set data.train.eval_fraction instead",
        )
