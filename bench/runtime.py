"""Launch, dispatch, channels and idle cost of rlhpc, compared with Ray actors and the limits of the machine.

Each repetition measures the limits (`bench/peers/limits.py`), rlhpc (`bench/peers/rlhpc_runtime.py`) and, if a Python has
it, Ray (`bench/peers/ray_actors.py`), in turn and in separate processes. Ratios are ratios of medians. Ray sends large items
by object references, not by its queue.

    python -m bench.runtime --repeat 5 [--ray-python PYTHON]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from bench.machine import goal, spread, write

ROUND_TRIP = "ZeroMQ TCP round trip, 1 KB (us)"


def run_child(python: str, *command: str) -> Any:
    """Returns the last line of a program's stdout."""
    result = subprocess.run([python, *command], capture_output=True, text=True, timeout=900)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def has_ray(python: str) -> bool:
    return subprocess.run([python, "-c", "import ray"], capture_output=True).returncode == 0


def measure_once(ray_python: str | None) -> dict[str, dict[str, float]]:
    """Runs one repetition of all measurements."""
    rows = {
        "limit": run_child(sys.executable, "-m", "bench.peers.limits"),
        "rlhpc": run_child(sys.executable, "-m", "bench.peers.rlhpc_runtime"),
    }
    if ray_python:
        rows["Ray"] = run_child(ray_python, "-m", "bench.peers.ray_actors")
    return rows


def list_goals(medians: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Returns the goals of the runtime, with the measurements."""
    limit, rlhpc, ray = medians["limit"], medians["rlhpc"], medians.get("Ray")
    start, trip = limit["interpreter and import torch (s)"], limit[ROUND_TRIP]
    runtime_goals = [
        goal("cold start to 8 workers / interpreter and torch", rlhpc["cold start to 8 ready workers (s)"] / start, at_most=2),
        goal("warm launch of 8 (s)", rlhpc["warm launch of 8 workers (s)"], at_most=1),
        goal("dispatch to 1 worker / ZeroMQ round trip", rlhpc["dispatch to 1 worker (us)"] / trip, at_most=3),
        goal("channel 1 KB, one way / ZeroMQ round trip", rlhpc["channel, 1 KB, one way (us)"] / trip, at_most=5),
        goal("channel 1 KB, one to one (items/s)", rlhpc["channel, 1 KB, one to one (items/s)"], at_least=10_000),
        goal("channel 1 KB, four to one (items/s)", rlhpc["channel, 1 KB, four to one (items/s)"], at_least=10_000),
        goal("memory copy / channel, 64 MiB",
             limit["memory copy, 64 MiB (ms)"] / rlhpc["channel, 64 MiB, one way (ms)"], at_least=0.75),
        goal("memory copy / send and recv, 64 MiB",
             limit["memory copy, 64 MiB (ms)"] / rlhpc["send and recv, 64 MiB, one way (ms)"], at_least=0.75),
        goal("memory copy / channel, dict of 256 MiB",
             limit["memory copy, 256 MiB (ms)"] / rlhpc["channel, 256 MiB dict of tensors, one way (ms)"], at_least=0.75),
        goal("idle PSS of a worker beyond the first (MB)",
             rlhpc["idle memory, a worker beyond the first (PSS, MB)"], at_most=60),
        goal("system processes", rlhpc["system processes"], at_most=1),
        goal("idle CPU with 8 workers (% of a core)", rlhpc["idle CPU, 8 workers and all else (% of a core)"], at_most=1),
    ]  # fmt: skip
    if ray:
        key = "dispatch to 8 workers (us)"
        runtime_goals.append(goal("dispatch to 8 workers / Ray's", rlhpc[key] / ray[key], at_most=1 / 15))
    return runtime_goals


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its figures to `results/runtime.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ray-python", default=sys.executable, help="a Python that has Ray, NumPy, psutil and torch")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    ray_python = args.ray_python if has_ray(args.ray_python) else None
    if ray_python is None:
        print(f"{args.ray_python} has no Ray: its rows are left out (pip install 'rlhpc[bench]', or --ray-python)")
    rows = []
    for _ in range(args.repeat):
        rows.append(measure_once(ray_python))
        print(json.dumps(rows[-1]), flush=True)
    figures = {side: {name: spread([row[side][name] for row in rows]) for name in rows[0][side]} for side in rows[0]}
    medians = {
        side: {name: figure["median"] for name, figure in side_figures.items()}
        for side, side_figures in figures.items()
    }
    beside_ray = {
        name: medians["Ray"][name] / value
        for name, value in medians["rlhpc"].items()
        if name in medians.get("Ray", {}) and value
    }
    goal_rows = list_goals(medians)
    content = {"figures": figures, "ray_over_rlhpc": beside_ray, "goals": goal_rows}
    path = write("runtime", f"python -m bench.runtime --repeat {args.repeat}", content)
    for side, side_figures in figures.items():
        for name, figure in side_figures.items():
            print(f"{side:6} {name:55} {figure['min']:12.2f} {figure['median']:12.2f} {figure['max']:12.2f}")
    for line in goal_rows:
        print(f"{'met   ' if line['met'] else 'MISSED'} {line['goal']:55} {line['measured']:12.3f} ({line['wanted']})")
    print(path)


if __name__ == "__main__":
    main()
