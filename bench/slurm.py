"""Startup and restart time of a Slurm job: the launcher's share and Slurm's share.

The benchmark needs a cluster (`SLURM_CONF`, a site file). On the test cluster of this project:

    python -m tests.slurm.cluster up --root /tmp/rlhpc-bench
    eval "$(python -m tests.slurm.cluster env --root /tmp/rlhpc-bench)"
    python -m bench.slurm --site SITE.yaml --repeat 5

"job start to first rollout" is the time from the start of the batch step's process to the end of the first training step.
"stop to first new step" is the time from Slurm's signal at the walltime to the end of the first step after the requeue,
without the time of the job in the queue.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.machine import spread, write

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "embodied" / "cartpole_het.yaml"


def _wait_until(condition: Callable[[], Any], goal: str, deadline_s: float = 120.0) -> Any:
    deadline = time.monotonic() + deadline_s
    while not (condition_value := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {deadline_s:.0f} s until {goal}")
        time.sleep(0.05)
    return condition_value


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def measure_once(site: str, folder: Path) -> dict[str, float]:
    """Measures one run: started, stopped by the signal that announces the walltime, requeued, and cancelled after its first
    step.
    """
    root = folder / "run"
    command = [sys.executable, "-m", "rlhpc.cli", "submit", str(CONFIG), "--executor", "slurm", "--site", site,
               f"runner.run_dir={folder}", "runner.name=run", "runner.segments=1", "runner.max_steps=100000",
               "runner.save_interval=20", "runner.logger.logger_backends=[jsonl]"]  # fmt: skip
    waiter = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        first_times = _wait_until(
            lambda: _read_json(next(iter(root.glob("registry/*-0/timeline.json")), root)), "the first step is done"
        )
        _wait_until(lambda: list(root.glob("checkpoints/*/COMPLETE")), "a checkpoint is there")
        job = _read_json(root / "submit" / "segment_0.json")["job_id"]
        stopped_at = time.time()
        subprocess.run(["scancel", "--batch", "--signal=USR2", job], check=True)
        resumed_times = _wait_until(
            lambda: _read_json(next(iter(root.glob("registry/*-1/timeline.json")), root)), "it goes on", 300
        )
        attempts = _read_json(root / "submit" / "segment_0.attempts.json")["attempts"]
    finally:
        subprocess.run([sys.executable, "-m", "rlhpc.cli", "cancel", str(root)], capture_output=True)
        waiter.wait(60)
    start_time, end_time, resumed_at = attempts[0]["began"], attempts[0]["ended"], attempts[1]["began"]
    return {
        "job start to driver (s)": first_times["driver"] - start_time,
        "job start to all ranks (s)": first_times["ranks"] - start_time,
        "job start to first rollout (s)": first_times["first_step"] - start_time,
        "stop to saved and gone (s)": end_time - stopped_at,
        "queue (Slurm's own, s)": resumed_at - end_time,
        "requeued job start to first new step (s)": resumed_times["first_step"] - resumed_at,
        "stop to first new step, net of the queue (s)": end_time
        - stopped_at
        + resumed_times["first_step"]
        - resumed_at,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures the launcher's and Slurm's shares of the time, and writes `results/slurm.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", required=True)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[dict[str, float]] = []
    for _ in range(args.repeat):
        start_time = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        limit_s = time.perf_counter() - start_time
        with tempfile.TemporaryDirectory(dir=os.environ.get("RLHPC_BENCH_DIR")) as folder:
            rows.append({"limit: import torch, one interpreter (s)": limit_s, **measure_once(args.site, Path(folder))})
        print(json.dumps(rows[-1]), flush=True)
    summary = {name: spread([row[name] for row in rows]) for name in rows[0]}
    for name, values in summary.items():
        print(f"{name:52s} {values['min']:8.2f} {values['median']:8.2f} {values['max']:8.2f}")
    torch_s = statistics.median(row["limit: import torch, one interpreter (s)"] for row in rows)
    ratios = {f"{name} / import torch": values["median"] / torch_s for name, values in summary.items()}
    print(write("slurm", f"python -m bench.slurm --repeat {args.repeat}", {"summary": summary, "ratios": ratios}))


if __name__ == "__main__":
    main()
