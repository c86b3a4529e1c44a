"""Metrics of short runs of shipped configurations, recorded for tests: `python -m tests.recorded_metrics CONFIG=RUN_FOLDER…`.

Each run was made by `rlhpc train CONFIG runner.segments=1` on two cores and ended after some minutes. Only metrics that rules
for alerts may name are kept, with five digits.
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

from rlhpc.metrics import read_metrics

FILE = Path(__file__).parent / "data" / "recorded_metrics.json.xz"
_KEPT = ("train/", "eval/", "critic/", "rollout/nonfinite", "env/nonfinite")


def recorded() -> dict[str, list[dict[str, Any]]]:
    """Returns configuration → rows."""
    return dict(json.loads(lzma.decompress(FILE.read_bytes())))


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main(pairs: list[str]) -> None:
    runs = recorded() if FILE.exists() else {}
    for pair in pairs:
        config, _, folder = pair.partition("=")
        rows = read_metrics(Path(folder) / "metrics.jsonl")
        runs[config] = [{k: _short(v) for k, v in row.items() if k == "step" or k.startswith(_KEPT)} for row in rows]
    FILE.write_bytes(lzma.compress(json.dumps(dict(sorted(runs.items()))).encode(), preset=9))


if __name__ == "__main__":
    main(sys.argv[1:])
