"""Learning curve: GRPO on sums of reasoning-gym, by rlhpc and by TRL, in the same minutes on the same card.

Both start from one model of random weights, which a short SFT by rlhpc in the same call has taught the form of answers, and
take the same number of samples a step by the same optimizer settings. The mean reward of a step is that of its samples, drawn
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

from bench.gpu.part import ROOT, Report

#: Seconds of each of both, on a card and on a CPU.
SECONDS, SMALL_SECONDS = 75.0, 12.0
GROUP, ANSWER, LR = 8, 6, 2e-4


def prompts_on(device: str) -> int:
    """Returns the number of prompts of a step."""
    return 8 if device == "cpu" else 64


def problems() -> str:
    """Returns the overrides of the problems, of training and of SFT."""
    options = "{task: chain_sum, min_terms: 2, max_terms: 2, min_digits: 2, max_digits: 2}"
    return f"data.train={{source: reasoning_gym, size: 8000, kwargs: {options}}}"


def words(report: Report, folder: Path) -> list[str]:
    """Returns overrides that both runs of rlhpc share."""
    model = "{context: 192}" if report.small else "{hidden: 512, layers: 8, heads: 8, context: 192}"
    return [
        f"runner.run_dir={folder}", "runner.segments=1", "runner.logger.logger_backends=[jsonl]", "data.eval=[]",
        "workflow.eval_suites=[]", "data.max_prompt_tokens=160", f"actor.model.kwargs={model}",
        f"cluster.accelerators_per_node={0 if report.small else 1}",
    ]  # fmt: skip


def rlhpc(*words: str, seconds: float | None = None) -> None:
    """Runs `rlhpc train`; interrupts it after `seconds`.

    Raises:
        RuntimeError: It failed.
    """
    command = [sys.executable, "-m", "rlhpc.cli", "train", *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    else:
        if process.returncode:
            raise RuntimeError(f"rlhpc train ended with {process.returncode}: {output[-2000:]}")


def ours(report: Report, folder: Path, start: Path, seconds: float) -> list[tuple[float, float]]:
    """Returns seconds since the first step's end, and the mean reward, of each step."""
    vllm, prompts = importlib.util.find_spec("vllm") is not None and not report.small, prompts_on(report.device)
    rlhpc(
        "configs/reasoning/demo.yaml", *words(report, folder), problems(), "runner.name=grpo", "runner.max_steps=100000",
        "runner.save_interval=-1", f"actor.model.model_path={start}", "actor.model.kwargs={}", "workflow.sft=null",
        "workflow.sft_overrides=[]", f"data.prompts_per_step={prompts}", f"algorithm.group_size={GROUP}",
        f"actor.global_batch_size={prompts * GROUP}", f"rollout.max_new_tokens={ANSWER}", f"actor.optim.lr={LR}",
        f"rollout.max_batch_size={prompts * GROUP}", f"rollout.rollout_backend={'vllm' if vllm else 'hf'}",
        *(["rollout.gpu_memory_utilization=0.3"] if vllm else []), seconds=seconds,
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "grpo" / "metrics.jsonl").read_text().splitlines()]
    return [(row["time/wall_s"] - rows[0]["time/wall_s"], row["train/reward"]) for row in rows]


def train_trl(report: Report, folder: Path, start: Path, seconds: float) -> list[tuple[float, float]]:
    """Returns the same of TRL, which runs in a process of its own."""
    output = folder / "trl.json"
    command = [sys.executable, "-m", "bench.gpu.curve", str(start), str(output), str(seconds), report.device]
    completed = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True)
    if completed.returncode:
        raise RuntimeError(f"TRL ended with {completed.returncode}: {completed.stderr[-2000:]}")
    rows: list[list[float]] = json.loads(output.read_text())
    return [(row[0], row[1]) for row in rows]


def peer(start: str, output: str, seconds: float, device: str) -> None:
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

    def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [float(m[0]["content"].strip() == a) for m, a in zip(completions, answer, strict=True)]

    class RewardClock(TrainerCallback):
        began = 0.0

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "reward" in logs:
                self.began = self.began or time.perf_counter()
                curve.append((time.perf_counter() - self.began, float(logs["reward"])))
                Path(output).write_text(json.dumps(curve))
                control.should_training_stop |= curve[-1][0] > seconds

    vllm = importlib.util.find_spec("vllm") is not None and device != "cpu"
    batch = prompts_on(device) * GROUP
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(start), reward_funcs=right, train_dataset=Dataset.from_list(rows),
        callbacks=[RewardClock()],
        args=GRPOConfig(
            output_dir=str(Path(output).parent / "trl"), use_cpu=device == "cpu", bf16=device != "cpu", max_steps=100000,
            per_device_train_batch_size=batch, gradient_accumulation_steps=1, num_generations=GROUP,
            max_completion_length=ANSWER, temperature=1.0, beta=0.0, epsilon=0.2, epsilon_high=0.28, loss_type="dapo",
            scale_rewards="group", learning_rate=LR, lr_scheduler_type="constant", adam_beta2=0.99, adam_epsilon=1e-8,
            weight_decay=0.0, max_grad_norm=1.0, save_strategy="no", logging_steps=1, report_to="none", disable_tqdm=True,
            use_vllm=vllm, gradient_checkpointing=False,
        ),
    )  # fmt: skip
    trainer.train()


def tell(report: Report, name: str, curve: Sequence[tuple[float, float]], seconds: float) -> None:
    """Reports steps, and mean rewards at quarters of the time."""
    if len(curve) < 3:
        report.fail(name, f"{len(curve)} steps in {seconds:g} s")
        return
    report.figure(f"{name}, a step", (curve[-1][0] - curve[0][0]) / (len(curve) - 1), "s")
    for quarter in range(1, 5):
        end = seconds * quarter / 4
        rewards = [reward for time_s, reward in curve if end - seconds / 8 <= time_s <= end]
        if rewards:
            report.figure(f"{name}, reward after {end:.0f} s", statistics.mean(rewards), "of 1")


def measure(report: Report) -> None:
    """Trains by rlhpc, then by TRL."""
    seconds = SMALL_SECONDS if report.small else SECONDS
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = Path(temporary_folder)
        os.environ["RLHPC_MODELS"] = str(folder / "models")
        rlhpc(
            "configs/reasoning/demo_sft.yaml", *words(report, folder), problems(), "data.train.chat_template=true",
            "runner.name=sft", f"runner.max_steps={20 if report.small else 120}", "actor.model.model_path=builtin:tiny",
            f"data.prompts_per_step={64 if report.small else 256}",
        )  # fmt: skip
        (checkpoint,) = (folder / "sft" / "checkpoints").glob("global_step_*")
        start = folder / "start"
        convert = ["convert", "--checkpoint", str(checkpoint), "--output", str(start)]
        subprocess.run([sys.executable, "-m", "rlhpc.cli", *convert], cwd=ROOT, check=True, capture_output=True)
        with report.piece("rlhpc"):
            tell(report, "rlhpc", ours(report, folder, start, 20 + seconds if report.small else 60 + seconds), seconds)
        if importlib.util.find_spec("trl") is None:
            report.skip("TRL", "it is not installed: pip install 'rlhpc[bench]'")
            return
        with report.piece("TRL"):
            tell(report, "TRL", train_trl(report, folder, start, seconds), seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="TRL's side of the part `curve`.")
    for name in ("start", "output", "seconds", "device"):
        parser.add_argument(name)
    options = parser.parse_args()
    peer(options.start, options.output, float(options.seconds), options.device)
