"""Page of charts: those without data take no space."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from rlhpc.metrics.charts import Line, is_empty, line_chart, number, standalone, statement
from rlhpc.metrics.page import render_figures


def test_charts_without_data_take_no_room_on_a_page() -> None:
    empty, full = line_chart("a", "x", "y", []), line_chart("b", "x", "y", [Line("", [1.0, 2.0], [1.0, 2.0])])
    assert is_empty(empty) and not is_empty(full)
    assert render_figures([empty, full]).count("<figure>") == 1 and render_figures([empty]) == ""


@pytest.mark.parametrize("value", [0.0, 0.5, 1e-4, -3.0, 2.5e7])
@pytest.mark.parametrize("count", [1, 2, 50])
def test_a_number_that_never_changes_is_a_sentence(value: float, count: int) -> None:
    """Also where rounding moves it."""
    y = [value * (1 + 1e-12 * (i % 3)) + 1e-9 * (i % 2) for i in range(count)]
    chart = line_chart("Learning rate", "global step", "learning rate", [Line("", range(count), y)])
    sentence = statement(chart)
    assert sentence is not None and f"Learning rate: {number(value)}" in sentence.replace("1e-9", "0")
    assert "<figure" not in render_figures([chart]) and f"<li>{sentence}</li>" in render_figures([chart])
    assert ElementTree.fromstring(standalone(chart).partition("?>")[2]) is not None
    moving = line_chart(
        "Learning rate", "global step", "learning rate", [Line("", [1, 2], [value, value + 1e-4 + abs(value) / 9])]
    )
    assert statement(moving) is None and "<figure" in render_figures([moving])
