"""The tables of the page about scale are those of the result in `bench/results`."""

from __future__ import annotations

import json

from bench.machine import RESULTS
from bench.scale_model import CONSTANTS, PAGE, insert_tables, render_tables

CONTENT = json.loads((RESULTS / "scale_model.json").read_text())


def test_the_page_shows_the_result() -> None:
    text = PAGE.read_text()
    assert insert_tables(text, CONTENT) == text, "python -m bench.scale_model --page writes the present tables"
    for name, table in render_tables(CONTENT).items():
        assert table in text, f"the page has no place for the table {name}"


def test_predictions_are_named_so() -> None:
    """A figure that nobody has measured says so in its own table."""
    heads = {name: table.splitlines()[0] for name, table in render_tables(CONTENT).items()}
    for name in ("step", "weights"):
        assert heads[name].startswith("| predicted,")
    assert heads["failures"].startswith("| simulated,") and heads["simulated"].startswith("| simulated ranks")


def test_every_constant_has_a_source() -> None:
    assert all(constant.source for constant in CONSTANTS.values())


def test_no_run_had_other_counts_than_the_model() -> None:
    assert {ranks: check["differences"] for ranks, check in CONTENT["checks"].items()} == dict.fromkeys(
        CONTENT["checks"], 0
    )
