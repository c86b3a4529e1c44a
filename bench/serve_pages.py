"""Time in which a page of `rlhpc serve` opens, in headless Chromium: 50 runs of 10 000 steps.

    python -m bench.serve_pages --repeat 5

Writes the run folders, starts `rlhpc serve` anew for each opening, so that it has read nothing, and opens its page in a new
browser. `default` is the page as it opens: the table of all runs, and the charts of the four that were written last. `all`
is a bookmark of all runs, whose charts have a curve of each. Both times run from the navigation to the moment when the
table and all charts are drawn, and `bytes` counts what the page received until then. Curves of runs that were not read yet
are drawn from a sample of their rows; `read` is the time until every row counts. Prints a line for each opening and writes
bench/results/serve_pages.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.machine import goal, spread, write
from tests.chromium_pipe import Browser

RUNS, STEPS = 50, 10_000
#: Limit of the time in which a page opens, in seconds.
LIMIT_S = 2.0
#: Metrics of a row; a PPO run has as many.
METRICS = (
    "train/episode_return", "train/success_once", "train/loss", "train/approx_kl", "train/entropy", "train/grad_norm",
    "time/step_s", "time/rollout_s", "time/train_s", "time/wall_s", "rollout/env_steps", "memory/host_bytes",
)  # fmt: skip
#: True when the table has all runs, and each chart the curves of all chosen runs.
DRAWN = """(() => {{
  const charts = [...document.querySelectorAll('figure canvas')];
  return document.querySelectorAll('#table tbody tr').length === {runs} && charts.length > 0
    && charts.every(canvas => canvas.dataset.range) && document.querySelectorAll('#legend > span').length === {curves};
}})()"""


def write_runs(folder: Path) -> None:
    """Writes the folders of finished runs, whose metrics are noisy curves."""
    rows = random.Random(0)
    for number in range(RUNS):
        run = folder / f"run{number:02}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("runner: {task_type: embodied}\n")
        status = {"updated": time.time() + number, "state": "finished", "step": STEPS, "max_steps": STEPS}
        (run / "status.json").write_text(json.dumps(status))
        with (run / "metrics.jsonl").open("w") as file:
            for step in range(1, STEPS + 1):
                values = {name: math.exp(-step / 3000) + 0.1 * rows.random() for name in METRICS}
                values |= {"time/wall_s": 2.0 * step, "rollout/env_steps": 512 * step}
                file.write(json.dumps({"step": step, **values}) + "\n")


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Yields the address of a new `rlhpc serve`."""
    command = [sys.executable, "-m", "rlhpc.cli", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait(20)


def open_page(folder: Path, is_all: bool) -> dict[str, float]:
    """Returns the seconds in which a page opens and in which all rows are read, and the bytes that it receives."""
    chosen = "#runs=" + "%0A".join(f"run{number:02}" for number in range(RUNS)) if is_all else ""
    with tempfile.TemporaryDirectory() as scratch, serving(folder) as address, Browser(Path(scratch)) as browser:
        start = time.monotonic()
        browser.open(address + chosen)
        browser.wait(DRAWN.format(runs=RUNS, curves=RUNS if is_all else 4), 120)
        opened_s = time.monotonic() - start
        received = browser.evaluate(
            "performance.getEntriesByType('resource').reduce((sum, entry) => sum + entry.transferSize, 0)"
        )
        browser.wait("document.querySelector('#sampled')?.textContent === ''", 300)
        return {"open_s": opened_s, "bytes": received, "read_s": time.monotonic() - start}


def main() -> None:
    """Measures both pages and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_runs(Path(scratch))
        for name in ("default", "all"):
            openings = [open_page(Path(scratch), name == "all") for _ in range(args.repeat)]
            for opening in openings:
                print(name, {key: round(value, 2) for key, value in opening.items()}, flush=True)
            results[name] = {key: spread([opening[key] for opening in openings]) for key in openings[0]}
    goals = [
        goal(
            f"the page of {RUNS} runs of {STEPS} steps opens, {name}",
            results[name]["open_s"]["median"],
            at_most=LIMIT_S,
        )
        for name in results
    ]
    content = {"runs": RUNS, "steps": STEPS, "metrics": len(METRICS), "pages": results, "goals": goals}
    print(write("serve_pages", f"python -m bench.serve_pages --repeat {args.repeat}", content))


if __name__ == "__main__":
    main()
