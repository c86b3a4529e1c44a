"""Merging of overrides into a configuration."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlhpc.config.merge import parse_override
from rlhpc.config.sweep import override
from rlhpc.config.yaml_files import plain_value, scalar_values

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
