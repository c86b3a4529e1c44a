"""Where things are in a chart: nothing covers anything, whatever is drawn and however long the names are."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from rlhpc.metrics.charts import (
    CHART,
    STYLE,
    WIDE,
    Line,
    arrange_in_rows,
    is_empty,
    line_chart,
    log_bar_chart,
    stacked_bar_chart,
    standalone,
    statement,
    text_width,
    tick_labels,
    ticks,
)
from rlhpc.metrics.curves import Metric, color_of, draw_metric_charts

#: DejaVu Sans at 13 px: the widest of the fonts that a page falls back to.
MEASURED = {
    "rollout": 41.5, "update": 45.8, "advantage": 69.4, "sync": 29.9, "other": 34.6, "one process": 78.3, "quickstart": 65.1,
    "episode return": 94.7, "approximate KL (nats)": 144.4, "share of episodes, 95 % interval": 209.4, "1.25M": 40.2,
    "receive": 47.5, "L2 norm before clipping": 154.7, "0123456789": 82.7,
}  # fmt: skip
PHASES = ("rollout", "receive", "advantage", "update", "sync", "save", "eval", "other")


@dataclass(frozen=True)
class Box:
    what: str
    left: float
    top: float
    right: float
    bottom: float

    def covers(self, other: Box) -> bool:
        return (
            self.left < other.right - 0.5 and other.left < self.right - 0.5
            and self.top < other.bottom - 0.5 and other.top < self.bottom - 0.5
        )  # fmt: skip


def boxes(svg: str) -> tuple[list[Box], Box]:
    """Of all texts and of the squares of the key, and of the drawing."""
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())

    def found() -> Iterator[Box]:
        for element in root.iter():
            tag, at = element.tag.rpartition("}")[2], element.attrib
            if tag == "text":
                letters = 12.5
                wide = text_width(element.text or "", letters * (1.12 if at.get("class") == "title" else 1.0))
                x, y = float(at["x"]), float(at["y"])
                left = x - {"end": wide, "middle": wide / 2}.get(at.get("text-anchor", ""), 0.0)
                yield Box(element.text or "", left, y - letters * 0.75, left + wide, y + letters * 0.2)
            elif tag == "rect" and at.get("width") == "9":
                yield Box("square", float(at["x"]), float(at["y"]), float(at["x"]) + 9, float(at["y"]) + 9)

    return list(found()), Box("drawing", 0, 0, width, height)


def check(svg: str) -> None:
    parts, whole = boxes(svg)
    assert len(parts) > 3
    for box in parts:
        inside = box.left >= whole.left and box.right <= whole.right + 4 and box.top >= 0 and box.bottom <= whole.bottom
        assert inside, f"{box} leaves {whole}"
    for one, other in itertools.combinations(parts, 2):
        assert not one.covers(other), f"{one} covers {other}"


@pytest.mark.parametrize("text", MEASURED)
def test_texts_are_not_wider_than_the_layout_thinks(text: str) -> None:
    assert MEASURED[text] <= text_width(text, 13.0) <= 1.3 * MEASURED[text]


def test_the_style_has_no_wider_letters_than_the_layout() -> None:
    assert max(float(size) for size in re.findall(r"font-size:([\d.]+)px", STYLE)) == 12.5


@pytest.mark.parametrize("count", range(1, len(PHASES) + 1))
def test_bars_with_any_number_of_phases(count: int) -> None:
    stacks = [(name, [0.2, 0.3, 0.1]) for name in PHASES[:count]]
    check(stacked_bar_chart("Time per phase", "global step", "seconds per step", [(0, 10), (10, 20), (20, 25)], stacks))


@pytest.mark.parametrize("size", [CHART, WIDE], ids=["chart", "wide"])
@pytest.mark.parametrize(
    "names",
    [
        ("",),
        ("mine", "quickstart"),
        ("from demonstrations", "from scratch, a longer name", "WWW", "default"),
        tuple(f"suite number {i}" for i in range(12)),
    ],
    ids=len,
)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 2e7], ids=str)
def test_lines(names: tuple[str, ...], size: tuple[int, int], scale: float) -> None:
    lines = [Line(name, [0, 50, 100], [scale * i, scale, -scale / 3], color=i) for i, name in enumerate(names)]
    check(line_chart("Return in evaluations over experience", "environment steps", "share of episodes, 95 % interval",
                     lines, size))  # fmt: skip


def test_lying_bars() -> None:
    rows = {
        "cold start to 8 ready workers": {
            "limit": (1.9, 2.0, 2.2),
            "rlhpc": (1.5, 1.51, 1.6),
            "Ray": (11.0, 14.2, 15.0),
        },
        "warm launch": {"rlhpc": (0.01, 0.11, 0.3), "Ray": (13.0, 13.0, 13.0)},
    }
    chart = log_bar_chart("Launch", "s", rows, {"limit": 7, "rlhpc": 0, "Ray": 1})
    check(chart)
    assert "rlhpc: 1.51 s (1.5 to 1.6)" in chart


@pytest.mark.parametrize("x", [[0.0, 120.0], [120.0, 240.0, 360.0]], ids=len)
def test_dots_lie_within_the_plot(x: list[float]) -> None:
    values = [500.0 + i for i in range(len(x))]
    chart = line_chart("Evaluation", "global step", "return", [Line("", x, values, markers=True)])
    line = re.search(r'class="axis" d="M(\d+) \d+H(\d+)"', chart)
    assert line is not None
    for at in re.findall(r'<circle cx="([\d.]+)"', chart):
        assert int(line[1]) + 3.4 < float(at) < int(line[2]) - 3.4


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (0, 1e-3, ["0", "0.0002", "0.0004", "0.0006", "0.0008", "0.0010"]),
        (0, 10_000, ["0", "2k", "4k", "6k", "8k", "10k"]),
        (0, 5e-6, ["0", "1e-6", "2e-6", "3e-6", "4e-6", "5e-6"]),
        (-1, 1, ["-1.0", "-0.5", "0", "0.5", "1.0"]),
        (0, 2.5e6, ["0", "0.5M", "1.0M", "1.5M", "2.0M", "2.5M"]),
    ],
    ids=str,
)
def test_the_numbers_of_an_axis_are_written_alike(low: float, high: float, shown: list[str]) -> None:
    assert tick_labels(ticks(low, high)) == shown


def test_every_line_tells_its_values_where_the_pointer_is() -> None:
    x = list(range(1, 201))
    once, twice, thrice = ([factor * i for i in x] for factor in (1.0, 2.0, 3.0))
    lines = [Line("first", x, once), Line("second", x, twice, once, thrice)]
    chart = line_chart("t", "global step", "return", lines)
    told = re.findall(r'class="strip" x="([\d.]+)"[^>]*width="([\d.]+)"[^>]*><title>([^<]*)</title>', chart)
    assert 20 < len(told) < 50
    assert told[0][2] == "global step 1\nfirst: 1\nsecond: 2 (1 to 3)"
    assert "global step 200\nfirst: 200\nsecond: 400 (200 to 600)" in told[-1][2]
    ends = [(float(left), float(left) + float(width)) for left, width, _ in told]
    assert all(abs(a[1] - b[0]) < 0.3 for a, b in itertools.pairwise(ends))  # no gap, no overlap
    assert "<script" not in chart


def test_several_charts_in_one_drawing() -> None:
    chart = line_chart("a", "x", "y", [Line("", [1.0, 2.0], [1.0, 2.0])], CHART)
    whole = ElementTree.fromstring(standalone(arrange_in_rows([chart] * 4, CHART, 3)))
    assert whole.attrib["viewBox"] == "0 0 1092 480" and len(whole.findall("{http://www.w3.org/2000/svg}svg")) == 4


def test_a_single_evaluation_is_a_number_with_its_interval() -> None:
    lines = [Line("held_out", [40], [0.259], [0.13], [0.44], markers=True), Line("other", [40], [0.5], markers=True)]
    sentence = "Accuracy: held_out: 0.259 (0.13 … 0.44) at global step 40; other: 0.5 at global step 40"
    assert statement(line_chart("Accuracy", "global step", "accuracy", lines)) == sentence


def test_a_metric_is_drawn_once_and_in_one_colour() -> None:
    rows = [{"step": step, "train/policy_loss": 1 / step, "train/loss": 1 / step, "train/accuracy": step / 9,
             "train/lr": 1e-4} for step in range(1, 9)]  # fmt: skip
    names = ("policy_loss", "loss", "accuracy", "lr", "absent")
    charts = draw_metric_charts(rows, [Metric(name, f"train/{name}", name, "") for name in names], ("absent",))
    assert statement(charts["loss"]) == "loss: the same as policy_loss" and statement(charts["lr"]) == "lr: 1e-4"
    assert statement(charts["accuracy"]) is None and is_empty(charts["absent"])
    assert f"stroke:var(--c{color_of('eval/accuracy')})" in charts["accuracy"]
    for quantity in ("accuracy", "success_once"):
        assert color_of(f"train/{quantity}") == color_of(f"eval/{quantity}")
    assert color_of("train/episode_return") == color_of("eval/return_mean") == color_of("train/reward")
