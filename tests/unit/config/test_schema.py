"""Configuration schema: keys, types and hints, from a tree of dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from rlhpc.config.schema import Schema, element_of, nearest_key, open_mapping_of, typed_value, with_variables, words_of
from rlhpc.config.yaml_files import Scalar


@dataclass
class Optim:
    """Section of the optimizer."""

    lr: float = 1e-3
    name: str = "adam"
    betas: list[float] = field(default_factory=list)


@dataclass
class Term:
    """Element of a list of sections."""

    name: str = ""
    weight: float | None = None


@dataclass
class Root:
    """Configuration of these tests."""

    optim: Optim = field(default_factory=Optim)
    terms: list[Term] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    model_path: str = ""
    env_id: str = ""


SCHEMA = Schema(Root, "test")


def test_keys_are_those_of_all_sections() -> None:
    assert SCHEMA.keys == ("optim.lr", "optim.name", "optim.betas", "terms", "kwargs", "model_path", "env_id")
    assert SCHEMA.open == {"kwargs"}
    assert (
        SCHEMA.type_of("optim.lr") is float
        and SCHEMA.type_of("optim") is Optim
        and SCHEMA.type_of("optim.lr.x") is None
    )
    assert SCHEMA.type_name("optim.name") == "str" and SCHEMA.type_name("nothing") == "another type"


@pytest.mark.parametrize(
    ("path", "exists"),
    [("optim", True), ("optim.lr", True), ("optim.x", False), ("terms[]", True), ("terms[2].weight", True),
     ("terms.2.weight", True), ("terms.0", True), ("terms.x", False), ("optim.0", False),
     ("terms[].x", False), ("optim[].lr", False), ("optim.lr.x", False)],
)  # fmt: skip
def test_elements_of_lists_are_keys_too(path: str, exists: bool) -> None:
    assert (path in SCHEMA) == exists


@pytest.mark.parametrize(
    ("key", "prefix", "hint"),
    [
        ("learning_rate", "optim.", "optim.lr"),  # another project's name
        ("nmae", "optim.", "optim.name"),
        ("lr", "", "optim.lr"),  # of another section
        ("env", "", "env_id"),
        ("zzzzzzzz", "", None),
    ],
)
def test_an_unknown_key_has_a_hint_if_one_is_similar(key: str, prefix: str, hint: str | None) -> None:
    allowed = ["lr", "name", "betas"] if prefix else ["optim", "terms", "kwargs", "model_path", "env_id"]
    assert nearest_key(key, prefix, allowed, SCHEMA.keys) == hint


def test_mappings_with_keys_of_the_users() -> None:
    assert open_mapping_of("env.train.kwargs.g.x") == "env.train.kwargs"
    assert open_mapping_of("cluster.component_placement") == "cluster.component_placement"
    assert open_mapping_of("actor.optim.lr") is None


def test_the_types_of_sections_in_lists() -> None:
    assert element_of(list[Term]) is Term
    assert element_of(list[int]) is None and element_of(Term) is None


def scalar(text: str, value: Any) -> Scalar:
    """Returns a scalar as YAML reads it."""
    return Scalar(text=text, value=value)


def test_a_scalar_is_its_text_where_the_key_is_one_and_its_value_elsewhere() -> None:
    on, number = scalar("on", True), scalar("1e3", 1000.0)
    written = {scalar("optim", "optim"): {scalar("name", "name"): on, scalar("lr", "lr"): number}}
    assert typed_value(written, Root) == {"optim": {"name": "on", "lr": 1000.0}}
    assert typed_value([number, on], list[str]) == ["1e3", "on"]
    assert typed_value(on, str | None) == "on" and typed_value(on, int | str | None) is True
    assert typed_value({scalar("1", 1): on}, dict[int, Any]) == {1: True}
    assert typed_value({scalar("terms", "terms"): [{scalar("name", "name"): number}]}, Root) == {
        "terms": [{"name": "1e3"}]
    }
    assert typed_value(7, str) == 7


def test_a_key_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="key 'lr' is given twice"):
        typed_value({scalar("lr", "lr"): 1, scalar('"lr"', "lr"): 2, "lr": 3}, Optim)


def test_variables_are_read_in_paths_alone() -> None:
    content = {
        "model_path": "$HOME/${USER}x\\$y",
        "env_id": "$HOME",
        "optim": {"name": "$A"},
        "terms": [{"name": "$B"}],
    }
    assert with_variables(content, Root) == {
        **content, "model_path": "${oc.env:HOME}/${oc.env:USER}x\\$y",
    }  # fmt: skip


def test_types_in_words() -> None:
    assert words_of(int) == "int"
    assert words_of(float | None) == "float | null"
    assert words_of(dict[str, Any]) == "dict[str, Any]"
