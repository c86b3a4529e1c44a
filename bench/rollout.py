"""Tokens per second of each rollout engine, compared with its underlying library on the same prompts.

Both sides generate the same number of tokens for the same prompts, in turn, in one process. The figures are medians.

    python -m bench.rollout                  # a new model of 0.8M parameters
    python -m bench.rollout --model FOLDER --requests 16 --tokens 32
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.machine import spread, write

if TYPE_CHECKING:
    from rlhpc.language.config.run import LanguageConfig

BACKENDS = ("hf", "vllm")


def write_tiny_model(folder: Path) -> None:
    """Writes the 4-layer Llama that the demonstration trains; it has no end token, so every sequence
    has its full length.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def build_config(backend: str, batch: int) -> LanguageConfig:
    """Returns the configuration that `make_rollout` reads."""
    from omegaconf import OmegaConf

    from rlhpc.config.typed import typed
    from rlhpc.language.config.run import LanguageConfig

    cfg = typed(LanguageConfig, OmegaConf.structured(LanguageConfig))
    cfg.rollout.rollout_backend, cfg.rollout.max_batch_size = backend, batch
    return cfg


def make_transformers_call(
    folder: str, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int]
) -> Callable[[], None]:
    """Returns a function that calls `generate` once on the batch, padded on the left."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def run() -> None:
        outputs = model.generate(
            ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max(lengths),
            min_new_tokens=max(lengths), pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        # The log-probs that training needs.
        torch.stack([step.log_softmax(-1) for step in outputs.logits], 1).gather(
            2, outputs.sequences[:, width:].unsqueeze(2)
        )

    return run


def make_vllm_call(
    folder: str, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int], batch: int
) -> Callable[[], None]:
    """Returns a function that calls `LLM.generate`, with the log-probs that training needs."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder, dtype="float32", enforce_eager=True, logprobs_mode="processed_logprobs", max_num_seqs=batch,
        kv_cache_memory_bytes=1 << 30, skip_tokenizer_init=True,
    )  # fmt: skip
    inputs: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    sampling = [
        SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False, seed=i)
        for i, length in enumerate(lengths)
    ]

    def run() -> None:
        llm.generate(inputs, sampling, use_tqdm=False)

    return run


def measure(backend: str, folder: str, lengths: Sequence[int], batch: int, repeat: int) -> dict[str, Any]:
    """Returns the tokens per second of both sides, and the tokens per second of CPU time, which is less noisy."""
    from rlhpc.language.engines import Request, SamplingParams, make_rollout

    rng = random.Random(0)
    prompts = [tuple(rng.randrange(3, 60) for _ in range(rng.randint(5, 20))) for _ in lengths]
    engine = make_rollout(build_config(backend, batch), model_path=folder, device="cpu", seed=0)
    queue = [
        Request(i, prompt, SamplingParams(max_new_tokens=length), seed=i)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    contenders: dict[str, Callable[[], Any]] = {
        "rlhpc": lambda: engine.generate(queue),
        "plain": make_vllm_call(folder, prompts, lengths, batch)
        if backend == "vllm"
        else make_transformers_call(folder, prompts, lengths),
    }
    rates: dict[str, list[float]] = {f"{name} (tokens/{unit})": [] for name in contenders for unit in ("s", "CPU s")}
    for turn in range(repeat + 1):
        for name in sorted(contenders, reverse=bool(turn % 2)):
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            contenders[name]()
            if turn:  # the first one warms up
                rates[f"{name} (tokens/s)"].append(sum(lengths) / (time.perf_counter() - start_s))
                rates[f"{name} (tokens/CPU s)"].append(sum(lengths) / (time.process_time() - start_cpu_s))
    engine.close()
    figures = {name: spread(values) for name, values in rates.items()}
    ratios = {
        f"ratio by {unit}": figures[f"rlhpc (tokens/{unit})"]["median"] / figures[f"plain (tokens/{unit})"]["median"]
        for unit in ("s", "CPU s")
    }
    return {**figures, **ratios}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its figures to `results/rollout.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Hugging Face folder; by default a tiny one is made")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as work_dir:
        if not args.model:
            write_tiny_model(Path(work_dir))
        rng = random.Random(1)
        cases = {
            "equal lengths": [args.tokens] * args.requests,
            "mixed lengths": [rng.randint(max(1, args.tokens // 8), args.tokens) for _ in range(args.requests)],
        }
        engine_results: dict[str, Any] = {backend: {} for backend in args.backends}
        for backend in args.backends:
            for case, lengths in cases.items():
                measurements = measure(backend, args.model or work_dir, lengths, args.batch, args.repeat)
                engine_results[backend][case] = measurements
                print(backend, case, json.dumps(measurements), flush=True)
    arguments_text = " ".join(f"--{name} {getattr(args, name)}" for name in ("requests", "tokens", "batch", "repeat"))
    print(write("rollout", f"python -m bench.rollout {arguments_text}", {"engines": engine_results}))


if __name__ == "__main__":
    main()
