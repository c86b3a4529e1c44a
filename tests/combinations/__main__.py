"""`make combinations`: runs a part of the rows, and reports each that is not right."""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.combinations.array import coverage, pairwise
from tests.combinations.options import KINDS
from tests.combinations.trial import Outcome, attempt


def main() -> int:
    """Runs the rows of a seed; returns 1 if one is not right."""
    parser = argparse.ArgumentParser(prog="python -m tests.combinations", description=__doc__)
    parser.add_argument("--kind", choices=[*KINDS], help="of one kind of run alone")
    parser.add_argument("--seed", default="1", help="of the rows")
    parser.add_argument("--part", default="1/1", help="K/N: the K-th of N parts of the rows")
    parser.add_argument("--workers", type=int, default=1, help="rows that run at a time")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds after which a run hangs")
    args = parser.parse_args()
    number, _, count = args.part.partition("/")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="combinations-") as scratch:
        for kind in [KINDS[args.kind]] if args.kind else KINDS.values():
            rows = pairwise(kind, args.seed)
            chosen = list(enumerate(rows))[int(number) - 1 :: int(count)]
            print(f"{kind.name}: {len(chosen)} of {len(rows)} rows of seed {args.seed}", flush=True)
            outcomes = list[Outcome]()

            def run(numbered: tuple[int, object], kind=kind) -> tuple[int, Outcome, float]:  # type: ignore[no-untyped-def]
                index, row = numbered
                folder, began = Path(scratch) / f"{kind.name}-{index}", time.monotonic()
                outcome = attempt(kind, row, folder, seed=f"{args.seed} {index}", deadline_s=args.deadline)
                return index, outcome, time.monotonic() - began

            with ThreadPoolExecutor(args.workers) as pool:
                for index, outcome, seconds in pool.map(functools.partial(run), chosen):
                    outcomes.append(outcome)
                    print(f"{kind.name} {index}: {'; '.join(outcome.faults) or 'ok'} ({seconds:.0f} s)", flush=True)
                    if outcome.faults:
                        failed += 1
                        print(f"  {outcome.command}", flush=True)
            met, total = coverage(kind, [outcome.row for outcome in outcomes])
            print(f"{kind.name}: {met} of {total} pairs met, {failed} rows were not right", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
