"""Charts as SVG text: lines with bands and error bars, without dependencies or scripts.

Colours are CSS variables (`STYLE`), so one drawing works on a light and a dark page; `standalone` puts the variables
into the drawing for use as a separate file. The browser's own tooltips show the values under the pointer.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Size = tuple[int, int]
#: Size of a chart: the width of a phone, or a third of a page elsewhere.
CHART: Size = (364, 240)
#: Size of a chart that is as wide as two charts and the gap between them; its font size is the same.
WIDE: Size = (766, 330)
#: Size of a chart next to a wide one.
TALL: Size = (CHART[0], WIDE[1])
#: Absolute difference, and difference relative to the largest value, below which values count as equal.
_NOISE, _RELATIVE_NOISE = 1e-8, 1e-9
_LEFT_MARGIN, _RIGHT_MARGIN, _BOTTOM_MARGIN = 54, 18, 42
_MAX_POINTS = 500
#: Largest font size that a page may use (`STYLE`); the layout leaves room for it.
_FONT_SIZE = 12.5
_BOLD_FONT_SIZE = 1.12 * _FONT_SIZE
_LINE_HEIGHT = 17
#: Opening tags of a chart with data, an empty chart, and a chart that only has a sentence.
_CHART = '<svg xmlns="http://www.w3.org/2000/svg" class="chart"'
_EMPTY = '<svg xmlns="http://www.w3.org/2000/svg" class="chart empty"'
_SENTENCE = '<svg xmlns="http://www.w3.org/2000/svg" class="chart stated"'
#: Number of sections of the x axis, each with its own tooltip.
_MAX_STRIPS = 32

STYLE = """
:root{--bg:#ffffff;--panel:#ffffff;--ink:#1b2330;--muted:#5b6779;--line:#dfe4ec;--soft:#f4f6fa;
--c0:#2f6fde;--c1:#e07b1a;--c2:#15936b;--c3:#cf3f4f;--c4:#8256d0;--c5:#1292a8;--c6:#c74591;--c7:#7f8796}
@media (prefers-color-scheme:dark){:root{--bg:#10151d;--panel:#171e29;--ink:#e4e9f1;--muted:#9aa6ba;--line:#2b3545;
--soft:#1e2633;--c0:#6ea2ff;--c1:#f5a352;--c2:#41c79a;--c3:#f47a85;--c4:#b294f5;--c5:#4cc6da;--c6:#ee85bf;--c7:#9aa4b5}}
.chart{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-size:12.5px}
.chart text{fill:var(--muted)}.chart .title{fill:var(--ink);font-weight:650}
.chart .grid{stroke:var(--line);stroke-width:1}.chart .axis{stroke:var(--muted);stroke-width:1}
.chart .num{font-variant-numeric:tabular-nums}.chart .key{fill:var(--ink)}
.chart .strip{fill:transparent}.chart .strip:hover{fill:var(--ink);fill-opacity:.07}
"""


@dataclass(frozen=True)
class Line:
    """Line of a chart.

    Attributes:
        name: Name in the key; "" for none.
        x, y: The points, x ascending.
        low, high: Ends of the error bars, as y values.
        color: Index into the palette.
        smooth: Draw the points faintly, with their running mean on top.
        markers: Draw a dot at each point.
        band: Fill between `low` and `high` instead of drawing error bars.
        hollow: For each point, whether its dot is drawn as a ring.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    color: int = 0
    smooth: bool = False
    markers: bool = False
    band: bool = False
    hollow: Sequence[bool] = ()


@dataclass
class Frame:
    """Plot area of a chart: the ranges of its axes and its location in the drawing.

    Attributes:
        x0, x1, y0, y1: Ends of the axes.
        size: Size of the drawing.
        top: Upper end of the plot, below title and key.
        plot_left: Left end of the plot, to the right of the labels.
        elements: SVG elements drawn so far.
    """

    x0: float
    x1: float
    y0: float
    y1: float
    size: Size
    top: float = 40.0
    plot_left: float = _LEFT_MARGIN
    elements: list[str] = field(default_factory=list)

    @property
    def right(self) -> int:
        return self.size[0] - _RIGHT_MARGIN

    @property
    def bottom(self) -> int:
        return self.size[1] - _BOTTOM_MARGIN

    def px(self, x: float) -> float:
        return self.plot_left + (x - self.x0) / (self.x1 - self.x0) * (self.right - self.plot_left)

    def py(self, y: float) -> float:
        return self.bottom - (y - self.y0) / (self.y1 - self.y0) * (self.bottom - self.top)


def ticks(low_value: float, high_value: float, num_ticks: int = 5) -> list[float]:
    """Returns about `num_ticks` round tick values; the first is at or below `low_value`, the last at or above `high_value`."""
    if high_value <= low_value:
        pad = abs(low_value) * 0.1 or 1.0
        low_value, high_value = low_value - pad, high_value + pad
    raw_step = (high_value - low_value) / num_ticks
    power_of_ten = 10.0 ** math.floor(math.log10(raw_step))
    step = next(
        step_factor * power_of_ten
        for step_factor in (1, 2, 2.5, 5, 10)
        if step_factor * power_of_ten >= raw_step * 0.999
    )
    first_index, last_index = math.floor(low_value / step + 1e-9), math.ceil(high_value / step - 1e-9)
    return [round(index * step, 12) for index in range(first_index, last_index + 1)]


def number(value: float) -> str:
    """Formats a number in short form: 1200000 → 1.2M, 0.00025 → 2.5e-4."""
    magnitude = abs(value)
    for min_magnitude, scale, unit_name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if magnitude >= min_magnitude:
            return f"{value / scale:.4g}{unit_name}"
    if magnitude and magnitude < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def tick_labels(tick_values: Sequence[float]) -> list[str]:
    """Returns the labels of one axis in a uniform format: the same unit, decimals and exponent."""
    largest_tick = max((abs(tick) for tick in tick_values), default=0.0)
    step = min((next_tick - tick for tick, next_tick in itertools.pairwise(tick_values)), default=largest_tick) or 1.0
    scale, unit_name = next(
        ((s, u) for s, u in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if largest_tick >= s * (10 if u == "k" else 1)),
        (1.0, ""),
    )
    decimals = _count_decimals(step / scale)
    if decimals > 4:  # too small to write out
        exponent = math.floor(math.log10(largest_tick))
        scale, unit_name = 10.0**exponent, f"e{exponent}"
        decimals = _count_decimals(step / scale)
    return ["0" if tick == 0 else f"{tick / scale:.{decimals}f}{unit_name}" for tick in tick_values]


def _count_decimals(step: float) -> int:
    """Returns the number of decimals that distinguish multiples of `step`."""
    return next((n for n in range(12) if abs(round(step, n) - step) < 1e-6 * step), 12)


def text_width(label_text: str, font_size: float = _FONT_SIZE) -> float:
    """Estimates the width of a text in pixels. The estimate is large, because the font depends on the reader's machine."""
    num_narrow, num_wide = sum(map(label_text.count, "fijlrtI.,:;|!'() ")), sum(map(label_text.count, "mwMW%@"))
    num_capitals = len(re.findall("[A-LN-VX-Z]", label_text.replace("I", "")))
    return font_size * (
        0.37 * num_narrow
        + 0.92 * num_wide
        + 0.72 * num_capitals
        + 0.65 * (len(label_text) - num_narrow - num_wide - num_capitals)
    )


def line_chart(
    title: str, x_label: str, y_label: str, lines: Sequence[Line], size: Size = CHART, *, has_key: bool = False
) -> str:
    """Draws a line chart; draws a note instead if nothing was logged, and a sentence if no line changes (`statement`).

    With `has_key`, even a single line has a key.
    """
    lines = [line for line in lines if len(line.x)]
    if not lines:
        return empty_chart(title, "nothing logged yet", size)
    if all(is_constant(line.y) and (line.markers or all(map(is_constant, (line.low, line.high)))) for line in lines):
        return stated_chart(title, "; ".join(_describe_constant(line, x_label) for line in lines), size)
    xs = [x for line in lines for x in line.x]
    ys = [y for line in lines for line_values in (line.y, line.low, line.high) for y in line_values]
    has_dots = any(line.markers or len(line.x) == 1 for line in lines)
    frame = Frame(*span(xs, 0.04 if has_dots else 0.0, has_dots), *span(ys, 0.06), size)
    render_heading(
        frame, title, y_label, [(line.name, line.color) for line in lines if line.name], min_names=1 if has_key else 2
    )
    draw_axes(frame, x_label)
    for line in lines:
        _draw_line(frame, line)
    frame.elements += _iter_strips(frame, x_label, lines)
    return wrap_drawing(title, frame)


def is_constant(y_values: Sequence[float]) -> bool:
    """Returns whether values differ by no more than float noise."""
    if not len(y_values):
        return True
    lowest_value, highest = min(y_values), max(y_values)
    return highest - lowest_value <= max(_NOISE, _RELATIVE_NOISE * max(abs(lowest_value), abs(highest)))


def _describe_constant(line: Line, x_label: str) -> str:
    """Describes a line that never changes: its value, with its interval if it is a single point."""
    constant = line.y[0]
    if len(line.y) > 1 and abs(constant) <= _NOISE and not all(y == constant for y in line.y):
        constant = 0.0  # only rounding noise around 0
    sentence = number(constant)
    if len(line.x) == 1:
        if len(line.low) and len(line.high) and line.low[0] < line.high[0]:
            sentence += f" ({number(line.low[0])} … {number(line.high[0])})"
        sentence += f" at {x_label} {number(line.x[0])}"
    return f"{line.name}: {sentence}" if line.name else sentence


def standalone(svg: str) -> str:
    """Returns a drawing as the content of an SVG file, with its size, `STYLE` and a background."""
    content_start = svg.index(">") + 1
    width, height = svg[:content_start].split('viewBox="0 0 ')[1].split('"')[0].split()
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n{svg[: content_start - 1]} width="{width}" height="{height}">'
        f"<style>{STYLE}</style>"
        f'<rect width="100%" height="100%" style="fill:var(--bg)"/>{svg[content_start:]}\n'
    )


def arrange_in_rows(charts: Sequence[str], chart_size: Size, num_columns: int) -> str:
    """Combines drawings of one size into one drawing, in rows of `num_columns`."""
    num_columns = min(num_columns, len(charts))
    width, height = chart_size
    frame = Frame(0, 1, 0, 1, (num_columns * width, -(-len(charts) // num_columns) * height))
    for i, chart_svg in enumerate(charts):
        place_attributes = (
            f'x="{i % num_columns * width}" y="{i // num_columns * height}" width="{width}" height="{height}" '
        )
        frame.elements.append(chart_svg.replace("<svg ", f"<svg {place_attributes}", 1))
    return wrap_drawing("", frame)


def is_empty(svg: str) -> bool:
    """Returns whether a chart has no data."""
    return svg.startswith(_EMPTY)


def statement(svg: str) -> str | None:
    """Returns the sentence of a chart whose values never change, as HTML for a page; None for other charts."""
    if not svg.startswith(_SENTENCE):
        return None
    return svg.split('aria-label="', 1)[1].split('"', 1)[0]


def _draw_line(frame: Frame, line: Line) -> None:
    color = f"var(--c{line.color % 8})"
    if line.band and line.low:
        outline = [*zip(line.x, line.high, strict=True), *reversed(list(zip(line.x, line.low, strict=True)))]
        path_points = " ".join(f"{frame.px(x):.1f},{frame.py(y):.1f}" for x, y in outline)
        frame.elements.append(f'<polygon points="{path_points}" style="fill:{color};opacity:.18"/>')
    for x, low_y, high_y in () if line.band else zip(line.x, line.low, line.high, strict=False):
        px, top, bottom = frame.px(x), frame.py(high_y), frame.py(low_y)
        frame.elements.append(
            f'<path d="M{px:.1f} {top:.1f}V{bottom:.1f}M{px - 4:.1f} {top:.1f}h8M{px - 4:.1f} {bottom:.1f}h8" '
            f'style="stroke:{color};stroke-width:1.4;fill:none;opacity:.75"/>'
        )
    smooth = line.smooth and len(line.x) >= 60
    frame.elements.append(
        _draw_polyline(frame, *thin(line.x, line.y), color, 1.0 if smooth else 1.9, 0.35 if smooth else 1.0)
    )
    if smooth:
        frame.elements.append(_draw_polyline(frame, *thin(line.x, running_mean(line.y)), color, 2.0, 1.0))
    if line.markers or len(line.x) == 1:
        rings = line.hollow or [False] * len(line.x)
        for x, y, ring in zip(line.x, line.y, rings, strict=True):
            marker_style = f"fill:var(--panel);stroke:{color};stroke-width:1.6" if ring else f"fill:{color}"
            frame.elements.append(
                f'<circle cx="{frame.px(x):.1f}" cy="{frame.py(y):.1f}" r="3.4" style="{marker_style}"/>'
            )


def _iter_strips(frame: Frame, x_label: str, lines: Sequence[Line]) -> Iterator[str]:
    """Yields transparent strips of the plot, each with a tooltip of the lines' values at its x."""
    xs = sorted({x for line in lines for x in line.x})
    strip_xs = xs[:: math.ceil(len(xs) / _MAX_STRIPS)]
    if strip_xs[-1] != xs[-1]:
        strip_xs.append(xs[-1])
    midpoints = [(strip_x + next_position) / 2 for strip_x, next_position in itertools.pairwise(strip_xs)]
    for x, strip_start, strip_end in zip(strip_xs, [frame.x0, *midpoints], [*midpoints, frame.x1], strict=True):
        tooltip = [f"{x_label} {number(x)}"]
        for line in lines:
            i = min(bisect.bisect_left(line.x, x), len(line.x) - 1)
            if not strip_start <= line.x[i] <= strip_end:
                continue
            has_band = len(line.low) > i < len(line.high) and line.low[i] < line.high[i]
            interval_text = f" ({number(line.low[i])} to {number(line.high[i])})" if has_band else ""
            tooltip.append(f"{line.name + ': ' if line.name else ''}{number(line.y[i])}{interval_text}")
        left_x, right_x = frame.px(strip_start), frame.px(strip_end)
        yield (
            f'<rect class="strip" x="{left_x:.1f}" y="{frame.top:.0f}" width="{right_x - left_x:.1f}" '
            f'height="{frame.bottom - frame.top:.0f}"><title>{escape(chr(10).join(tooltip))}</title></rect>'
        )


def _draw_polyline(
    frame: Frame, x: Sequence[float], y: Sequence[float], color: str, width: float, opacity: float
) -> str:
    path_points = " ".join(
        f"{frame.px(x_value):.1f},{frame.py(y_value):.1f}" for x_value, y_value in zip(x, y, strict=True)
    )
    return (
        f'<polyline points="{path_points}" style="fill:none;stroke:{color};stroke-width:{width};opacity:{opacity};'
        'stroke-linejoin:round;stroke-linecap:round"/>'
    )


def thin(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Reduces a curve to about `_MAX_POINTS` points or fewer.

    The lowest and highest point of each stretch remain, so that spikes stay visible.
    """
    if len(x) <= _MAX_POINTS:
        return list(x), list(y)
    stretch_length = math.ceil(len(x) / (_MAX_POINTS // 2))
    stretches = [
        range(range_start, min(range_start + stretch_length, len(x)))
        for range_start in range(0, len(x), stretch_length)
    ]
    indices = sorted({extreme(stretch, key=lambda i: y[i]) for stretch in stretches for extreme in (min, max)})
    return [x[i] for i in indices], [y[i] for i in indices]


def running_mean(y: Sequence[float] | np.ndarray, window_share: float = 0.04) -> list[float]:
    """Returns the centred mean over a share of the points, and over at least three points."""
    import numpy as np  # here, because other charts do without it

    half_width = max(1, int(len(y) * window_share / 2 + 1e-9))
    sums = np.concatenate(([0.0], np.cumsum(np.asarray(y, np.float64))))
    indices = np.arange(len(y))
    window_starts, window_ends = np.maximum(indices - half_width, 0), np.minimum(indices + half_width + 1, len(y))
    means: list[float] = ((sums[window_ends] - sums[window_starts]) / (window_ends - window_starts)).tolist()
    return means


def span(values: Sequence[float], pad: float, pads_both_ends: bool = False) -> tuple[float, float]:
    """Returns the ends of an axis: the range of the values plus a margin of `pad` times its width at each end.

    If no value is negative and the lowest is near zero, the axis starts at zero, unless `pads_both_ends` is set.
    """
    lowest, highest = min(values), max(values)
    if lowest == highest:
        lowest, highest = lowest - (abs(lowest) * 0.1 or 1.0), highest + (abs(highest) * 0.1 or 1.0)
    width = highest - lowest
    axis_start = 0.0 if 0 <= lowest <= 0.25 * width and not pads_both_ends else lowest - pad * width
    return axis_start, highest + pad * width


def render_heading(
    frame: Frame, title: str, y_label: str, line_names: Sequence[tuple[str, int]] = (), *, min_names: int = 2
) -> None:
    """Draws the title, the label of the y axis, and the legend, which is on the right if it fits, otherwise in rows below.

    Sets `frame.top`. A legend of many rows makes the drawing taller. A legend of fewer than `min_names` names is omitted.
    """
    width, elements = frame.size[0], frame.elements
    elements.append(f'<text class="title" x="8" y="18">{escape(title)}</text>')
    bottom = 18.0
    if y_label:
        bottom += _LINE_HEIGHT
        elements.append(f'<text x="8" y="{bottom:.0f}">{escape(y_label)}</text>')
    if len(line_names) >= min_names:
        rows = _wrap_key([(name, color, 15 + text_width(name) + 10) for name, color in line_names], width - 16)
        key_x = 32 + (text_width(y_label) if y_label else text_width(title, _BOLD_FONT_SIZE))
        first_row_width = sum(entry_width for _, _, entry_width in rows[0])
        has_room = len(rows) == 1 and key_x + first_row_width <= width - 8
        bottom -= _LINE_HEIGHT if has_room else 0
        for row in rows:
            bottom += _LINE_HEIGHT
            x = width - 8 - first_row_width if has_room else 8.0
            for name, color, entry_width in row:
                elements.append(
                    f'<rect x="{x:.0f}" y="{bottom - 9:.0f}" width="9" height="9" rx="2" style="fill:var(--c{color % 8})"/>'
                    f'<text class="key" x="{x + 14:.0f}" y="{bottom:.0f}">{escape(name)}</text>'
                )
                x += entry_width
        frame.size = (width, frame.size[1] + max(0, len(rows) - 2) * _LINE_HEIGHT)
    frame.top = bottom + 14


def _wrap_key(key_entries: Sequence[tuple[str, int, float]], width: float) -> list[list[tuple[str, int, float]]]:
    """Divides the entries of a key into rows no wider than `width`."""
    rows: list[list[tuple[str, int, float]]] = [[]]
    for key_entry in key_entries:
        if rows[-1] and sum(entry_width for _, _, entry_width in rows[-1]) + key_entry[2] > width:
            rows.append([])
        rows[-1].append(key_entry)
    return rows


def draw_axes(frame: Frame, x_label: str) -> None:
    """Draws the grid, the ticks and their numbers; sets `frame.plot_left` to fit the widest number."""
    y_ticks = [y for y in ticks(frame.y0, frame.y1, 6) if frame.y0 <= y <= frame.y1]
    y_labels = tick_labels(y_ticks)
    frame.plot_left = max(34.0, 12 + max(map(text_width, y_labels)))
    left_x, elements, bottom = frame.plot_left, frame.elements, frame.bottom
    for tick_y, label in zip(map(frame.py, y_ticks), y_labels, strict=True):
        elements += [
            f'<path class="grid" d="M{left_x:.0f} {tick_y:.1f}H{frame.right}"/>',
            f'<text class="num" x="{left_x - 6:.0f}" y="{tick_y + 4:.1f}" text-anchor="end">{label}</text>',
        ]
    elements.append(f'<path class="axis" d="M{left_x:.0f} {bottom}H{frame.right}"/>')
    for tick_x, label in _iter_x_ticks(frame, frame.size[0] // 90):
        elements += [
            f'<path class="axis" d="M{tick_x:.1f} {bottom}v4"/>',
            f'<text class="num" x="{tick_x:.1f}" y="{bottom + 17}" text-anchor="middle">{label}</text>',
        ]
    middle_x = (left_x + frame.right) / 2
    elements.append(f'<text x="{middle_x:.0f}" y="{bottom + 35}" text-anchor="middle">{escape(x_label)}</text>')


def _iter_x_ticks(frame: Frame, num_ticks: int) -> Iterator[tuple[float, str]]:
    """Yields the location in the drawing and the label of each tick of the x axis."""
    tick_xs = [x for x in ticks(frame.x0, frame.x1, num_ticks) if frame.x0 <= x <= frame.x1]
    yield from zip(map(frame.px, tick_xs), tick_labels(tick_xs), strict=True)


def stated_chart(title: str, statement_text: str, size: Size = CHART) -> str:
    """Returns an SVG file with a sentence, for a chart without data; a page shows only the sentence (`statement`)."""
    frame = Frame(0, 1, 0, 1, (size[0], 60))
    render_heading(frame, title, "")
    frame.elements.append(f'<text x="8" y="40">{escape(statement_text)}</text>')
    return wrap_drawing(f"{title}: {statement_text}", frame, _SENTENCE)


def empty_chart(title: str, message_text: str, size: Size) -> str:
    """Draws an empty chart with the reason as text."""
    frame = Frame(0, 1, 0, 1, size)
    render_heading(frame, title, "")
    frame.elements.append(
        f'<text x="{size[0] / 2}" y="{size[1] / 2}" text-anchor="middle">{escape(message_text)}</text>'
    )
    return wrap_drawing(title, frame, _EMPTY)


def wrap_drawing(title: str, frame: Frame, tag: str = _CHART) -> str:
    """Returns the complete SVG element of a frame; `title` is its accessible label."""
    return (
        f'{tag} viewBox="0 0 {frame.size[0]} {frame.size[1]}" role="img" '
        f'aria-label="{escape(title, quote=True)}">' + "".join(frame.elements) + "</svg>"
    )


Spread = tuple[float, float, float]
_ROW_HEIGHT, _BAR_HEIGHT = 20, 15


def stacked_bar_chart(
    title: str,
    x_label: str,
    y_label: str,
    bin_edges: Sequence[tuple[float, float]],
    stacks: Sequence[tuple[str, Sequence[float]]],
) -> str:
    """Draws a stacked bar over each x interval of `bin_edges`; `stacks` has the name and the heights of each layer, from the
    bottom up.
    """
    if not bin_edges or not stacks:
        return empty_chart(title, "nothing logged yet", CHART)
    heights = [sum(bar_values[i] for _, bar_values in stacks) for i in range(len(bin_edges))]
    frame = Frame(bin_edges[0][0], bin_edges[-1][1], 0.0, (max(heights) or 1.0) * 1.06, CHART)
    render_heading(frame, title, y_label, [(name, color) for color, (name, _) in enumerate(stacks)])
    draw_axes(frame, x_label)
    stack_heights = [0.0] * len(bin_edges)
    for color, (name, bar_values) in enumerate(stacks):
        for i, (bin_start, bin_end) in enumerate(bin_edges):
            left_x, right_x = frame.px(bin_start), frame.px(bin_end)
            gap = min(1.0, (right_x - left_x) * 0.15)
            top, bottom = frame.py(stack_heights[i] + bar_values[i]), frame.py(stack_heights[i])
            stack_heights[i] += bar_values[i]
            if bottom - top > 0.05:
                frame.elements.append(
                    f'<rect x="{left_x + gap / 2:.1f}" y="{top:.1f}" width="{max(right_x - left_x - gap, 0.5):.1f}" '
                    f'height="{bottom - top:.1f}" style="fill:var(--c{color % 8})">'
                    f"<title>{escape(name)}: {bar_values[i]:.3g} s</title></rect>"
                )
    return wrap_drawing(title, frame)


def log_bar_chart(
    title: str, unit_name: str, rows: Mapping[str, Mapping[str, Spread]], colors: Mapping[str, int]
) -> str:
    """Draws horizontal bars on a logarithmic axis, each with its value and spread; the bars of a row form a group.

    Args:
        title: Title of the chart.
        unit_name: Unit of the values, shown under the title.
        rows: Measurement → subject → (lowest, median, highest), all above 0.
        colors: Subject → index into the palette; the key is in this order.
    """
    bound_values = [bound for spreads in rows.values() for spread in spreads.values() for bound in spread]
    low_exponent, high_exponent = math.floor(math.log10(min(bound_values))), math.ceil(math.log10(max(bound_values)))
    width = CHART[0]
    frame = Frame(low_exponent, max(high_exponent, low_exponent + 1), 0, 1, (width, 0))
    render_heading(
        frame,
        title,
        unit_name,
        [(subject, color) for subject, color in colors.items() if any(subject in f for f in rows.values())],
    )
    frame.plot_left, y = 8.0, frame.top + 4
    bars_end = (
        width - 8 - max(text_width(number(bound)) for bound in bound_values)
    )  # room for the values after the bars

    def to_x(axis_value: float) -> float:
        return 8 + (math.log10(axis_value) - low_exponent) / (frame.x1 - low_exponent) * (bars_end - 8)

    bars: list[str] = []
    for name, spreads in rows.items():
        bars.append(f'<text class="key" x="8" y="{y + 10:.0f}">{escape(name)}</text>')
        y += _ROW_HEIGHT - 4
        for subject_name, (low_value, median, high_value) in spreads.items():
            range_text = f"({number(low_value)} to {number(high_value)})"
            tooltip = f"{escape(subject_name)}: {number(median)} {escape(unit_name)} {range_text}"
            bars.append(
                f'<rect x="8" y="{y:.0f}" width="{max(to_x(median) - 8, 1):.1f}" height="{_BAR_HEIGHT - 3}" rx="1.5" '
                f'style="fill:var(--c{colors[subject_name] % 8})"><title>{tooltip}</title></rect>'
                f'<path class="axis" d="M{to_x(low_value):.1f} {y + 6:.1f}H{to_x(high_value):.1f}"/>'
                f'<text class="num" x="{max(to_x(median), to_x(high_value)) + 5:.1f}" y="{y + 10:.0f}">{number(median)}</text>'
            )
            y += _BAR_HEIGHT
        y += 8
    for exponent in range(low_exponent, int(frame.x1) + 1):
        x = to_x(10.0**exponent)
        frame.elements.append(f'<path class="grid" d="M{x:.1f} {frame.top:.0f}V{y:.0f}"/>')
        anchor_text = "start" if exponent == low_exponent else "middle"  # the first label is at the drawing's edge
        frame.elements.append(
            f'<text class="num" x="{x:.1f}" y="{y + 14:.0f}" text-anchor="{anchor_text}">{number(10.0**exponent)}</text>'
        )
    frame.elements += bars
    frame.size = (width, int(y) + 24)
    return wrap_drawing(title, frame)


_INTERVAL_ROW = 24


@dataclass(frozen=True)
class ChartRow:
    """Row of an interval chart.

    Attributes:
        name: Name of the row.
        value, low, high: The number, and the ends of its interval.
        dots: Individual values that the row summarizes, drawn as small rings.
        color: Index into the palette.
    """

    name: str
    value: float
    low: float
    high: float
    dots: Sequence[float] = field(default=())
    color: int = 0


def interval_chart(title: str, x_label: str, rows: Sequence[ChartRow]) -> str:
    """Draws a dot and an interval for each row, next to the row's name or, if names are long, below it."""
    axis_values = [x_value for row in rows for x_value in (row.value, row.low, row.high, *row.dots)]
    if is_constant(axis_values):
        return stated_chart(title, f"{number(axis_values[0])} of all")
    width = CHART[0]
    frame = Frame(*span(axis_values, 0.04, pads_both_ends=True), 0, 1, (width, 0))
    render_heading(frame, title, "")
    max_name_width = 16 + max(text_width(row.name) for row in rows)
    names_above = max_name_width > 0.45 * width  # long names stand above their rows
    frame.plot_left = 16.0 if names_above else max_name_width
    y, row_drawings = frame.top + 6, []
    for row in rows:
        color = f"var(--c{row.color % 8})"
        interval_text = f" ({number(row.low)} to {number(row.high)})" if row.low < row.high else ""
        name_y = y + 12
        y += 17 if names_above else 0
        title_text = f"{row.name}: {number(row.value)}{interval_text}"
        marks_svg = "".join(
            f'<circle cx="{frame.px(x_value):.1f}" cy="{y + 8}" r="2.6" '
            f'style="fill:var(--panel);stroke:{color};stroke-width:1.2"/>'
            for x_value in row.dots
        )
        row_drawings.append(
            f'<g><title>{escape(title_text)}</title><text class="key" x="8" y="{name_y}">{escape(row.name)}</text>'
            f'<path d="M{frame.px(row.low):.1f} {y + 8}H{frame.px(row.high):.1f}" style="stroke:{color};stroke-width:3;'
            f'opacity:.45"/>{marks_svg}<circle cx="{frame.px(row.value):.1f}" cy="{y + 8}" r="4.4" '
            f'style="fill:{color}"/></g>'
        )
        y += _INTERVAL_ROW
    for tick_x, label in _iter_x_ticks(frame, 4):
        frame.elements.append(f'<path class="grid" d="M{tick_x:.1f} {frame.top:.0f}V{y:.0f}"/>')
        frame.elements.append(
            f'<text class="num" x="{tick_x:.1f}" y="{y + 15:.0f}" text-anchor="middle">{label}</text>'
        )
    frame.elements.append(f'<text x="{width / 2:.0f}" y="{y + 32:.0f}" text-anchor="middle">{escape(x_label)}</text>')
    frame.elements += row_drawings
    frame.size = (width, int(y) + 42)
    return wrap_drawing(title, frame)
