"""Makes the baseline: `python -m tests.baseline make|record [NAME …]`, `python -m tests.baseline lists`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.baseline import lists
from tests.baseline.archive import pack, unpack
from tests.baseline.compare import common, machine, record_of
from tests.baseline.exercise import exercise, train
from tests.baseline.runs import RUNS


def record(name: str, scratch: Path, models: Path) -> None:
    """Records what an archived run does; a value that differs when it does it again is not recorded."""
    first, second = (
        exercise(RUNS[name], unpack(name, scratch / f"{name}-{part}", models), models) for part in ("a", "b")
    )
    agreed, varying = common(first, second)
    record_of(name).write_text(json.dumps({"machine": machine(), **agreed}, indent=1, sort_keys=True) + "\n")
    for path in varying:
        print(f"  {name}: {path} varies and is not compared", flush=True)


def main() -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.baseline", description=__doc__)
    parser.add_argument("command", choices=("make", "record", "lists"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="of runs (default: all)")
    args = parser.parse_args()
    if unknown := sorted({*args.names} - {*RUNS}):
        parser.error(f"no run {', '.join(unknown)}; there are: {', '.join(RUNS)}")
    if args.command == "lists":
        lists.write_all()
        return 0
    failed = []
    with tempfile.TemporaryDirectory(prefix="baseline-") as folder:
        scratch = Path(folder).resolve()
        models, state = scratch / "models", scratch / "state"
        os.environ |= {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(state)}
        for name in args.names or RUNS:
            began = time.monotonic()
            try:
                size = 0
                if args.command == "make":
                    (scratch / name).mkdir()
                    train(RUNS[name], scratch / name, models)
                    size = pack(scratch / name, models, name)
                    shutil.rmtree(state, ignore_errors=True)  # to those who unpack it, the run is somebody else's
                record(name, scratch, models)
            except AssertionError as error:
                failed.append(name)
                print(f"{name}: {error}", flush=True)
            else:
                print(f"{name}: {size} bytes, {time.monotonic() - began:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
