"""Lines of the benchmark page that name each result's command, date, commit and machine: `python -m bench.measured`."""

from __future__ import annotations

import json
import re

from bench.machine import RESULTS
from rlhpc.runtime.repository import run_git

PAGE = RESULTS.parents[1] / "docs" / "reference" / "benchmarks.md"
#: A result's line on the page.
LINE = re.compile(r"^- `(\w+)\.json`.*$", re.M)


def format_line(result: str) -> str:
    """Formats the line of a result. Results without a commit have the commit that added the file."""
    path = RESULTS / f"{result}.json"
    content = json.loads(path.read_text())
    machine = content["machine"]
    command = re.sub(r" --(folder|out) \S*/\S*", "", content["command"]).replace("; ", "`, `")
    commit = machine.get("commit") or run_git(RESULTS, "log", "-1", "--format=%h", "--", path.name)
    cpu = machine["cpu"].replace("(R)", "").replace(" Processor", "")
    return (
        f"- `{result}.json`: `{command}`; {machine['date']}, commit {commit[:7]}; "
        f"{machine['cores']} cores ({cpu}), load {machine['load']:.1f}"
    )


def main() -> None:
    """Rewrites every line of the page."""
    PAGE.write_text(LINE.sub(lambda match: format_line(match[1]), PAGE.read_text()))


if __name__ == "__main__":
    main()
