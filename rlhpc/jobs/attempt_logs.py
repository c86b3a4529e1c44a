"""Log files that hold several starts of a run; a marker line separates the output of two starts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

_START_LINE = re.compile(r"---- start (\d+), \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ----")
_RANK_LOG_NAME = re.compile(r".+-\d+")
#: Values of `rlhpc logs --start` besides numbers.
LAST, ALL = "last", "all"


def mark_start(folder: Path) -> None:
    """Appends a marker line for a new start to each log of a folder; does nothing if no rank has written there yet."""
    files = [file for pattern in ("*.out", "*.err") for file in folder.glob(pattern) if file.stat().st_size]
    if not any(_RANK_LOG_NAME.fullmatch(file.stem) for file in files):  # the driver's own log may already exist
        return
    start_number = 1 + max((_last_start_number(file) for file in files), default=0)
    start_line = f"---- start {start_number}, {time.strftime('%Y-%m-%d %H:%M:%S')} ----\n"
    for file in files:
        with file.open("rb+") as log:
            log.seek(-1, 2)
            ends_line = log.read(1) == b"\n"
        with file.open("a", encoding="utf-8") as log:
            log.write(start_line if ends_line else f"\n{start_line}")


def _last_start_number(file: Path) -> int:
    """Returns the number of the last start in a log."""
    with file.open(encoding="utf-8", errors="replace") as log:
        start_numbers = [int(match[1]) for line in log if (match := _START_LINE.fullmatch(line.rstrip("\n")))]
    return max(start_numbers, default=1)


def lines_of_start(lines: Iterable[str], start: str) -> list[str]:
    """Returns the lines that a start of the run wrote.

    Args:
        lines: Lines of a log or of its end.
        start: The start's number, `last` or `all`.
    """
    if start == ALL:
        return list(lines)
    start_lines: list[str] = []
    start_number, is_selected = 1, start in (LAST, "1")
    for line in lines:
        if match := _START_LINE.fullmatch(line):
            start_number = int(match[1])
            is_selected = start in (LAST, str(start_number))
            if start == LAST:
                start_lines.clear()
        elif is_selected:
            start_lines.append(line)
    return start_lines
