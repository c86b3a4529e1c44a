"""Start of a worker group as the number of ranks grows, and the predicted time of a start with 1024 ranks.

    python -m bench.start                # real ranks on this machine
    python -m bench.start --srun         # and srun's own time, in an environment with a Slurm

Measures groups of real processes: CPU seconds of the driver until all ranks are ready, and of the ranks while they form their
process group. CPU seconds, because here many ranks share two cores, while on a cluster each rank has its own. Fits them
against the number of ranks: linear for the driver and for a rank (it opens a connection to each other rank), and linear and
quadratic for the rank that stores the group's keys (it sends N ranks N addresses). The predicted time of a start is the sum of
these terms, as if none of them overlapped, and of one import of torch. The error is that of the prediction of the largest
measured group from the smaller ones.

What is not in the sum: time in Slurm's queue, the import from a filesystem that is slower than this machine's, and delays of
the network between hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.machine import goal, spread, write
from rlhpc import Cluster, NodePlacementStrategy, Session, Worker

REAL = (8, 16, 32, 64, 128)
PREDICTED = 1024
#: Quantity → powers of the number of ranks in its fit.
TERMS = {
    "driver until all are ready, CPU (s)": (0, 1),
    "first call on all, CPU of the driver (s)": (0, 1),
    "rank with the keys forms the group, CPU (s)": (0, 1, 2),
    "another rank forms the group, CPU (s)": (0, 1),
}
SRUN = "srun of so many tasks (s)"


class Forming(Worker):
    """Rank that forms its process group."""

    def idle(self) -> None:
        """Does nothing."""

    def form(self) -> float:
        """Forms the group of all ranks; returns the CPU seconds of this process."""
        start = time.process_time()
        self.init_process_group()
        return time.process_time() - start


def measure(count: int) -> dict[str, float]:
    """Measures one group of `count` real ranks."""
    cluster = Cluster.local(1, 0)
    Worker.create_group().launch(cluster, NodePlacementStrategy([0]), "first")  # torch is imported now
    group = Forming.create_group()
    start_cpu_s, start_s = time.process_time(), time.perf_counter()
    group.launch(cluster, NodePlacementStrategy([0] * count), "group", timeout=600)
    row = {
        "driver until all are ready, CPU (s)": time.process_time() - start_cpu_s,
        "launch (s)": time.perf_counter() - start_s,
    }
    start_cpu_s = time.process_time()
    group.idle().wait()
    row["first call on all, CPU of the driver (s)"] = time.process_time() - start_cpu_s
    start_s = time.perf_counter()
    cpu_by_rank = group.form().wait()
    row["group formed (s)"] = time.perf_counter() - start_s
    row["rank with the keys forms the group, CPU (s)"] = cpu_by_rank[0]
    row["another rank forms the group, CPU (s)"] = float(np.mean(cpu_by_rank[1:]))
    Session.current().stop()
    return row


def measure_import() -> float:
    """Measures the CPU seconds of one interpreter that imports torch, which each node needs once."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure_srun(count: int) -> float:
    """Measures a job step of `count` tasks that do nothing, in an allocation of all nodes."""
    command = ["srun", "--overcommit", f"--ntasks={count}", "--mpi=none", "true"]
    start = time.perf_counter()
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def run_child(count: int) -> dict[str, float]:
    """Measures one group in a separate process."""
    command = [sys.executable, "-m", "bench.start", "--only", str(count)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    row: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return row


def fit_coefficients(counts: Sequence[int], values: Sequence[float], powers: Sequence[int]) -> np.ndarray:
    """Returns the coefficients of the powers of the number of ranks, by least squares of the relative errors."""
    ranks, measured_values = np.asarray(counts, float), np.asarray(values)
    columns = np.stack([ranks**power for power in powers], axis=1) / measured_values[:, None]
    return np.linalg.lstsq(columns, np.ones(len(counts)), rcond=None)[0]


def evaluate_fit(coefficients: np.ndarray, powers: Sequence[int], count: int) -> float:
    """Returns the fitted value of a number of ranks."""
    return float(
        sum(coefficient * float(count) ** power for coefficient, power in zip(coefficients, powers, strict=True))
    )


def predict(
    rows: dict[int, dict[str, dict[str, float]]], terms: dict[str, tuple[int, ...]], import_s: float
) -> dict[str, Any]:
    """Predicts the start of `PREDICTED` ranks.

    Args:
        rows: Number of ranks → quantity → spread of the measurements.
        terms: Quantity → powers of its fit.
        import_s: CPU seconds of one import of torch.
    """
    counts = sorted(rows)
    parts: dict[str, Any] = {}
    totals = {"predicted": 0.0, "largest measured": 0.0, "largest predicted from smaller": 0.0}
    for name, powers in terms.items():
        values = [rows[count][name]["median"] for count in counts]
        coefficients = fit_coefficients(counts, values, powers)
        smaller = evaluate_fit(fit_coefficients(counts[:-1], values[:-1], powers), powers, counts[-1])
        residuals = [
            evaluate_fit(coefficients, powers, count) / value - 1 for count, value in zip(counts, values, strict=True)
        ]
        parts[name] = {
            "powers": powers, "coefficients": coefficients.tolist(), "largest residual": max(map(abs, residuals)),
            "predicted (s)": evaluate_fit(coefficients, powers, PREDICTED),
            f"{counts[-1]} ranks, predicted from fewer (s)": smaller, f"{counts[-1]} ranks, measured (s)": values[-1],
        }  # fmt: skip
        totals["predicted"] += parts[name]["predicted (s)"]
        totals["largest measured"] += values[-1]
        totals["largest predicted from smaller"] += smaller
    return {
        "ranks": PREDICTED, "parts": parts, "import of torch, CPU (s)": import_s,
        "predicted start (s)": import_s + totals["predicted"],
        f"error at {counts[-1]} ranks": totals["largest predicted from smaller"] / totals["largest measured"] - 1,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its figures to `results/start.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--srun", action="store_true", help="measure srun, too (SLURM_CONF, an idle cluster)")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.only:
        print(json.dumps(measure(args.only)))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    measurements: dict[int, list[dict[str, float]]] = {}
    imports = []
    for _ in range(args.repeat):
        imports.append(measure_import())
        for count in REAL:
            row = run_child(count)
            if args.srun:
                row[SRUN] = measure_srun(count)
            measurements.setdefault(count, []).append(row)
            print(count, json.dumps(row), flush=True)
    rows = {
        count: {name: spread([row[name] for row in count_rows]) for name in count_rows[0]}
        for count, count_rows in measurements.items()
    }
    terms = {**TERMS, **({SRUN: (0, 1)} if args.srun else {})}
    prediction = predict(rows, terms, spread(imports)["median"])
    for name, part in prediction["parts"].items():
        seconds, residual = part["predicted (s)"], part["largest residual"]
        print(f"{name}: predicted {seconds:.2f} s at {PREDICTED} ranks; residuals to {residual:.0%}")
    goals = [goal(f"predicted start of {PREDICTED} ranks (s)", prediction["predicted start (s)"], at_most=10)]
    for line in goals:
        print(f"{'met   ' if line['met'] else 'MISSED'} {line['goal']:45} {line['measured']:8.2f} ({line['wanted']})")
    command = f"python -m bench.start --repeat {args.repeat}{' --srun' if args.srun else ''}"
    content = {"figures": rows, "import of torch, CPU (s)": spread(imports), "prediction": prediction, "goals": goals}
    print(write("start", command, content))


if __name__ == "__main__":
    main()
