"""Sources of problems by name: built in, registered, an entry point of group `rlhpc.data`, or `module:Class`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rlhpc.language.data.prompts import Answering, Demonstrating, Located, Prompt, PromptDataset
from rlhpc.language.data.wording import Wording
from rlhpc.language.rewards.base import ChecksProblems, Comparing
from rlhpc.language.rewards.registry import REWARDS
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry

if TYPE_CHECKING:
    from rlhpc.language.config import DataSourceConfig

#: Of classes or functions `(cfg, *, part, key) -> PromptDataset`.
SOURCES: Registry[Callable[..., PromptDataset]] = Registry(
    "data source", "data.train.source", "rlhpc.data",
    {
        "jsonl": "rlhpc.language.data.columns:jsonl",
        "parquet": "rlhpc.language.data.columns:parquet",
        "hdf5": "rlhpc.language.data.columns:hdf5",
        "hf": "rlhpc.language.data.columns:hf",
        "reasoning_gym": "rlhpc.language.data.reasoning:ReasoningGymProblems",
        "arithmetic": "rlhpc.language.data.arithmetic:ArithmeticProblems",
        "code": "rlhpc.language.data.code_tasks:CodeProblems",
        "drawn": "rlhpc.language.data.drawn:DrawnProblems",
        "environment": "rlhpc.language.environments.problems:EnvironmentProblems",
    },
)  # fmt: skip
register_source = SOURCES.register
PARTS = ("train", "eval")
#: Sources that read files.
FILES = ("jsonl", "parquet", "hdf5", "hf")
MADE_UP = ("reasoning_gym", "arithmetic", "code", "drawn", "environment")


def make_dataset(
    cfg: DataSourceConfig, part: str = "train", *, demonstrations: bool = False, key: str | None = None
) -> WordedDataset:
    """Builds the problems of a section `data.train` or `data.eval[i]`.

    Args:
        cfg: The section.
        part: "train" or "eval": which of the two sides of `eval_fraction`, and of a procedural task's problems. No
            problem is on both.
        demonstrations: Every problem must have a `response` (sft).
        key: What messages call the section.

    Raises:
        ConfigError: It cannot be built, or has no problem.
    """
    key = key or f"data.{part}"
    if part not in PARTS:
        raise ConfigError(f"part of {key} is {part!r}; allowed: {', '.join(PARTS)}")
    if not 0 <= cfg.eval_fraction < 1:
        raise ConfigError(f"{key}.eval_fraction is {cfg.eval_fraction}; allowed: from 0 to below 1")
    if cfg.size is not None and cfg.size < 1:
        raise ConfigError(f"{key}.size is {cfg.size}; allowed: 1 or more, or null")
    if cfg.images_key and cfg.source.lower() in MADE_UP:
        raise ConfigError(
            f"{key}.images_key is {cfg.images_key!r}, and source {cfg.source} makes its problems up, without columns: leave "
            "it out"
        )
    wording = Wording(cfg.prompt_template, cfg.system_prompt, key=key)
    source = SOURCES.find(cfg.source, f"{key}.source")
    try:
        problems = source(cfg, part=part, key=key)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: source {cfg.source!r} cannot be made: {error}") from error
    if len(problems) == 0:
        raise ConfigError(f"{key}: the dataset is empty ({_description(cfg, part)})")
    worded = WordedDataset(problems, wording)
    if demonstrations:
        _require_responses(worded, cfg, key)
    return worded


def check_problems(terms: Iterable[str], dataset: WordedDataset, key: str) -> None:
    """Refuses problems that a term of the reward cannot judge: programs without tests, problems without the reference answer
    that it compares with. Files are read to their end; of any other source the first problem tells.

    Args:
        terms: Names of rewards (`reward.terms`).
        dataset: The problems.
        key: What messages call the section.

    Raises:
        ConfigError: Names file and row, and what is wrong with the problem.
    """
    problems = dataset.problems
    for name in terms:
        if name.lower() not in REWARDS.names() and ":" not in name:
            continue  # a group that rates answers
        reward = REWARDS.find(name)
        if isinstance(reward, Comparing) and reward.needs_answer:
            _require_answers(dataset, f"the reward {name!r}", key)
        if not isinstance(reward, ChecksProblems):
            continue
        for index in range(len(problems) if isinstance(problems, Located) else 1):
            try:
                reward.check_problem(problems[index].meta)
            except ValueError as error:
                place = problems.place(index) if isinstance(problems, Located) else f"its problem {index}"
                raise ConfigError(
                    f"{key}: {place}: reward.terms has {name!r}, which cannot judge this problem: {error}. Mend the row or "
                    "leave it out; docs/how-to/rewards.md says which tests are read"
                ) from None


class WordedDataset:
    """A source's problems, in the words of `prompt_template` and `system_prompt`."""

    def __init__(self, problems: PromptDataset, wording: Wording) -> None:
        self.problems, self.wording = problems, wording

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> Prompt:
        return self.wording(self.problems[index])


def _require_answers(dataset: WordedDataset, why: str, key: str) -> None:
    if isinstance(dataset.problems, Answering):
        dataset.problems.require_answers(why)
    elif not dataset[0].answer.strip():
        raise ConfigError(f"{key}: its problems have no reference answer, and {why} compares with one")


def _require_responses(dataset: WordedDataset, cfg: DataSourceConfig, key: str) -> None:
    # Files name the line at fault themselves; of any other source the first problem tells.
    if isinstance(dataset.problems, Demonstrating):
        dataset.problems.require_responses()
    elif not dataset[0].response:
        raise ConfigError(f"{key}: source {cfg.source!r} has no demonstrations; sft needs a response to every prompt")


def _description(cfg: DataSourceConfig, part: str) -> str:
    said = [f"source {cfg.source}"]
    named = {"path": cfg.path, "split": cfg.split, "size": cfg.size}
    said += [f"{name} {value}" for name, value in named.items() if value is not None]
    if cfg.eval_fraction:
        said.append(f"the {part} side of eval_fraction {cfg.eval_fraction}")
    return ", ".join(said)
