"""Sweeps: the runs that section `sweep` of a file describes. The name of a run depends only on the run's values."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import OmegaConf

from rlhpc.config.constraints import check_choice, normalize_words
from rlhpc.config.merge import ConfigLayers, parse_override
from rlhpc.config.schema import Schema, keys_of, typed_value
from rlhpc.config.yaml_files import Scalar
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.key_metadata import Choices
from rlhpc.runtime.text import cut, short_repr

SWEEP = "sweep"
#: Maximum number of runs; a larger grid is probably a mistake.
MAX_RUNS = 1000
_SEED = "runner.seed"
_FIXED_KEYS = {
    "runner.name": "each run gets a name of its own from its values",
    "runner.run_dir": "the runs of a sweep are in one folder, run_dir/name",
    "runner.task_type": "a sweep is of one task type; rlhpc compare compares runs of several",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Names of the sweep's own folders and files.
_RESERVED_NAMES = re.compile(r"logs|(sft|demos)-[0-9a-f]{8}(\..*)?")
#: Longest name in characters; a longer one is shortened and ends with a digest.
_MAX_NAME_LENGTH = 80


@dataclass
class SweepConfig:
    """Sweep: several runs from one file; for `rlhpc run`, the workflow, `rlhpc plan`, `status`, `cancel` and `compare`."""

    grid: dict[str, Any] = field(default_factory=dict)
    """Key → its values, such as `{actor.optim.lr: [1e-4, 3e-4]}`; each combination is a run."""
    seeds: list[int] = field(default_factory=list)
    """Values of `runner.seed`: each combination runs with every seed, and the page shows means over seeds."""
    max_queued: int | None = None
    """Maximum number of the sweep's training jobs queued or running at once; null leaves it to Snakemake's profile."""
    metric: str | None = None
    """Metric that the page compares, of the last evaluation (`eval/return_mean`) or of the last step (`train/loss`); null
    takes the first comparison metric of the task type that all runs have."""
    goal: Annotated[str | None, Choices("maximize", "minimize")] = None
    """Better direction of the metric: `maximize` or `minimize`; null derives it from the metric's name: a smaller loss, error
    or time is better."""
    list: list[Any] = field(default_factory=list)
    """Single combinations, instead of `grid`: mappings of keys to values, with an optional `name`."""


@dataclass
class SweepFile:
    """Part of a configuration file that describes a sweep."""

    sweep: SweepConfig = field(default_factory=SweepConfig)
    """Several runs from one file."""


@dataclass(frozen=True)
class Point:
    """Run of a sweep.

    Attributes:
        name: Name of the run.
        label: Values without the seed, for display; "" if only seeds vary.
        values: Key → value, without the seed.
        seed: `runner.seed`; None if the sweep does not set it.
    """

    name: str
    label: str
    values: Mapping[str, Any]
    seed: int | None

    @property
    def overrides(self) -> list[str]:
        """Values as `key=value`."""
        seed = {} if self.seed is None else {_SEED: self.seed}
        return [override(key, swept_value) for key, swept_value in {**self.values, **seed}.items()]


def override(key: str, value: Any) -> str:
    """Formats a key and a value as a command-line override."""
    return f"{key}={_format_yaml(value)}"


def _format_yaml(plain_value: Any) -> str:
    if isinstance(plain_value, Scalar):
        return plain_value.text
    if isinstance(plain_value, list):
        return f"[{', '.join(map(_format_yaml, plain_value))}]"
    if isinstance(plain_value, dict):
        item_texts = (
            f"{_format_yaml(name)}: {_format_yaml(nested_value)}" for name, nested_value in plain_value.items()
        )
        return f"{{{', '.join(item_texts)}}}"
    if isinstance(plain_value, float) and not math.isfinite(plain_value):
        return f"{plain_value:+}".replace("+", "").replace("inf", ".inf").replace("nan", ".nan")
    return json.dumps(plain_value, ensure_ascii=False)


def is_about_sweep(override_text: str) -> bool:
    """Returns whether an override changes the sweep."""
    key = override_text.partition("=")[0].strip()
    return key == SWEEP or key.startswith(f"{SWEEP}.")


def read_section(
    files: Sequence[tuple[str, Any]], overrides: Sequence[str], run_keys: Schema | None = None
) -> tuple[SweepConfig, str] | None:
    """Reads the sweep that files and overrides describe; None if they describe a single run.

    Args:
        files: Source and content of each file, included files first; a later `sweep` replaces an earlier one.
        overrides: All overrides of the command line; `sweep=…` replaces the section of the files, `sweep.seeds=…` changes it.
        run_keys: Schema of the runs, which determines the types of the values.

    Returns:
        The sweep and its source.

    Raises:
        ConfigError: An unknown key, or a value of a different type.
    """
    sweep: tuple[ConfigLayers, str] | None = None
    sections = [(source, content[SWEEP]) for source, content in files if isinstance(content, dict) and SWEEP in content]
    sweep_overrides = [override_text for override_text in overrides if is_about_sweep(override_text)]
    for source, content in [*sections, *(("", override_text) for override_text in sweep_overrides)]:
        key, override_value = (SWEEP, content) if source else parse_override(content)
        source = source or f"override {short_repr(content)}"
        override_value = _convert_types(key, override_value, run_keys)
        if key != SWEEP:
            sweep = sweep or (ConfigLayers(Schema(SweepFile)), source)
            sweep[0].set(key, override_value, f"override {short_repr(content)}")
        elif override_value is None:
            sweep = None
        else:
            sweep = ConfigLayers(Schema(SweepFile)), source
            sweep[0].add({SWEEP: override_value}, source)
    if sweep is None:
        return None
    layers, source = sweep
    normalize_words(layers.cfg, keys_of(SweepFile))
    plain_section: Any = OmegaConf.to_container(layers.cfg.sweep, resolve=False)
    return SweepConfig(**plain_section), source


def _convert_types(key: str, section_value: Any, run_keys: Schema | None) -> Any:
    """Returns the value of a sweep key with all run values converted to the types of their keys."""

    def cast_key_value(run_key: Any, key_value: Any, *, is_list: bool = False) -> Any:
        key_type = (run_keys.type_of(run_key) if run_keys and isinstance(run_key, str) else None) or Any
        return typed_value(key_value, list[key_type] if is_list else key_type)  # type: ignore[valid-type]

    grid = f"{SWEEP}.grid"
    if key.startswith(f"{grid}."):
        return cast_key_value(key.removeprefix(f"{grid}."), section_value, is_list=True)
    if key == grid and isinstance(section_value, dict):
        return {name: cast_key_value(name, swept_values, is_list=True) for name, swept_values in section_value.items()}
    if key == f"{SWEEP}.list" and isinstance(section_value, list):
        return [
            {
                name: typed_value(field_value, str) if name == "name" else cast_key_value(name, field_value)
                for name, field_value in list_entry.items()
            }
            if isinstance(list_entry, dict)
            else list_entry
            for list_entry in section_value
        ]
    if key == SWEEP and isinstance(section_value, dict):
        return {
            name: _convert_types(f"{SWEEP}.{name}", nested_section, run_keys)
            for name, nested_section in section_value.items()
        }
    return section_value


def points(section: SweepConfig, source: str, overrides: Sequence[str] = ()) -> list[Point]:
    """Returns the runs of a sweep; runs that differ only in their seeds are consecutive.

    Args:
        section: The sweep.
        source: Source of the section, for messages.
        overrides: Overrides of the command line, none of which may set a key that the sweep varies.

    Raises:
        ConfigError: The section has an empty list, a repeated value, two runs of one name, or a key that a sweep cannot vary.
    """

    def make_error(key_path: str, rule: str) -> ConfigError:
        return ConfigError(f"{source}: {SWEEP}{'.' if key_path else ''}{key_path}: {rule}")

    if section.grid and section.list:
        raise make_error("", "it has both grid and list; give one of them")
    if section.goal is not None:
        goals = keys_of(SweepConfig)["goal"].choices
        check_choice(
            f"{SWEEP}.goal", section.goal, goals, lambda key, rule: make_error("goal", f"{section.goal}; {rule}")
        )
    if section.max_queued is not None and section.max_queued < 1:
        raise make_error("max_queued", f"it is {section.max_queued}; it must be at least 1, or null for no limit")
    if section.metric is not None and not re.fullmatch(r"[\w.-]+/[\w./-]+", section.metric):
        raise make_error(
            "metric", f"it is {short_repr(section.metric)}; write a metric's name, such as eval/return_mean"
        )
    seeds = _seeds(section, make_error)
    named_combinations = (
        _list_combinations(section.list, make_error)
        if section.list
        else _list_grid_combinations(section.grid, make_error)
    )
    if not seeds and not section.grid and not section.list:
        raise make_error("", "it is empty; give it a grid, a list or seeds (or sweep=null for the single run)")
    varied_keys = {key for _, swept_values in named_combinations for key in swept_values} | (
        {_SEED} if seeds else set()
    )
    for override_text in overrides:
        if (key := override_text.partition("=")[0].strip()) in varied_keys:
            raise ConfigError(
                f"override {short_repr(override_text)}: the sweep varies {key} ({source}); change its values there, with "
                f"{SWEEP}.{'seeds' if key == _SEED else f'grid.{key}'}=[…], or leave out the override"
            )
    runs = [
        Point(
            "-".join([*([name] if name else []), *([] if seed is None else [f"s{seed}"])]),
            _label(name, swept_values),
            swept_values,
            seed,
        )
        for name, swept_values in named_combinations
        for seed in seeds or (None,)
    ]
    if len(runs) > MAX_RUNS:
        raise make_error("", f"these are {len(runs)} runs; a sweep has at most {MAX_RUNS}")
    _check_names(runs, make_error)
    return runs


def _seeds(section: SweepConfig, fail: Any) -> list[int]:
    has_seed_keys = _SEED in section.grid or any(
        isinstance(list_entry, dict) and _SEED in list_entry for list_entry in section.list
    )
    if section.seeds and has_seed_keys:
        raise fail("seeds", f"{_SEED} is among the values, too; give the seeds in one of the two places")
    if duplicates := _duplicates(section.seeds):
        raise fail("seeds", f"{duplicates[0]} is there twice")
    return [*section.seeds]


def _list_grid_combinations(grid: Mapping[str, Any], fail: Any) -> list[tuple[str, dict[str, Any]]]:
    """Returns the name and the values of each combination."""
    num_combinations = 1
    for key, swept_values in grid.items():
        _check_key(key, fail, "grid")
        if isinstance(swept_values, dict) and swept_values:
            raise fail(
                f"grid.{key}",
                f"it is a mapping; write the whole key before its values: {key}.{next(iter(swept_values))}",
            )
        if not isinstance(swept_values, list):
            raise fail(
                f"grid.{key}", f"it is {short_repr(swept_values)}; write a list of values: [{short_repr(swept_values)}]"
            )
        if not swept_values:
            raise fail(f"grid.{key}", "the list is empty; give it values, or leave out the key")
        if duplicates := _duplicates(swept_values):
            raise fail(f"grid.{key}", f"{short_repr(duplicates[0])} is there twice")
        num_combinations *= len(swept_values)
    if num_combinations > MAX_RUNS:
        raise fail("grid", f"these are {num_combinations} combinations; a sweep has at most {MAX_RUNS}")
    value_combinations = [
        dict(zip(grid, combination, strict=True)) for combination in itertools.product(*grid.values())
    ]
    return [(_format_combination_name(combination), combination) for combination in value_combinations]


def _list_combinations(list_entries: Sequence[Any], fail: Any) -> list[tuple[str, dict[str, Any]]]:
    named_values = []
    for index, list_entry in enumerate(list_entries):
        key_path = f"list[{index}]"
        if not isinstance(list_entry, dict) or not list_entry:
            raise fail(
                key_path,
                f"it is {short_repr(list_entry)}; write a mapping of keys to values, such as {{actor.optim.lr: 1e-4}}",
            )
        values_by_key = {key: swept_value for key, swept_value in list_entry.items() if key != "name"}
        for key in values_by_key:
            _check_key(key, fail, key_path)
        name = list_entry.get("name")
        if name is not None and (not isinstance(name, str) or not _NAME.fullmatch(name)):
            raise fail(f"{key_path}.name", f"it is {short_repr(name)}; use letters, digits, '.', '_' and '-'")
        named_values.append((name or _format_combination_name(values_by_key), values_by_key))
    return named_values


def _check_key(key: Any, fail: Any, key_path: str) -> None:
    if not isinstance(key, str) or not all(key_part.strip() for key_part in key.split(".")):
        raise fail(key_path, f"{cut(str(key))} is no key of a configuration")
    if key.split(".")[0] in (SWEEP, "defaults"):
        raise fail(f"{key_path}.{key}", "a sweep cannot be within a sweep")
    if key in _FIXED_KEYS:
        raise fail(f"{key_path}.{key}", f"{_FIXED_KEYS[key]}; leave it out")


def _check_names(runs: Sequence[Point], fail: Any) -> None:
    points_by_name: dict[str, Point] = {}
    for point in runs:
        if _RESERVED_NAMES.fullmatch(point.name):
            raise fail("", f"a run cannot be called {point.name}, as the sweep's own files are; give it another name")
        same_name_point = points_by_name.setdefault(point.name.lower(), point)
        if same_name_point is not point:
            first_overrides, second_overrides = (
                " ".join(named_point.overrides) for named_point in (same_name_point, point)
            )
            way_out = (
                "give them other names (list: [{name: …, …}])"
                if first_overrides != second_overrides
                else "leave out one of them"
            )
            raise fail(
                "", f"two runs would have the name {point.name}: {first_overrides}, and {second_overrides}; {way_out}"
            )


def _duplicates(list_values: Sequence[Any]) -> list[Any]:
    """Returns the repeated values; 1 and 1.0 are equal, 1 and true are not."""
    typed_values = [(isinstance(list_value, bool), list_value) for list_value in list_values]
    return [
        list_value for index, (_, list_value) in enumerate(typed_values) if typed_values[index] in typed_values[:index]
    ]


# -- names ------------------------------------------------------------------------------------------------------------


def _format_combination_name(values_by_key: Mapping[str, Any]) -> str:
    """Returns the name of a combination: the last part of each key with its value, such as `lr_0.0001-group_size_4`."""
    point_name = "-".join(
        f"{short_key}_{_format_name_text(swept_value)}" for short_key, swept_value in _iter_short_keys(values_by_key)
    )
    if len(point_name) <= _MAX_NAME_LENGTH:
        return point_name
    return f"{point_name[: _MAX_NAME_LENGTH - 9].rstrip('._-')}-{digest(dict(values_by_key))}"


def _label(name: str, values_by_key: Mapping[str, Any]) -> str:
    if name and name != _format_combination_name(values_by_key):
        return name
    return ", ".join(
        f"{short_key}={_format_value(swept_value)}" for short_key, swept_value in _iter_short_keys(values_by_key)
    )


def _iter_short_keys(values_by_key: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields each value with the end of its key, which is long enough to identify the key among the varied keys."""
    for key, swept_value in values_by_key.items():
        key_parts = key.split(".")
        for num_parts in range(1, len(key_parts) + 1):
            suffix = key_parts[-num_parts:]
            if sum(other_key.split(".")[-num_parts:] == suffix for other_key in values_by_key) == 1:
                break
        yield ".".join(suffix), swept_value


def _format_name_text(swept_value: Any) -> str:
    """Formats a value for a run's name; characters that are not allowed in file names become `_`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", _format_value(swept_value)).strip("_") or "empty"


def _format_value(swept_value: Any) -> str:
    if isinstance(swept_value, str):
        return swept_value
    json_text = json.dumps(swept_value, ensure_ascii=False)
    return json_text if not isinstance(swept_value, dict | list) or len(json_text) <= 40 else digest(swept_value)


def digest(facts: Any) -> str:
    """Returns a short fingerprint of plain data."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:8]
