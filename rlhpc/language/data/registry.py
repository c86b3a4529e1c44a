"""Sources of problems by name: built in, registered, an entry point of group `rlhpc.data`, or `module:Class`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from rlhpc.language.data.prompts import Prompt, PromptDataset
from rlhpc.language.data.wording import Wording
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.lookup import load_attribute

Source = Callable[..., PromptDataset]
_BUILT_IN = {
    "jsonl": "rlhpc.language.data.columns:jsonl",
    "parquet": "rlhpc.language.data.columns:parquet",
    "hdf5": "rlhpc.language.data.columns:hdf5",
    "hf": "rlhpc.language.data.columns:hf",
    "reasoning_gym": "rlhpc.language.data.reasoning:ReasoningGymProblems",
    "arithmetic": "rlhpc.language.data.arithmetic:ArithmeticProblems",
    "code": "rlhpc.language.data.code_tasks:CodeProblems",
}
_registered: dict[str, Source] = {}
PARTS = ("train", "eval")


def register_source(name: str) -> Callable[[Source], Source]:
    """Decorator for a class or function `(cfg, *, part, key) -> PromptDataset`; twice is an error."""

    def add(source: Source) -> Source:
        if name.lower() in _registered or name.lower() in _BUILT_IN:
            raise ConfigError(f"data source {name!r} is registered twice")
        _registered[name.lower()] = source
        return source

    return add


def source_types() -> list[str]:
    """All names."""
    return sorted({*_BUILT_IN, *_registered, *(e.name.lower() for e in entry_points(group="rlhpc.data"))})


def find_source(name: str, key: str = "data.train") -> Source:
    """The factory of a source.

    Raises:
        ConfigError: Unknown; names the nearest and all allowed ones.
    """
    lower = name.lower()
    if lower in _registered:
        return _registered[lower]
    if lower in _BUILT_IN:
        built_in: Source = load_attribute(_BUILT_IN[lower], f"{key}.source")
        return built_in
    for entry in entry_points(group="rlhpc.data"):
        if entry.name.lower() == lower:
            loaded: Source = entry.load()
            return loaded
    if ":" in name:
        given: Source = load_attribute(name, f"{key}.source")
        return given
    near = difflib.get_close_matches(lower, source_types(), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    raise ConfigError(
        f"{key}.source is {name!r}, which is unknown{hint} allowed: {', '.join(source_types())}, or module:Class"
    )


def make_dataset(
    cfg: Any, part: str = "train", *, demonstrations: bool = False, key: str | None = None
) -> PromptDataset:
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
    key = key or ("data.train" if part == "train" else f"data.eval[{cfg.name}]")
    if part not in PARTS:
        raise ConfigError(f"part of {key} is {part!r}; allowed: {', '.join(PARTS)}")
    if not 0 <= cfg.eval_fraction < 1:
        raise ConfigError(f"{key}.eval_fraction is {cfg.eval_fraction}; allowed: from 0 to below 1")
    if cfg.size is not None and cfg.size < 1:
        raise ConfigError(f"{key}.size is {cfg.size}; allowed: 1 or more, or null")
    wording = Wording(cfg.prompt_template, cfg.system_prompt, key=key)
    source = find_source(str(cfg.source), key)
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


class WordedDataset:
    """A source's problems, in the words of `prompt_template` and `system_prompt`."""

    def __init__(self, problems: PromptDataset, wording: Wording) -> None:
        self.problems, self.wording = problems, wording

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> Prompt:
        return self.wording(self.problems[index])


def _require_responses(dataset: PromptDataset, cfg: Any, key: str) -> None:
    # Files name the line at fault themselves; of any other source the first problem tells.
    check = getattr(getattr(dataset, "problems", None), "require_responses", None)
    if check is not None:
        check()
    elif not dataset[0].response:
        raise ConfigError(f"{key}: source {cfg.source!r} has no demonstrations; sft needs a response to every prompt")


def _description(cfg: Any, part: str) -> str:
    said = [f"source {cfg.source}"]
    said += [f"{name} {value}" for name in ("path", "split", "size") if (value := getattr(cfg, name)) is not None]
    if cfg.eval_fraction:
        said.append(f"the {part} side of eval_fraction {cfg.eval_fraction}")
    return ", ".join(said)
