"""Texts for people: numbers, intervals, tables, the ends of logs, and what a terminal must not get."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhpc.runtime.text import (
    align_columns,
    cut,
    first_line,
    format_bytes,
    format_duration,
    format_names,
    interval_text,
    last_lines,
    one_line,
    parenthesized_interval,
    printable,
    readable,
    short_repr,
    tail,
    with_source_line,
)

PACKAGE = Path(__file__).resolve().parents[3] / "rlhpc"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"), (0.0291, "29.1 ms"), (0.9994, "999 ms"), (0.9996, "1.0 s"), (42.49, "42.5 s"), (59.94, "59.9 s"),
        (60, "1 min 00 s"), (200.4, "3 min 20 s"), (3599.6, "1 h 00 min"), (5 * 3600 + 7 * 60, "5 h 07 min"),
        (7 * 86400 + 8 * 3600, "7 d 8 h"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (5 << 40, "5.0 TiB")]
)
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_intervals() -> None:
    assert interval_text((0.25, 0.5), ".2f") == "0.25 … 0.50"
    assert interval_text((0.5, 0.5), ".2f") == interval_text(None, ".2f") == interval_text(("a", "b"), "") == ""
    assert (
        parenthesized_interval((1.0, 2.0), ".0f", "95 %: ") == " (95 %: 1 to 2)"
        and parenthesized_interval(None, "f") == ""
    )


def test_the_first_names_and_the_number_of_the_others() -> None:
    assert format_names([]) == "" and format_names("abc") == "a, b, c"
    assert format_names(range(7)) == "0, 1, 2 and 4 more"
    assert format_names(("a b", "c"), limit=1, separator="; ") == "a b and 1 more"


def test_no_message_lists_some_of_its_names_as_if_they_were_all() -> None:
    """Who shortens a list of names says how many there are more: `format_names`."""
    shortened = re.compile(r"""['"][,;] ['"]\.join\(.*\[:(?!1\])(?:\d+|_MAX\w*)\]""")
    lines = [line for path in PACKAGE.rglob("*.py") for line in path.read_text().splitlines() if shortened.search(line)]
    assert not lines


def test_tables() -> None:
    rows = [("run", "return"), ("cartpole", "9"), ("x", "123.4")]
    assert align_columns(rows) == ["run       return", "cartpole  9", "x         123.4"]
    assert align_columns(rows, right_from=1) == ["run       return", "cartpole       9", "x          123.4"]


def test_long_texts_are_cut_and_keep_their_ends() -> None:
    text = "a" * 300 + "the end"
    assert (
        len(cut(text)) < 200
        and cut(text).startswith("aaa")
        and "(307 characters)" in cut(text)
        and "the end" in cut(text)
    )
    assert cut("short") == "short" and short_repr({"a": 1}) == "{'a': 1}"
    assert len(readable("key " + "x" * 5000)) < 400


def test_a_terminal_gets_no_control_characters() -> None:
    assert printable("plain\ttext\n") == "plain\ttext\n"
    assert printable("\x1b[31mred\x1b[0m\r\nnext") == "red\nnext"
    assert printable("a\x1b]0;title\x07\u202eb") == "a\\x1b]0;title\\x07\\u202eb"
    assert one_line("two\nlines") == "two\\nlines"


def test_errors_without_a_message_have_their_type() -> None:
    assert first_line(ValueError("one\ntwo")) == "one" and first_line(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_an_error_with_its_source_line() -> None:
    with pytest.raises(ValueError) as caught:
        int("x")
    assert re.search(r'.* \(.*test_text\.py, line \d+: int\("x"\)\)$', with_source_line(caught.value))
    assert with_source_line(ValueError("one\ntwo")) == "one"


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(str(log)) == ""
    log.write_text("".join(f"line {number}\n" for number in range(40)))
    assert tail(str(log)).splitlines()[-1] == "    line 39" and "line 20" not in tail(str(log))
    stack = "".join(f'  File "a.py", line {number} in f\n' for number in range(20))
    shown = last_lines(
        f"first\n{'noise' * 3}\n" * 9 + f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n{stack}"
    )
    assert "Segmentation fault" in shown and "line 0 in f" in shown and "line 19 in f" not in shown
    assert len(last_lines("line\n" * 30 + "end").splitlines()) == 14


FAULT = """Fatal Python error: Segmentation fault

Thread 0x01 (most recent call first):
  File "service.py", line 1 in _serve

Current thread 0x02 (most recent call first):
  File "role.py", line 7 in fault

Extension modules: numpy, torch (total: 2)
"""


def test_a_fault_is_shown_unless_it_was_an_earlier_processs(tmp_path: Path) -> None:
    log = tmp_path / "rank.err"
    log.write_text("before\n" + FAULT)
    assert "in fault" in tail(str(log)) and "Extension modules" not in tail(str(log)) and "_serve" not in tail(str(log))
    later = [f"line {n}" for n in range(20)]
    log.write_text(FAULT + "\n".join(later) + "\n")
    assert tail(str(log)).split("\n    ")[1:] == later[-12:]
