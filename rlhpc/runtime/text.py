"""Text formatting for messages: it shortens long values in the middle, and escapes control characters.

Text from files and other processes may contain characters that control a terminal; `printable` replaces them by escapes.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlhpc.runtime.env_references import mask_values

_MAX_LENGTH = 120
_MAX_WORD_LENGTH = 500
_MAX_MESSAGE_LENGTH = 3500
#: Terminal codes for colours and other styles of text.
_RENDITION = re.compile(r"\x1b\[[0-9;:]*m")
#: C0 except tab and line feed, DEL, C1, line separators, and characters that change the direction of text.
_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def short_repr(value: Any) -> str:
    """Returns the value's `repr`, cut to about 120 characters."""
    return cut(repr(value))


def cut(text: str, max_length: int = _MAX_LENGTH) -> str:
    """Returns the text or, if it is too long, its beginning, end and length. First masks values from the environment."""
    text = mask_values(text)
    if len(text) <= max_length:
        return text
    return f"{text[: max_length - 40]}…{text[-10:]} ({len(text)} characters)"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if the message is empty."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def with_source_line(error: BaseException) -> str:
    """Returns the first line of an error's message, with the file and the source line that raised it.

    For assertions of other packages, which often have no message.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return first_line(error)
    path = frames[-1].filename.rpartition("/site-packages/")[2]
    return f"{first_line(error)} ({path}, line {frames[-1].lineno}: {frames[-1].line})"


def format_bytes(num_bytes: float, num_decimals: int = 1) -> str:
    """Formats a number of bytes with a binary unit."""
    for unit_name in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.{0 if unit_name == 'B' else num_decimals}f} {unit_name}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_duration(duration_s: float) -> str:
    """Formats seconds: 29.1 ms, 42.5 s, 3 min 20 s, 5 h 07 min, 7 d 8 h."""
    if duration_s < 0.9995:
        return f"{duration_s * 1e3:.3g} ms"
    if duration_s < 60:
        return f"{duration_s:.1f} s"
    num_minutes, remainder_s = divmod(round(duration_s), 60)
    if num_minutes < 60:
        return f"{num_minutes} min {remainder_s:02d} s"
    num_hours = num_minutes // 60
    return f"{num_hours} h {num_minutes % 60:02d} min" if num_hours < 72 else f"{num_hours // 24} d {num_hours % 24} h"


def printable(text: str) -> str:
    """Replaces characters that control a terminal by their escapes (`\\x1b`, `\\u202e`), and removes colours.

    Keeps tabs and line feeds, and removes a carriage return before a line feed.
    """
    if _CONTROL_CHARACTERS.search(text) is None:
        return text
    uncoloured_text = _RENDITION.sub("", text).replace("\r\n", "\n")
    return _CONTROL_CHARACTERS.sub(
        lambda control_match: control_match[0].encode("unicode_escape").decode(), uncoloured_text
    )


def one_line(multiline_text: str) -> str:
    """Makes text `printable` and escapes line feeds, so that a row of a table stays one row."""
    return printable(multiline_text).replace("\n", "\\n")


def readable(message: str) -> str:
    """Cuts overlong words of a message, and the message itself, because not all code that quotes input uses `short_repr`."""
    return cut(
        re.sub(rf"\S{{{_MAX_WORD_LENGTH},}}", lambda word_match: cut(word_match[0]), mask_values(message)),
        _MAX_MESSAGE_LENGTH,
    )


def format_names(names: Iterable[object], limit: int = 3, separator: str = ", ") -> str:
    """Formats the first `limit` names, and the number of further names: `a, b, c and 4 more`."""
    all_names = [str(name) for name in names]
    listed_names = separator.join(all_names[:limit])
    return listed_names + (f" and {len(all_names) - limit} more" if len(all_names) > limit else "")


def interval_text(interval_bounds: Sequence[Any] | None, number_format: str, separator: str = " … ") -> str:
    """Returns an interval as text; "" if the interval is unknown or both ends are equal.

    Args:
        interval_bounds: Lower and upper end; None if the interval is unknown.
        number_format: Format of the ends.
        separator: Text between the ends.
    """
    low_bound, high_bound = interval_bounds or (0.0, 0.0)
    is_numeric = isinstance(low_bound, int | float) and isinstance(high_bound, int | float)
    return (
        f"{low_bound:{number_format}}{separator}{high_bound:{number_format}}"
        if is_numeric and low_bound < high_bound
        else ""
    )


def parenthesized_interval(
    interval_bounds: Sequence[Any] | None, number_format: str, label: str = "", separator: str = " to "
) -> str:
    """Returns a space and the `interval_text` with a label in parentheses; "" if the `interval_text` is empty."""
    formatted_interval = interval_text(interval_bounds, number_format, separator)
    return formatted_interval and f" ({label}{formatted_interval})"


_TAIL_BYTES = 16384


def align_columns(rows: Sequence[Sequence[str]], right_from: int | None = None) -> list[str]:
    """Formats a table as lines; columns from `right_from` on are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right_columns = range(len(widths))[right_from:] if right_from is not None else ()
    return [
        "  ".join(
            cell.rjust(width) if index in right_columns else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def tail(path: str) -> str:
    """Returns the last lines of a log file, as the end of a message; "" if the log is empty or cannot be read."""
    with contextlib.suppress(OSError):
        return last_lines(Path(path).read_bytes()[-_TAIL_BYTES:].decode(errors="replace"))
    return ""


def last_lines(multiline_text: str) -> str:
    """Returns the informative last lines of a log's text, as the end of a message; "" if the text is empty."""
    lines = multiline_text.strip().splitlines()
    return (
        "\n  last lines of its log:\n" + "\n".join("    " + line for line in _select_informative_lines(lines))
        if lines
        else ""
    )


def _select_informative_lines(lines: list[str]) -> list[str]:
    """Returns the last lines. If `faulthandler` has written them, returns only its message and the stack of the fault."""
    fatal_lines = [index for index, line in enumerate(lines) if line.startswith("Fatal Python error")]
    if not fatal_lines or not lines[-1].startswith(
        ("  File ", "Extension modules: ")
    ):  # the output of `faulthandler` is not at the end, so an earlier process has written it
        return lines[-12:]
    index = next(
        (index for index in range(fatal_lines[-1], len(lines)) if lines[index].startswith("Current thread")),
        fatal_lines[-1] + 1,
    )
    frames = itertools.takewhile(str.strip, lines[index : index + 8])
    return [*lines[: fatal_lines[-1]][-3:], lines[fatal_lines[-1]], *frames]
