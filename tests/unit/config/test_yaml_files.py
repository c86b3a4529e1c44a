"""Values of Python as those of a configuration, and as words of a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from rlhpc.config.yaml_files import plain_value
from rlhpc.runtime.errors import ConfigError


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
