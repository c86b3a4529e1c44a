"""Every number of the configuration has a range, which a value outside of it is refused by."""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

import rlhpc
from rlhpc.config.constraints import Range
from rlhpc.config.sweep import points, read_section
from rlhpc.language.scoring.checks import section_of
from rlhpc.language.scoring.groups import scoring_groups
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
    "runner.alerts.rules": {"name": "a", "metrics": ["train/reward"], "above": 1.0},
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


WORDS = [
    (name, path)
    for name, kind in KINDS.items()
    for path, key in kind.keys.by_path.items()
    if (key.choices or key.registry)
    and "[]" not in path
    and path not in ("runner.logger.logger_backends", "runner.task_type")
]


@pytest.mark.parametrize(("name", "path"), WORDS, ids=[f"{name}:{path}" for name, path in WORDS])
def test_the_case_of_a_known_word_does_not_matter(name: str, path: str) -> None:
    """Readers compare with words in lower case: a word in capitals that reached them would silently mean another."""
    key = KINDS[name].keys.by_path[path]
    for word in key.choices or key.names():
        cfg = load_config(CONFIGS / SOUND[name], [f"{path}={word.upper()}"], check=False)
        assert OmegaConf.select(cfg, path) == word


def test_case_does_not_matter_in_lists_references_suites_and_kwargs_either() -> None:
    content = {
        "defaults": [str(CONFIGS / "reasoning/gsm8k.yaml")],
        "runner": {"logger": {"logger_backends": ["WandB", "TensorBoard", "my.module:Logger"]}},
        "reward": {"terms": [{"name": "Math"}, {"name": "My.Module:Term"}]},
        "algorithm": {"kl_in": "${oc.env:RLHPC_TEST_KL_IN,LOSS}"},
        "groups": [{"name": "second", "scorer": "JUDGE", "kwargs": {"mode": "Grade", "rollout_backend": "VLLM"}}],
    }
    cfg = load_config(content, check=False)
    assert list(cfg.runner.logger.logger_backends) == ["wandb", "tensorboard", "my.module:Logger"]
    assert [term.name for term in cfg.reward.terms] == ["math", "My.Module:Term"]
    assert cfg.algorithm.kl_in == "loss"
    group = scoring_groups(cfg)["second"]
    assert group.scorer == "judge"
    section = section_of(cfg, group)
    assert (section.mode, section.rollout_backend) == ("grade", "vllm")


def test_a_sweep_that_maximizes_in_capitals_maximizes() -> None:
    section, source = read_section([("file", {"sweep": {"seeds": [0, 1], "goal": "MAXIMIZE"}})], [])
    assert section.goal == "maximize"
    assert len(points(section, source)) == 2


def test_an_unknown_word_is_shown_as_it_was_written() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.kl_in is 'LOS'; did you mean 'loss'\?"):
        load_config(CONFIGS / SOUND["reasoning"], ["algorithm.kl_in=LOS"])


def test_no_reader_puts_a_word_into_lower_case_again() -> None:
    """Where one reader must remember to ignore case, another forgets it."""
    names = {path.rpartition(".")[2] for _, path in WORDS} - {"name"}
    again = [
        f"{file}:{node.lineno}"
        for file in sorted(Path(rlhpc.__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "lower"
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr in names
    ]
    assert again == []
