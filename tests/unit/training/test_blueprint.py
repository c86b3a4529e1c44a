"""Blueprints: what a module's layers are, and what is done to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.extras import need_extra

need_extra("llm")

from transformers import LlamaConfig, LlamaForCausalLM

from rlhpc.config.parallel import MeshSizes
from rlhpc.runtime import torch_adapter
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.blueprint import Blueprint, compile_layers, disable_dropout, transformer_layers


class Small(Blueprint):
    """One layer, and nothing but what must be defined."""

    def build(self, *, empty: bool = False) -> nn.Module:
        return nn.Linear(2, 2)

    def named_weights(self, module: nn.Module, full: Any, without: Any = ()) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, full(tensor)) for name, tensor in module.state_dict().items())

    def frozen_names(self, module: nn.Module) -> frozenset[str]:
        return frozenset()


def llama(layers: int = 2, **options: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=layers, num_attention_heads=2,
            num_key_value_heads=1, **options,
        )
    )  # fmt: skip


def test_a_module_without_plans_has_no_layers_and_is_not_divided() -> None:
    blueprint, module = Small(), nn.Linear(2, 2)
    assert not blueprint.has_reference and blueprint.layers(module) == blueprint.expert_modules(module) == []
    assert blueprint.slices() is None and blueprint.last_layer(module) is None and blueprint.is_exported("weight")
    assert (
        list(blueprint.created_tensors(module)) == [] and blueprint.identity() == blueprint.recorded_facts(module) == {}
    )
    with pytest.raises(NotImplementedError):
        blueprint.build_reference()
    plain = type("Mesh", (), {"sizes": MeshSizes(1, 1)})()
    blueprint.divide(module, plain)
    shared = type("Mesh", (), {"sizes": MeshSizes(1, 1, tensor=2)})()
    with pytest.raises(ConfigError, match=r"actor\.parallel\.tensor\(2\) is for language models"):
        blueprint.divide(module, shared)


def test_layers_are_found_by_the_classes_that_a_model_declares() -> None:
    model = llama(3)
    assert transformer_layers(nn.Sequential(model)) == [*model.model.layers]
    assert transformer_layers(nn.Linear(2, 2)) == []


def test_a_wrapped_layer_is_still_a_layer() -> None:
    """FSDP2 replaces the class of a layer by a subclass with another name."""
    model = llama(2)
    for layer in model.model.layers:
        layer.__class__ = type(f"FSDP{type(layer).__name__}", (type(layer),), {})
    assert transformer_layers(model) == [*model.model.layers]


def test_dropout_is_off_wherever_it_is_written() -> None:
    model = llama(1, attention_dropout=0.5)
    model.model.extra = nn.Dropout(0.1)
    assert disable_dropout(model)
    assert model.model.layers[0].self_attn.attention_dropout == 0.0 and model.model.extra.p == 0.0
    assert not disable_dropout(model)


def test_layers_share_a_graph_and_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch_adapter, "_COMPILER", "eager")
    torch._dynamo.reset()
    counters.clear()
    model, ids = llama(3).eval(), torch.tensor([[1, 2, 3, 4]])
    expected = model(ids, use_cache=False).logits
    compile_layers(model, transformer_layers(model), "actor.compile")
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_a_model_whose_layers_are_unknown_or_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"critic\.compile=blocks: Linear does not declare its layers: set it to off"):
        compile_layers(nn.Linear(2, 2), [], "critic.compile")

    class Printing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("a graph cannot print")
            return x

    layer = Printing()
    compile_layers(layer, [layer], "actor.compile")
    with pytest.raises(ConfigError, match=r"actor\.compile=blocks: torch cannot compile Printing .*; set it to off"):
        layer(torch.ones(1))
