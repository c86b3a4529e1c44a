"""Numbers with their intervals, one above the other, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from rlhpc.metrics.svg import (
    CHART,
    Frame,
    drawing,
    heading,
    is_constant,
    number,
    span,
    stated_chart,
    text_width,
    tick_labels,
    ticks,
)

_INTERVAL_ROW = 24


@dataclass(frozen=True)
class Row:
    """One line of the chart.

    Attributes:
        name: What it is.
        value, low, high: The number, and the ends of its interval.
        dots: Single values behind it, drawn faintly.
        color: Index into the palette.
    """

    name: str
    value: float
    low: float
    high: float
    dots: Sequence[float] = field(default=())
    color: int = 0


def interval_chart(title: str, x_label: str, rows: Sequence[Row]) -> str:
    """Draws a dot and an interval for each row, under its name."""
    extent = [value for row in rows for value in (row.value, row.low, row.high, *row.dots)]
    if is_constant(extent):
        return stated_chart(title, f"{number(extent[0])} of all")
    width = CHART[0]
    frame = Frame(*span(extent, 0.04, both=True), 0, 1, (width, 0))
    heading(frame, title, "")
    widest = 16 + max(text_width(row.name) for row in rows)
    above = widest > 0.45 * width  # long names stand above their rows
    frame.left = 16.0 if above else widest
    y, drawn = frame.top + 6, []
    for row in rows:
        color = f"var(--c{row.color % 8})"
        ends = f" ({number(row.low)} to {number(row.high)})" if row.low < row.high else ""
        name_y = y + 12
        y += 17 if above else 0
        title_text = f"{row.name}: {number(row.value)}{ends}"
        points = "".join(
            f'<circle cx="{frame.px(value):.1f}" cy="{y + 8}" r="2.6" '
            f'style="fill:var(--panel);stroke:{color};stroke-width:1.2"/>'
            for value in row.dots
        )
        drawn.append(
            f'<g><title>{escape(title_text)}</title><text class="key" x="8" y="{name_y}">{escape(row.name)}</text>'
            f'<path d="M{frame.px(row.low):.1f} {y + 8}H{frame.px(row.high):.1f}" style="stroke:{color};stroke-width:3;'
            f'opacity:.45"/>{points}<circle cx="{frame.px(row.value):.1f}" cy="{y + 8}" r="4.4" style="fill:{color}"/></g>'
        )
        y += _INTERVAL_ROW
    places = [x for x in ticks(frame.x0, frame.x1, 4) if frame.x0 <= x <= frame.x1]
    for x, label in zip(places, tick_labels(places), strict=True):
        at = frame.px(x)
        frame.parts.append(f'<path class="grid" d="M{at:.1f} {frame.top:.0f}V{y:.0f}"/>')
        frame.parts.append(f'<text class="num" x="{at:.1f}" y="{y + 15:.0f}" text-anchor="middle">{label}</text>')
    middle = width / 2
    frame.parts.append(f'<text x="{middle:.0f}" y="{y + 32:.0f}" text-anchor="middle">{escape(x_label)}</text>')
    frame.parts += drawn
    frame.size = (width, int(y) + 42)
    return drawing(title, frame)
