"""Learning curve: GRPO on sums of reasoning-gym, by rlhpc and by TRL, in the same minutes on the same card.

Both start from one model of random weights, which a short SFT by rlhpc in the same call has taught the form of answers, and
take the same number of samples per step by the same optimizer settings. Answers have six tokens, so that both generate them by
transformers, whose start takes seconds. The mean reward of a step is that of its samples, drawn
at temperature 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.carry import carried_packages
from bench.gpu.part import ROOT, Report

#: Seconds of each of both, on a card and on a CPU.
SECONDS, SMALL_SECONDS = 60.0, 10.0
GROUP, ANSWER, LR = 8, 6, 2e-4


def prompts_on(device: str) -> int:
    """Returns the number of prompts of a step."""
    return 8 if device == "cpu" else 64


def problems() -> str:
    """Returns the overrides of the problems, of training and of SFT."""
    options = "{task: chain_sum, min_terms: 2, max_terms: 2, min_digits: 2, max_digits: 2}"
    return f"data.train={{source: reasoning_gym, size: 8000, kwargs: {options}}}"


def build_overrides(report: Report, folder: Path) -> list[str]:
    """Returns overrides that both runs of rlhpc share."""
    model = "{context: 192}" if report.small else "{hidden: 512, layers: 8, heads: 8, context: 192}"
    return [
        f"runner.run_dir={folder}", "runner.segments=1", "runner.logger.logger_backends=[jsonl]", "data.eval=[]",
        "workflow.eval_suites=[]", "data.max_prompt_tokens=160", f"actor.model.kwargs={model}",
        f"cluster.accelerators_per_node={0 if report.small else 1}",
    ]  # fmt: skip


def _has_rows(metrics: Path) -> bool:
    return metrics.exists() and metrics.stat().st_size > 0


#: Seconds within which a run finishes its first step.
START_S = 180.0


def run_rlhpc(*arguments: str, metrics: Path | None = None, duration_s: float | None = None) -> None:
    """Runs `rlhpc train`; interrupts it `duration_s` after the first row of `metrics`, as TRL is.

    Raises:
        RuntimeError: It failed.
    """
    command = [sys.executable, "-m", "rlhpc.cli", "train", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + START_S
    while metrics is not None and not _has_rows(metrics) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        output, _ = process.communicate(timeout=duration_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    else:
        if process.returncode:
            raise RuntimeError(f"rlhpc train ended with {process.returncode}: {output[-2000:]}")


def train_rlhpc(report: Report, folder: Path, start: Path, duration_s: float) -> list[tuple[float, float]]:
    """Returns seconds since the first step's end, and the mean reward, of each step."""
    prompts = prompts_on(report.device)
    run_rlhpc(
        "configs/reasoning/demo.yaml", *build_overrides(report, folder), problems(), "runner.name=grpo",
        "runner.max_steps=100000", "runner.save_interval=-1",
        f"actor.model.model_path={start}", "actor.model.kwargs={}", "workflow.sft=null",
        "workflow.sft_overrides=[]", f"data.prompts_per_step={prompts}", f"algorithm.group_size={GROUP}",
        f"actor.global_batch_size={prompts * GROUP}", f"rollout.max_new_tokens={ANSWER}", f"actor.optim.lr={LR}",
        f"rollout.max_batch_size={prompts * GROUP}", "rollout.rollout_backend=hf",
        metrics=folder / "grpo" / "metrics.jsonl", duration_s=duration_s,
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "grpo" / "metrics.jsonl").read_text().splitlines()]
    return [(row["time/wall_s"] - rows[0]["time/wall_s"], row["train/reward"]) for row in rows]


def train_trl(report: Report, folder: Path, start: Path, duration_s: float) -> list[tuple[float, float]]:
    """Returns the curve of TRL, which trains in a separate process."""
    output = folder / "trl.json"
    command = [sys.executable, "-m", "bench.gpu.curve", str(start), str(output), str(duration_s), report.device]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"TRL ended with {result.returncode}: {result.stderr[-2000:]}")
    rows: list[list[float]] = json.loads(output.read_text())
    return [(row[0], row[1]) for row in rows]


def trl_options(output: Path, device: str) -> dict[str, Any]:
    """Returns the arguments of TRL's GRPOConfig, which are those of the run of rlhpc."""
    return {
        "output_dir": str(output), "use_cpu": device == "cpu", "bf16": device != "cpu", "max_steps": 100_000,
        "per_device_train_batch_size": prompts_on(device) * GROUP, "gradient_accumulation_steps": 1,
        "num_generations": GROUP, "max_completion_length": ANSWER, "temperature": 1.0, "beta": 0.0, "epsilon": 0.2,
        "epsilon_high": 0.28, "loss_type": "dapo", "scale_rewards": "group", "learning_rate": LR,
        "lr_scheduler_type": "constant", "adam_beta2": 0.99, "adam_epsilon": 1e-8, "weight_decay": 0.0,
        "max_grad_norm": 1.0, "save_strategy": "no", "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
        "use_vllm": False, "gradient_checkpointing": False,
    }  # fmt: skip


def run_peer(start: str, output: str, duration_s: float, device: str) -> None:
    """Trains by TRL's GRPOTrainer for some seconds after its first step, and writes its rewards."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rlhpc.config.typed import typed
    from rlhpc.language.config.run import GrpoConfig
    from rlhpc.language.data import make_dataset
    from rlhpc.runs.configuration import load_config

    cfg = typed(
        GrpoConfig, load_config("configs/reasoning/demo.yaml", [problems(), "data.eval=[]", "workflow.eval_suites=[]"])
    )
    dataset = make_dataset(cfg.data.train, "train")
    rows = [{"prompt": list(dataset[i].messages), "answer": dataset[i].answer} for i in range(len(dataset))]
    curve: list[tuple[float, float]] = []

    def right(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
        return [float(m[0]["content"].strip() == a) for m, a in zip(completions, answer, strict=True)]

    class RewardClock(TrainerCallback):
        start_time = 0.0

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "reward" in logs:
                self.start_time = self.start_time or time.perf_counter()
                curve.append((time.perf_counter() - self.start_time, float(logs["reward"])))
                Path(output).write_text(json.dumps(curve))
                control.should_training_stop |= curve[-1][0] > duration_s

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(start),
        reward_funcs=right,
        train_dataset=Dataset.from_list(rows),
        callbacks=[RewardClock()],
        args=GRPOConfig(**trl_options(Path(output).parent / "trl", device)),
    )
    trainer.train()


def report_curve(report: Report, name: str, curve: Sequence[tuple[float, float]], duration_s: float) -> None:
    """Reports steps, and mean rewards at quarters of the time."""
    if len(curve) < 3:
        report.fail(name, f"{len(curve)} steps in {duration_s:g} s")
        return
    report.figure(f"{name}, a step", (curve[-1][0] - curve[0][0]) / (len(curve) - 1), "s")
    for quarter in range(1, 5):
        end = duration_s * quarter / 4
        rewards = [reward for time_s, reward in curve if end - duration_s / 8 <= time_s <= end]
        if rewards:
            report.figure(f"{name}, reward after {end:.0f} s", statistics.mean(rewards), "of 1")


def measure(report: Report) -> None:
    """Trains by rlhpc, then by TRL."""
    with carried_packages() as has_problems, tempfile.TemporaryDirectory() as temporary_folder:
        if not has_problems:
            remedy = "pip install 'rlhpc[llm]', or take along what python -m bench.gpu.carry writes"
            report.skip("rlhpc and TRL", f"reasoning-gym is not installed: {remedy}")
            return
        _train_both(report, Path(temporary_folder))


def _train_both(report: Report, folder: Path) -> None:
    seconds = SMALL_SECONDS if report.small else SECONDS
    os.environ["RLHPC_MODELS"] = str(folder / "models")
    run_rlhpc(
        "configs/reasoning/demo_sft.yaml", *build_overrides(report, folder), problems(), "data.train.chat_template=true",
        "runner.name=sft", f"runner.max_steps={4 if report.small else 120}", "actor.model.model_path=builtin:tiny",
        f"data.prompts_per_step={16 if report.small else 256}",
    )  # fmt: skip
    (checkpoint,) = (folder / "sft" / "checkpoints").glob("global_step_*")
    start = folder / "start"
    convert = ["convert", "--checkpoint", str(checkpoint), "--output", str(start)]
    subprocess.run([sys.executable, "-m", "rlhpc.cli", *convert], cwd=ROOT, check=True, capture_output=True)
    with report.piece("rlhpc"):
        report_curve(report, "rlhpc", train_rlhpc(report, folder, start, seconds + 2), seconds)
    if importlib.util.find_spec("trl") is None:
        report.skip("TRL", "it is not installed: pip install 'rlhpc[trl]'")
        return
    with report.piece("TRL"):
        report_curve(report, "TRL", train_trl(report, folder, start, seconds), seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="TRL's side of the part `curve`.")
    for name in ("start", "output", "seconds", "device"):
        parser.add_argument(name)
    options = parser.parse_args()
    run_peer(options.start, options.output, float(options.seconds), options.device)
