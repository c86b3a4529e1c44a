"""Training step of a language model with the shape of Qwen2.5-1.5B and its vocabulary of 152 000, on one card, in variants;
and the same step as a plain loop of transformers, and by TRL.

All train on the same 16 sequences of 1024 tokens in bfloat16 with float32 weights, by AdamW. The rate of operations counts
those that the mathematics needs, so that computing activations a second time does not raise it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from bench.gpu.part import Report, dtype_for, peak_bytes, timed

REPEAT = 3


@dataclass(frozen=True)
class Shape:
    """Shape of the model and of a step's batch."""

    layers: int
    hidden: int
    inner: int
    heads: int
    groups: int
    vocabulary: int
    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.length

    @property
    def operations(self) -> float:
        """Operations of a step's forward and backward passes: products with weights, and causal attention."""
        head = self.hidden // self.heads
        layer = self.hidden * (2 * self.hidden + 2 * self.groups * head) + 3 * self.hidden * self.inner
        weights = self.layers * layer + self.hidden * self.vocabulary
        attention = self.layers * self.hidden * self.length  # half of 2 · length · hidden, for queries and for values
        return self.tokens * 6 * (weights + attention)


QWEN = Shape(28, 1536, 8960, 12, 2, 151_936, 16, 1024)
SMALL = Shape(2, 64, 128, 4, 2, 1000, 4, 32)
#: Variants by name: what is set below `actor`, and whether chunks of logits have their least size.
VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "as configured": ({}, False),
    "compiled blocks": ({"compile": "blocks"}, False),
    "chunks of 16 million logits": ({}, True),
    "checkpointing": ({"model": {"gradient_checkpointing": True}}, False),
    "LoRA of rank 16": ({"lora": {"rank": 16}}, False),
    "a plain loop of transformers": ({}, False),
    # From then on, all models of this family have Liger's kernels in this process, as TRL's.
    "Liger's kernels": ({"kernels": "liger"}, False),
}
#: Variant that is not of rlhpc.
PLAIN = "a plain loop of transformers"


def make_model(folder: Path, shape: Shape, device: str) -> None:
    """Writes the model with random weights, which are drawn on the device."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlhpc.runtime.devices import empty_cache

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.inner,
                num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.groups,
                max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
    model.to(getattr(torch, dtype_for(device))).save_pretrained(folder)
    del model
    empty_cache()


@contextlib.contextmanager
def use_min_chunks(uses_min_chunks: bool) -> Iterator[None]:
    """Makes chunks of logits as small as on a card with little memory, within the block."""
    from rlhpc.language.models import logprobs

    with (
        mock.patch.object(logprobs, "device_memory", lambda device: None)
        if uses_min_chunks
        else contextlib.nullcontext()
    ):
        yield


@contextlib.contextmanager
def quick_compiler(is_quick: bool) -> Iterator[None]:
    """Makes graphs that PyTorch runs operation by operation, within the block: a CPU takes a minute to compile their code."""
    from rlhpc.runtime import torch_adapter

    with mock.patch.object(torch_adapter, "_COMPILER", "aot_eager") if is_quick else contextlib.nullcontext():
        yield


def build_step(
    report: Report, model: Path, shape: Shape, changes: dict[str, Any]
) -> tuple[Callable[[], None], Callable[[], Any]]:
    """Returns one optimizer step of rlhpc, and a scoring pass over the same tokens."""
    import torch

    from bench.gpu.training import configuration
    from rlhpc import Worker
    from rlhpc.language.models.logprobs import TokenScores
    from rlhpc.language.models.token_batch import TokenBatch
    from rlhpc.language.training.trainer import TokenTrainer

    worker = Worker()
    worker.accelerators = () if report.small else (0,)
    trainer = TokenTrainer(configuration(model, report.device, changes), worker)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, shape.vocabulary, (shape.length,), generator=generator) for _ in range(shape.sequences)]
    masks = [torch.ones(shape.length, dtype=torch.bool) for _ in ids]
    batches = [TokenBatch.from_sequences(ids, masks).read_by(trainer.packed)]

    def loss(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = -scores.logprobs.sum() / shape.tokens
        return value, {"loss": value}

    def step() -> None:
        trainer.forward_backward(batches, loss)
        trainer.optimizer_step(1e-6)

    return step, lambda: trainer.forward(batches[0])


def report_rates(report: Report, name: str, shape: Shape, seconds: list[float]) -> None:
    """Reports tokens and operations a second."""
    report.figure(f"{name}, trained", [shape.tokens / s for s in seconds], "tokens/s")
    rates = [shape.operations / s / 1e12 for s in seconds]
    report.figure(f"{name}, operations", rates, "TFLOP/s", of="product")


def plain_loop(model: Path, shape: Shape, device: str) -> Callable[[], None]:
    """Returns one step as a user of transformers alone writes it: autocast, whole logits, the model's own loss."""
    import torch
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    module = module.to(device).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)
    ids = torch.randint(0, shape.vocabulary, (shape.sequences, shape.length), device=device)
    micro = max(1, shape.sequences // 4)  # whole logits of all would take 30 GB

    def step() -> None:
        for part in ids.split(micro):
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu"):
                loss = module(input_ids=part, labels=part, use_cache=False).loss * len(part) / len(ids)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trl_options(shape: Shape, output: Path, *, is_small: bool, liger: bool) -> dict[str, Any]:
    """Returns the arguments of TRL's SFTConfig: its documented best setting, bfloat16 and Liger's kernels.

    There is no padding to remove, because all sequences are equally long.
    """
    micro_batches = 1 if liger else min(4, shape.sequences)
    return {
        "output_dir": str(output), "use_cpu": is_small, "bf16": not is_small, "use_liger_kernel": liger,
        "gradient_checkpointing": False, "gradient_accumulation_steps": micro_batches,
        "per_device_train_batch_size": shape.sequences // micro_batches, "max_steps": REPEAT + 2,
        "max_length": shape.length, "learning_rate": 1e-6, "optim": "adamw_torch_fused", "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "logging_steps": 1000,
        "dataset_kwargs": {"skip_prepare_dataset": True}, "pad_token": None,
    }  # fmt: skip


def train_trl(report: Report, model: Path, shape: Shape, folder: Path) -> list[float]:
    """Returns the seconds of steps of TRL's SFTTrainer on the same lengths (`trl_options`)."""
    import time

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from bench.gpu.part import synchronize

    liger = importlib.util.find_spec("liger_kernel") is not None and not report.small
    ends: list[float] = []

    class StepClock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize()
            ends.append(time.perf_counter())

    generator = torch.Generator().manual_seed(0)
    shape_of_rows = (shape.sequences * (REPEAT + 2), shape.length)
    rows = torch.randint(0, shape.vocabulary, shape_of_rows, generator=generator).tolist()
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        callbacks=[StepClock()],
        args=SFTConfig(**trl_options(shape, folder / "trl", is_small=report.small, liger=liger)),
    )
    trainer.train()
    return [after - before for before, after in itertools.pairwise(ends[1:])]


def measure_variant(report: Report, name: str, model: Path, shape: Shape) -> None:
    """Reports the figures of one variant."""
    import torch

    changes, uses_min_chunks = VARIANTS[name]
    if not report.small:
        torch.accelerator.reset_peak_memory_stats()
    with use_min_chunks(uses_min_chunks), quick_compiler(report.small):
        score: Callable[[], Any] | None = None
        if name == PLAIN:
            step = plain_loop(model, shape, report.device)
        else:
            step, score = build_step(report, model, shape, {"max_tokens_per_micro_batch": shape.tokens, **changes})
        warm_s = timed(step)
        if "compile" in changes:
            report.figure(f"{name}, first step", warm_s, "s")
        report_rates(report, name, shape, [timed(step) for _ in range(REPEAT)])
        report.figure(f"{name}, most memory", peak_bytes(report.device) / 1e9, "GB")
        if score is not None and name == next(iter(VARIANTS)):
            timed(score)
            report.figure("scored", [shape.tokens / timed(score) for _ in range(REPEAT)], "tokens/s")


def measure(report: Report) -> None:
    """Measures all variants, one after the other, then TRL."""
    import gc

    from rlhpc.runtime.devices import empty_cache

    shape = SMALL if report.small else QWEN
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = Path(temporary_folder)
        make_model(folder / "model", shape, report.device)
        for name, (changes, _) in VARIANTS.items():
            if changes.get("kernels") and (report.small or importlib.util.find_spec("liger_kernel") is None):
                report.skip(name, "it needs a GPU and the package liger-kernel")
                continue
            with report.piece(name):
                measure_variant(report, name, folder / "model", shape)
            gc.collect()
            empty_cache()
        if importlib.util.find_spec("trl") is None:
            report.skip("TRL", "it is not installed: pip install 'rlhpc[trl]'")
            return
        with report.piece("TRL"):
            report_rates(report, "TRL", shape, train_trl(report, folder / "model", shape, folder))
