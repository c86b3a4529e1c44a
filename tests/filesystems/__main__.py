"""`make filesystems`: runs scenarios on filesystems with drawn faults, one draw for each seed.

A run is one seed: two hosts with faults of their own, on which every scenario has to pass. Runs that are noted as passed in
the results file are left out, so that an interrupted command goes on where it ended. One run in `--train-every` trains the
quickstart.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.filesystems.beds import SharedFolder
from tests.filesystems.faults import Faults
from tests.filesystems.scenarios import SCENARIOS, drawn_faults

#: Scenarios that change the faults of a client, or need a quiet machine: each has mounts of its own.
_ALONE = ("full_disk", "read_only", "quickstart")
#: Scenarios that run at a time.
_WORKERS = 5


def run_seed(seed: int, folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Runs scenarios with the faults of a seed; returns the traceback of each one that failed."""
    failures: dict[str, str] = {}

    def run(bed: SharedFolder, name: str) -> None:
        try:
            SCENARIOS[name](bed, random.Random(f"{seed} {name}"))
        except Exception:
            failures[name] = traceback.format_exc()

    faults = faults_of(seed)
    with SharedFolder(folder / "together", *faults) as bed, ThreadPoolExecutor(_WORKERS) as pool:
        list(pool.map(lambda name: run(bed, name), [name for name in names if name not in _ALONE]))
    for name in _ALONE:
        if name in names:
            with SharedFolder(folder / name, *faults) as bed:
                run(bed, name)
    return failures


def faults_of(seed: int) -> tuple[Faults, Faults]:
    """Returns the faults of a seed's two hosts; seed 0 has none."""
    if seed == 0:
        return Faults(), Faults()
    draw = random.Random(f"faults {seed}")
    return drawn_faults(draw, seed), drawn_faults(draw, seed + 1)


def main() -> int:
    """Runs a part of the seeds; returns 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.filesystems", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    parser.add_argument("--runs", type=int, default=50, help="number of seeds")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th seed, from the K-th")
    parser.add_argument("--only", default="", help="names of scenarios, with commas between them")
    parser.add_argument("--train-every", type=int, default=10, help="one seed in so many trains the quickstart, too")
    parser.add_argument("--results", type=Path, default=Path("runs/filesystems.txt"), help="notes of the passed seeds")
    args = parser.parse_args()
    number, _, count = args.part.partition("/")
    seeds = range(args.seed, args.seed + args.runs)[int(number) - 1 :: int(count)]
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    notes = args.results.read_text().splitlines() if args.results.exists() else []
    failed = 0
    for seed in seeds:
        names = args.only.split(",") if args.only else [
            name for name in SCENARIOS if name != "quickstart" or seed % args.train_every == 0
        ]  # fmt: skip
        note = f"passed {seed} at {commit}: {','.join(names)}"
        if note in notes:
            print(f"seed {seed}: passed before", flush=True)
            continue
        folder, begin = Path(tempfile.mkdtemp(prefix="filesystems-")), time.monotonic()
        failures = run_seed(seed, folder, names)
        shutil.rmtree(folder, ignore_errors=True)
        verdict = f"failed: {', '.join(failures)}" if failures else "ok"
        print(f"seed {seed}: {verdict} ({time.monotonic() - begin:.0f} s; {len(names)} scenarios)", flush=True)
        for name, words in failures.items():
            print(f"--- seed {seed}, {name}, {faults_of(seed)}\n{words}", flush=True)
        failed += bool(failures)
        if not failures:
            with args.results.open("a") as file:
                file.write(note + "\n")
    print(f"{len(seeds)} seeds, {failed} failed; again: make filesystems SEED={args.seed} PART={args.part}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
