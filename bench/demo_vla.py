"""Flow-policy demonstration on a ManiSkill task: demonstrations of a weak controller, behaviour cloning, then PPO.

    python -m bench.demo_vla --seeds 3

The control is PPO from random weights with the same settings, seed and number of env steps. The task is MS-CartpoleSwingUp-v1,
truncated after 300 steps; 300 is also the highest possible return. All policies are evaluated without noise on 100 episodes
that no policy trained on.

The criterion was fixed before the first run: the mean return over the seeds of PPO from the clone exceeds that of the clone
and that of PPO from random weights, each by more than the largest of the three ranges from lowest to highest seed.

Prints a line for each seed and writes bench/results/demo_vla.json, a drawing of the training curves, and videos of the clone
before and after PPO (demo_vla_before.mp4 and demo_vla_after.mp4 in --runs). Fails if the criterion does not hold. With one
seed the ranges are 0, so any excess suffices.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.demo_agent import ROOT, run_rlhpc
from bench.learning_page import compute_band
from bench.machine import RESULTS, write
from rlhpc.metrics.charts import line_chart, standalone

BC, PPO = "configs/embodied/cartpole_swingup_bc.yaml", "configs/embodied/cartpole_swingup_ppo.yaml"
NAMES = {"clone": "the clone", "tuned": "PPO from the clone", "alone": "PPO from random weights"}
#: Of the controller's actions; without it they are repeated forever where they do not reach.
NOISE = 0.2
_RNG = np.random.default_rng(1)


def compute_actions(obs: np.ndarray) -> np.ndarray:
    """Returns actions `[N, 1]` for states `[N, 10]`: swings the pole up by its energy, and catches it only near the upright
    position.
    """
    x, pole_angle, speed, spin = obs[:, 0], (obs[:, 1] + np.pi) % (2 * np.pi) - np.pi, obs[:, 2], obs[:, 3]
    missing_energy = 15 * (1 - np.cos(pole_angle)) - spin**2 / 2  # of the energy of a pole that stands still
    swing_up = -0.4 * np.tanh(spin * np.cos(pole_angle)) * np.clip(missing_energy / 10, -1, 1) - 0.2 * x
    balance = pole_angle + 0.4 * spin + 0.1 * x + 0.3 * speed
    upright_weight = 1 / (1 + np.exp(-20 * (0.4 - np.abs(pole_angle))))
    targets = upright_weight * balance + (1 - upright_weight) * swing_up + NOISE * _RNG.standard_normal(len(obs))
    return np.clip(targets, -1, 1)[:, None].astype(np.float32)


def evaluate_newest(run_folder: Path) -> dict[str, float]:
    """Evaluates a run's newest checkpoint; returns the mean and lowest return and the number of episodes."""
    output = run_folder / "held_out.json"
    run_rlhpc("eval", "--run", str(run_folder), "--step", "latest", "--output", str(output))
    eval_result = json.loads(output.read_text())
    return {"return": eval_result["return_mean"], "lowest": eval_result["return_min"], "n": eval_result["episodes"]}


def read_curve(run_folder: Path) -> list[tuple[int, float]]:
    """Returns env steps, and the mean return of the training episodes that ended in a step."""
    rows = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [(int(row["rollout/env_steps"]), round(row["rollout/episode_return"], 2)) for row in rows]


def run_seed(seed: int, runs: Path, num_episodes: int, overrides: list[str]) -> dict[str, Any]:
    """Runs demonstrations, behaviour cloning, PPO from the clone, and PPO from scratch at one seed."""
    start_time, shared_overrides = time.perf_counter(), [f"runner.run_dir={runs}", f"runner.seed={seed}"]
    demos, name = runs / f"demo-vla-{seed}.h5", f"demo-vla-{seed}"
    run_rlhpc("record", "--expert", "bench.demo_vla:compute_actions", "--config", BC, "--episodes", str(num_episodes),
          "--output", str(demos), *shared_overrides)  # fmt: skip
    run_rlhpc("train", BC, *shared_overrides, f"runner.name={name}-clone", f"demos.path={demos}")
    start = f"runner.init_from={runs / f'{name}-clone'}"
    for run_kind, start_overrides in {"tuned": [start], "alone": []}.items():
        run_rlhpc("train", PPO, *shared_overrides, f"runner.name={name}-{run_kind}", *start_overrides, *overrides)
    row: dict[str, Any] = {"seed": seed, "demonstrations": compute_demo_return(demos)}
    row |= {run_kind: evaluate_newest(runs / f"{name}-{run_kind}") for run_kind in NAMES}
    row["curves"] = {run_kind: read_curve(runs / f"{name}-{run_kind}") for run_kind in ("tuned", "alone")}
    return {**row, "seconds": time.perf_counter() - start_time}


def compute_demo_return(path: Path) -> float:
    """Returns the mean return of the demonstrations."""
    import h5py

    with h5py.File(path) as file:
        return statistics.fmean(float(np.sum(file[name]["rewards"])) for name in file)


def record_videos(runs: Path, seed: int) -> list[Path]:
    """Records videos of four evaluation episodes before and after PPO; returns no video if rendering is not possible."""
    video_paths = []
    for run_kind, name in {"clone": "before", "tuned": "after"}.items():
        output = runs / f"demo_vla_{name}.json"
        run_folder = runs / f"demo-vla-{seed}-{run_kind}"
        run_rlhpc("eval", "--run", str(run_folder), "--step", "latest", "--output", str(output),
              "env.eval.num_envs=4", "env.eval.num_episodes=4", "env.eval.video_episodes=4")  # fmt: skip
        video_paths += [output.with_suffix(".mp4")] if output.with_suffix(".mp4").is_file() else []
    return video_paths


def draw_curves(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws training curves: the mean over the seeds, and a band from the lowest to the highest."""
    lines = []
    for color, run_kind in enumerate(("tuned", "alone")):
        x = [float(steps) for steps, _ in rows[0]["curves"][run_kind]]
        columns = list(
            zip(*([episode_return for _, episode_return in row["curves"][run_kind]] for row in rows), strict=True)
        )
        lines.append(compute_band(NAMES[run_kind], x, columns, color))
    title = f"MS-CartpoleSwingUp-v1, {len(rows)} seeds"
    path.write_text(standalone(line_chart(title, "environment steps", "return in training, with noise", lines)))


def compare_returns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compares mean returns over the seeds; returns them with the largest spread and the outcome of the criterion."""
    values = {run_kind: [row[run_kind]["return"] for row in rows] for run_kind in NAMES}
    mean_returns = {run_kind: statistics.fmean(returns) for run_kind, returns in values.items()}
    return_range = max(max(returns) - min(returns) for returns in values.values())
    gains = {run_kind: mean_returns["tuned"] - mean_returns[run_kind] for run_kind in ("clone", "alone")}
    return {"means": mean_returns, "spread": return_range, "above": gains, "holds": min(gains.values()) > return_range}


def main() -> int:
    """Runs all seeds; returns 1 if the criterion does not hold, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs")
    parser.add_argument("--demonstrations", type=int, default=40)
    parser.add_argument("overrides", nargs="*", help="key=value, of PPO")
    args = parser.parse_args()
    runs, rows = args.runs.absolute(), []
    runs.mkdir(parents=True, exist_ok=True)
    for seed in range(1, args.seeds + 1):
        row = run_seed(seed, runs, args.demonstrations, args.overrides)
        rows.append(row)
        returns_text = ", ".join(f"{name} {row[run_kind]['return']:.1f}" for run_kind, name in NAMES.items())
        print(
            f"seed {seed}: controller {row['demonstrations']:.1f}, {returns_text}; {row['seconds']:.0f} s", flush=True
        )
    comparison = compare_returns(rows)
    draw_curves(rows, RESULTS / "demo_vla.svg")
    write("demo_vla", f"python -m bench.demo_vla --seeds {args.seeds}", {"rows": rows, "compared": comparison})
    print(json.dumps(comparison))
    video_paths = " ".join(map(str, record_videos(runs, 1)))
    print(f"videos: {video_paths or 'none, there is no renderer here'}")
    if not comparison["holds"]:
        print("PPO from the clone is not above both by more than the spread of the seeds", file=sys.stderr)
    return int(not comparison["holds"])


if __name__ == "__main__":
    raise SystemExit(main())
