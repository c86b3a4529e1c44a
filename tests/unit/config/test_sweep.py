"""Which runs a section `sweep` stands for, what they are called, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.config.sweep import SweepConfig, points
from rlhpc.runtime.errors import ConfigError


def names(**section: Any) -> list[str]:
    return [point.name for point in points(SweepConfig(**section), "file")]


def test_every_combination_with_every_seed() -> None:
    found = points(SweepConfig(grid={"actor.optim.lr": [1e-4, 3e-4], "runner.max_steps": [4]}, seeds=[1, 2]), "file")
    assert [point.name for point in found] == [
        "lr_0.0001-max_steps_4-s1", "lr_0.0001-max_steps_4-s2", "lr_0.0003-max_steps_4-s1", "lr_0.0003-max_steps_4-s2",
    ]  # fmt: skip
    assert found[0].overrides == ["actor.optim.lr=0.0001", "runner.max_steps=4", "runner.seed=1"]
    assert {point.label for point in found} == {"lr=0.0001, max_steps=4", "lr=0.0003, max_steps=4"}


def test_a_name_follows_from_the_values_of_its_run_alone() -> None:
    before = names(grid={"actor.optim.lr": [1e-4, 3e-4]}, seeds=[1])
    assert set(before) <= set(names(grid={"actor.optim.lr": [1e-3, 3e-4, 1e-4]}, seeds=[2, 1]))
    alone = names(list=[{"actor.optim.lr": 1e-4}])
    assert alone[0] in names(list=[{"critic.optim.lr": 1e-3, "actor.optim.lr": 1e-3}, {"actor.optim.lr": 1e-4}])


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (True, "x_true"), (None, "x_null"), (-1, "x_-1"), (1e-05, "x_1e-05"), ("a/b c", "x_a_b_c"), ([64, 64], "x_64_64"),
        ({"digits": 2}, "x_digits_2"), ("", "x_empty"),
    ],
)  # fmt: skip
def test_values_in_names(value: Any, name: str) -> None:
    assert names(grid={"a.x": [value]}) == [name]


def test_keys_that_end_alike_are_told_apart() -> None:
    assert names(list=[{"actor.optim.lr": 1, "critic.optim.lr": 2}]) == ["actor.optim.lr_1-critic.optim.lr_2"]


def test_a_long_name_is_cut_and_stays_its_own() -> None:
    found = names(list=[{"data.path": "x" * 90 + end} for end in "ab"])
    assert len(set(found)) == 2 and all(len(name) <= 80 for name in found)


def test_entries_of_a_list_may_have_names() -> None:
    found = points(SweepConfig(list=[{"name": "small", "a.x": 1}, {"a.x": 2}], seeds=[3]), "file")
    assert [(point.name, point.label) for point in found] == [("small-s3", "small"), ("x_2-s3", "x=2")]
    assert found[0].overrides == ["a.x=1", "runner.seed=3"]


def test_seeds_alone() -> None:
    assert names(seeds=[1, 2]) == ["s1", "s2"]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({}, "it is empty"),
        ({"grid": {"a.x": []}}, "sweep.grid.a.x: the list is empty"),
        ({"grid": {"a.x": 3}}, "sweep.grid.a.x: it is 3; write a list of values: [3]"),
        ({"grid": {"a": {"x": [1]}}}, "write the whole key before its values: a.x"),
        ({"grid": {"a.x": [1, 2, 1.0]}}, "sweep.grid.a.x: 1.0 is there twice"),
        ({"grid": {"a.x": ["b c", "b/c"]}}, "two runs would have the name x_b_c: a.x=\"b c\", and a.x=\"b/c\""),
        ({"grid": {"a.x": ["B", "b"]}}, "two runs would have the name x_b"),
        ({"list": [{"a.x": 1}, {"a.x": 1}]}, "leave out one of them"),
        ({"grid": {"a.x": [1]}, "list": [{"a.x": 2}]}, "both grid and list"),
        ({"grid": {"sweep.seeds": [[1]]}}, "a sweep cannot be within a sweep"),
        ({"list": [{"sweep": {"seeds": [1]}}]}, "a sweep cannot be within a sweep"),
        ({"list": ["a"]}, "sweep.list[0]: it is 'a'; write a mapping"),
        ({"list": [{"name": "a/b", "a.x": 1}]}, "sweep.list[0].name: it is 'a/b'"),
        ({"list": [{"name": "logs", "a.x": 1}]}, "a run cannot be called logs"),
        ({"grid": {"runner.seed": [1]}, "seeds": [1]}, "give the seeds in one of the two places"),
        ({"seeds": [1, 1]}, "sweep.seeds: 1 is there twice"),
        ({"grid": {"runner.name": ["a"]}}, "each run gets a name of its own"),
        ({"grid": {"runner.task_type": ["bc"]}}, "a sweep is of one task type"),
        ({"seeds": [1], "max_queued": 0}, "sweep.max_queued: it is 0; it must be at least 1"),
        ({"seeds": [1], "goal": "maximise"}, "did you mean 'maximize'"),
        ({"seeds": [1], "metric": "return"}, "write a metric's name, such as eval/return_mean"),
        ({"grid": {"a.x": list(range(50)), "a.y": list(range(50))}}, "2500 combinations; a sweep has at most 1000"),
        ({"grid": {"a.x": list(range(50))}, "seeds": list(range(50))}, "2500 runs; a sweep has at most 1000"),
    ],
)  # fmt: skip
def test_what_is_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        points(SweepConfig(**section), "lr.yaml")
    assert str(refused.value).startswith("lr.yaml: sweep") and said in str(refused.value)


def test_an_override_does_not_undo_what_is_varied() -> None:
    section = SweepConfig(grid={"actor.optim.lr": [1e-4]}, seeds=[1])
    for text, key in (("actor.optim.lr=1", "sweep.grid.actor.optim.lr"), ("runner.seed=3", "sweep.seeds")):
        with pytest.raises(ConfigError, match=f"the sweep varies .*{key}="):
            points(section, "lr.yaml", [text])
