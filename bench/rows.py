"""Sequence packing of samples with mixed lengths, compared with padded batches of samples of similar length.

    python -m bench.rows --repeat 7

Both sides have the same samples of 64 to 1024 tokens (uniform in the logarithm), the same model and the same maximum of
tokens in a micro-batch. They train one step each in turn. The time is CPU time, because other processes hardly change it.
Then separate processes measure the memory of a row by its number of tokens. With `--loss`, which takes minutes, the
benchmark instead measures the memory of the log-probs and entropies of a model with a vocabulary of 152 000.

Prints a line for each figure and writes bench/results/rows.json, or rows_loss.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from bench.machine import goal, spread, write
from bench.training import LR, make_model
from rlhpc import Worker
from rlhpc.config.typed import typed
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.micro_batching import split_micro_batches
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.training.trainer import TokenTrainer

LAYERS, WIDTH, VOCABULARY, SAMPLES, MAX_TOKENS = 4, 256, 8192, 32, 4096
SHORTEST, LONGEST = 64, 1024
#: Tokens of a row, for memory.
SIZES = (2048, 4096, 8192, 16384)


def make_samples(lengths: list[int], vocabulary: int) -> TokenBatch:
    """Returns a batch of random tokens with a random weight per token."""
    torch.manual_seed(0)
    ids = [torch.randint(0, vocabulary, (n,)) for n in lengths]
    return TokenBatch.from_sequences(
        ids, [torch.ones(n) for n in lengths], {"weights": [torch.randn(n) for n in lengths]}
    )


def draw_mixed_lengths() -> list[int]:
    rng = random.Random(0)
    return [round(math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST)))) for _ in range(SAMPLES)]


def make_trainer(folder: str, is_packed: bool) -> TokenTrainer:
    cfg = typed(GrpoConfig, OmegaConf.structured(GrpoConfig))
    cfg.actor.model.model_path, cfg.actor.use_remove_padding = folder, is_packed
    cfg.actor.optim.name, cfg.actor.optim.clip_grad = "adamw", 1.0
    token_trainer = TokenTrainer(cfg, Worker())
    assert token_trainer.packed == is_packed
    return token_trainer


def run_passes(
    token_trainer: TokenTrainer, parts: list[TokenBatch], total: int, computes_entropy: bool = False
) -> None:
    """Runs the forward and backward pass of a batch."""

    def loss(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss_value = -(batch.columns["weights"] * scores.logprobs).sum() / total
        if scores.entropy is not None:
            loss_value = loss_value - 0.01 * scores.entropy.sum() / total
        return loss_value, {"loss": loss_value}

    token_trainer.forward_backward(parts, loss, compute_entropy=computes_entropy)


def measure_throughput(folder: str, repeat: int) -> dict[str, Any]:
    """Returns tokens per CPU second with and without padding, and their ratio within a round."""
    batch = make_samples(draw_mixed_lengths(), VOCABULARY)
    step_arguments, rates, cells = {}, dict[str, list[float]](), dict[str, int]()
    for name, is_packed in (("rows", True), ("rectangles", False)):
        token_trainer = make_trainer(folder, is_packed)
        micro_batches = [
            micro_batch
            for _, micro_batch in split_micro_batches(
                batch, MAX_TOKENS, is_packed=is_packed, hidden_size=token_trainer.hidden
            )
        ]
        cells[name] = sum(micro_batch.inputs()["input_ids"].numel() for micro_batch in micro_batches)
        step_arguments[name], rates[name] = (token_trainer, micro_batches), []
    for turn in range(repeat + 1):
        for name in sorted(step_arguments, reverse=bool(turn % 2)):
            token_trainer, micro_batches = step_arguments[name]
            start_s = time.process_time()
            run_passes(token_trainer, micro_batches, batch.tokens)
            token_trainer.optimizer_step(LR)
            if turn:  # the first round warms up
                rates[name].append(batch.tokens / (time.process_time() - start_s))
    ratio = statistics.median(a / b for a, b in zip(rates["rows"], rates["rectangles"], strict=True))
    return {
        "tokens a step": batch.tokens,
        **{f"cells of padding, {name}": count - batch.tokens for name, count in cells.items()},
        **{f"{name} (tokens per CPU second)": spread(values) for name, values in rates.items()},
        "rows / rectangles": ratio,
    }


def read_resident_kib(field: str) -> int:
    """Returns this process's resident memory (VmRSS) or its peak (VmHWM), in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def print_peak(folder: str, num_tokens: int, computes_entropy: bool) -> None:
    """Prints the growth of this process's peak resident memory, in MiB, during a training step on `num_tokens` tokens."""
    token_trainer = make_trainer(folder, True)
    vocabulary = token_trainer.backend.module.config.vocab_size  # type: ignore[union-attr]
    small_batch = make_samples([8, 8], int(vocabulary))  # type: ignore[arg-type]
    run_passes(token_trainer, [small_batch.read_by(True)], small_batch.tokens, computes_entropy)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    kib_before = read_resident_kib("VmRSS")
    batch, start_s = make_samples([512] * (num_tokens // 512), int(vocabulary)), time.perf_counter()  # type: ignore[arg-type]
    run_passes(token_trainer, [batch.read_by(True)], batch.tokens, computes_entropy)
    print(
        json.dumps({"MiB": (read_resident_kib("VmHWM") - kib_before) / 1024, "seconds": time.perf_counter() - start_s})
    )


def measure_in_process(folder: str, num_tokens: int, *arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.rows", "--peak", str(num_tokens), "--model", folder, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(result.stderr[-2000:])
    figures: dict[str, float] = json.loads(result.stdout)
    return figures


def main() -> None:
    """Measures throughput and memory, prints the figures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--loss", action="store_true", help="the loss of 16 384 tokens over 152 000 words, instead")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--entropy", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak:
        print_peak(args.model, args.peak, args.entropy)
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.loss:
            measure_loss(folder, args.threads)
            return
        make_model(Path(folder) / "mixed", LAYERS, WIDTH, VOCABULARY)
        figures = measure_throughput(str(Path(folder) / "mixed"), args.repeat)
        for tokens in SIZES:
            figures[f"a row of {tokens} tokens (MiB)"] = measure_in_process(str(Path(folder) / "mixed"), tokens)["MiB"]
        half_size_mib, full_size_mib = (figures[f"a row of {tokens} tokens (MiB)"] for tokens in (SIZES[-2], SIZES[-1]))
        goals = [
            goal("rows without padding as fast as rectangles, or faster", figures["rows / rectangles"], at_least=1.0),
            goal("twice the tokens, at most twice the memory", full_size_mib / half_size_mib, at_most=2.1),
        ]
    write_report("rows", f"python -m bench.rows --repeat {args.repeat}", args.threads, figures, goals)


def measure_loss(folder: str, num_threads: int) -> None:
    """Returns the memory of the log-probs and entropies of many tokens over a large vocabulary, and of their gradients."""
    make_model(Path(folder) / "wide", 1, 64, 152_000)
    peak_figures = measure_in_process(str(Path(folder) / "wide"), 16384, "--entropy", "--threads", str(num_threads))
    figures = {
        "the loss of 16384 tokens over 152000 words (MiB)": peak_figures["MiB"],
        "the same (s)": peak_figures["seconds"],
    }
    goals = [goal("16k tokens over 152k words in half a gigabyte", peak_figures["MiB"] / 953.7, at_most=0.5)]
    write_report("rows_loss", "python -m bench.rows --loss", num_threads, figures, goals)


def write_report(
    name: str, command: str, num_threads: int, figures: dict[str, Any], goals: list[dict[str, Any]]
) -> None:
    """Prints the figures and goals, and writes the result."""
    command += f" --threads {num_threads}" if num_threads > 1 else ""
    path = write(name, command, {"figures": figures, "goals": goals})
    for name, value in figures.items():
        print(f"{name:50} {value['median'] if isinstance(value, dict) else value:12.3f}")
    for goal_row in goals:
        print(
            f"{'met' if goal_row['met'] else 'NOT MET':8} {goal_row['goal']}: "
            f"{goal_row['measured']:.3f} ({goal_row['wanted']})"
        )
    print(path)


if __name__ == "__main__":
    main()
