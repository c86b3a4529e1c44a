"""Rows of several samples against the same samples one by one, in each family that reads such; and families that do not."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Phi3Config,
    PhimoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from rlhpc.config.sections import LoraConfig
from rlhpc.language.models import packing
from rlhpc.language.models.logprobs import token_scores
from rlhpc.language.models.packing import NAME, attend, pack, packs, reads_rows, unpack
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.models.value_head import add_value_head
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.lora import attach_lora

SMALL = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.3, "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
DEEPSEEK = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "n_routed_experts": 4,
    "first_k_dense_replace": 1, "head_dim": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 2, **EXPERTS,
}  # fmt: skip
WINDOW = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}
#: Names of configurations, and what is changed of them.
READ = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen2, window": (Qwen2Config, WINDOW),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True}),
    "qwen3 moe": (Qwen3MoeConfig, EXPERTS),
    "mistral, window": (MistralConfig, WINDOW),
    "mixtral": (MixtralConfig, EXPERTS),
    "deepseek v3": (DeepseekV3Config, DEEPSEEK),
    "gemma 3": (Gemma3TextConfig, WINDOW),
    "granite": (GraniteConfig, {}),
    "olmo 2": (Olmo2Config, {}),
    "phi 3": (Phi3Config, {}),
    "gpt2": (GPT2Config, {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}),
}
#: Families whose tokens see others by more than attention that weighs values, or whose positions cannot be said.
NOT_READ = {
    "bound on logits": (Gemma2Config, {}),
    "sinks": (GptOssConfig, EXPERTS),
    "state": (MambaConfig, {"state_size": 4}),
    "linear attention": (
        Qwen3NextConfig, {**EXPERTS, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
                          "linear_value_head_dim": 8, "shared_expert_intermediate_size": 8},
    ),
    # their factors follow from the longest position in the row, which is another sample's
    "longrope": (Phi3Config, {
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
        "original_max_position_embeddings": 8, "max_position_embeddings": 64,
    }),
    "dynamic rope": (LlamaConfig, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
}  # fmt: skip
HOW = (torch.device("cpu"), torch.float32)
LENGTHS = (9, 5, 5, 1, 7)


def built(kind, changes, **how):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**{**SMALL, **changes}), **how).eval()


@pytest.fixture
def batch():
    torch.manual_seed(5)
    masks = [torch.arange(n) >= n // 3 for n in LENGTHS]
    return TokenBatch.from_sequences([torch.randint(1, 61, (n,)) for n in LENGTHS], masks)


def told(model, batch):
    """Log-probs, entropies, values, and gradients of a sum of them."""
    model.zero_grad()
    scores = token_scores(model, batch, 0.7, computes_entropy=True)
    weights = torch.linspace(-1, 1, batch.tokens)
    loss = (scores.logprobs * weights).sum() + (scores.entropy * weights.flip(0)).sum()
    if scores.values is not None:
        loss = loss + (scores.values * weights).sum()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    said = [scores.logprobs, scores.entropy, *([] if scores.values is None else [scores.values])]
    return torch.stack([each.detach() for each in said]), grads


def same(found, expected) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=2e-5, atol=2e-5)
    assert found[1].keys() == expected[1].keys() and found[1]
    whole = max(float(grad.abs().max()) for grad in expected[1].values())
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-5 * max(1.0, whole), msg=name)


@pytest.mark.parametrize("family", READ)
def test_a_row_says_what_its_samples_say(family, batch) -> None:
    model = built(*READ[family])
    one_by_one = told(model, batch)  # as a rectangle, which each sample says the same of alone
    alone = torch.cat([token_scores(model, part, 0.7).logprobs for part in batch.split([1] * len(batch))])
    torch.testing.assert_close(alone, one_by_one[0][0], rtol=2e-5, atol=2e-5)
    assert pack(model) and packs(model) and reads_rows(model, *HOW)
    given = batch.read_by(True).inputs()
    assert (
        given["input_ids"].shape == given["position_ids"].shape == (1, batch.tokens) and "attention_mask" not in given
    )
    same(told(model, batch), one_by_one)


@pytest.mark.parametrize("family", NOT_READ)
def test_what_would_mix_samples_is_read_as_a_rectangle(family, batch) -> None:
    model = built(*NOT_READ[family])
    assert not pack(model) and not packs(model) and model.config._attn_implementation != NAME
    assert torch.isfinite(token_scores(model, batch).logprobs).all()


def test_a_family_that_does_not_hand_on_what_it_is_given(batch) -> None:
    """Its declarations say nothing of it; a pass over a few tokens does."""
    model = built(NemotronConfig, {})
    expected = token_scores(model, batch).logprobs
    assert pack(model) and not reads_rows(model, *HOW)
    unpack(model)
    torch.testing.assert_close(token_scores(model, batch).logprobs, expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", [Qwen2MoeConfig, PhimoeConfig, Qwen2Config, MistralConfig])
def test_a_window_that_is_kept_in_a_mask_is_not_lost(family) -> None:
    """Some families hand their window on to their attention, others have it in a mask alone, which rows do without."""
    torch.manual_seed(5)
    lengths = (40, 33)
    samples = TokenBatch.from_sequences(
        [torch.randint(1, 61, (n,)) for n in lengths], [torch.arange(n) >= 4 for n in lengths]
    )
    changes = {**EXPERTS, "shared_expert_intermediate_size": 8, **WINDOW, "sliding_window": 12}
    if family in (Qwen2Config, Qwen2MoeConfig):
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    model = built(family, changes)
    expected = token_scores(model, samples).logprobs
    is_packed = pack(model) and reads_rows(model, *HOW)
    assert is_packed == (family in (Qwen2Config, MistralConfig))
    if not is_packed:
        unpack(model)
    torch.testing.assert_close(token_scores(model, samples).logprobs, expected, rtol=2e-5, atol=2e-5)


def test_positions_that_are_not_heeded(monkeypatch) -> None:
    model = built(GPT2Config, {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64})
    assert pack(model)
    forward = model.transformer.forward
    monkeypatch.setattr(model.transformer, "forward", lambda *a, position_ids=None, **k: forward(*a, **k))
    assert not reads_rows(model, *HOW)


def test_another_attention_is_the_users_choice() -> None:
    assert not pack(built(LlamaConfig, {}, attn_implementation="eager"))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("changed", ["whole", "adapter", "values"])
def test_adapters_heads_and_recomputed_activations(changed, checkpointing, batch) -> None:
    models = []
    for packed in (False, True):
        model = built(LlamaConfig, {})
        if packed:
            assert pack(model)
        if changed == "values":
            add_value_head(model, seed=3)
        if changed == "adapter":
            model = attach_lora(model, LoraConfig(rank=2, target_modules=["q_proj", "v_proj"]), seed=1)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        assert packs(model) == packed
        models.append(model)
    same(told(models[1], batch), told(models[0], batch))


@pytest.mark.parametrize("lengths", [(0,), (1,), (0, 1), (2,), (0, 3, 0, 3)])
def test_next_to_nothing(lengths) -> None:
    """Samples without tokens, and rows too short for a model."""
    model = built(Qwen3Config, {})
    batch = TokenBatch.from_sequences(
        [torch.ones(n, dtype=torch.int64) for n in lengths], [torch.ones(n) for n in lengths]
    )
    expected = token_scores(model, batch).logprobs
    pack(model)
    found = token_scores(model, batch)
    assert found.logprobs.shape == (sum(lengths),)
    torch.testing.assert_close(found.logprobs, expected, rtol=1e-5, atol=1e-5)
    found.logprobs.sum().backward()  # what other ranks wait for


def test_nothing_of_the_size_of_a_mask_is_made(monkeypatch) -> None:
    """300 samples of 8 tokens: a mask of the row would have 5.8 million cells."""
    model = built(Qwen2Config, WINDOW)
    assert pack(model)
    batch = TokenBatch.from_sequences([torch.ones(8, dtype=torch.int64)] * 300, [[True] * 8] * 300)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            seen.extend(
                each.numel() for each in torch.utils._pytree.tree_leaves(found) if isinstance(each, torch.Tensor)
            )
            return found

    with Watch():
        token_scores(model, batch).logprobs.sum().backward()
    assert max(seen) <= 2400 * 64, "what is largest is a part of the logits, or of the heads"


def test_what_a_family_wants_beside_is_refused() -> None:
    model = built(LlamaConfig, {})
    attention = model.model.layers[0].self_attn
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ConfigError, match=r"LlamaAttention wants softcap .*actor\.use_remove_padding=false"):
        attend(attention, q, q[:, :1], q[:, :1], softcap=30.0)


def test_the_kernel_for_rows_gets_what_it_wants(monkeypatch) -> None:
    """On an accelerator: the same samples, causally, within the window, and the heads shared as the model shares them."""
    given = {}

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
        given.update(window=window_size, gqa=enable_gqa, longest=(max_q, max_k), ends=cu_seq_q.tolist())
        assert (
            cu_seq_q.dtype == torch.int32 and cu_seq_q is cu_seq_k and query.shape == (27, 2, 8) and key.shape[1] == 1
        )
        out = torch.empty_like(query)
        for start, end in zip(given["ends"], given["ends"][1:], strict=False):
            q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
            at = torch.arange(end - start)
            behind = at[:, None] - at
            seen = (behind >= 0) & ((behind <= window_size[0]) | (window_size[0] < 0))
            found = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
            )
            out[start:end] = found[0].transpose(0, 1)
        return out

    import torch.nn.attention.varlen as varlen

    theirs = inspect.signature(varlen.varlen_attn).parameters
    assert set(inspect.signature(varlen_attn).parameters) <= set(theirs)  # the names that are used are torch's
    monkeypatch.setattr(packing, "has_segment_attention", lambda query, value: True)
    monkeypatch.setattr(packing, "_KERNEL", packing._with_current_signature(varlen_attn))
    torch.manual_seed(5)
    batch = TokenBatch.from_sequences([torch.randint(1, 61, (n,)) for n in LENGTHS], [torch.ones(n) for n in LENGTHS])
    for changes, window in (({}, (-1, 0)), (WINDOW, (3, 0))):
        model = built(MistralConfig, {"sliding_window": None, **changes})
        expected = told(model, batch)
        assert pack(model)
        same(told(model, batch), expected)
        assert given == {"window": window, "gqa": True, "longest": (9, 9), "ends": [0, 9, 14, 19, 20, 27]}

    # Before torch 2.13 the kernel shares heads without being told to; before 2.11 it has no windows, and is not used.
    def older(*rows, scale, window_size):
        return varlen_attn(*rows, scale=scale, window_size=window_size, enable_gqa=True)

    monkeypatch.setattr(packing, "_KERNEL", packing._with_current_signature(older))
    given.clear()
    same(told(model, batch), expected)
    assert given["gqa"]
    assert packing._with_current_signature(lambda *rows, is_causal=False, return_aux=None: None) is None
    monkeypatch.setattr(packing, "_KERNEL", None)
    same(told(model, batch), expected)


def test_names_that_transformers_has() -> None:
    """What `pack` asks of a model, and that no mask is made for an attention of another name."""
    from transformers import PreTrainedModel
    from transformers.masking_utils import create_causal_mask

    assert PreTrainedModel._supports_attention_backend is False and PreTrainedModel._is_stateful is False
    config = AutoConfig.for_model("llama", **SMALL)
    config._attn_implementation = NAME
    embeds, places = torch.zeros(1, 6, 16), torch.tensor([[0, 1, 2, 0, 1, 2]])
    mask = create_causal_mask(
        config=config, inputs_embeds=embeds, attention_mask=None, past_key_values=None, position_ids=places
    )
    assert mask is None
