"""Merging of files and overrides into a configuration: later layers, their sources, and keys and values that do not fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhpc.config.merge import ConfigLayers, parse_override
from rlhpc.config.schema import Schema
from rlhpc.config.sweep import override
from rlhpc.config.yaml_files import plain_value, scalar_values
from rlhpc.embodied.config import PpoConfig
from rlhpc.language.config.run import GrpoConfig
from rlhpc.runtime.errors import ConfigError

SAME: list[Any] = [
    None, True, 0, -7, 1e-05, 3e-4, 1e22, -math.inf, math.inf, "", "10", "yes", "1e-3", "null", "a: b", "#x", "'\"",
    "two\nlines", "ä €", " a ", [], {}, [1, "1", None, [2.5]], {"a": {"b": [1, {"c": "no"}]}}, "${oc.env:HOME}", "-", "~",
    "*x", "[1",
]  # fmt: skip


@pytest.mark.parametrize("value", SAME, ids=repr)
def test_a_value_is_read_back_as_it_was_given(value: Any) -> None:
    key, found = parse_override(override("some.key", plain_value(value, "some.key")))
    assert key == "some.key"
    assert scalar_values(found) == value and type(scalar_values(found)) is type(value)


def test_not_a_number_is_read_back() -> None:
    assert math.isnan(scalar_values(parse_override(override("key", math.nan))[1]))


class OfGrpo:
    """Keys of another task type."""

    def explain_foreign_key(self, key: str) -> str:
        return "is a key of GRPO" if key in ("data", "algorithm.filter_groups") else ""

    def foreign_names(self, section: str) -> set[str]:
        return {"": {"data"}, "algorithm": {"filter_groups"}}.get(section, set())


@pytest.fixture
def layers() -> ConfigLayers:
    return ConfigLayers(Schema(PpoConfig), OfGrpo())


def test_later_layers_win_and_are_the_source(layers: ConfigLayers) -> None:
    layers.add({"runner": {"max_steps": 3, "name": "a"}}, "a.yaml")
    before = layers.copy()
    layers.add({"runner": {"max_steps": 4}}, "b.yaml")
    layers.override("runner.name=b")
    assert (layers.cfg.runner.max_steps, layers.cfg.runner.name) == (4, "b")
    assert layers.sources["runner.max_steps"] == "b.yaml" and "runner.name=b" in layers.sources["runner.name"]
    assert before.cfg.runner.max_steps == 3 and before.sources == {
        "runner.max_steps": "a.yaml",
        "runner.name": "a.yaml",
    }


@pytest.fixture
def terms() -> ConfigLayers:
    layers = ConfigLayers(Schema(GrpoConfig))
    layers.add(
        {
            "reward": {
                "terms": [{"name": "exact"}, {"name": "a:b", "kwargs": {"x": {"y": 1}, "path": "${oc.env:HOME}"}}]
            }
        },
        "a",
    )
    return layers


@pytest.mark.parametrize("index", [".{}", "[{}]"])
def test_an_override_changes_one_element_of_a_list(terms: ConfigLayers, index: str) -> None:
    first, second = (f"reward.terms{index.format(number)}" for number in (0, 1))
    for override_text in (f"{first}.weight=2", f"{second}.kwargs.x.z=3", f"{second}.name=10"):
        terms.override(override_text)
    assert OmegaConf.to_container(terms.cfg.reward.terms) == [
        {"name": "exact", "weight": 2.0, "kwargs": {}},
        {"name": "10", "weight": 1.0, "kwargs": {"x": {"y": 1, "z": 3}, "path": "${oc.env:HOME}"}},
    ]
    assert terms.element_keys["reward.terms"] == [{"name", "weight"}, {"name", "kwargs"}], "a default is not set by it"
    terms.override(f"{second}={{name: other}}")
    assert [term.name for term in terms.cfg.reward.terms] == ["exact", "other"] and terms.cfg.reward.terms[
        1
    ].kwargs == {}


@pytest.mark.parametrize(
    ("override_text", "message"),
    [
        ("reward.terms.2.name=x", r"reward\.terms has no element 2; it has 2, counted from 0"),
        ("reward.process_terms[0].name=x", r"reward\.process_terms has no element 0; it has 0"),
        ("reward.terms.0.nam=x", r"unknown key reward\.terms\[0\]\.nam; did you mean reward\.terms\[0\]\.name"),
        ("reward.terms[1]=3", r"reward\.terms\[1\] is 3; it is a section"),
        ("reward.terms[1].weight=x", r"reward\.terms\[1\]\.weight is 'x'; it must be float"),
        ("reward.terms.x.name=y", r"reward\.terms is .*; it is a list"),
    ],
)
def test_an_element_that_does_not_fit(terms: ConfigLayers, override_text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        terms.override(override_text)


def test_a_mapping_of_a_later_file_replaces_an_override_changes_an_entry(layers: ConfigLayers) -> None:
    layers.add({"env": {"train": {"kwargs": {"a": 1, "b": {"c": 2}}}}}, "a.yaml")
    layers.override("env.train.kwargs.b.d=3")
    assert layers.cfg.env.train.kwargs == {"a": 1, "b": {"c": 2, "d": 3}}
    layers.override("env.train.kwargs.a.x=1")
    assert layers.cfg.env.train.kwargs.a == {"x": 1}, "a section in place of a number"
    layers.add({"env": {"train": {"kwargs": {"e": 1}}}}, "b.yaml")
    assert layers.cfg.env.train.kwargs == {"e": 1}
    with pytest.raises(ConfigError, match=r"has an empty part; write env.train.kwargs.name=value"):
        layers.override("env.train.kwargs..a=1")


def test_a_component_that_is_placed_elsewhere_leaves_its_group(layers: ConfigLayers) -> None:
    layers.add({"cluster": {"component_placement": {"actor,rollout,env": "0"}}}, "a.yaml")
    layers.override("cluster.component_placement.env=1")
    assert layers.cfg.cluster.component_placement == {"actor,rollout": "0", "env": 1}
    layers.override("cluster.component_placement.actor,rollout=2-3")
    assert layers.cfg.cluster.component_placement == {"env": 1, "actor,rollout": "2-3"}


def test_null_may_stand_for_a_number() -> None:
    layers = ConfigLayers(Schema(PpoConfig), null_numbers={"runner.save_interval": -1})
    layers.override("runner.save_interval=null")
    assert layers.cfg.runner.save_interval == -1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"runner": {"max_stpes": 3}}, "a.yaml: unknown key runner.max_stpes; did you mean"),
        ({"data": {}}, "a.yaml: data is a key of GRPO"),
        (
            {"algorithm": {"filter_gruops": {}}},
            "unknown key algorithm.filter_gruops; did you mean algorithm.filter_groups? it is a key of GRPO; allowed here: ",
        ),
        ({"runner": 3}, "a.yaml: runner is 3; it is a section with the keys "),
        ({"runner": {"max_steps": True}}, "a.yaml: runner.max_steps is True; it must be int"),
        ({"runner": {"max_steps": {"a": 1}}}, "a.yaml: runner.max_steps is {'a': 1}; it must be int"),
        ({"runner": {"max_steps": "many"}}, "a.yaml: runner.max_steps"),
        ({"runner": {"max_steps": None}}, "a.yaml: runner.max_steps is null; it must be int"),
        ({"cluster": {"node_groups": 3}}, "a.yaml: cluster.node_groups is 3; it is a list"),
        ({"cluster": {"node_groups": [{"labl": "a"}]}}, "unknown key cluster.node_groups[0].labl; did you mean"),
        ({"cluster": {"node_groups": [{"label": "a", "num_nodes": "x"}]}}, "cluster.node_groups[0].num_nodes"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_source(layers: ConfigLayers, content: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        layers.add(content, "a.yaml")
    assert said in str(refused.value)


def test_elements_of_a_list_are_typed_and_their_keys_known(layers: ConfigLayers) -> None:
    layers.add({"cluster": {"node_groups": [{"label": "a"}, {"label": "b", "num_nodes": 2}]}}, "a.yaml")
    assert [group.num_nodes for group in layers.cfg.cluster.node_groups] == [None, 2]
    assert layers.element_keys["cluster.node_groups"] == [{"label"}, {"label", "num_nodes"}]


def test_an_earlier_versions_file_may_have_keys_of_other_tasks() -> None:
    layers = ConfigLayers(Schema(GrpoConfig))
    content = {"runner": {"max_steps": 3, "gone": 1}, "env": {"train": {}}}
    layers.add(content, "old.yaml", lenient=True)
    assert layers.cfg.runner.max_steps == 3 and "env" not in layers.cfg
    with pytest.raises(ConfigError, match="unknown key"):
        layers.add(content, "new.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("runner.max_steps", "write key=value"), ("=3", "write key=value"), ("a=[1", "is not valid YAML; quote it"),
        ("a={b: 1, b: 2}", "is not valid YAML; quote it"),
    ],
)  # fmt: skip
def test_an_override_of_another_form_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_override(text)
    assert said in str(refused.value)
