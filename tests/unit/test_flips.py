"""Flipped comparisons: which there are, and where they are drawn."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.structure.flips import FLIPPED, draw, flips_of


@pytest.mark.parametrize(
    ("source", "flipped"),
    [
        ("x = a == b\n", "x = a != b\n"),
        ("if 'é' <= f(a < b, c):\n    pass\n", "if 'é' > f(a < b, c):\n    pass\n"),
        ("x = a not in b\n", "x = a in b\n"),
        ("x = (a) is b\n", "x = (a) is not b\n"),
    ],
)
def test_one_operator_is_replaced(source: str, flipped: str) -> None:
    assert flips_of(source)[0].apply(source) == flipped


def test_each_operator_has_its_contrary() -> None:
    for before, after in FLIPPED.values():
        source = f"x = a {before.strip()} b\n"
        [flip] = flips_of(source)
        assert flip.after == after and flips_of(flip.apply(source))[0].apply(flip.apply(source)) == source
        assert isinstance(ast.parse(flip.apply(source)), ast.Module)


def test_comparisons_over_several_lines_or_operators_are_left_out() -> None:
    assert flips_of("x = (a ==\n    b)\ny = a < b < c\n") == []


def test_modules_are_drawn_over_all_packages(tmp_path: Path) -> None:
    for package in ("runs", "jobs", "config"):
        (tmp_path / "rlhpc" / package).mkdir(parents=True)
        for name in "abc":
            (tmp_path / "rlhpc" / package / f"{name}.py").write_text("x = 1 == 2\ny = 1 < 2\n")
    (tmp_path / "rlhpc/runs/plain.py").write_text("x = 1\n")
    drawn = draw(tmp_path, 7, 3)
    assert drawn == draw(tmp_path, 7, 3) != draw(tmp_path, 7, 4)
    packages = [path.parts[1] for path, _ in drawn]
    assert sorted(map(packages.count, ("runs", "jobs", "config"))) == [2, 2, 3]
    assert len({path for path, _ in drawn}) == 7
    assert len(draw(tmp_path, 99, 3)) == 9
