"""A terminal session as an animated SVG, for the README.

    script -q -O out -T timing -c "stty cols 118 rows 24; rlhpc run configs/quickstart.yaml"
    python docs/recording.py out timing --command "rlhpc run configs/quickstart.yaml" --seconds 16 >docs/images/run.svg

Only what our commands write is understood: lines, carriage returns, and the sequences that clear a line or set colours.
"""

from __future__ import annotations

import argparse
import html
import re
from pathlib import Path

COLUMNS, ROWS = 118, 17
_WIDTH, _HEIGHT, _LEFT, _TOP = 7.23, 17, 14, 40
_PIECE = re.compile(r"\x1b\[\??([\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Screen:
    """The lines that a terminal shows."""

    def __init__(self) -> None:
        self.lines, self.column = [""], 0

    def feed(self, text: str) -> None:
        """Takes what was written."""
        for _, code, move, words in _PIECE.findall(text):
            if move == "\n":
                self.lines.append("")
                self.column = 0
            elif move == "\r":
                self.column = 0
            elif code == "K":
                self.lines[-1] = ""
            elif words:
                line = self.lines[-1].ljust(self.column)
                self.lines[-1] = line[: self.column] + words + line[self.column + len(words) :]
                self.column += len(words)

    def shown(self) -> tuple[str, ...]:
        """The last lines, as many as fit."""
        return tuple(line[:COLUMNS].rstrip() for line in self.lines[-ROWS:])


def frames(out: bytes, timing: str, command: str, seconds: float, most: int) -> list[tuple[float, tuple[str, ...]]]:
    """(when, what is shown), `seconds` in all, at most `most` of them."""
    body = out[out.index(b"\n") + 1 :]  # `script` says first when it started
    body = body[: body.rindex(b"Script done")].rstrip()
    screen, at, now = Screen(), 0, 0.0
    screen.feed(f"$ {command}\n")
    found = [(0.0, screen.shown())]
    for line in timing.splitlines():
        delay, count = line.split()[-2:]
        now += float(delay)
        screen.feed(body[at : at + int(count)].decode(errors="ignore"))
        at += int(count)
        if screen.shown() != found[-1][1]:
            found.append((now, screen.shown()))
    length = found[-1][0]
    kept, last = [], -1.0
    for when, shown in found:
        when *= seconds / length
        if when - last >= seconds / most or shown is found[-1][1]:
            kept.append((when, shown))
            last = when
    return kept


def drawn(shots: list[tuple[float, tuple[str, ...]]], pause: float) -> str:
    """The SVG; it starts again after `pause` seconds. Without animation the last picture stands."""
    total = shots[-1][0] + pause
    wide, high = COLUMNS * _WIDTH + 2 * _LEFT, _TOP + ROWS * _HEIGHT + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high}" role="img" aria-label="rlhpc run">',
        "<style>text{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d6deeb;white-space:pre}"
        "@media (prefers-reduced-motion:reduce){g{visibility:hidden!important;animation:none!important}"
        "g:last-of-type{visibility:visible!important}}g{visibility:hidden}",
    ]
    bodies = []
    for index, (when, shown) in enumerate(shots):
        until = shots[index + 1][0] if index + 1 < len(shots) else total
        a, b = 100 * when / total, 100 * until / total
        hidden = f"0%,{a:.2f}%{{visibility:hidden}}" if index else ""
        parts.append(
            f"@keyframes k{index}{{{hidden}{a + 0.01 if index else 0:.2f}%,{b:.2f}%{{visibility:visible}}"
            + (f"{b + 0.01:.2f}%,100%{{visibility:hidden}}}}" if b < 99.98 else "}")
            + f"#f{index}{{animation:k{index} {total:.1f}s step-end infinite}}"
        )
        rows = [
            f'<text x="{_LEFT}" y="{_TOP + number * _HEIGHT}" xml:space="preserve">{html.escape(line)}</text>'
            for number, line in enumerate(shown)
            if line
        ]
        bodies.append(f'<g id="f{index}">{"".join(rows)}</g>')
    parts.append("</style>")
    parts.append('<rect width="100%" height="100%" rx="8" fill="#0b1522"/>')
    for place, colour in zip((18, 34, 50), ("#ff5f57", "#febc2e", "#28c840"), strict=True):
        parts.append(f'<circle cx="{place}" cy="16" r="5" fill="{colour}"/>')
    return "\n".join([*parts, *bodies, "</svg>"]) + "\n"


def main() -> None:
    """Reads the two files of `script`, writes the SVG."""
    parser = argparse.ArgumentParser(description="a terminal session as an animated SVG")
    parser.add_argument("out", type=Path)
    parser.add_argument("timing", type=Path)
    parser.add_argument("--command", required=True, help="what was typed")
    parser.add_argument("--seconds", type=float, default=16.0, help="how long it plays")
    parser.add_argument("--frames", type=int, default=60)
    args = parser.parse_args()
    shots = frames(args.out.read_bytes(), args.timing.read_text(), args.command, args.seconds, args.frames)
    print(drawn(shots, 6.0), end="")


if __name__ == "__main__":
    main()
