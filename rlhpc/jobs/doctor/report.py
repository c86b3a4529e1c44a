"""What the doctor found: lines, as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["pass", "warn", "fail"]
LEVELS: tuple[Level, ...] = ("pass", "warn", "fail")
_WIDTH = 120


@dataclass(frozen=True)
class Line:
    """One finding.

    Attributes:
        level: `fail` for what a run cannot do without; `warn` for what costs something, or could not be checked.
        what: What was checked.
        found: What was found.
        do: What to do about it; empty if the check passed.
    """

    level: Level
    what: str
    found: str
    do: str = ""


def names(nodes: Iterable[str]) -> str:
    """Node names for a message: all of them if they are few, otherwise their number."""
    listed = sorted(dict.fromkeys(nodes))
    return ", ".join(listed) if len(listed) <= 6 else f"{', '.join(listed[:5])} and {len(listed) - 5} more"


def size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def worst(lines: Sequence[Line]) -> Level:
    return max((line.level for line in lines), key=LEVELS.index, default="pass")


def render(lines: Sequence[Line]) -> str:
    """The lines as text, and a line that counts them."""
    column = max((len(line.what) for line in lines), default=0) + 2
    indent = " " * (6 + column)
    out = []
    for line in lines:
        out += textwrap.wrap(
            line.found, _WIDTH, initial_indent=f"{line.level}  {line.what:<{column}}", subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        if line.do:
            out += textwrap.wrap(
                line.do, _WIDTH, initial_indent=f"{indent}→ ", subsequent_indent=f"{indent}  ",
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
    counts = Counter(line.level for line in lines)
    return "\n".join([*out, "", f"{len(lines)} checks: " + ", ".join(f"{counts[level]} {level}" for level in LEVELS)])


def to_json(lines: Sequence[Line]) -> str:
    """The same as JSON: `{"level": …, "lines": [{"level", "what", "found", "do"}, …]}`."""
    return json.dumps({"level": worst(lines), "lines": [asdict(line) for line in lines]}, indent=1, ensure_ascii=False)
