"""Minari's datasets: numbers of their spaces and steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlhpc.embodied.data.minari import _describe_space, join_spaces
from rlhpc.embodied.data.trajectories import read_trajectories
from tests.unit.embodied.data.dataset_files import data, discrete
from tests.unit.embodied.data.test_trajectories import assert_same


@pytest.mark.parametrize(("declared", "places", "moves"), [(None, 9, 2), (16, 16, 16), (4, 9, 4)])
@pytest.mark.parametrize("lengths", [(3, 8), (8, 3)])
def test_minari_s_numbers_of_places_and_moves(
    tmp_path: Path, lengths: tuple[int, ...], declared: int | None, places: int, moves: int
) -> None:
    """Those that the source declares, and at least those that occur."""
    source, there = discrete(tmp_path / "a", *lengths, declared=declared), tmp_path / "b"
    data("convert", source, "--to", "minari", "--output", there)
    described = json.loads((there / "data/metadata.json").read_text())
    found = [json.loads(described[name])["n"] for name in ("observation_space", "action_space")]
    assert found == [places, moves]
    for one, two in zip(read_trajectories(source), read_trajectories(there), strict=True):
        assert_same(one["obs"], two["obs"])
        assert_same(one["actions"], two["actions"])


def test_minari_s_spaces_of_several_episodes() -> None:
    number = {"type": "Discrete", "dtype": "int64", "start": 0, "n": 3}
    box = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1, -1], "high": [1, 1]}
    wide = {**box, "low": [-np.inf] * 2, "high": [np.inf] * 2}
    both = {"type": "Dict", "subspaces": {"a": number, "b": box}}
    assert join_spaces(number, {**number, "n": 5, "start": -1}) == {**number, "start": -1, "n": 5}
    assert join_spaces(box, wide) == box
    assert join_spaces(both, {"type": "Dict", "subspaces": {"a": {**number, "n": 9}, "b": wide}}) == {
        "type": "Dict", "subspaces": {"a": {**number, "n": 9}, "b": box}}  # fmt: skip
    for other in (box, {**box, "shape": [3]}, {"type": "Dict", "subspaces": {"a": number}}, None):
        assert join_spaces(both if other is None else number, other) is None
    assert join_spaces(box, {**box, "shape": [3]}) is None
    ints = np.zeros((4, 2), np.int64)
    assert _describe_space(ints)["low"] == [np.iinfo(np.int64).min] * 2 and _describe_space(ints > 0)["high"] == [
        True,
        True,
    ]
