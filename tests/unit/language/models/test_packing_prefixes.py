"""Rows that have a shared prefix once, against the same samples with the prefix in each."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen3Config

from bench.prefixes import compute_exact_gradients, relative_difference
from rlhpc.config.sections import LoraConfig
from rlhpc.language.models import packing
from rlhpc.language.models.logprobs import linear_head, logit_rows, token_scores
from rlhpc.language.models.micro_batching import Parts, split_micro_batches
from rlhpc.language.models.moe_routing import EXPERTS, load_balance_loss, replayed_experts, routing_of
from rlhpc.language.models.packing import pack, reads_prefixes, reads_rows
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.models.value_head import add_value_head
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.lora import attach_lora
from tests.unit.language.models.test_packing import HOW, READ, WINDOW, built
from tests.unit.language.models.trees import one_group, paths, shuffled_tree

LONG = {"max_position_embeddings": 512, "initializer_range": 0.1}
SHARED = [name for name in READ if "window" not in name and name != "gemma 3"]


def family(name: str):
    kind, changes = READ[name]
    model = built(kind, {**changes, **LONG, **({"n_positions": 512} if kind is GPT2Config else {})})
    assert pack(model) and reads_rows(model, *HOW)
    return model


def cut(batch: TokenBatch, *, shared: bool, max_tokens: int = 4000) -> Parts:
    return split_micro_batches(batch, max_tokens, is_packed=True, shares_prefixes=shared, hidden_size=16)


def told(model, batch: TokenBatch, parts: Parts):
    """Log-probs, entropies and values of all tokens, and gradients of a sum of them."""
    model.zero_grad()
    weights, columns = torch.linspace(-1, 1, batch.tokens), []
    for samples, part in parts:
        tokens = batch.tokens_of(samples)
        scores = token_scores(model, part, 0.7, computes_entropy=True)
        loss = (scores.logprobs * weights[tokens] + scores.entropy * weights.flip(0)[tokens]).sum()
        if scores.values is not None:
            loss = loss + (scores.values * weights[tokens]).sum()
        loss.backward()
        rows = torch.stack(
            [each.detach() for each in (scores.logprobs, scores.entropy, scores.values) if each is not None]
        )
        columns.append(torch.zeros(len(rows), batch.tokens).index_copy(1, tokens, rows))
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return torch.stack(columns).sum(0), grads


def same(found, expected) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=2e-5, atol=2e-5)
    assert found[1].keys() == expected[1].keys() and found[1]
    for name, grad in expected[1].items():
        apart = float((found[1][name] - grad).abs().max() / grad.abs().max().clamp_min(1e-3))
        assert apart < 2e-5, f"{name} is {apart} apart"


@pytest.mark.parametrize("name", SHARED)
def test_log_probs_and_gradients_are_those_of_flat_rows(name) -> None:
    model, batch = family(name), shuffled_tree()
    assert reads_prefixes(model, *HOW)
    parts = cut(batch, shared=True)
    assert sum(len(part.row.tokens) for _, part in parts) < batch.tokens / 3
    expected = told(model, batch, cut(batch, shared=False))
    same(told(model, batch, parts), expected)
    same(told(model, batch, cut(batch, shared=True, max_tokens=300)), expected)  # a tree in several rows


def test_in_float64_nothing_is_left_of_the_difference(monkeypatch) -> None:
    """What is apart in float32 is rounding: in float64 all sums are 1e-9 times as far apart."""
    model, batch = family("gpt2").double(), shuffled_tree()  # the norms of others compute in float32
    flat, shared = (cut(batch, shared=each)[0] for each in (False, True))
    outputs = [part.of_tokens(model(**part.inputs(), use_cache=False)["logits"]) for _, part in (flat, shared)]
    ordered = [
        each[batch.tokens_of(samples).argsort()] for each, (samples, _) in zip(outputs, (flat, shared), strict=True)
    ]
    weights = torch.linspace(-1, 2, batch.tokens, dtype=torch.float64)[:, None]
    grads = []
    for each in ordered:
        model.zero_grad()
        (each * weights).sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert float(((ordered[0] - ordered[1]).abs().max() / ordered[0].abs().max()).detach()) < 1e-12
    for name, grad in grads[0].items():
        assert float((grads[1][name] - grad).abs().max() / grad.abs().max()) < 1e-12, name


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_gradients_are_those_of_flat_rows_to_1e_6_and_as_near_to_float64(name) -> None:
    """By the norm over all parameters: the norm of the difference, relative to that of the gradient."""
    model, batch = family(name), shuffled_tree()
    weights, gradients = torch.linspace(-1, 2, batch.tokens), {}
    exact_model = built(READ[name][0], {**READ[name][1], **LONG, "n_positions": 512})
    exact_model.load_state_dict(model.state_dict())
    for shared in (False, True):
        model.zero_grad()
        for samples, part in cut(batch, shared=shared):
            tokens = batch.tokens_of(samples)
            (-(token_scores(model, part).logprobs * (weights * batch.mask)[tokens]).sum()).backward()
        gradients[shared] = {parameter_name: p.grad.clone() for parameter_name, p in model.named_parameters()}
    exact = compute_exact_gradients(exact_model, batch, weights)
    assert relative_difference(gradients[True], gradients[False]) < 1e-6
    errors = {shared: relative_difference(found, exact) for shared, found in gradients.items()}
    assert 0 < errors[True] < 1e-6 and errors[True] < 1.5 * errors[False], errors


@pytest.mark.parametrize("changed", ["adapter", "values", "checkpointing", "whole logits"])
def test_adapters_heads_recomputed_activations_and_whole_logits(changed, monkeypatch) -> None:
    model, batch = family("llama"), shuffled_tree()
    if changed == "values":
        add_value_head(model, seed=3)
    elif changed == "adapter":
        model = attach_lora(model, LoraConfig(rank=2, target_modules=["q_proj", "v_proj"]), seed=1)
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
    elif changed == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    else:  # one row of logits then gets the gradients of all samples that part there
        assert linear_head(model) is not None
        monkeypatch.setattr("rlhpc.language.models.logprobs.linear_head", lambda model: None)
    same(told(model, batch, cut(batch, shared=True)), told(model, batch, cut(batch, shared=False)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_as_flat_rows(dtype) -> None:
    """Against float32: shared rows are at most half as far again as flat ones."""
    model, batch = family("qwen3"), shuffled_tree()
    expected = told(model, batch, cut(batch, shared=False))[0]
    model = model.to(dtype)
    apart = [
        float((told(model, batch, cut(batch, shared=shared))[0] - expected).abs().mean()) for shared in (False, True)
    ]
    assert 0 < apart[1] < 1.5 * apart[0]


def test_logits_of_a_teacher_are_those_of_flat_rows() -> None:
    model, batch = family("qwen3"), shuffled_tree()
    found = {}
    for shared in (False, True):
        [(samples, part)] = cut(batch, shared=shared)
        rows = logit_rows(model, part)
        logits = torch.zeros(batch.tokens, rows.width)
        logits[batch.tokens_of(samples)[part.predictors()[0]]] = rows.make(slice(0, rows.number))
        found[shared] = logits
    torch.testing.assert_close(found[True], found[False], rtol=2e-5, atol=2e-5)


def test_routers_count_a_prefix_for_each_sample_and_replay_the_same_experts() -> None:
    model, batch = family("qwen3 moe"), shuffled_tree()
    routing = routing_of(model)
    losses, scores = [], []
    generator = torch.Generator().manual_seed(7)
    by_token = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(61 * 2)]).view(61, 4)
    for shared in (False, True):
        [(samples, part)] = cut(batch, shared=shared)
        with routing.watch() as outputs:
            token_scores(model, part)
        losses.append(load_balance_loss(outputs, part))
        part.columns[EXPERTS] = by_token[
            part.ids
        ]  # the same for equal prefixes, as an engine with a cache of prefixes says
        part = part.select(torch.arange(len(part)))
        routing.replay(replayed_experts(part))
        scores.append(
            torch.zeros(batch.tokens).index_copy(
                0, batch.tokens_of(samples), token_scores(model, part).logprobs.detach()
            )
        )
        routing.replay(None)
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(scores[1], scores[0], rtol=2e-5, atol=2e-5)


def test_tokens_with_other_experts_are_not_shared() -> None:
    prefix = torch.arange(1, 61)
    batch = one_group([torch.cat([prefix, torch.tensor([end])]) for end in (1, 2)])
    batch.columns[EXPERTS] = torch.zeros(batch.tokens, 2, dtype=torch.int64)
    batch.columns[EXPERTS][61 + 40, 1] = 3
    assert batch.common_prefixes([0, 1]) == [0, 40] and batch.common_prefixes([1, 1]) == [0, 61]


@pytest.mark.parametrize("kind", [MistralConfig, Qwen3Config])
def test_a_window_is_a_reason_not_to_share(kind, caplog) -> None:
    model = built(kind, {**WINDOW, **LONG, "layer_types": None})
    assert pack(model) and reads_rows(model, *HOW)
    with caplog.at_level(logging.INFO, "rlhpc"):
        assert not reads_prefixes(model, *HOW)
    assert "a layer has a sliding window" in caplog.text
    batch = one_group(paths([(-1, 40), (0, 5), (0, 6)]))
    with pytest.raises(ConfigError, match=r"sliding window.*actor\.share_prefixes=false"):
        token_scores(model, batch.read_by(True).sharing_prefixes())


def test_a_model_with_too_few_positions_for_the_check_does_not_share(caplog) -> None:
    kind, changes = READ["gpt2"]
    model = built(kind, changes)
    assert pack(model) and reads_rows(model, *HOW)
    with caplog.at_level(logging.INFO, "rlhpc"):
        assert not reads_prefixes(model, *HOW)
    assert "the model at most 64" in caplog.text


def test_a_model_that_computes_something_else_is_found(monkeypatch, caplog) -> None:
    """Positions of the row instead of the samples'."""
    model = family("llama")
    forward = model.model.forward

    def shifted(*arguments, segments, position_ids, **options):
        if segments.prefixes:
            position_ids = torch.arange(position_ids.shape[1])[None]
        return forward(*arguments, segments=segments, position_ids=position_ids, **options)

    monkeypatch.setattr(model.model, "forward", shifted)
    with caplog.at_level(logging.INFO, "rlhpc"):
        assert not reads_prefixes(model, *HOW)
    assert "its outputs differ" in caplog.text


@pytest.mark.parametrize("fault", ["gradient", "operator"])
def test_an_attention_that_is_wrong_or_absent_is_found_before_training(fault, monkeypatch, caplog) -> None:
    def backward(*arguments, **options):
        if fault == "operator":
            raise NotImplementedError("no kernel")
        grads = real(*arguments, **options)
        return grads if options["is_causal"] else (grads[0], grads[1] * 1.1, grads[2])

    real = packing.segment_attention_backward
    monkeypatch.setattr(packing, "segment_attention_backward", backward)
    with caplog.at_level(logging.INFO, "rlhpc"):
        assert not reads_prefixes(family("llama"), *HOW)
    assert ("differs on cpu" if fault == "gradient" else "no kernel") in caplog.text


@pytest.mark.parametrize("head", [(8, 8), (12, 6)])
def test_values_of_another_size_than_keys(head) -> None:
    """Against attention with a mask, also with more heads than keys have."""
    torch.manual_seed(0)
    batch = one_group(paths([(-1, 33), (0, 4), (0, 5), (2, 34), (3, 2), (3, 3)]))
    batch = batch.read_by(True).sharing_prefixes()
    row = batch.row
    tokens = len(row.tokens)
    q, k = (torch.randn(1, heads, tokens, head[0], requires_grad=True) for heads in (4, 2))
    v = torch.randn(1, 2, tokens, head[1], requires_grad=True)
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for sample in range(len(batch)):
        places = row.places[batch.cu_seqlens[sample] : batch.cu_seqlens[sample + 1]]
        for index, place in enumerate(places):
            mask[place, places[: index + 1]] = True
    grads = []
    for masked in (True, False):
        if masked:
            outputs = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=True
            ).transpose(1, 2)
        else:
            outputs = packing.attend(torch.nn.Module(), q, k, v, segments=batch.inputs()["segments"])[0]
        grads.append(
            (outputs, *torch.autograd.grad((outputs * torch.linspace(-1, 1, tokens)[:, None, None]).sum(), (q, k, v)))
        )
    for found, expected in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_nothing_of_the_size_of_a_mask_or_of_keys_for_each_sample_is_made() -> None:
    model = built(LlamaConfig, {**LONG, "max_position_embeddings": 4096})
    assert pack(model)
    batch = one_group(paths([(-1, 2000), *[(0, 8)] * 100]))
    batch.mask &= torch.cat([torch.arange(n) >= 2000 for n in batch.lengths.tolist()])
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            seen.extend(
                each.numel() for each in torch.utils._pytree.tree_leaves(found) if isinstance(each, torch.Tensor)
            )
            return found

    [(_, part)] = cut(batch, shared=True)
    with Watch():
        token_scores(model, part).logprobs.sum().backward()
    assert len(part.row.tokens) == 2800 and max(seen) <= batch.tokens < 2800 * 2800 / 30


def test_the_same_numbers_twice() -> None:
    """Bit for bit, as a resumed run computes them."""
    model, batch = family("mixtral"), shuffled_tree()
    first, second = (told(model, batch, cut(batch, shared=True)) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], grad) for name, grad in second[1].items())
