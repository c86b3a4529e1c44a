"""Tensor and expert parallelism: which part of each weight a rank has, what cannot be divided, and computed buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlhpc.config.parallel import MeshSizes
from rlhpc.config.sections import LoraConfig
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.lora import attach_lora
from rlhpc.training.mesh import Mesh
from rlhpc.training.tensor_parallel import computed_buffers, divide, expert_modules, make_buffers, summed_gradient
from tests.extras import need_extra
from tests.families.models import FAMILIES, SMALL
from tests.unit.training.fake_groups import group

need_extra("llm")

import transformers

from tests.integration.training.mesh_models import BASE, configs


def built(name: str) -> Any:
    """Returns a tiny model of a family, always with the same weights."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(configs()[name])


@contextmanager
def ranks(rank: int, **sizes: int) -> Iterator[Mesh]:
    """Makes this process a rank of a mesh."""
    shape = MeshSizes(**sizes)
    with group(rank, shape.ranks):
        yield Mesh(shape, rank, "cpu")


def parts(model: Any) -> dict[str, tuple[int, torch.Tensor]]:
    """Returns name → (dimension that is cut, this rank's part) of all weights that are cut."""
    cut = {name: weight for name, weight in model.named_parameters() if isinstance(weight, DTensor)}
    return {
        name: (weight.placements[0].dim, weight.to_local().detach())
        for name, weight in cut.items()
        if not weight.placements[0].is_replicate()
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_its_rows_or_columns(rank: int) -> None:
    whole, model = dict(built("qwen3").named_parameters()), built("qwen3")
    with ranks(rank, tensor=2) as mesh:
        divide(model, mesh, "actor.parallel")
        cut = parts(model)
        layer = "model.layers.1."
        dims = {f"{layer}self_attn.{name}_proj.weight": 0 for name in "qkv"}
        dims |= {f"{layer}self_attn.o_proj.weight": 1, f"{layer}mlp.down_proj.weight": 1}
        dims |= {f"{layer}mlp.{name}_proj.weight": 0 for name in ("gate", "up")}
        dims |= {"model.embed_tokens.weight": 0, "lm_head.weight": 0}
        assert {name: dim % 2 for name, (dim, _) in cut.items() if layer in name or "layers" not in name} == dims
        for name, (dim, part) in cut.items():
            assert torch.equal(part, whole[name].detach().chunk(2, dim)[rank]), name
        assert torch.equal(model.model.norm.weight, whole["model.norm.weight"])


def test_a_head_that_is_the_embeddings_stays_one_weight_with_them() -> None:
    model = built("llama_tied")
    with ranks(1, tensor=2) as mesh:
        divide(model, mesh, "actor.parallel")
        assert isinstance(model.lm_head.weight, DTensor)
        assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_its_experts_and_all_other_weights(rank: int) -> None:
    whole, model = dict(built("qwen3_moe").named_parameters()), built("qwen3_moe")
    with ranks(rank, shard=2, expert=2) as mesh:
        divide(model, mesh, "actor.parallel")
        cut = parts(model)
        names = {f"model.layers.{n}.mlp.experts.{part}" for n in range(2) for part in ("gate_up_proj", "down_proj")}
        assert set(cut) == names and len(expert_modules(model)) == 2
        for name, (dim, part) in cut.items():
            assert dim == 0 and torch.equal(part, whole[name].detach().chunk(2)[rank])


def test_a_model_without_experts_has_no_modules_of_them() -> None:
    assert expert_modules(built("llama")) == []


def test_an_adapters_factor_is_cut_with_its_layer() -> None:
    model = attach_lora(built("llama"), LoraConfig(rank=4, alpha=8, target_modules=["q_proj", "o_proj"]), seed=0)
    with ranks(0, tensor=2) as mesh:
        divide(model, mesh, "actor.parallel")
        factors = {name.rpartition("layers.")[2]: cut for name, cut in parts(model).items() if "lora_" in name}
    assert {(name.split(".")[2], name.split(".")[3]) for name in factors} == {
        ("q_proj", "lora_B"),
        ("o_proj", "lora_A"),
    }
    assert len(factors) == 4
    for name, (dim, part) in factors.items():
        assert tuple(part.shape) == ((16, 4) if "lora_B" in name else (4, 16)) and dim % 2 == int("lora_A" in name)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("gpt2", {"tensor": 2}, r"p\.tensor\(2\): transformers has no plan to divide GPT2LMHeadModel"),
        ("odd_heads", {"tensor": 2}, r"p\.tensor\(2\) does not divide the 3 attention heads of LlamaForCausalLM"),
        ("qwen2", {"tensor": 4}, r"p\.tensor\(4\) does not divide the 2 heads of keys and values"),
        ("odd_words", {"tensor": 2}, r"p\.tensor\(2\) does not divide the vocabulary of 63 tokens"),
        ("llama", {"context": 8}, r"p\.context\(8\) does not divide the 4 attention heads that a rank of Llama"),
        ("qwen3_moe", {"tensor": 2}, r"into interleaved columns, which checkpoints do not survive; share .* p\.expert"),
        ("llama", {"shard": 2, "expert": 2}, r"p\.expert\(2\): transformers has no plan to share out experts of Llama"),
        ("odd_experts", {"shard": 2, "expert": 2}, r"p\.expert\(2\) does not divide the 3 experts of Mixtral"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_its_numbers(name: str, sizes: dict[str, int], message: str) -> None:
    model = built(name)
    with ranks(0, **sizes) as mesh, pytest.raises(ConfigError, match=message):
        divide(model, mesh, "p")


def test_a_dimension_that_ranks_cannot_share_evenly_is_refused() -> None:
    torch.manual_seed(0)
    odd = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**BASE, "intermediate_size": 47}))
    with (
        ranks(0, tensor=2) as mesh,
        pytest.raises(ConfigError, match=r"2 ranks cannot share dimension 0 of .*gate_proj"),
    ):
        divide(odd, mesh, "p")


def test_gradients_of_several_micro_batches_are_summed_over_the_ranks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' sum is twice this rank's part."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: tensor.mul_(2))
    layer, given = nn.Linear(3, 2), torch.randn(4, 3)
    weight, bias = layer.weight, layer.bias
    layer(given).sum().backward()
    assert weight.grad is not None
    expected, weight.grad = 4 * weight.grad, None  # two micro-batches of two ranks
    with ranks(0, tensor=2) as mesh:
        summed_gradient().install_forward(layer, mesh.tensor)
        for _ in range(2):
            layer(given).sum().backward()
        assert layer.weight is weight and layer.bias is bias
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize(
    ("family", "buffer_name"),
    [
        ("smollm3", "model.rotary_emb.inv_freq"),
        ("gemma3_text", "model.embed_tokens.embed_scale"),  # a module with weights of its own
        ("falcon_h1", "model.layers.1.mamba.mup_vector"),  # computed by the module's parent
    ],
)
def test_a_model_that_was_built_empty_computes_its_buffers(family: str, buffer_name: str) -> None:
    config = transformers.CONFIG_MAPPING[family](**{**SMALL, **FAMILIES[family]})
    expected = dict(computed_buffers(transformers.AutoModelForCausalLM.from_config(config)))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.model.register_buffer("unknown", torch.zeros(2), persistent=False)
        model.model.register_buffer("saved", torch.zeros(2))
    state = torch.get_rng_state()
    buffers, unknown_names = make_buffers(model)
    assert unknown_names == ["model.unknown"] and torch.equal(torch.get_rng_state(), state)
    assert buffer_name in expected and set(buffers) == {*expected, "model.unknown"}
    for name, tensor in expected.items():
        torch.testing.assert_close(buffers[name], tensor)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
