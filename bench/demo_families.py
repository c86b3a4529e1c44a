"""GRPO on tiny models of two hybrid families and of two mixtures of experts: SFT, GRPO, and accuracy on held-out sums.

    python -m bench.demo_families --seeds 2

Each family starts from random weights. Its engine is hf, whose log-probs must agree with the trainer's at every step.

Prints a line a family and seed, writes bench/results/demo_families.json after each, and fails where accuracy on held-out
problems did not rise by 15 points over SFT, where the interval of the difference includes 0, or where engine and trainer
differed by more than rounding.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.machine import RESULTS, write
from rlhpc.metrics.logger import read_metrics

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "configs/reasoning/demo.yaml"
#: Mean difference of a token's log-prob that rounding explains in float32 on a CPU (`rollout.probe_tolerance`).
BOUND = 1e-3
#: Steps of SFT: twice those of the demonstration's model, because GRPO learns little where answers are rarely right.
SFT_STEPS = 360
#: Minimum gain in accuracy over the SFT start.
GAIN = 0.15
_SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
#: Sizes that differ from `_SIZES`, by model type.
FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {
        "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"] * 2,
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


def run_seed(family: str, seed: int, runs: Path, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Runs the workflow for a family at one seed."""
    name, start_time = f"{family}-{seed}", time.perf_counter()
    save_model(runs / f"{name}-model", family, seed)
    sft_overrides = [
        f"runner.name={name}-sft", f"runner.run_dir={runs}", f"runner.seed={seed}",
        f"actor.model.model_path={runs / f'{name}-model'}", f"runner.max_steps={SFT_STEPS}",
        f"runner.save_interval={SFT_STEPS}",
    ]  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "rlhpc.cli", "run", CONFIG, f"runner.seed={seed}", f"runner.name={name}",
         f"runner.run_dir={runs}", f"runner.max_steps={steps}", f"runner.save_interval={steps}", "runner.segments=1",
         f"workflow.sft_overrides={json.dumps(sft_overrides)}", *overrides],
        cwd=ROOT, check=True,
    )  # fmt: skip
    start, end = sorted(
        (json.loads(path.read_text()) for path in (runs / name / "eval").glob("global_step_*/held_out.json")),
        key=lambda result: int(result["global_step"]),
    )
    rows = read_metrics(runs / name / "metrics.jsonl")
    # Both are shares of the same problems; their difference varies at most as that of two sets of problems.
    error = math.sqrt(sum(share * (1 - share) / start["n"] for share in (start["accuracy"], end["accuracy"])))
    return {
        "family": family, "seed": seed, "sft": start["accuracy"], "grpo": end["accuracy"], "n": start["n"],
        "low": end["accuracy"] - start["accuracy"] - 1.96 * error, "steps": len(rows),
        "mismatch": max(row["train/mismatch_abs"] for row in rows), "seconds": time.perf_counter() - start_time,
    }  # fmt: skip


def falls_short(row: dict[str, Any]) -> bool:
    """Returns whether a run misses a criterion."""
    return row["grpo"] - row["sft"] < GAIN or row["low"] <= 0 or not row["mismatch"] <= BOUND


def main() -> int:
    """Runs all families and seeds; returns 1 if one misses a criterion, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs")
    parser.add_argument("overrides", nargs="*", help="key=value")
    args = parser.parse_args()
    path = RESULTS / "demo_families.json"
    earlier_rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    rows_by_case = {(row["family"], row["seed"]): row for row in earlier_rows}
    tried_rows = list[dict[str, Any]]()
    for family in args.families:
        for seed in range(1, args.seeds + 1):
            row = rows_by_case[family, seed] = run_seed(family, seed, args.runs.absolute(), args.steps, args.overrides)
            tried_rows.append(row)
            print(
                f"{family}, seed {seed}: SFT {row['sft']:.1%} → GRPO {row['grpo']:.1%} on {row['n']} held-out problems, at "
                f"least {row['low']:+.1%}; largest mismatch {row['mismatch']:.2g} in {row['steps']} steps; "
                f"{row['seconds']:.0f} s",
                flush=True,
            )
            command = f"python -m bench.demo_families --seeds {args.seeds} --steps {args.steps}"
            write("demo_families", command, {"rows": [rows_by_case[case] for case in sorted(rows_by_case)]})
    failed_rows = [row for row in tried_rows if falls_short(row)]
    for row in failed_rows:
        print(f"{row['family']}, seed {row['seed']} fell short", file=sys.stderr)
    return int(bool(failed_rows))


if __name__ == "__main__":
    raise SystemExit(main())
