"""Weight updates in vLLM: tied names, mixtures of experts, and updates that reach not all weights.

The slices that vLLM's loaders want are tested with vLLM in tests/integration/language/test_engine_architectures.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.extras import need_extra

need_extra("llm")

from transformers import AutoConfig, AutoModelForCausalLM

from rlhpc.language.engines import vllm_weights
from rlhpc.language.engines.common import WeightUpdateError
from rlhpc.language.engines.vllm_weights import (
    FileNames,
    Loaded,
    is_mixture,
    require_all_loaded,
    tensors_of,
    with_tied_names,
)
from rlhpc.runtime.errors import ConfigError

SMALL = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 4, "num_experts": 3, "num_experts_per_tok": 2}


def model_of(model_type: str, **changes: Any) -> Any:
    """Returns a model on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL, **changes}))


# -- names of tensors


def test_a_tied_weight_is_needed_once_and_has_another_name() -> None:
    needed, optional, aliases = tensors_of(model_of("qwen3", tie_word_embeddings=True))
    assert needed["model.embed_tokens.weight"] == (16, 8) and "lm_head.weight" not in needed
    assert "lm_head.weight" in optional and aliases == {"model.embed_tokens.weight": ["lm_head.weight"]}
    needed, optional, aliases = tensors_of(model_of("qwen3", tie_word_embeddings=False))
    assert "lm_head.weight" in needed and not optional and not aliases


def test_buffers_are_optional() -> None:
    model = nn.BatchNorm1d(4)
    needed, optional, aliases = tensors_of(model)
    assert needed == {"weight": (4,), "bias": (4,)} and not aliases
    assert optional == {"running_mean": (4,), "running_var": (4,), "num_batches_tracked": ()}


def test_each_tied_name_gets_the_weight_once_though_an_update_brings_both() -> None:
    first, second = torch.ones(2), torch.zeros(2)
    update = [("embed", first), ("head", first), ("norm", second)]
    pairs = list(with_tied_names(update, {"embed": ["head", "other"]}))
    assert [name for name, _ in pairs] == ["embed", "head", "other", "norm"]
    assert all(tensor is first for _, tensor in pairs[:3]) and pairs[3][1] is second


# -- mixtures of experts


@pytest.mark.parametrize(("model_type", "changes"), [("qwen3_moe", EXPERTS), ("mixtral", {"num_local_experts": 3})])
def test_a_mixture_is_recognised_by_its_configuration(model_type: str, changes: dict[str, Any]) -> None:
    assert is_mixture(AutoConfig.for_model(model_type, **{**SMALL, **changes}))
    assert not is_mixture(AutoConfig.for_model("qwen3", **SMALL))


def test_experts_of_a_family_that_no_test_compares_are_split_like_others() -> None:
    sizes = {**EXPERTS, "n_routed_experts": 3, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    model = model_of("glm4_moe", **sizes)
    files = dict(FileNames(model)(model.state_dict().items()))
    assert "model.layers.0.mlp.experts.2.down_proj.weight" in files and not any("gate_up" in name for name in files)


def test_experts_are_split_into_the_tensors_of_the_files() -> None:
    names = FileNames(model_of("qwen3_moe", **EXPERTS))
    gate_up = torch.arange(3 * 8 * 8, dtype=torch.float32).reshape(3, 8, 8)
    prefix = "model.layers.0.mlp.experts"
    files = dict(names([(f"{prefix}.gate_up_proj", gate_up), ("model.norm.weight", torch.ones(8))]))
    assert files.keys() == {"model.norm.weight"} | {
        f"{prefix}.{expert}.{factor}_proj.weight" for expert in range(3) for factor in ("gate", "up")
    }
    for expert in range(3):
        halves = [files[f"{prefix}.{expert}.{factor}_proj.weight"] for factor in ("gate", "up")]
        assert torch.equal(torch.cat(halves), gate_up[expert])


def test_experts_that_can_only_be_split_all_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading

    def revert(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return tensors if len(tensors) > 1 else {f"{name}.0": tensor for name, tensor in tensors.items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", revert)
    with pytest.raises(ConfigError, match="splits the experts of Qwen3MoeForCausalLM in a way that takes the whole"):
        FileNames(model_of("qwen3_moe", **EXPERTS))


# -- slices that loaders copy


def test_a_loader_shows_the_slices_that_it_copies() -> None:
    """A fused weight, of which this rank has the second half of each part; another rank's tensor; and a scalar's copies."""
    copies = vllm_weights._CopyRecorder()
    with vllm_weights._MetaWeights():
        fused, norm = torch.empty(8, 6), torch.empty(4)
    assert fused.is_meta and norm.is_meta, "no weight takes memory"
    with copies:
        query, key = copies.source("q", (8, 6)), copies.source("k", (8, 6))
        copies.source("another rank's", (4,))
        fused[:4].copy_(query.narrow(0, 4, 4))
        fused[4:].copy_(key[4:])
        for _ in range(2):
            norm.copy_(copies.source("norm", (4,)))
    assert copies.tensor_slices.keys() == {"q", "k", "norm"}
    for name in ("q", "k"):
        (tensor_slice,) = copies.tensor_slices[name]
        assert (tensor_slice.starts, tensor_slice.sizes) == ((4, 0), (4, 6))
    assert [tensor_slice.sizes for tensor_slice in copies.tensor_slices["norm"]] == [(4,), (4,)], "with repetitions"


# -- complete updates


EXPECTED = {"a": 4, "b": 6}


def test_an_update_that_loads_all_once_is_complete() -> None:
    require_all_loaded(Loaded({"a": 4, "b": 6, "buffer": 9}, ()), EXPECTED, 3)


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (Loaded({"a": 4}, ()), r"did not load all of version 3 once: b \(0 of 6 elements\); nobody acts"),
        (Loaded({"a": 8, "b": 6}, ()), r"a \(8 of 4 elements\)"),
        (Loaded({"a": 1, "b": 5}, ()), r"a \(1 of 4 elements\), b \(5 of 6 elements\)"),
        (
            Loaded({"a": 4, "b": 6}, ("layers.0", "norm")),
            "kept the old weights of layers.* version 3 .*: layers.0, norm;",
        ),
    ],
)
def test_an_update_that_is_not_complete_names_what_is_missing(loaded: Loaded, message: str) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        require_all_loaded(loaded, EXPECTED, 3)


def test_of_many_names_a_message_has_three() -> None:
    with pytest.raises(WeightUpdateError, match=r": a .*, b .*, c .* and 2 more; "):
        require_all_loaded(Loaded({}, ()), dict.fromkeys("abcde", 1), 1)


class Worker:
    """A worker of vLLM whose loader skips some tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.model_runner = self

    def get_model(self) -> nn.Module:
        return self.model


@pytest.mark.parametrize("packed", [False, True])
def test_copies_are_counted_by_the_tensor_that_is_being_loaded(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    hooks: list[Any] = []

    @contextlib.contextmanager
    def observed(on_copy: Callable[[int], None], on_idle: Callable[[Any], None]) -> Iterator[None]:
        hooks[:] = on_copy, on_idle
        yield

    def load(weights: Any) -> None:
        for name, tensor in weights:
            if not name.startswith("1."):
                hooks[0](tensor.numel())
        hooks[1](model[1])

    worker: Any = Worker(model)
    worker.reload_weights = lambda weights_iterator: load(weights_iterator)
    monkeypatch.setattr(vllm_weights, "observed_reload", observed)
    monkeypatch.setattr(vllm_weights, "reload_packed", lambda worker, weights: load(weights))
    loaded = vllm_weights.reload_counted(worker, model.state_dict().items(), packed)
    assert loaded == Loaded({"0.weight": 6, "0.bias": 3}, ("1",))
    with pytest.raises(WeightUpdateError, match=r"1\.weight \(0 of 6 elements\)"):
        require_all_loaded(loaded, {name: tensor.numel() for name, tensor in model.state_dict().items()}, 2)
