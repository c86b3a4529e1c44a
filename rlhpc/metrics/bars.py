"""Bar charts as SVG text: stacked bars over steps, and horizontal bars on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from rlhpc.metrics.svg import CHART, Frame, axes, drawing, empty_chart, heading, number, text_width

Spread = tuple[float, float, float]
_ROW, _BAR = 20, 15


def stacked_bars(
    title: str,
    x_label: str,
    y_label: str,
    bins: Sequence[tuple[float, float]],
    stacks: Sequence[tuple[str, Sequence[float]]],
) -> str:
    """Draws stacked bars over x intervals; each named layer has its colour, from the bottom up."""
    if not bins or not stacks:
        return empty_chart(title, "nothing logged yet", CHART)
    heights = [sum(values[i] for _, values in stacks) for i in range(len(bins))]
    frame = Frame(bins[0][0], bins[-1][1], 0.0, (max(heights) or 1.0) * 1.06, CHART)
    heading(frame, title, y_label, [(name, color) for color, (name, _) in enumerate(stacks)])
    axes(frame, x_label)
    base = [0.0] * len(bins)
    for color, (name, values) in enumerate(stacks):
        for i, (start, end) in enumerate(bins):
            left, right = frame.px(start), frame.px(end)
            gap = min(1.0, (right - left) * 0.15)
            top, bottom = frame.py(base[i] + values[i]), frame.py(base[i])
            base[i] += values[i]
            if bottom - top > 0.05:
                frame.parts.append(
                    f'<rect x="{left + gap / 2:.1f}" y="{top:.1f}" width="{max(right - left - gap, 0.5):.1f}" '
                    f'height="{bottom - top:.1f}" style="fill:var(--c{color % 8})">'
                    f"<title>{escape(name)}: {values[i]:.3g} s</title></rect>"
                )
    return drawing(title, frame)


def log_bars(title: str, unit: str, rows: Mapping[str, Mapping[str, Spread]], colors: Mapping[str, int]) -> str:
    """Draws horizontal bars on a logarithmic axis, each with its value and spread; the bars of a row belong together.

    Args:
        title: Title of the chart.
        unit: Unit of the values, shown under the title.
        rows: Measurement → subject → (lowest, median, highest), all above 0.
        colors: Subject → index into the palette; the key is in this order.
    """
    values = [value for found in rows.values() for spread in found.values() for value in spread]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    width = CHART[0]
    frame = Frame(low, max(high, low + 1), 0, 1, (width, 0))
    heading(frame, title, unit, [(who, color) for who, color in colors.items() if any(who in f for f in rows.values())])
    frame.left, y = 8.0, frame.top + 4
    end = width - 8 - max(text_width(number(value)) for value in values)  # room for the values after the bars

    def at(value: float) -> float:
        return 8 + (math.log10(value) - low) / (frame.x1 - low) * (end - 8)

    bars: list[str] = []
    for name, found in rows.items():
        bars.append(f'<text class="key" x="8" y="{y + 10:.0f}">{escape(name)}</text>')
        y += _ROW - 4
        for who, (least, middle, most) in found.items():
            told = f"{escape(who)}: {number(middle)} {escape(unit)} ({number(least)} to {number(most)})"
            bars.append(
                f'<rect x="8" y="{y:.0f}" width="{max(at(middle) - 8, 1):.1f}" height="{_BAR - 3}" rx="1.5" '
                f'style="fill:var(--c{colors[who] % 8})"><title>{told}</title></rect>'
                f'<path class="axis" d="M{at(least):.1f} {y + 6:.1f}H{at(most):.1f}"/>'
                f'<text class="num" x="{max(at(middle), at(most)) + 5:.1f}" y="{y + 10:.0f}">{number(middle)}</text>'
            )
            y += _BAR
        y += 8
    for power in range(low, int(frame.x1) + 1):
        x = at(10.0**power)
        frame.parts.append(f'<path class="grid" d="M{x:.1f} {frame.top:.0f}V{y:.0f}"/>')
        anchor = "start" if power == low else "middle"  # the first label is at the drawing's edge
        frame.parts.append(
            f'<text class="num" x="{x:.1f}" y="{y + 14:.0f}" text-anchor="{anchor}">{number(10.0**power)}</text>'
        )
    frame.parts += bars
    frame.size = (width, int(y) + 24)
    return drawing(title, frame)
