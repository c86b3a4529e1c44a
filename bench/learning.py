"""Learning curves compared with single-process loops: the same task, hyperparameters, seeds and environment steps.

Each case trains with rlhpc and with a loop in one process, seed by seed and concurrently. The loops are
`single_process_ppo.py`, which follows CleanRL's and ManiSkill's ppo.py, and `single_process_sac.py`, `_td3.py`, `_crossq.py`
and `_iql.py`, which follow CleanRL, SB3-Contrib and CORL. The result of a run is the mean return of the training episodes
that ended in each of the case's equal spans of environment steps.

The criterion was fixed before the first run: a two-sided t-test at 5 % over the seeds finds no difference between the two
sides, neither in the mean of the complete curve nor in that of its last quarter. With three seeds, a difference is 2.3
standard deviations of a seed, so "equal" means no large difference, and one comparison in twenty fails by chance. The share
of spans in which the bands from lowest to highest seed overlap, and the difference in standard deviations, describe the
similarity.

    python -m bench.learning                  # all cases, one results/learning_<case>.json each, then the page
    python -m bench.learning --case push_cube --seeds 3
    python -m bench.learning --page           # results/learning.png and learning.md from existing results
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.learning_cases import CASES, DATA, Case
from bench.learning_page import write_page
from bench.machine import RESULTS, write
from bench.offline_data import write_dataset as write_data

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("rlhpc", "single_process")
#: Two-sided 5 % points of Student's t, by degrees of freedom.
T_POINTS = {2: 4.303, 4: 2.776, 6: 2.447, 8: 2.306, 10: 2.228, 12: 2.179, 14: 2.145, 16: 2.120, 18: 2.101}


def run_command(command: Sequence[str]) -> str:
    """Runs a command on one thread and returns its standard output; raises if it fails."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}")
    return result.stdout


def run_ours(case: Case, seed: int, num_steps: int) -> dict[str, Any]:
    """Runs rlhpc: `[env steps, episodes, their returns' sum, their successes' sum]` a row."""
    total = num_steps // case.transitions + case.settings.get("offline_steps", 0)
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"runner.run_dir={folder}", "runner.name=bench", f"runner.seed={seed}",
                 f"runner.max_steps={total}", "runner.save_interval=-1",
                 "runner.logger.logger_backends=[jsonl]"]  # fmt: skip
        run_command([sys.executable, "-m", "rlhpc.cli", "train", case.config, *case.build_overrides(), *overrides])
        rows = [json.loads(line) for line in (Path(folder) / "bench" / "metrics.jsonl").read_text().splitlines()]
    points = []
    for row in rows:
        if count := int(row["rollout/episodes"]):
            success = row.get("rollout/success_once")
            total = None if success is None else count * success
            points.append([int(row["rollout/env_steps"]), count, count * row["rollout/episode_return"], total])
    return {"rows": points, "env_steps": rows[-1]["rollout/env_steps"], "loop_s": rows[-1]["time/wall_s"]}


def run_plain(case: Case, seed: int, num_steps: int) -> dict[str, Any]:
    """Runs the single-process loop, in the same rows."""
    run_result = json.loads(
        run_command([sys.executable, "-m", *case.build_reference_command(seed, num_steps)]).splitlines()[-1]
    )
    if case.off_policy:
        run_result["curve"] = [[step, [[episode_return, None]]] for step, episode_return in run_result["returns"]]
        run_result |= {"total_env_steps": num_steps, "total_seconds": run_result["loop_s"]}
    points = []
    for env_steps, episodes in run_result["curve"]:
        if episodes:
            has_success = all(success is not None for _, success in episodes)
            total = sum(success for _, success in episodes) if has_success else None
            points.append([env_steps, len(episodes), sum(episode_return for episode_return, _ in episodes), total])
    return {"rows": points, "env_steps": run_result["total_env_steps"], "loop_s": run_result["total_seconds"]}


def compute_span_means(rows: Sequence[Sequence[Any]], num_steps: int, count: int, column: int) -> list[float | None]:
    """Returns the mean over the episodes that ended in each of `count` equal spans of `num_steps` environment steps."""
    sums = [[0.0, 0.0] for _ in range(count)]
    for row in rows:
        if row[column] is not None:
            span_sums = sums[min((int(row[0]) - 1) * count // num_steps, count - 1)]
            span_sums[0], span_sums[1] = span_sums[0] + row[column], span_sums[1] + row[1]
    return [total / episodes if episodes else None for total, episodes in sums]


def compare_sides(our_values: Sequence[float], reference_values: Sequence[float]) -> dict[str, float | bool]:
    """Returns, for two sides' seeds, means, their difference in standard deviations of a seed, and the t-test."""
    n = len(our_values)
    mean_difference = statistics.mean(our_values) - statistics.mean(reference_values)
    deviation = math.sqrt((statistics.variance(our_values) + statistics.variance(reference_values)) / 2) or 1e-12
    t = mean_difference / (deviation * math.sqrt(2 / n))
    return {"rlhpc": statistics.mean(our_values), "single_process": statistics.mean(reference_values),
            "difference": mean_difference,
            "in_seed_deviations": mean_difference / deviation, "t": t, "t_point": T_POINTS[2 * n - 2],
            "equal": abs(t) < T_POINTS[2 * n - 2]}  # fmt: skip


def compare(curves: dict[str, list[list[float | None]]]) -> dict[str, Any]:
    """Checks the criterion for one measure."""
    spans = zip(*(curve for side in SIDES for curve in curves[side]), strict=True)
    common_spans = [span_index for span_index, values in enumerate(spans) if None not in values]
    full_curves = {side: [_select_spans(curve, common_spans) for curve in curves[side]] for side in SIDES}
    num_late = max(1, len(common_spans) // 4)

    def means(side: str, last_span: int) -> list[float]:
        return [statistics.mean(curve[-last_span:]) for curve in full_curves[side]]

    overlaps = [
        min(max(c[i] for c in full_curves[side]) for side in SIDES)
        >= max(min(c[i] for c in full_curves[side]) for side in SIDES)
        for i in range(len(common_spans))
    ]
    return {
        "whole": compare_sides(*(means(side, len(common_spans)) for side in SIDES)),
        "end": compare_sides(*(means(side, num_late) for side in SIDES)),
        "bands_overlap": sum(overlaps) / len(overlaps),
        "spans": len(common_spans),
    }


def _select_spans(curve: Sequence[float | None], spans: Sequence[int]) -> list[float]:
    return [span_mean for span_index in spans if (span_mean := curve[span_index]) is not None]


def learn(name: str, case: Case, num_seeds: int, num_steps: int, num_concurrent: int) -> None:
    """Runs a case and writes its result."""
    jobs = [(seed, side) for seed in range(1, num_seeds + 1) for side in SIDES]
    start_time = time.perf_counter()
    data_returns = write_data(DATA) if "data" in case.settings else []

    def one(job: tuple[int, str]) -> dict[str, Any]:
        seed, side = job
        run_side = (run_ours if side == "rlhpc" else run_plain)(case, seed, num_steps)
        curves = {"return": compute_span_means(run_side["rows"], num_steps, case.spans, 2)}
        if any(row[3] is not None for row in run_side["rows"]):
            curves["success"] = compute_span_means(run_side["rows"], num_steps, case.spans, 3)
        run_result = {
            "side": side,
            "seed": seed,
            "loop_s": run_side["loop_s"],
            "env_steps": run_side["env_steps"],
            "curves": curves,
        }
        print(name, json.dumps(run_result), flush=True)
        return run_result

    with ThreadPoolExecutor(num_concurrent) as pool:
        runs = list(pool.map(one, jobs))
    comparisons = {
        measure: compare({side: [run["curves"][measure] for run in runs if run["side"] == side] for side in SIDES})
        for measure in runs[0]["curves"]
    }
    print(name, json.dumps(comparisons), flush=True)
    arguments = f"--case {name} --seeds {num_seeds} --steps {num_steps} --together {num_concurrent}"
    print(write(f"learning_{name}", f"python -m bench.learning {arguments}", {
        "title": case.title, "task": case.env, "algorithm": case.algorithm, "env_steps": num_steps, "spans": case.spans,
        "settings": case.settings, "seconds": time.perf_counter() - start_time, "compared": comparisons,
        "runs": runs, **({"data_return": statistics.mean(data_returns)} if data_returns else {}),
    }))  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="environment steps; default: the case's")
    parser.add_argument("--together", type=int, default=2, help="runs at a time")
    parser.add_argument("--page", action="store_true", help="only draw what is there")
    options = parser.parse_args(argv)
    if not options.page:
        for name in options.case or CASES:
            case = CASES[name]
            steps = (options.steps or case.steps) // case.transitions * case.transitions
            learn(name, case, options.seeds, steps, options.together)
    print(write_page(RESULTS))


if __name__ == "__main__":
    main()
