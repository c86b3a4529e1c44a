"""Computes the table of families and writes the page.

    python -m tests.families [FAMILY…]

Prints a line a family; writes tests/families/results.json and docs/reference/model-families.md after each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from bench.machine import commit
from tests.families.cells import CELLS, evaluate
from tests.families.models import FAMILIES
from tests.families.page import PAGE, RESULTS, read_results, render


def main(names: Sequence[str]) -> None:
    """Computes all cells of families."""
    rows = read_results()
    for name in names or FAMILIES:
        began_s = time.perf_counter()
        cells = {cell: evaluate(name, cell) for cell in CELLS}
        rows[name] = {"commit": commit(), **cells}
        print(f"{name} ({time.perf_counter() - began_s:.0f} s):", *cells.values(), sep=" | ", flush=True)
        RESULTS.write_text(json.dumps({key: rows[key] for key in sorted(rows)}, indent=1) + "\n")
        PAGE.write_text(render(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
