"""Rollout engine on one card: tokens per second, weight sync time, and memory that its sleep mode frees."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from bench.gpu.part import ROOT, Report, dtype_for, free_bytes, make_model, size_for, timed
from rlhpc.config.typed import typed
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines import Request, SamplingParams, make_rollout
from rlhpc.runtime.errors import ConfigError

REPEAT = 3


def configuration(backend: str, device: str, batch: int) -> GrpoConfig:
    """Returns the configuration of an engine that is colocated with a trainer."""
    cfg = typed(GrpoConfig, OmegaConf.structured(GrpoConfig))
    cfg.rollout.rollout_backend, cfg.rollout.max_batch_size, cfg.rollout.max_model_len = backend, batch, 1024
    cfg.rollout.gpu_memory_utilization, cfg.actor.model.dtype = 0.5, dtype_for(device)
    cfg.actor.offload_in_rollout = True
    return cfg


def build(report: Report, folder: str, batch: int) -> tuple[str, Any]:
    """Builds the vLLM engine, or the `hf` engine if vLLM is not available."""
    try:
        cfg = configuration("vllm", report.device, batch)
        return "vllm", make_rollout(cfg, model_path=folder, device=report.device, seed=0)
    except ConfigError as error:
        report.skip("vLLM", str(error).splitlines()[0])
    return "hf", make_rollout(
        configuration("hf", report.device, batch), model_path=folder, device=report.device, seed=0
    )


#: A program that generates as a user of vLLM alone does, and prints the seconds of each repetition.
PLAIN = """
import json, sys, time
from vllm import LLM, SamplingParams
folder, prompts, tokens, repeat = json.loads(sys.stdin.read())
llm = LLM(folder, skip_tokenizer_init=True, gpu_memory_utilization=0.5, max_model_len=1024, max_num_seqs=len(prompts))
sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
seconds = []
for _ in range(repeat + 1):
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    seconds.append(time.perf_counter() - begin)
print(json.dumps(seconds[1:]))
"""


def plain_vllm(folder: str, prompts: list[tuple[int, ...]], num_tokens: int) -> list[float]:
    """Returns the seconds in which vLLM, without rlhpc, answers the same prompts in a separate process."""
    task = json.dumps([folder, prompts, num_tokens, REPEAT])
    result = subprocess.run([sys.executable, "-c", PLAIN], input=task, capture_output=True, text=True, cwd=ROOT)
    if result.returncode:
        raise RuntimeError(f"vLLM alone ended with {result.returncode}: {result.stderr[-1000:]}")
    seconds: list[float] = json.loads(result.stdout.splitlines()[-1])
    return seconds


def measure(report: Report) -> None:
    """Measures generation, weight updates, sleep and wake-up of the engine."""
    import torch
    from transformers import AutoModelForCausalLM

    size = size_for(report.device)
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(size.vocabulary) for _ in range(rng.randint(8, 64))) for _ in range(size.requests)]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), size, report.device)
        # On the host, as they come out of shared memory.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype_for(report.device)))
        weights = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
        nbytes = sum(tensor.nbytes for _, tensor in weights)
        engines: list[tuple[str, Any]] = []
        report.figure("start of the engine", timed(lambda: engines.append(build(report, folder, size.requests))), "s")
        ((name, engine),) = engines

        def generate(temperature: float) -> list[list[int]]:
            sampling = SamplingParams(max_new_tokens=size.tokens, temperature=temperature)
            return [c.token_ids for c in engine.generate([Request(i, p, sampling, i) for i, p in enumerate(prompts)])]

        generate(1.0)
        seconds = [timed(lambda: generate(1.0)) for _ in range(REPEAT)]
        num_tokens = size.requests * size.tokens
        rates = [num_tokens / s for s in seconds]
        report.figure(f"{name}, {size.requests} sequences", rates, "tokens/s")
        updates = [timed(lambda v=v: engine.update_weights(v, iter(weights))) for v in range(1, REPEAT + 1)]  # type: ignore[misc]
        report.figure(
            f"{name}, update of {nbytes / 1e9:.3f} GB from the host", [nbytes / s / 1e9 for s in updates], "GB/s"
        )
        tokens_before = generate(0.0)
        if report.small:
            report.skip("sleep and wake", "a CPU has no memory of an accelerator to give back")
        else:
            free_before = free_bytes()
            report.figure(f"{name}, falls asleep", timed(engine.offload), "s")
            report.figure(f"{name}, gives back", (free_bytes() - free_before) / 1e9, "GB")
            report.figure(f"{name}, wakes", timed(engine.reload), "s")
            report.figure(f"{name}, update after it", timed(lambda: engine.update_weights(9, iter(weights))), "s")
        tokens_after = generate(0.0)
        equal_share = sum(
            token_before == token_after for token_before, token_after in zip(tokens_before, tokens_after, strict=True)
        ) / len(tokens_before)
        report.figure(f"{name}, greedy sequences that are the same again", equal_share, "of 1")
        engine.close()
        if name != "vllm" or report.small:
            report.skip("plain vLLM", "it is compared on a card")
            return
        with report.piece("plain vLLM"):
            plain_rates = [num_tokens / s for s in plain_vllm(folder, prompts, size.tokens)]
            report.figure("plain LLM.generate", plain_rates, "tokens/s")
            ratio = statistics.median(rates) / statistics.median(plain_rates)
            report.figure("vllm, of plain LLM.generate", ratio, "of 1")
