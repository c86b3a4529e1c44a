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
from rlhpc.language.models.logprobs import chunks, gradient, logprobs_and_entropy, token_scores
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.runtime.torch_adapter import add_product

GPU_BYTES = {"24 GB": 24e9, "80 GB": 80e9, "141 GB": 141e9}


@pytest.mark.parametrize("memory", GPU_BYTES.values(), ids=GPU_BYTES)
@pytest.mark.parametrize("width", [32_000, 151_936, 262_144])
def test_a_chunk_on_an_accelerator_takes_a_share_of_its_memory(width: int, memory: float) -> None:
    rows = chunk_rows(width, is_on_host=False, memory=memory)
    assert memory / 160 < 4 * rows * width <= memory / 128
    assert rows > 2 * chunk_rows(width, is_on_host=False)


def test_the_smallest_chunk_is_64_mib_and_a_cpu_has_a_quarter() -> None:
    assert chunk_rows(2**14, is_on_host=False) == chunk_rows(2**14, is_on_host=False, memory=1e9) == 1024
    assert chunk_rows(2**14, is_on_host=True) == chunk_rows(2**14, is_on_host=True, memory=141e9) == 256
    assert chunk_rows(2**17, is_on_host=True) == 128  # as many rows as a product needs
    assert chunk_rows(2**30, is_on_host=False) == chunk_rows(2**30, is_on_host=True) == 1


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
    batch = TokenBatch.from_sequences([torch.randint(0, 61, (9,))], [torch.arange(9) >= 3])
    token_scores(model, batch).logprobs.sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(logprobs, "linear_head", lambda model: None)
        token_scores(model, batch).logprobs.sum().backward()
    assert memories == [80e9] * 4  # forward and backward, from hidden states and from logits


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Asserts that the difference is at most `tolerance` of the expected tensor, by their norms."""
    assert float(expected.norm()) > 0
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 53])
def test_the_loss_does_not_depend_on_the_size_of_chunks(monkeypatch: pytest.MonkeyPatch, rows: int, tied: bool) -> None:
    """Log-probs, entropies and the gradients of all weights, in float32: as of one chunk, to 1e-5."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            initializer_range=0.3, tie_word_embeddings=tied,
        )
    )  # fmt: skip
    lengths = (23, 9, 25)
    batch = TokenBatch.from_sequences(
        [torch.randint(0, 61, (n,)) for n in lengths], [torch.arange(n) >= 1 for n in lengths]
    )
    weights, sizes = torch.randn(2, batch.tokens), list[int]()
    results = list[dict[str, torch.Tensor]]()
    for size in (1 << 24, rows):

        def chunk(width: int, size: int = size, **_: Any) -> int:
            sizes.append(size)
            return size

        monkeypatch.setattr(logprobs, "chunk_rows", chunk)
        model.zero_grad()
        scores = token_scores(model, batch, 0.7, computes_entropy=True)
        assert scores.entropy is not None
        ((scores.logprobs * weights[0]).sum() + (scores.entropy * weights[1]).sum()).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append({"logprobs": scores.logprobs.detach(), "entropies": scores.entropy.detach(), **gradients})
    assert sizes == [1 << 24] * 2 + [rows] * 2, "forward and backward"
    assert results[0].keys() == results[1].keys() and len(results[0]) > 8
    for name, expected in results[0].items():
        assert_close(results[1][name], expected, 1e-5)


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 53])
def test_the_formulas_and_the_sum_of_products_do_not_depend_on_it_in_float64(rows: int) -> None:
    """Against autograd of all rows at once, to 1e-10. The head itself gives float32, whatever its weights are."""
    draw = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 16, generator=draw, dtype=torch.float64) for n in (53, 61))
    targets = torch.randint(0, 61, (53,), generator=draw)
    grads = torch.randn(2, 53, generator=draw, dtype=torch.float64)
    z = (hidden @ weight.T).requires_grad_()
    log_p = torch.log_softmax(z, -1)
    expected = log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    (expected[0] * grads[0] + expected[1] * grads[1]).sum().backward()
    assert z.grad is not None
    weight_grad, parts = torch.zeros_like(weight), list[tuple[torch.Tensor, ...]]()
    for start in range(0, 53, rows):
        part = slice(start, start + rows)
        logits = hidden[part] @ weight.T
        token_logprobs, log_sums, entropies = logprobs_and_entropy(logits, targets[part], True)
        assert entropies is not None
        grad = gradient(logits, log_sums, entropies, targets[part], grads[0, part], grads[1, part])
        add_product(weight_grad, grad.T, hidden[part])
        parts.append((token_logprobs, entropies, grad))
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    for found, wanted in zip((*columns, weight_grad), (*expected, z.grad, z.grad.T @ hidden), strict=True):
        assert found.dtype == torch.float64
        assert_close(found, wanted.detach(), 1e-10)
