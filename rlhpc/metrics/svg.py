"""Small charts as SVG text: lines with bands and error bars, stacked bars. No dependency, no script.

Colours are CSS variables (`STYLE`), so one drawing serves a light and a dark page; `standalone` puts the variables
into the drawing for use as a file of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

Size = tuple[int, int]
LARGE: Size = (560, 300)
SMALL: Size = (400, 250)
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 18, 40, 46
_MAX_POINTS = 500

STYLE = """
:root{--bg:#ffffff;--panel:#ffffff;--ink:#1b2330;--muted:#647085;--line:#dfe4ec;--soft:#f4f6fa;
--c0:#2f6fde;--c1:#e07b1a;--c2:#15936b;--c3:#cf3f4f;--c4:#8256d0;--c5:#1292a8;--c6:#c74591;--c7:#7f8796}
@media (prefers-color-scheme:dark){:root{--bg:#10151d;--panel:#171e29;--ink:#e4e9f1;--muted:#93a0b5;--line:#2b3545;
--soft:#1e2633;--c0:#6ea2ff;--c1:#f5a352;--c2:#41c79a;--c3:#f47a85;--c4:#b294f5;--c5:#4cc6da;--c6:#ee85bf;--c7:#9aa4b5}}
.chart{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-size:11.5px}
.chart text{fill:var(--muted)}.chart .title{fill:var(--ink);font-size:13.5px;font-weight:600}
.chart .grid{stroke:var(--line);stroke-width:1}.chart .axis{stroke:var(--muted);stroke-width:1}
.chart .num{font-variant-numeric:tabular-nums}.chart .key{fill:var(--ink)}
"""


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: In the key; "" for none.
        x, y: Points, x ascending.
        low, high: Ends of error bars, as y values.
        color: Index into the palette.
        smooth: Draw the points faintly and their running mean over them.
        markers: Draw a dot at each point.
        band: Fill between `low` and `high` instead of drawing error bars.
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


@dataclass(frozen=True)
class _Frame:
    x0: float
    x1: float
    y0: float
    y1: float
    size: Size
    parts: list[str] = field(default_factory=list)

    @property
    def right(self) -> int:
        return self.size[0] - _RIGHT

    @property
    def bottom(self) -> int:
        return self.size[1] - _BOTTOM

    def px(self, x: float) -> float:
        return _LEFT + (x - self.x0) / (self.x1 - self.x0) * (self.right - _LEFT)

    def py(self, y: float) -> float:
        return self.bottom - (y - self.y0) / (self.y1 - self.y0) * (self.bottom - _TOP)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def number(value: float) -> str:
    """Short: 1200000 → 1.2M, 0.00025 → 2.5e-4."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = {"G": 1e9, "M": 1e6, "k": 1e3}[unit]
            return f"{value / scale:.4g}{unit}"
    if size and size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def line_chart(title: str, x_label: str, y_label: str, lines: Sequence[Line], size: Size = LARGE) -> str:
    """A chart of lines; says so when there is nothing to draw."""
    lines = [line for line in lines if len(line.x)]
    if not lines:
        return _empty(title, "nothing logged yet", size)
    xs = [x for line in lines for x in line.x]
    ys = [y for line in lines for values in (line.y, line.low, line.high) for y in values]
    frame = _Frame(*_range(xs, 0.03 if any(line.markers for line in lines) else 0.0), *_range(ys, 0.06), size)
    _axes(frame, title, x_label, y_label)
    for line in lines:
        _draw(frame, line)
    _key(frame, [(line.name, line.color) for line in lines if line.name])
    return _wrap(title, frame.parts, frame.size)


def stacked_bars(
    title: str,
    x_label: str,
    y_label: str,
    bins: Sequence[tuple[float, float]],
    stacks: Sequence[tuple[str, Sequence[float]]],
) -> str:
    """Bars over x intervals, one colour per named layer from the bottom up."""
    if not bins or not stacks:
        return _empty(title, "nothing logged yet", LARGE)
    heights = [sum(values[i] for _, values in stacks) for i in range(len(bins))]
    frame = _Frame(bins[0][0], bins[-1][1], 0.0, (max(heights) or 1.0) * 1.06, LARGE)
    _axes(frame, title, x_label, y_label)
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
    _key(frame, [(name, color) for color, (name, _) in enumerate(stacks)])
    return _wrap(title, frame.parts, frame.size)


def standalone(svg: str) -> str:
    """The same drawing as a file of its own."""
    start = svg.index(">") + 1
    width, height = svg[:start].split('viewBox="0 0 ')[1].split('"')[0].split()
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n{svg[: start - 1]} width="{width}" height="{height}">'
        f"<style>{STYLE}</style>"
        f'<rect width="100%" height="100%" style="fill:var(--bg)"/>{svg[start:]}\n'
    )


def _draw(frame: _Frame, line: Line) -> None:
    color = f"var(--c{line.color % 8})"
    if line.band and line.low:
        outline = [*zip(line.x, line.high, strict=True), *reversed(list(zip(line.x, line.low, strict=True)))]
        points = " ".join(f"{frame.px(x):.1f},{frame.py(y):.1f}" for x, y in outline)
        frame.parts.append(f'<polygon points="{points}" style="fill:{color};opacity:.18"/>')
    for x, low, high in () if line.band else zip(line.x, line.low, line.high, strict=False):
        px, top, bottom = frame.px(x), frame.py(high), frame.py(low)
        frame.parts.append(
            f'<path d="M{px:.1f} {top:.1f}V{bottom:.1f}M{px - 4:.1f} {top:.1f}h8M{px - 4:.1f} {bottom:.1f}h8" '
            f'style="stroke:{color};stroke-width:1.4;fill:none;opacity:.75"/>'
        )
    smooth = line.smooth and len(line.x) >= 60
    frame.parts.append(_path(frame, *thin(line.x, line.y), color, 1.0 if smooth else 1.9, 0.35 if smooth else 1.0))
    if smooth:
        frame.parts.append(_path(frame, *thin(line.x, running_mean(line.y)), color, 2.0, 1.0))
    if line.markers or len(line.x) == 1:
        for x, y in zip(line.x, line.y, strict=True):
            frame.parts.append(
                f'<circle cx="{frame.px(x):.1f}" cy="{frame.py(y):.1f}" r="3.4" style="fill:{color}">'
                f"<title>{number(x)}: {number(y)}</title></circle>"
            )


def _path(frame: _Frame, x: Sequence[float], y: Sequence[float], color: str, width: float, opacity: float) -> str:
    points = " ".join(f"{frame.px(a):.1f},{frame.py(b):.1f}" for a, b in zip(x, y, strict=True))
    return (
        f'<polyline points="{points}" style="fill:none;stroke:{color};stroke-width:{width};opacity:{opacity};'
        'stroke-linejoin:round;stroke-linecap:round"/>'
    )


def thin(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most about `_MAX_POINTS` points; of each stretch the lowest and the highest stay, so spikes do not vanish."""
    if len(x) <= _MAX_POINTS:
        return list(x), list(y)
    stretch = math.ceil(len(x) / (_MAX_POINTS // 2))
    keep: list[int] = []
    for start in range(0, len(x), stretch):
        part = range(start, min(start + stretch, len(x)))
        keep += sorted({min(part, key=lambda i: y[i]), max(part, key=lambda i: y[i])})
    return [x[i] for i in keep], [y[i] for i in keep]


def running_mean(y: Sequence[float]) -> list[float]:
    """Centred mean over about 4 % of the points."""
    half = max(1, len(y) // 50)
    sums = [0.0]
    for value in y:
        sums.append(sums[-1] + value)
    spans = [(max(0, i - half), min(len(y), i + half + 1)) for i in range(len(y))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in spans]


def _range(values: Sequence[float], pad: float) -> tuple[float, float]:
    """Ends of an axis: the data and a margin; zero where the data start near it."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
    span = high - low
    start = 0.0 if 0 <= low <= 0.25 * span else low - pad * span
    return start, high + pad * span


def _axes(frame: _Frame, title: str, x_label: str, y_label: str) -> None:
    x_ticks = [x for x in ticks(frame.x0, frame.x1, frame.size[0] // 90) if frame.x0 <= x <= frame.x1]
    y_ticks = [y for y in ticks(frame.y0, frame.y1, 6) if frame.y0 <= y <= frame.y1]
    parts, bottom = frame.parts, frame.bottom
    parts.append(f'<text class="title" x="{_LEFT}" y="18">{escape(title)}</text>')
    for y in y_ticks:
        at = frame.py(y)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{frame.right}"/>')
        parts.append(f'<text class="num" x="{_LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{number(y)}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{frame.right}"/>')
    for x in x_ticks:
        at = frame.px(x)
        parts.append(f'<path class="axis" d="M{at:.1f} {bottom}v4"/>')
        parts.append(f'<text class="num" x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{number(x)}</text>')
    middle_x, middle_y = (_LEFT + frame.right) / 2, (_TOP + bottom) / 2
    parts.append(f'<text x="{middle_x:.0f}" y="{bottom + 37}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text x="15" y="{middle_y:.0f}" text-anchor="middle" transform="rotate(-90 15 {middle_y:.0f})">'
        f"{escape(y_label)}</text>"
    )


def _key(frame: _Frame, names: Sequence[tuple[str, int]]) -> None:
    if len(names) < 2:
        return
    at = frame.right - sum(17 + 6.6 * len(name) for name, _ in names)
    for name, color in names:
        frame.parts.append(
            f'<rect x="{at:.0f}" y="10" width="9" height="9" rx="2" style="fill:var(--c{color % 8})"/>'
            f'<text class="key" x="{at + 13:.0f}" y="18">{escape(name)}</text>'
        )
        at += 17 + 6.6 * len(name)


def _empty(title: str, text: str, size: Size) -> str:
    return _wrap(
        title,
        [
            f'<text class="title" x="{_LEFT}" y="18">{escape(title)}</text>',
            f'<text x="{size[0] / 2}" y="{size[1] / 2}" text-anchor="middle">{escape(text)}</text>',
        ],
        size,
    )


def _wrap(title: str, parts: Sequence[str], size: Size) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {size[0]} {size[1]}" role="img" '
        f'aria-label="{escape(title, quote=True)}">' + "".join(parts) + "</svg>"
    )
