"""What the hf engine makes of a request does not depend, bit for bit, on what else it makes."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from test_rollout_backends import EXPERTS, VOCABULARY, config, run_out, save_model

from rlhpc.language.engines import Completion, Request, SamplingParams, make_rollout
from rlhpc.language.engines.hf import HFRollout

pytestmark = pytest.mark.long(together=True)

MOE = {**EXPERTS, "moe_intermediate_size": 40, "head_dim": 32}
#: Name, family and changes of each model, and whether its rows are computed together.
MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "llama": ("Llama", {}, True),
    "odd": ("Llama", {"intermediate_size": 84, "hidden_size": 60, "head_dim": 20, "num_attention_heads": 3}, True),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, True),
    "qwen3": ("Qwen3", {"head_dim": 32}, True),
    "window": ("Mistral", {"sliding_window": 6}, True),
    "gemma3": (
        "Gemma3Text",
        {"head_dim": 32, "sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]},
        True,
    ),
    "softcap": ("Gemma2", {"head_dim": 32, "sliding_window": 9, "attn_logit_softcapping": 5.0}, False),
    "experts": ("Qwen3Moe", {**MOE, "num_experts": 4}, True),
    "mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 4}, True),
    "latent": (
        "DeepseekV3",
        {
            **EXPERTS,
            "moe_intermediate_size": 40,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 24,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 2,
        },
        True,
    ),
    "sinks": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        False,
    ),
    "alibi": ("Bloom", {"n_layer": 2, "n_head": 2}, False),
}


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    family, changes, _ = MODELS[kind]
    save_model(path, family, **changes)
    return path


def made(folder: Path, rows: int, dtype: str, attention: str = "sdpa") -> HFRollout:
    cfg = config("hf", max_batch_size=rows, dtype=dtype)
    cfg.actor.model.attn_implementation = attention
    engine = make_rollout(cfg, model_path=str(folder), device="cpu", seed=0)
    assert isinstance(engine, HFRollout)
    return engine


def requests(count: int, rng: random.Random) -> list[Request]:
    """Some with the prompt of another, long and short ones, each sampled in its own way."""
    prompts = [
        tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.choice([1, 2, 5, 31, 32, 33, 70]))) for _ in range(count)
    ]
    return [
        Request(
            i,
            rng.choice(prompts),
            SamplingParams(
                max_new_tokens=rng.randint(1, 20),
                temperature=rng.choice([0.0, 0.7, 1.0]),
                top_p=rng.choice([1.0, 0.8]),
                top_k=rng.choice([-1, 5]),
            ),
            seed=rng.randrange(1 << 70),
        )
        for i in range(count)
    ]


def said(completion: Completion) -> tuple[list[int], list[float]]:
    return completion.token_ids, completion.logprobs


def arriving(engine: HFRollout, queue: list[Request], rng: random.Random) -> Iterator[Completion]:
    """What comes of requests that are added a few at a time, in any order, between steps."""
    waiting = rng.sample(queue, len(queue))
    while waiting:
        some, waiting = waiting[: (size := rng.randint(1, 9))], waiting[size:]
        engine.add(some)
        for _ in range(rng.randint(0, 6)):
            yield from engine.step()
    yield from run_out(engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_company_does_not_matter(folder: Path, kind: str, dtype: str) -> None:
    """Not who else is there, when they came, in which order, in how many rows, or with which lengths."""
    rng = random.Random(kind + dtype)
    attention = "eager" if kind in ("softcap", "sinks", "alibi") else "sdpa"
    queue = requests(14, rng)
    engine = made(folder, 64, dtype, attention)
    assert engine._forward.is_batched == MODELS[kind][2]
    alone = {request.id: said(engine.generate([request])[0]) for request in queue}
    assert len({tuple(tokens) for tokens, _ in alone.values()}) > 8
    for rows in (64, 3):
        other = made(folder, rows, dtype, attention)
        for completion in (*other.generate(queue), *arriving(other, queue, rng)):
            assert said(completion) == alone[completion.id]
        other.close()


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing_about_that(tmp_path: Path, threads: int) -> None:
    """With activations of so many numbers that torch divides them among threads.

    Some libraries also divide products of some shapes among three threads by their rows: an engine sees that when it starts,
    and then computes each sequence by itself.
    """
    save_model(tmp_path, hidden_size=96, num_attention_heads=3, intermediate_size=1100)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engine = made(tmp_path, 64, "float32")
        queue = requests(48, random.Random(threads))
        together = engine.generate(queue)
        assert engine._forward.is_batched or threads == 3
        for completion in together[::12]:
            assert said(engine.generate([queue[completion.id]])[0]) == said(completion)
    finally:
        torch.set_num_threads(before)
