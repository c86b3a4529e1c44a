"""The JSON schema of configuration files accepts and refuses what the loader does."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from omegaconf import MISSING

from rlhpc.config.constraints import check_choices, check_ranges, null_numbers
from rlhpc.config.json_schema import site_schema, task_type_schema
from rlhpc.config.merge import ConfigLayers
from rlhpc.config.options import check_components
from rlhpc.config.schema import ConfigKey
from rlhpc.runs.task_type import TaskType, all_task_types
from rlhpc.runtime.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
KINDS = {kind.name: kind for kind in all_task_types()}
ANY_FILE = Draft202012Validator(task_type_schema([kind.keys for kind in all_task_types()]))
VALIDATORS = {name: Draft202012Validator(task_type_schema([kind.keys])) for name, kind in KINDS.items()}
#: A value of another type for each type.
WRONG: dict[Any, Any] = {int: "seven", float: "fast", bool: "maybe", str: ["a"], list: 7, dict: 7}


def plain_type(key: ConfigKey) -> Any:
    """Returns a key's type without `None` and without that of elements; `Any` where every value is allowed."""
    options = [option for option in typing.get_args(key.type) if option is not type(None)]
    kind = key.type if typing.get_origin(key.type) in (list, dict) or not options else options[0]
    return typing.get_origin(kind) or kind


def nested(path: str, value: Any) -> dict[str, Any]:
    """Returns a document with one key."""
    for name in reversed(path.split(".")):
        value = {name.removesuffix("[]"): [value] if name.endswith("[]") else value}
    return typing.cast(dict[str, Any], value)


def loader_refuses(kind: TaskType[Any], document: dict[str, Any]) -> bool:
    """Returns whether the loader refuses a document of one key: its name, its type, its range or its choice."""

    def fail(key: str, rule: str) -> ConfigError:
        return ConfigError(f"{key}: {rule}")

    layers = ConfigLayers(kind.schema, kind.keys, null_numbers(kind.keys.by_path))
    try:
        layers.add(document, "file")
        keys = {path: key for path, key in kind.keys.by_path.items() if path in touched(document)}
        check_ranges(layers.cfg, keys, fail)
        check_choices(layers.cfg, keys, fail)
    except ConfigError:
        return True
    return False


def touched(document: Any, prefix: str = "") -> set[str]:
    """Returns the paths of the keys in a document."""
    paths = set()
    if isinstance(document, dict):
        for name, value in document.items():
            paths |= {f"{prefix}{name}", *touched(value, f"{prefix}{name}.")}
    elif isinstance(document, list):
        for item in document:
            paths |= touched(item, f"{prefix.removesuffix('.')}[].")
    return paths


def disagreements(kind: TaskType[Any], documents: Iterator[tuple[str, Any]], *, refused: bool) -> list[str]:
    """Returns the keys for whose document schema or loader do not answer as they should."""
    wrong = []
    for path, value in documents:
        document = nested(path, value)
        answers = (not VALIDATORS[kind.name].is_valid(document), loader_refuses(kind, document))
        if answers != (refused, refused):
            wrong.append(f"{path}={value!r}: schema refuses {answers[0]}, loader refuses {answers[1]}")
    return wrong


def outside(key: ConfigKey) -> list[float]:
    """Returns the nearest numbers outside a key's range."""
    allowed, step = key.range, 1e-3 if plain_type(key) is float else 1
    assert allowed is not None
    numbers = []
    if allowed.low is not None:
        numbers.append(allowed.low if allowed.above else allowed.low - step)
    if allowed.high is not None:
        numbers.append(allowed.high if allowed.below else allowed.high + step)
    return [number for number in numbers if number not in allowed]


def test_it_is_a_schema() -> None:
    for schema in (
        task_type_schema([kind.keys for kind in all_task_types()]),
        site_schema(),
        *(task_type_schema([kind.keys]) for kind in all_task_types()),
    ):
        Draft202012Validator.check_schema(schema)
        json.dumps(schema)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_shipped_file_fits(path: Path) -> None:
    validator = Draft202012Validator(site_schema()) if path.parent.name == "site" else ANY_FILE
    errors = validator.iter_errors(yaml.safe_load(path.read_text()))
    assert [f"{list(error.absolute_path)}: {error.message}" for error in errors] == []


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_value_of_another_type_is_refused(kind: TaskType[Any]) -> None:
    cases = [
        (path, WRONG[plain_type(key)])
        for path, key in kind.keys.by_path.items()
        if key.type is not Any and not key.choices
    ]
    assert len(cases) > 90
    assert disagreements(kind, iter(cases), refused=True) == []


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_number_out_of_range_is_refused(kind: TaskType[Any]) -> None:
    cases = [
        (path, [number] if plain_type(key) is list else number)
        for path, key in kind.keys.by_path.items()
        if key.range is not None
        for number in outside(key)
    ]
    assert len(cases) > 40
    assert disagreements(kind, iter(cases), refused=True) == []


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_word_that_is_no_choice_is_refused(kind: TaskType[Any]) -> None:
    choices = {path: key.choices for path, key in kind.keys.by_path.items() if key.choices}
    assert len(choices) > 3
    assert disagreements(kind, ((path, "nosuch") for path in choices), refused=True) == []
    spelt = ((path, form) for path, words in choices.items() for word in words for form in (word, word.upper()))
    assert disagreements(kind, spelt, refused=False) == []


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_misspelt_key_is_refused(kind: TaskType[Any]) -> None:
    assert disagreements(kind, ((f"{path}x", None) for path in kind.keys.tree), refused=True) == []


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_defaults_references_and_nulls(kind: TaskType[Any]) -> None:
    """Every default is valid, any value may be a reference, and null is allowed by both or by none of them."""
    keys = {path: key for path, key in kind.keys.by_path.items() if path != "runner.task_type"}
    defaults = ((path, key.default) for path, key in keys.items() if key.default not in (MISSING, []))
    assert disagreements(kind, defaults, refused=False) == []
    references = ((path, "${oc.env:HOME}") for path, key in keys.items() if "[]" not in path and not is_list(key))
    assert [path for path, value in references if not VALIDATORS[kind.name].is_valid(nested(path, value))] == []
    nulls = [nested(path, None) for path in keys]
    validator = VALIDATORS[kind.name]
    assert [each for each in nulls if validator.is_valid(each) == loader_refuses(kind, each)] == []


def is_list(key: ConfigKey) -> bool:
    """Returns whether the key is a list of sections."""
    return any(path.startswith(f"{key.path}[]") for kind in KINDS.values() for path in kind.keys.tree)


def test_task_types_are_told_apart() -> None:
    validator = ANY_FILE
    assert validator.is_valid({"runner": {"task_type": "sft"}, "data": {"max_prompt_tokens": 9}})
    assert not validator.is_valid({"runner": {"task_type": "bc"}, "data": {"max_prompt_tokens": 9}})
    assert not validator.is_valid({"runner": {"task_type": "stf"}})
    assert validator.is_valid({"runner": {"task_type": "my_package:KIND"}, "mine": {"key": 1}})
    assert validator.is_valid({"data": {"max_prompt_tokens": 9}}), "without a task type a file may be part of any"
    assert not validator.is_valid({"data": {"max_prompt_token": 9}})
    assert validator.is_valid({"defaults": ["base.yaml"], "sweep": {"grid": {"actor.optim.lr": [1e-4]}, "seeds": [1]}})
    assert not validator.is_valid({"sweep": {"grids": {}}})


def test_names_of_registries_are_offered_and_open() -> None:
    env_type = task_type_schema([KINDS["embodied"].keys])["$defs"]["RolloutEnvConfig"]["properties"]["env_type"]
    assert "gymnasium" in env_type["anyOf"][0]["enum"]
    assert Draft202012Validator(env_type).is_valid("my_package:Env")


#: Table of options → the first key that has it, with a task type that has the key.
HOLDERS: dict[Any, tuple[TaskType[Any], ConfigKey]] = {}
for _kind in KINDS.values():
    for _key in _kind.keys.by_path.values():
        if _key.options:
            HOLDERS.setdefault(_key.options, (_kind, _key))
OPTIONS = [
    (kind, key, name, option)
    for kind, key in HOLDERS.values()
    for name, options in key.option_keys().items()
    for option in options.values()
]


def options_document(key: ConfigKey, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns a document with a component and its options."""
    assert key.options is not None
    document = nested(key.path, options)
    section: Any = document
    for part in key.path.split(".")[:-1]:
        section = section[part.removesuffix("[]")]
        section = section[0] if part.endswith("[]") else section
    section[key.options.selector] = name
    return document


def options_refused(kind: TaskType[Any], document: dict[str, Any]) -> tuple[bool, bool]:
    """Returns whether the schema and the loader refuse a document."""
    layers = ConfigLayers(kind.schema, kind.keys, null_numbers(kind.keys.by_path))
    layers.add(document, "file")
    keys = {path: key for path, key in kind.keys.by_path.items() if path in touched(document)}
    try:
        check_components(layers.cfg, keys, lambda key, rule: ConfigError(f"{key}: {rule}"))
    except ConfigError:
        return not VALIDATORS[kind.name].is_valid(document), True
    return not VALIDATORS[kind.name].is_valid(document), False


@pytest.mark.parametrize(("kind", "key", "name", "option"), OPTIONS)
def test_options_of_components(kind: TaskType[Any], key: ConfigKey, name: str, option: ConfigKey) -> None:
    accepted = options_document(key, name, {option.path: option.default})
    assert options_refused(kind, accepted) == (False, False)
    for choice in option.choices:
        assert options_refused(kind, options_document(key, name, {option.path: choice.upper()})) == (False, False)
    wrong: dict[str, Any]
    for wrong in ({option.path: [{}]}, {f"{option.path}_": option.default}):
        assert options_refused(kind, options_document(key, name, wrong)) == (True, True), wrong
    for number in outside(option) if option.range else ():
        assert options_refused(kind, options_document(key, name, {option.path: number})) == (True, True), number


def test_there_are_options() -> None:
    assert {key.path.rpartition(".")[0] for _, key in HOLDERS.values()} >= {"actor.model", "env.train", "data.train"}
    assert len(OPTIONS) > 40
