"""Cells of the table of families, against what trainer and engine do now: a part that the commit draws, and all cells after a
change to engines, weights or packing."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.extras import need_extra

need_extra("llm")

from tests.drawn import drawn
from tests.families.cells import CELLS, evaluate
from tests.families.models import FAMILIES
from tests.families.page import PAGE, ROOT, read_results, render

#: Paths after whose change all families are tried.
_PATHS = ("rlhpc/language/engines", "rlhpc/language/models", "rlhpc/weights", "rlhpc/training", "tests/families")

#: Processors round differently, so a deviation that a refusal quotes may have another last digit there.
_NUMBER = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")


def _verdict(text: str) -> str:
    """Returns the start of a cell's text without figures: what follows may list the elements of a set in any order."""
    return _NUMBER.sub("#", text)[:120]


def has_changed() -> bool:
    """Returns whether the last commit, or the working tree, changes one of the paths."""
    commands = (["diff", "--name-only", "HEAD~1"], ["status", "--porcelain"])
    done = [
        subprocess.run(["git", *words, "--", *_PATHS], cwd=ROOT, capture_output=True, text=True, check=False)
        for words in commands
    ]
    return any(run.stdout.strip() for run in done)


def families() -> list[str]:
    """Returns the families of this run: all with RLHPC_FAMILIES=all or after a change, otherwise a tenth."""
    if os.environ.get("RLHPC_FAMILIES") == "all" or has_changed():
        return list(FAMILIES)
    return drawn("families", FAMILIES, least=len(FAMILIES) // 10)


def test_the_page_has_the_committed_results_of_all_families() -> None:
    rows = read_results()
    assert rows.keys() == FAMILIES.keys() and all({*row} == {"commit", *CELLS} for row in rows.values())
    assert PAGE.read_text() == render(rows), "run: python -m tests.families"


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in families()])
def test_a_cell_says_what_happens(family: str, cell: str) -> None:
    text, expected_text = evaluate(family, cell), read_results()[family][cell]
    assert _verdict(text) == _verdict(expected_text), "run: python -m tests.families"
