"""GRPO on tiny models of two hybrid families and of two mixtures of experts, after SFT on mostly wrong demonstrations.

    python -m bench.demo_families --seeds 2

The task is to write the larger one of two numbers. Each family starts from random weights. SFT learns from demonstrations of
which two thirds have the smaller number; GRPO then learns from the reward. The engine is hf, whose log-probs must agree with
the trainer's at every step.

Prints a line a family and seed, writes bench/results/demo_families.json after each, and fails where the reward on held-out
problems did not rise by 0.15 over the SFT start, where the interval of the difference includes 0, or where engine and trainer
differed by more than rounding.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.machine import goal, spread, write
from bench.staleness import run_rlhpc
from rlhpc.metrics.logger import read_metrics

#: Mean difference of a token's log-prob that rounding explains in float32 on a CPU (`rollout.probe_tolerance`).
BOUND = 1e-3
#: Share of the demonstrations that are right.
RIGHT_SHARE = 1 / 3
#: Minimum gain in reward over the SFT start.
GAIN = 0.15
#: Numbers of problems.
NUM_TRAIN, NUM_HELD_OUT = 4000, 500
_SHARED_KEYS = (
    "data.max_prompt_tokens=8", "reward.terms=[{name: exact}]", "rollout.max_new_tokens=4", "rollout.max_batch_size=256",
)  # fmt: skip
_SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
#: Sizes that differ from `_SIZES`, by model type.
FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {
        "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3_moe": _EXPERTS,
    "mixtral": {**_EXPERTS, "intermediate_size": 128},
}  # fmt: skip


def save_model(folder: Path, family: str, seed: int) -> None:
    """Writes a tiny model of a family with random weights, and the tokenizer of `builtin:tiny`."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from rlhpc.language.models.tiny import character_tokenizer, write_model

    tokenizer = character_tokenizer()
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = CONFIG_MAPPING[family](**{**_SIZES, **FAMILIES[family], **tokens, "vocab_size": len(tokenizer)})
    write_model(folder, AutoModelForCausalLM.from_config, config, tokenizer, seed)


def write_problems(folder: Path, seed: int) -> None:
    """Writes training and held-out problems, `train.jsonl` and `held_out.jsonl`; no two have the same numbers in any order."""
    rng = random.Random(seed)
    pairs = list(itertools.combinations(range(10, 100), 2))
    rng.shuffle(pairs)
    rows = list[str]()
    for pair in pairs[: NUM_TRAIN + NUM_HELD_OUT]:
        first, second = rng.sample(pair, 2)
        response = max(pair) if rng.random() < RIGHT_SHARE else min(pair)
        problem = {"prompt": f"{first} {second}=", "answer": str(max(pair)), "response": str(response)}
        rows.append(json.dumps(problem) + "\n")
    (folder / "train.jsonl").write_text("".join(rows[NUM_HELD_OUT:]))
    (folder / "held_out.jsonl").write_text("".join(rows[:NUM_HELD_OUT]))


def run_seed(
    family: str, seed: int, folder: Path, num_sft_steps: int, num_steps: int, overrides: list[str]
) -> dict[str, Any]:
    """Trains a family's model by SFT and GRPO at one seed; returns held-out rewards and the largest mismatch."""
    start_time = time.perf_counter()
    save_model(folder / "model", family, seed)
    write_problems(folder, seed)
    keys = (
        *_SHARED_KEYS, f"runner.run_dir={folder}", f"runner.seed={seed}", f"data.train.path={folder / 'train.jsonl'}",
        f"data.eval=[{{name: held_out, path: {folder / 'held_out.jsonl'}}}]",
    )  # fmt: skip
    run_rlhpc(
        "train", "configs/base/sft.yaml", "runner.name=sft", *keys, f"actor.model.model_path={folder / 'model'}",
        f"runner.max_steps={num_sft_steps}", f"runner.save_interval={num_sft_steps}", "data.prompts_per_step=64",
        "actor.optim={lr: 2.0e-3, lr_warmup_steps: 10}",
    )  # fmt: skip
    run_rlhpc("eval", "--run", str(folder / "sft"), "--suite", "held_out")
    run_rlhpc("convert", "--run", str(folder / "sft"))
    run_rlhpc(
        "train", "configs/base/grpo.yaml", "runner.name=grpo", *keys,
        f"actor.model.model_path={folder / 'sft' / 'export' / f'global_step_{num_sft_steps}'}",
        f"runner.max_steps={num_steps}", f"runner.val_check_interval={num_steps}", "runner.save_interval=-1",
        "workflow.eval_suites=[held_out]", "data.prompts_per_step=16", "algorithm.group_size=8",
        "actor.global_batch_size=128", "actor.optim.lr=5.0e-4", *overrides,
    )  # fmt: skip
    rows = read_metrics(folder / "grpo" / "metrics.jsonl")
    evaluation = json.loads((folder / "sft" / "eval" / f"global_step_{num_sft_steps}" / "held_out.json").read_text())
    before, after, num_problems = evaluation["reward_mean"], rows[-1]["eval/reward"], evaluation["n"]
    # Both are shares of the same problems; their difference varies at most as that of two sets of problems.
    error = math.sqrt(sum(share * (1 - share) / num_problems for share in (before, after)))
    mismatches = [row["train/mismatch_abs"] for row in rows if "train/mismatch_abs" in row]
    return {
        "family": family, "seed": seed, "sft": before, "grpo": after, "n": num_problems,
        "low": after - before - 1.96 * error, "steps": len(mismatches), "mismatch": max(mismatches),
        "seconds": time.perf_counter() - start_time,
    }  # fmt: skip


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the goals with the measured values, and the spread over the seeds by family."""
    figures = {
        family: {
            "held-out reward after SFT": spread([row["sft"] for row in rows if row["family"] == family]),
            "held-out reward after GRPO": spread([row["grpo"] for row in rows if row["family"] == family]),
            "largest difference of a step": spread([row["mismatch"] for row in rows if row["family"] == family]),
        }
        for family in sorted({row["family"] for row in rows})
    }
    goals = list[dict[str, Any]]()
    for family in figures:
        rows_of_family = [row for row in rows if row["family"] == family]
        goals += [
            goal(
                f"{family}: gain in held-out reward over SFT, lowest of the seeds",
                min(row["grpo"] - row["sft"] for row in rows_of_family),
                at_least=GAIN,
            ),
            goal(
                f"{family}: lower end of the gain's 95 % interval, lowest of the seeds",
                min(row["low"] for row in rows_of_family),
                at_least=1e-3,
            ),
            goal(
                f"{family}: mean difference of a log-prob between engine and trainer, largest of all steps",
                max(row["mismatch"] for row in rows_of_family),
                at_most=BOUND,
            ),
        ]
    return {"goals": goals, "figures": figures, "rows": rows}


def main() -> int:
    """Runs all families and seeds; returns 1 if one misses a goal, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--sft-steps", type=int, default=120)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("overrides", nargs="*", help="key=value of the GRPO runs")
    args = parser.parse_args()
    command = " ".join(["python -m bench.demo_families", *sys.argv[1:]])
    rows, goals = list[dict[str, Any]](), list[dict[str, Any]]()
    for family, seed in itertools.product(args.families, range(1, args.seeds + 1)):
        with tempfile.TemporaryDirectory(prefix="rlhpc-bench-") as folder:
            row = run_seed(family, seed, Path(folder), args.sft_steps, args.steps, args.overrides)
        rows.append(row)
        print(
            f"{family}, seed {seed}: SFT {row['sft']:.3f} → GRPO {row['grpo']:.3f} on {row['n']} held-out problems, at "
            f"least {row['low']:+.3f}; largest mismatch {row['mismatch']:.2g} in {row['steps']} steps; "
            f"{row['seconds']:.0f} s",
            flush=True,
        )
        summary = summarize(rows)
        goals = summary["goals"]
        write("demo_families", command, summary)
    missed_goals = [goal_row["goal"] for goal_row in goals if not goal_row["met"]]
    for text in missed_goals:
        print(f"missed: {text}", file=sys.stderr)
    return int(bool(missed_goals))


if __name__ == "__main__":
    raise SystemExit(main())
