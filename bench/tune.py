"""Quality of the choice of `rlhpc tune`: real runs of the chosen placement, of the next best ones, and of a sample of all.

    python -m bench.tune --top 5 --among 4 --repeat 2 --steps 6

Each workload is tuned with staleness up to 1. Then the `--top` placements with the best predictions, the configured
placement and `--among` evenly spaced placements of the ranking run for a few steps, alternately. `chosen / best` is the median
time of the chosen placement over that of the fastest one. It should not exceed `1 + spread`, where the spread is the median
over placements of the relative difference between repetitions. `error` is predicted / measured - 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.machine import spread, write
from rlhpc.config import config_to_yaml
from rlhpc.runs.configuration import load_config
from rlhpc.runs.task_type import task_type_of
from rlhpc.runs.tuning.calibrate import ShortRuns
from rlhpc.runs.tuning.costs import Costs
from rlhpc.runs.tuning.search import RankedCandidate, search
from rlhpc.runs.tuning.tune import SHORT_RUN_OVERRIDES, TuneRequest, is_allowed, space_of, tune, workload_of

ROOT = Path(__file__).resolve().parents[1]
WORKLOADS: dict[str, tuple[str, tuple[str, ...]]] = {
    "PPO on CartPole-v1": ("configs/quickstart.yaml", ()),
    "GRPO of a tiny model": (
        "configs/reasoning/demo.yaml",
        ("actor.model.model_path=builtin:tiny", "workflow.sft=null", "workflow.sft_overrides=[]", "data.prompts_per_step=4",
         "actor.global_batch_size=32", "rollout.max_new_tokens=16", "algorithm.recompute_logprobs=true"),
    ),
}  # fmt: skip


def print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(folder: Path, workload: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns prediction and measurement of one workload."""
    config, overrides = WORKLOADS[workload]
    run_overrides = (*overrides, f"runner.run_dir={folder}")
    request = TuneRequest(str(ROOT / config), run_overrides, max_staleness=1, steps=options.steps)
    record = tune(request, print_line)
    cfg = load_config(request.config, run_overrides)
    space = space_of(request, workload_of(cfg, 1), Costs.from_json(record["costs"]), cfg, is_local=True)
    ranked_candidates = search(space, 10**6, lambda candidate: is_allowed(request, candidate, is_local=True))
    spread_indices = (round(i * (len(ranked_candidates) - 1) / options.among) for i in range(1, options.among + 1))
    chosen_indices = {0, *range(options.top), *spread_indices}
    picks = [ranked_candidates[index] for index in sorted(chosen_indices) if index < len(ranked_candidates)]
    if not any(_is_configured(pick, space.configured) for pick in picks):
        picks += [pick for pick in ranked_candidates if _is_configured(pick, space.configured)]
    file = folder / "config.yaml"
    file.write_text(config_to_yaml(cfg))
    fixed_overrides = tuple(
        f"{key}={value}" for key, value in SHORT_RUN_OVERRIDES.items() if key in task_type_of(cfg).schema
    )
    runs = ShortRuns(file, folder, fixed_overrides, request.steps, request.deadline_s)
    seconds: list[list[float]] = [[] for _ in picks]
    for repetition in range(options.repeat):
        for index in range(len(picks))[:: 1 if repetition % 2 else -1]:
            costs = runs.run(f"run_{index}", picks[index].candidate.overrides())
            seconds[index].append(costs.step_s)
            print_line(
                f"{workload}: {index} of {len(picks)}: {costs.step_s:.4f} s, predicted {picks[index].prediction.step_s:.4f} s"
            )
    medians = [statistics.median(step_times) for step_times in seconds]
    relative_spread = statistics.median(
        (max(step_times) - min(step_times)) / statistics.fmean(step_times) for step_times in seconds
    )
    errors = [pick.prediction.step_s / median - 1 for pick, median in zip(picks, medians, strict=True)]
    return {
        "candidates": len(ranked_candidates),
        "chosen / best": medians[0] / min(medians),
        "spread": relative_spread,
        "spread while tuning": record["costs"]["spread"],
        "not worse than the best beyond the spread": medians[0] / min(medians) <= 1 + relative_spread,
        "chosen / worst": medians[0] / max(medians),
        "error": spread(errors),
        "absolute error": spread([abs(error) for error in errors]),
        "rows": [
            {
                "placement": pick.candidate.placement(),
                "settings": dict(pick.candidate.settings),
                "configured": _is_configured(pick, space.configured),
                "predicted_s": pick.prediction.step_s,
                "measured_s": spread(step_times),
            }
            for pick, step_times in zip(picks, seconds, strict=True)
        ],
    }


def _is_configured(candidate: RankedCandidate, configured_placement: Any) -> bool:
    return bool(candidate.candidate.settings == configured_placement.settings) and all(
        placement.processes == configured_placement.placements[group].processes
        for group, placement in candidate.candidate.placements.items()
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--among", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(arguments)
    command = " ".join(["python -m bench.tune", *(f"--{name} {value}" for name, value in vars(options).items())])
    results_by_workload: dict[str, Any] = {}
    for workload in WORKLOADS:
        load_before = os.getloadavg()
        with tempfile.TemporaryDirectory() as folder:
            results_by_workload[workload] = measure(Path(folder), workload, options)
        results_by_workload[workload]["load"] = {"before": load_before[0], "after": os.getloadavg()[0]}
        print(write("tune", command, {"workloads": results_by_workload}), flush=True)


if __name__ == "__main__":
    main()
