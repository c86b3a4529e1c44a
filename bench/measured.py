"""python -m bench.measured: the table at the end of the page of benchmarks, which code each result was measured with."""

from __future__ import annotations

import json

from bench.machine import RESULTS
from rlhpc.runtime.repository import run_git

PAGE = RESULTS.parents[1] / "docs" / "reference" / "benchmarks.md"
_HEAD = "| result | measured on | code of |\n|---|---|---|\n"


def table() -> str:
    """Formats a row for each result, the oldest first. Results without a commit have the commit that added the file."""
    rows = []
    for path in RESULTS.glob("*.json"):
        machine = json.loads(path.read_text())["machine"]
        rows.append((machine["date"], path.stem, machine.get("commit") or _brought_by(path.name)))
    return _HEAD + "".join(f"| `{name}.json` | {date} | {commit} |\n" for date, name, commit in sorted(rows))


def _brought_by(name: str) -> str:
    return run_git(RESULTS, "log", "-1", "--format=%h", "--", name)


def main() -> None:
    """Writes the table in the place of the one that is there."""
    before, heading, _ = PAGE.read_text().partition(_HEAD)
    assert heading, f"{PAGE} has no table to replace"
    PAGE.write_text(before + table())


if __name__ == "__main__":
    main()
