"""Values of Python as those of a configuration, and as words of a command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from rlhpc.config.merge import parse_override
from rlhpc.config.sweep import override
from rlhpc.config.yaml_files import plain_value, scalar_values
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


def test_what_stands_for_a_plain_value_becomes_one() -> None:
    given = {
        "lr": np.float64(0.1),
        "n": np.int64(3),
        "at": Path("/x"),
        "sizes": (1, 2),
        "own": OmegaConf.create({"a": [1]}),
    }
    found = plain_value(given, "key")
    assert found == {"lr": 0.1, "n": 3, "at": "/x", "sizes": [1, 2], "own": {"a": [1]}}
    assert type(found["lr"]) is float and type(found["n"]) is int


def test_a_secret_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "do-not-write")
    assert plain_value(OmegaConf.create({"token": "${oc.env:SOME_SECRET}"}), "key") == {
        "token": "${oc.env:SOME_SECRET}"
    }


@pytest.mark.parametrize(("value", "said"), [
    ({"a": [1, object()]}, r"key\.a\[1\] is of type object"),
    ({1.5: 2}, "1.5 is not a key"),
    ({"f": len}, r"key\.f is of type builtin_function_or_method"),
])  # fmt: skip
def test_anything_else_is_refused_by_its_key(value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plain_value(value, "key")
