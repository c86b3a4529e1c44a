"""Comparison with recorded results: exact where numbers are computed alike, by outline elsewhere; exports are always exact."""

from __future__ import annotations

import pytest

from tests.baseline.compare import VARIES, common, differences, machine, outline

A, B = "0123456789abcdef", "fedcba9876543210"


@pytest.mark.parametrize(
    ("recorded", "current", "exact", "near"),
    [
        ({"metrics": [1.0]}, {"metrics": [1.0]}, 0, 0),
        ({"metrics": [1.0]}, {"metrics": [1.0001]}, 1, 0),
        ({"metrics": [1.0]}, {"metrics": [2.0]}, 1, 0),
        ({"metrics": [1.0]}, {"metrics": [float("nan")]}, 1, 1),
        ({"metrics": [1.0]}, {"metrics": [1.0, 2.0]}, 1, 1),
        ({"metrics": {"loss": 1.0}}, {"metrics": {"lost": 1.0}}, 2, 2),
        ({"report": ["a", "b"]}, {"report": ["b", "c"]}, 2, 2),
        ({"metrics": [VARIES]}, {"metrics": [3]}, 0, 0),
        ({"checkpoint": {"w": f"float32 [2] {A}"}}, {"checkpoint": {"w": f"float32 [2] {B}"}}, 1, 0),
        ({"checkpoint": {"w": f"float32 [2] {A}"}}, {"checkpoint": {"w": f"float32 [3] {A}"}}, 1, 1),
        ({"checkpoint": {"w": f"bytes [2] {A}"}}, {"checkpoint": {"w": f"bytes [3] {B}"}}, 1, 0),
        (
            {"export": {"policy": {"m.safetensors": {"w": f"float32 [2] {A}"}}}},
            {"export": {"policy": {"m.safetensors": {"w": f"float32 [2] {B}"}}}}, 1, 1,
        ),
    ],
)  # fmt: skip
def test_differences(recorded: object, current: object, exact: int, near: int) -> None:
    assert len(differences(recorded, current, exact=True)) == exact
    assert len(differences(recorded, current, exact=False)) == near


def test_merged_adapters_depend_on_rounding() -> None:
    one, other = (
        {"export": {name: {"m.safetensors": {"w": f"float32 [2] {digest}"}} for name in ("policy", "adapter")}}
        for digest in (A, B)
    )
    assert [line.partition(":")[0] for line in differences(one, other, exact=False, merged=True)] == [
        "/export/adapter/m.safetensors/w"
    ]


def test_what_varies_is_not_recorded() -> None:
    assert common({"a": [1, 2.0]}, {"a": [1, 3.0]}) == ({"a": [1, VARIES]}, ["/a/1"])


def test_the_outline_has_no_numbers_but_those_of_exports() -> None:
    result = {
        "metrics": [{"loss": 1.0, "reward": float("nan"), "x": VARIES}], "report": ["a.svg"], "run_folder": ["b"],
        "export": {"policy": {"w": "digest"}}, "checkpoint": {"COMPLETE": None, "actor-0.pt": {"w": "float32 [2]"}},
        "evaluate": {"printed": "anything"},
    }  # fmt: skip
    assert outline(result) == {
        "metrics": [{"loss": True, "reward": False, "x": VARIES}], "report": ["a.svg"], "run_folder": ["b"],
        "export": {"policy": {"w": "digest"}}, "actor-0.pt": ["w"],
    }  # fmt: skip


def test_numbers_are_computed_alike_in_one_place() -> None:
    assert machine() == machine() and len(machine()["numbers"]) == 16
