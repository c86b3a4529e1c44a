"""Training tokens per second of the language-model backends, compared with a plain PyTorch loop on the same batches.

The plain loop: one process, the model called with the mask, log_softmax and gather, clip_grad_norm_, fused AdamW. All of
them train on the same micro-batches, one step each in turn, so that a neighbour's load falls on all alike. A token counts
once, padding does not.

    python -m bench.training --repeat 9 [--model FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from bench.machine import spread, write
from rlhpc import Worker
from rlhpc.config.typed import typed
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.micro_batching import micro_batches
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.training.trainer import TokenTrainer

#: name: layers, width, vocabulary, sequences a step, longest sequence
SIZES = {"1M": (4, 128, 512, 64, 96), "20M": (6, 384, 16384, 16, 192)}
LR = 1e-4


def make_model(folder: Path, num_layers: int, width: int, vocabulary: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_batches(vocabulary: int, count: int, max_length: int, max_tokens: int) -> list[TokenBatch]:
    """Returns sequences of a quarter of `max_length` to its full length, with a weight a token."""
    torch.manual_seed(0)
    lengths = torch.randint(max_length // 4, max_length + 1, (count,)).tolist()
    ids, weights = zip(*((torch.randint(0, vocabulary, (n,)), torch.randn(n)) for n in lengths), strict=True)
    full_batch = TokenBatch.from_sequences(
        ids, [torch.ones(n, dtype=torch.bool) for n in lengths], {"weights": weights}
    )
    return [full_batch.select(samples) for samples in micro_batches(full_batch.lengths, max_tokens)]


def make_plain_step(folder: Path, batches: list[TokenBatch]) -> Callable[[], None]:
    """Returns a function that runs one step of the plain loop."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-5, fused=True)
    total = sum(batch.tokens for batch in batches)
    padded_batches = [
        (batch.padded(batch.ids), batch.attended(), batch.padded(batch.columns["weights"])) for batch in batches
    ]

    def step() -> None:
        for ids, mask, weights in padded_batches:
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            log_softmax = torch.log_softmax(logits[:, :-1], dim=-1)
            logprobs = log_softmax.gather(2, ids[:, 1:, None]).squeeze(2)
            loss = -(weights[:, 1:] * logprobs * mask[:, 1:]).sum() / total
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_rlhpc_step(folder: Path, batches: list[TokenBatch], backend: str) -> Callable[[], None]:
    """Returns a function that runs one step of a backend."""
    cfg = typed(GrpoConfig, OmegaConf.structured(GrpoConfig))
    cfg.actor.training_backend, cfg.actor.model.model_path = backend, str(folder)
    cfg.actor.optim.name, cfg.actor.optim.clip_grad = "adamw", 1.0
    trainer = TokenTrainer(cfg, Worker())
    total = sum(batch.tokens for batch in batches)

    def loss(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss_value = -(batch.columns["weights"] * scores.logprobs).sum() / total
        return loss_value, {"loss": loss_value}

    def step() -> None:
        trainer.forward_backward(batches, loss)
        trainer.optimizer_step(LR)

    return step


def measure(folder: Path, batches: list[TokenBatch], repeat: int, backends: list[str]) -> dict[str, Any]:
    """Returns tokens per second of each, and the ratio to the plain loop (median over rounds of the ratio within a round)."""
    num_tokens = sum(batch.tokens for batch in batches)
    steps = {
        "plain loop": make_plain_step(folder, batches),
        **{name: make_rlhpc_step(folder, batches, name) for name in backends},
    }
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeat + 1):
        order = list(steps) if turn % 2 else list(steps)[::-1]
        for name in order:
            start_s = time.perf_counter()
            steps[name]()
            if turn:  # the first round warms up
                rates[name].append(num_tokens / (time.perf_counter() - start_s))
    base = rates["plain loop"]
    figures = {f"{name} (tokens/s)": spread(values) for name, values in rates.items()}
    ratios = {
        f"{name} / plain loop": statistics.median(a / b for a, b in zip(rates[name], base, strict=True))
        for name in backends
    }
    return {
        "tokens a step": num_tokens,
        "padding": 1 - num_tokens / sum(len(batch) * batch.width for batch in batches),
        **figures,
        **ratios,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--backends", nargs="*", default=["local", "fsdp"])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder, instead of the made ones")
    parser.add_argument("--max-tokens", type=int, default=2048)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.model:
            vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
            batches = make_batches(vocabulary, 8, 128, options.max_tokens)
            figures[options.model.name] = measure(options.model, batches, options.repeat, options.backends)
        for name in [] if options.model else options.sizes:
            layers, width, vocabulary, count, max_length = SIZES[name]
            make_model(Path(folder) / name, layers, width, vocabulary)
            batches = make_batches(vocabulary, count, max_length, options.max_tokens)
            figures[name] = measure(Path(folder) / name, batches, options.repeat, options.backends)
    path = write("training", f"python -m bench.training --repeat {options.repeat}", {"figures": figures})
    for name, values in figures.items():
        for key, value in values.items():
            print(f"{name:6} {key:28} {value['median'] if isinstance(value, dict) else value:10.3f}")
    print(path)


if __name__ == "__main__":
    main()
