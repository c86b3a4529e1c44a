"""The page of benchmarks says of each result when it was measured, and of which code: `python -m bench.measured`."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `(\w+)\.json` \| (\d{4}-\d\d-\d\d) \| ([0-9a-f]{7,})\S* \|$", re.M)


def test_every_result_has_its_date_and_code() -> None:
    page = (ROOT / "docs" / "reference" / "benchmarks.md").read_text()
    rows = {name: (date, commit) for name, date, commit in ROW.findall(page)}
    files = {path.stem: json.loads(path.read_text())["machine"] for path in (ROOT / "bench" / "results").glob("*.json")}
    assert {name: date for name, (date, _) in rows.items()} == {name: one["date"] for name, one in files.items()}
    for name, machine in files.items():
        assert machine.get("commit", rows[name][1]).startswith(rows[name][1]), name
