"""Every number of the configuration has a range, which a value outside of it is refused by."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from rlhpc.config.constraints import Range
from rlhpc.runs.checks import validate
from rlhpc.runs.configuration import load_config
from rlhpc.runs.task_type import TaskType, all_task_types
from rlhpc.runtime.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
#: A sound configuration of each kind of run.
SOUND = {
    "embodied": "quickstart.yaml",
    "off_policy": "embodied/pendulum_sac.yaml",
    "bc": "embodied/push_cube_bc.yaml",
    "reasoning": "reasoning/gsm8k.yaml",
    "sft": "reasoning/demo_sft.yaml",
    "reward_model": "reasoning/reward_model.yaml",
    "dpo": "reasoning/dpo.yaml",
}


def numbers(cls: type, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Keys of the schema that hold a number, or a list of them; `list[].name` below a list; and whether it is an integer."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind: Any = hints[field.name]
        inner = [of for each in typing.get_args(kind) for of in (each, *typing.get_args(each))]
        below = [each for each in (kind, *inner) if dataclasses.is_dataclass(each)]
        if below:
            listed = "[]" if typing.get_origin(kind) is list else ""
            yield from numbers(below[0], f"{prefix}{field.name}{listed}.")
        elif {int, float} & {kind, *inner}:
            yield prefix + field.name, float not in (kind, *inner)


KINDS = {kind.name: kind for kind in all_task_types()}
RANGES = {
    path: key.range for kind in KINDS.values() for path, key in kind.keys.by_path.items() if key.range is not None
}
NUMBERS = {name: dict(numbers(kind.config)) for name, kind in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_number_has_one(kind: TaskType[Any]) -> None:
    assert set(NUMBERS[kind.name]) == {path for path, key in kind.keys.by_path.items() if key.range is not None}
    assert len(NUMBERS[kind.name]) > 40


def test_each_range_has_a_number() -> None:
    assert set(RANGES) == {key for numbers in NUMBERS.values() for key in numbers}


def outside(allowed: Range, integer: bool) -> list[float]:
    """The nearest numbers that are not allowed, by the bounds that are written down."""
    step, found = (1 if integer else 1e-3), []
    if allowed.low is not None:
        found.append(allowed.low if allowed.above else allowed.low - step)
    if allowed.high is not None:
        found.append(allowed.high if allowed.below else allowed.high + step)
    return [
        int(number) if integer else float(number) for number in found if not allowed.also or number != allowed.also[0]
    ]


CASES = [
    (key, number, name)
    for key, allowed in RANGES.items()
    for name in [next(name for name, own in NUMBERS.items() if key in own)]
    for number in outside(allowed, NUMBERS[name][key])
]
#: What an element of a list needs besides.
ELEMENTS = {
    "cluster.node_groups": {"label": "a"},
    "cluster.elastic": {"max": 9},
    "agent.services": {"name": "a", "command": ["a"]},
    "data.eval": {"name": "a"},
    "reward.terms": {"name": "math"},
    "groups": {"name": "a", "scorer": "logprobs"},
}


def document(key: str, value: float) -> dict[str, Any]:
    section, each, name = key.partition("[].")
    if each:
        found: Any = [{**ELEMENTS[section], name: value}]
    else:
        found = [8, value] if key.endswith("hidden_sizes") else value
    for word in reversed(section.split(".")):
        found = {word: found}
    return found


@pytest.fixture(scope="module")
def sound() -> dict[str, Any]:
    return {name: load_config(CONFIGS / path, training=False) for name, path in SOUND.items()}


@pytest.mark.parametrize(("key", "number", "kind"), CASES, ids=[f"{key}={number:g}" for key, number, _ in CASES])
def test_a_number_outside_is_refused(key: str, number: float, kind: str, sound: dict[str, Any]) -> None:
    """By source, key, what was found and what is allowed."""
    changed = OmegaConf.merge(sound[kind], document(key, number))
    with pytest.raises(ConfigError) as refused:
        validate(changed, "c.yaml", training=False)
    place, shown = key.replace("[]", "[0]"), [8, number] if key.endswith("hidden_sizes") else number
    assert str(refused.value) == f"c.yaml: {place} is {shown!r}; {RANGES[key].rule()}"


@pytest.mark.parametrize(
    ("key", "number"), [("actor.optim.adam_beta1", 1.5), ("cluster.signal_lead_s", -5), ("actor.optim.lr", 1e30)]
)
def test_in_a_file_the_file_is_named(key: str, number: float, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"defaults": [str(QUICKSTART)], **document(key, number)}))
    with pytest.raises(ConfigError) as refused:
        load_config(path, training=False)
    assert f"{path}: {key} is {number!r}; {RANGES[key].rule()}" in str(refused.value)


@pytest.mark.parametrize("key", [key for key, allowed in RANGES.items() if allowed.also])
def test_the_number_of_its_own_meaning_is_allowed(key: str) -> None:
    assert RANGES[key].also is not None and RANGES[key].also[0] in RANGES[key]
