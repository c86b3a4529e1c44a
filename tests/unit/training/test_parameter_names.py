"""Names of a model's tensors in checkpoints: those of `save_pretrained`, as views of the module's own tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rlhpc.training.parameter_names import ParameterView, checkpoint_parts, model_in, plain, require_same_shapes
from tests.extras import need_extra

need_extra("llm")
import transformers

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def mixture() -> transformers.PreTrainedModel:
    config = transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def dense() -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False))


@pytest.mark.parametrize("build", [mixture, dense])
def test_views_have_the_names_and_values_of_saved_files(build, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = build()
    assert model_in(nn.Sequential(model)) is model
    model.save_pretrained(tmp_path)
    saved, state = load_file(tmp_path / "model.safetensors"), model.state_dict()
    views = checkpoint_parts(model, {name: tuple(tensor.shape) for name, tensor in state.items()})
    assert sorted(view.name for parts in views.values() for view in parts) == sorted(saved)
    for name, parts in views.items():
        for view in parts:
            assert view.shape == tuple(saved[view.name].shape) and torch.equal(
                view.view_in(state[name]), saved[view.name]
            )


def test_another_modules_names_are_kept_and_adapters_leave_none() -> None:
    module = nn.Linear(3, 2)
    assert checkpoint_parts(module, {"weight": (2, 3)}) == {"weight": [ParameterView("weight", ((0, 2), (0, 3)))]}
    assert plain("base_model.model.layers.0.q_proj.base_layer.weight") == "layers.0.q_proj.weight"
    assert model_in(module) is None


def test_tensors_of_other_names_or_shapes_replace_nothing() -> None:
    shapes = {"a": (2, 3), "b": (4,)}
    require_same_shapes(shapes, {"a": torch.zeros(2, 3), "b": torch.zeros(4)})
    with pytest.raises(RuntimeError, match=r"the names differ: b"):
        require_same_shapes(shapes, {"a": torch.zeros(2, 3)})
    with pytest.raises(RuntimeError, match=r"b is \[5\] there and \[4\] here"):
        require_same_shapes(shapes, {"a": torch.zeros(2, 3), "b": torch.zeros(5)})
