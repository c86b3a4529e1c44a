"""Chunks of logits: their size follows the device's memory, in the trainer and in the memory plan alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhpc.language.models.logit_chunks import chunk_rows
from rlhpc.language.planning.memory_model import LayerMemory
from rlhpc.language.planning.model_size import ModelSize
from tests.extras import need_extra

need_extra("llm")
from transformers import LlamaConfig, LlamaForCausalLM

from rlhpc.language.models import logprobs
from rlhpc.language.models.logprobs import chunks, token_scores
from rlhpc.language.models.token_batch import TokenBatch

GPU_BYTES = {"24 GB": 24e9, "80 GB": 80e9, "141 GB": 141e9}


@pytest.mark.parametrize("memory", GPU_BYTES.values(), ids=GPU_BYTES)
@pytest.mark.parametrize("width", [32_000, 151_936, 262_144])
def test_a_chunk_on_an_accelerator_takes_a_share_of_its_memory(width: int, memory: float) -> None:
    rows = chunk_rows(width, on_host=False, memory=memory)
    assert memory / 160 < 4 * rows * width <= memory / 128
    assert rows > 2 * chunk_rows(width, on_host=False)


def test_the_smallest_chunk_is_64_mib_and_a_cpu_has_a_quarter() -> None:
    assert chunk_rows(2**14, on_host=False) == chunk_rows(2**14, on_host=False, memory=1e9) == 1024
    assert chunk_rows(2**14, on_host=True) == chunk_rows(2**14, on_host=True, memory=141e9) == 256
    assert chunk_rows(2**17, on_host=True) == 128  # as many rows as a product needs
    assert chunk_rows(2**30, on_host=False) == chunk_rows(2**30, on_host=True) == 1


@pytest.mark.parametrize("memory", [None, *GPU_BYTES.values()])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_plan_counts_the_rows_of_the_trainer(device: str, memory: float | None) -> None:
    size = ModelSize({}, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocabulary=151_936)
    planned = LayerMemory(size, 2, device == "cpu", capacity=memory).chunk_rows(size.vocabulary)
    slices = chunks(10_000, size.vocabulary, torch.device(device), memory)
    assert {part.stop - part.start for part in slices[:-1]} == {planned}
    assert slices[0].start == 0 and slices[-1].stop == 10_000


def test_the_trainers_chunks_follow_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    memories = list[Any]()

    def split(rows: int, width: int, device: torch.device, memory: float | None = None) -> list[slice]:
        memories.append(memory)
        return chunks(rows, width, device, memory)

    monkeypatch.setattr(logprobs, "chunks", split)
    monkeypatch.setattr(logprobs, "device_memory", lambda device: 80e9)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    batch = TokenBatch.of([torch.randint(0, 61, (9,))], [torch.arange(9) >= 3])
    token_scores(model, batch).logprobs.sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(logprobs, "linear_head", lambda model: None)
        token_scores(model, batch).logprobs.sum().backward()
    assert memories == [80e9] * 4  # forward and backward, from hidden states and from logits
