"""The benchmark page gives each result's command, date, commit and machine: `python -m bench.measured`."""

from __future__ import annotations

import re

from bench.machine import RESULTS
from bench.measured import LINE, PAGE, format_line

#: The commit of a result that does not name one is in the history, which a shallow clone may lack.
COMMIT = re.compile(r"commit [0-9a-f]{7}")


def test_every_result_has_its_line() -> None:
    lines = {match[1]: match[0] for match in LINE.finditer(PAGE.read_text())}
    assert set(lines) == {path.stem for path in RESULTS.glob("*.json")}
    for result, line in lines.items():
        assert COMMIT.search(line), result
        if '"commit"' in (RESULTS / f"{result}.json").read_text():
            assert line == format_line(result)
        else:
            assert COMMIT.sub("", line) == COMMIT.sub("", format_line(result))


def test_a_result_has_one_line_below_a_question() -> None:
    text = PAGE.read_text()
    assert len(LINE.findall(text)) == len(set(LINE.findall(text)))
    for section in re.split(r"^### ", text, flags=re.M)[1:]:
        assert section.splitlines()[0].endswith("?")
        assert LINE.search(section), section.splitlines()[0]
