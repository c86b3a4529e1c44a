"""Benefit of a critic, and of a reward model in a separate group, for the tiny model, on two-digit addition.

    python -m bench.groups --seeds 3                # PPO with a critic, and REINFORCE without a baseline
    python -m bench.groups --seeds 3 --part reward  # GRPO with a reward model, and with a reward model of random pairs

Both start from the model of the demonstrations (configs/reasoning/demo_sft.yaml). The accuracy is that of greedy answers to
held-out problems at a step that was fixed in advance. The reward models come from `bench.reward_model` (`--work` names its
folder, and existing models are reused): one is trained on pairs of a right and a wrong answer, the control on the same pairs
with a random choice of the preferred answer.

Prints a line for each run and writes bench/results/groups_<part>.json. Fails if the critic does not help, if the reward model
does not raise the true accuracy, or if the control raises it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.machine import spread, write

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "reasoning" / "demo.yaml"
SFT = "runs/demo_sft/export/global_step_180"
#: One answer to each of many prompts: nothing to compare within a group. Paid at its end: for being right, and for being a
#: number, which nearly all are: without a baseline that praises them all.
SPARSE = (
    "data.prompts_per_step=256", "algorithm.group_size=1", "algorithm.normalize_advantages=none",
    "reward.terms=[{name: exact}, {name: format, kwargs: {pattern: '[0-9]+'}}]",
)  # fmt: skip
WAYS = {
    "critic": (
        "algorithm.adv_type=gae", "algorithm.gae_lambda=1.0", "algorithm.value_clip=0.5", "critic.optim.lr=1e-3",
        "critic.update_epochs=4", "critic.warmup_steps=5",
        "cluster.component_placement={actor: 0, rollout: 0, critic: 0}",
    ),
    "no baseline": ("algorithm.adv_type=raw",),
}  # fmt: skip


def run_rlhpc(work_folder: Path, *arguments: str) -> None:
    """Runs an `rlhpc` command in the folder; raises if it fails."""
    result = subprocess.run(
        [sys.executable, "-m", "rlhpc.cli", *arguments], cwd=work_folder, capture_output=True, text=True
    )
    if result.returncode:
        raise SystemExit(f"rlhpc {' '.join(arguments)} failed:\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")


def measure_accuracy(work_folder: Path, model: str, name: str) -> dict[str, Any]:
    """Returns the accuracy of a model on the held-out problems, by the task's reward, whatever reward
    it was trained with.
    """
    output = work_folder / f"{name}.json"
    run_rlhpc(
        work_folder, "eval", "--config", str(CONFIG), "--model", model, "--suite", "held_out", "--output", str(output)
    )
    eval_result = json.loads(output.read_text())
    return {key: eval_result[key] for key in ("accuracy", "accuracy_ci95", "n")}


def train(work_folder: Path, name: str, num_steps: int, seed: int, *overrides: str) -> dict[str, Any]:
    """Trains for `num_steps` steps from the demonstrations' model, and returns the accuracy."""
    overrides_of_run = [
        f"runner.name={name}", f"runner.seed={seed}", f"runner.max_steps={num_steps}", f"runner.save_interval={num_steps}",
        "runner.segments=1", "workflow.sft=null", "workflow.sft_overrides=[]", f"actor.model.model_path={SFT}", *overrides,
    ]  # fmt: skip
    if not (work_folder / "runs" / name / "checkpoints" / f"global_step_{num_steps}" / "COMPLETE").exists():
        run_rlhpc(work_folder, "train", str(CONFIG), *overrides_of_run)
    run_rlhpc(work_folder, "convert", "--run", f"runs/{name}", "--step", "latest")
    rows = [json.loads(line) for line in (work_folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    final_accuracy = measure_accuracy(work_folder, f"runs/{name}/export/global_step_{num_steps}", name)
    last_row = rows[-1]
    logged_names = ("critic/explained_variance", "reward/reward", "train/accuracy")
    return {
        "name": name, "seed": seed, "steps": num_steps, **final_accuracy, "seconds": last_row["time/wall_s"],
        **{key: last_row[key] for key in logged_names if key in last_row},
    }  # fmt: skip


def format_run(row: dict[str, Any]) -> str:
    """Formats a run in a line."""
    ci_low, ci_high = row["accuracy_ci95"]
    metrics_text = ", ".join(
        f"{key} {row[key]:.2f}" for key in ("critic/explained_variance", "reward/reward") if key in row
    )
    line = f"{row['name']}: {row['accuracy']:.1%} ({ci_low:.1%} to {ci_high:.1%}) after {row['steps']} steps"
    return f"{line}, {metrics_text}" if metrics_text else line


def compare_critic(work_folder: Path, num_seeds: int, num_steps: int) -> tuple[dict[str, Any], bool]:
    """Runs PPO with a critic, and REINFORCE without a baseline, on the same number of answers."""
    rows: dict[str, list[dict[str, Any]]] = {variant: [] for variant in WAYS}
    for seed in range(1, num_seeds + 1):
        for variant, variant_overrides in WAYS.items():
            rows[variant].append(
                train(
                    work_folder,
                    f"{variant.replace(' ', '_')}-{num_steps}-{seed}",
                    num_steps,
                    seed,
                    *SPARSE,
                    *variant_overrides,
                )
            )
            print(format_run(rows[variant][-1]), flush=True)
    mean_accuracies = {
        variant: statistics.fmean(row["accuracy"] for row in way_rows) for variant, way_rows in rows.items()
    }
    return {
        "rows": rows,
        "accuracy": {variant: spread([r["accuracy"] for r in way_rows]) for variant, way_rows in rows.items()},
    }, (mean_accuracies["critic"] <= mean_accuracies["no baseline"])


def compare_reward_model(
    work_folder: Path, num_seeds: int, num_steps: int, num_model_steps: int
) -> tuple[dict[str, Any], bool]:
    """Runs GRPO with a reward model as its only reward, and with a reward model of random pairs."""
    from bench import reward_model

    reward_model.make_data(work_folder)
    for name, data_name in (("rm1", "train"), ("by_lot", "by_lot")):
        if not (work_folder / "runs" / name / "checkpoints" / f"global_step_{num_model_steps}" / "COMPLETE").exists():
            print(
                reward_model.format_run(reward_model.train(work_folder, name, data_name, num_model_steps, 1)),
                flush=True,
            )
        run_rlhpc(work_folder, "convert", "--run", f"runs/{name}", "--step", "latest")
    rows: dict[str, list[dict[str, Any]]] = {"rm1": [], "by_lot": []}
    for seed in range(1, num_seeds + 1):
        for name, name_rows in rows.items():
            grpo_overrides = (
                # What answers the model would never have given are worth, no reward model has learnt.
                "reward.terms=[{name: reward}]", "algorithm.kl_coef=0.1",
                f"reward.model.model_path=runs/{name}/export/global_step_{num_model_steps}",
                "cluster.component_placement={actor: 0, rollout: 0, reward: 0}",
            )  # fmt: skip
            name_rows.append(train(work_folder, f"grpo-{name}-{num_steps}-{seed}", num_steps, seed, *grpo_overrides))
            print(format_run(name_rows[-1]), flush=True)
    mean_accuracies = {name: statistics.fmean(row["accuracy"] for row in name_rows) for name, name_rows in rows.items()}
    start = measure_accuracy(work_folder, SFT, "start")
    error = (start["accuracy"] * (1 - start["accuracy"]) / start["n"]) ** 0.5
    is_short = (
        mean_accuracies["rm1"] < start["accuracy"] + 3 * error
        or mean_accuracies["by_lot"] > start["accuracy"] + 3 * error
    )
    return {
        "start": start,
        "rows": rows,
        "accuracy": {name: spread([r["accuracy"] for r in name_rows]) for name, name_rows in rows.items()},
    }, is_short


def main() -> int:
    """Runs a part at all seeds; returns 1 if it misses its criterion, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("critic", "reward"), default="critic")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--model-steps", type=int, default=1800, help="of the reward models")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench_reward_model")
    args = parser.parse_args()
    work_folder = args.work.absolute()
    work_folder.mkdir(parents=True, exist_ok=True)
    if not (work_folder / SFT / "config.json").exists():
        run_rlhpc(work_folder, "train", str(CONFIG.with_name("demo_sft.yaml")))
        run_rlhpc(work_folder, "convert", "--run", "runs/demo_sft")
    if args.part == "critic":
        figures, is_short = compare_critic(work_folder, args.seeds, args.steps)
    else:
        figures, is_short = compare_reward_model(work_folder, args.seeds, args.steps, args.model_steps)
    command = f"python -m bench.groups --part {args.part} --seeds {args.seeds} --steps {args.steps}"
    path = write(f"groups_{args.part}", command, figures)
    print(f"{json.dumps(figures['accuracy'])}\n{command} → {path.name}")
    return int(is_short)


if __name__ == "__main__":
    raise SystemExit(main())
