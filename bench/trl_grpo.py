"""GRPO in rlhpc and in TRL, with the same model, problems, batch, optimizer and steps: step time and accuracy.

    pip install -e '.[bench]'
    python -m bench.trl_grpo --seeds 3

Both start from the same SFT checkpoint and run in turn. The step time is the mean wall time from the 10th step to the last.
The same command measures the accuracy on the same held-out problems. TRL runs in one process; rlhpc runs an actor and a
rollout process, which alternate in this mode. Both are measured with one and with two threads per process.
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
from pathlib import Path
from typing import Any

from bench.machine import spread, write

ROOT = Path(__file__).resolve().parents[1]
SFT, GRPO = "configs/reasoning/demo_sft.yaml", "configs/reasoning/demo.yaml"
#: Steps before which nothing is timed.
WARM = 10


def run_rlhpc(*arguments: str) -> None:
    """Runs one `rlhpc` command; prints its output only if it fails."""
    result = subprocess.run([sys.executable, "-m", "rlhpc.cli", *arguments], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"rlhpc {' '.join(arguments)} failed:\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")


def measure_accuracy(model: Path, overrides: list[str]) -> float:
    """Returns the accuracy on the held-out problems, with greedy decoding."""
    output = model.parent / f"{model.name}-eval.json"
    run_rlhpc(
        "eval", "--model", str(model), "--config", GRPO, "--suite", "held_out", "--output", str(output), *overrides
    )
    return float(json.loads(output.read_text())["accuracy"])


def train_start(folder: Path) -> Path:
    """Returns the model from which both start."""
    overrides = [f"runner.run_dir={folder}", "runner.name=sft"]
    run_rlhpc("train", SFT, *overrides)
    export = folder / "sft-export"
    checkpoint = next((folder / "sft" / "checkpoints").glob("global_step_*"))
    run_rlhpc("convert", "--checkpoint", str(checkpoint), "--output", str(export))
    return export


def train_rlhpc(folder: Path, start: Path, seed: int, num_steps: int, num_threads: int) -> tuple[float, Path]:
    """Returns the seconds per step, and the exported model."""
    name = f"rlhpc-{seed}-{num_threads}"
    run_rlhpc(
        "train", GRPO, f"runner.run_dir={folder}", f"runner.name={name}", f"runner.seed={seed}", "runner.segments=1",
        f"runner.max_steps={num_steps}", f"runner.save_interval={num_steps}", f"actor.model.model_path={start}",
        "workflow.sft=null", "workflow.sft_overrides=[]",
        f"cluster.node_groups=[{{label: here, env_vars: {{OMP_NUM_THREADS: '{num_threads}'}}}}]",
        "cluster.component_placement={'actor,rollout': {node_group: here, placement: '0'}}",
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    seconds = (rows[-1]["time/wall_s"] - rows[WARM - 1]["time/wall_s"]) / (len(rows) - WARM)
    export = folder / f"{name}-export"
    run_rlhpc(
        "convert",
        "--checkpoint",
        str(folder / name / "checkpoints" / f"global_step_{num_steps}"),
        "--output",
        str(export),
    )
    return seconds, export


def train_trl(folder: Path, start: Path, seed: int, num_steps: int, num_threads: int) -> tuple[float, Path]:
    """Trains with TRL in a separate process; returns the seconds per step, and the exported model."""
    export = folder / f"trl-{seed}-{num_threads}"
    arguments = [
        "--peer",
        "--start",
        str(start),
        "--output",
        str(export),
        "--seed",
        str(seed),
        "--steps",
        str(num_steps),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    result = subprocess.run(
        [sys.executable, "-m", "bench.trl_grpo", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if result.returncode:
        raise SystemExit(f"TRL failed:\n{result.stderr[-3000:]}")
    return float(json.loads((export / "time.json").read_text())["step_s"]), export


def peer(start: str, output: str, seed: int, num_steps: int) -> None:
    """Runs TRL's GRPOTrainer with the demonstration's settings."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rlhpc.config.typed import typed
    from rlhpc.language.config.run import GrpoConfig, minibatch_size
    from rlhpc.language.data import make_dataset
    from rlhpc.runs.configuration import load_config

    cfg = typed(GrpoConfig, load_config(GRPO))
    problems = make_dataset(cfg.data.train, "train")
    rows = [
        {"prompt": list(problem.messages), "answer": problem.answer}
        for problem in (problems[i] for i in range(len(problems)))
    ]

    def right(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
        return [
            float(messages[0]["content"].strip() == expected_answer)
            for messages, expected_answer in zip(completions, answer, strict=True)
        ]

    step_ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_ends.append(time.perf_counter())

    batch = minibatch_size(cfg, cfg.actor)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(start, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(start),
        reward_funcs=right,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=output, use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False, seed=seed,
            max_steps=num_steps, per_device_train_batch_size=batch, gradient_accumulation_steps=1,
            num_generations=cfg.algorithm.group_size, max_completion_length=cfg.rollout.max_new_tokens,
            temperature=cfg.rollout.temperature, beta=0.0, epsilon=cfg.algorithm.clip_ratio_low,
            epsilon_high=cfg.algorithm.clip_ratio_high, loss_type="dapo", scale_rewards="group",
            learning_rate=cfg.actor.optim.lr, lr_scheduler_type="constant", warmup_steps=0,
            adam_beta2=cfg.actor.optim.adam_beta2, adam_epsilon=cfg.actor.optim.adam_eps, weight_decay=0.0,
            max_grad_norm=cfg.actor.optim.clip_grad or 0.0, save_strategy="no", logging_steps=50, report_to="none",
            disable_tqdm=True, dataloader_num_workers=0,
        ),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(output)
    seconds = (step_ends[-1] - step_ends[WARM - 1]) / (len(step_ends) - WARM)
    (Path(output) / "time.json").write_text(json.dumps({"step_s": seconds}))


def compare(num_seeds: int, num_steps: int, folder: Path) -> dict[str, Any]:
    """Runs rlhpc and TRL in turn at each seed, and writes the comparison."""
    start = train_start(folder)
    overrides = [f"runner.run_dir={folder}"]
    rows: dict[str, list[dict[str, float]]] = {f"{side}, {n} threads": [] for n in (1, 2) for side in ("rlhpc", "TRL")}
    for seed in range(1, num_seeds + 1):
        for name in rows if seed % 2 else reversed(rows):
            run_side, threads = (train_rlhpc if name.startswith("rlhpc") else train_trl), 2 if "2" in name else 1
            seconds, export = run_side(folder, start, seed, num_steps, threads)
            row = {"seed": float(seed), "step_s": seconds, "accuracy": measure_accuracy(export, overrides)}
            rows[name].append(row)
            print(f"seed {seed} {name:18} {seconds:.3f} s a step, accuracy {row['accuracy']:.1%}", flush=True)
    figures = {
        name: {key: spread([row[key] for row in side_rows]) for key in ("step_s", "accuracy")}
        for name, side_rows in rows.items()
    }
    ratios = {
        f"{n} threads": statistics.median(
            trl_row["step_s"] / rlhpc_row["step_s"]
            for rlhpc_row, trl_row in zip(
                _by_seed(rows[f"rlhpc, {n} threads"]), _by_seed(rows[f"TRL, {n} threads"]), strict=True
            )
        )
        for n in (1, 2)
    }
    return {
        "before": measure_accuracy(start, overrides),
        "figures": figures,
        "TRL / rlhpc, time of a step": ratios,
        "rows": rows,
    }


def _by_seed(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return sorted(rows, key=lambda row: row["seed"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.peer:
        peer(options.start, options.output, options.seed, options.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        comparison = compare(options.seeds, options.steps, Path(folder))
    command = f"python -m bench.trl_grpo --seeds {options.seeds} --steps {options.steps}"
    from importlib.metadata import version

    print(write("trl_grpo", command, {"trl": version("trl"), **comparison}))


if __name__ == "__main__":
    main()
