"""Memory model: terms of a layer, of training and of engines, against real tensors and against each other."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.config.parallel import MeshSizes
from rlhpc.language.planning.memory_model import LayerMemory, Serving, Training
from rlhpc.language.planning.model_size import size_of
from tests.extras import need_extra
from tests.unit.language.planning.accounts import SMALL


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_the_longest_sequence_is_the_last_that_the_cache_holds(engine: str, window: int | None) -> None:
    size = size_of("somebody/model", config={**SMALL, "model_type": "qwen2", "sliding_window": window,
                                             "use_sliding_window": window is not None, "max_window_layers": 3})  # fmt: skip
    serving = Serving(size, engine, 2, True, 1e9, 8, 8, 4)
    for nbytes in (0.0, 1e3, 1e5, 1e7):
        tokens = serving.longest_within(nbytes)
        assert serving.sequence(tokens) <= nbytes < serving.sequence(tokens + 1)


# -- training --------------------------------------------------------------------------------------------------------

SIZE = size_of("somebody/model", config={**SMALL, "model_type": "qwen2", "tie_word_embeddings": False})


def saved_by_autograd(config: dict[str, Any], tokens: int) -> int:
    """Returns the bytes that a real decoder layer saves for its backward pass, each tensor once and without weights."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    counts = []
    for layers in (1, 2):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen2Config(**{**config, "num_hidden_layers": layers}))
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved: dict[int, int] = {}

        def keep(tensor: Any, saved: dict[int, int] = saved, weights: set[int] = weights) -> Any:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model.model(torch.arange(tokens)[None] % 60, use_cache=False)
            counts.append(sum(saved.values()))
        del output
    return counts[1] - counts[0]


def test_a_layer_saves_what_autograd_saves() -> None:
    need_extra("llm")
    tokens = 96
    layers = LayerMemory(SIZE, 4, on_host=False)
    assert tokens * layers.layer() == pytest.approx(saved_by_autograd(SMALL, tokens), rel=0.15)


def training(backend: str = "fsdp", **changes: Any) -> Training:
    options: dict[str, Any] = {"accelerated": True, "itemsize": 2, "tokens": 4096, "sizes": MeshSizes(shard=4)}
    options |= changes
    return Training(SIZE, backend, options.pop("sizes"), options.pop("tokens"), options.pop("itemsize"), **options)


def bytes_of(plan: Training, term: str) -> float:
    return max(each.nbytes for moment in plan.moments() for each in moment.terms if each.name == term)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("backend", ["local", "fsdp", "deepspeed"])
def test_a_rank_has_its_part_of_weights_and_optimizer(backend: str, stage: int) -> None:
    plan = training(backend, stage=stage, sizes=MeshSizes(shard=1 if backend == "local" else 4))
    parts = 1 if backend == "local" else 4
    assert bytes_of(plan, "weights") == pytest.approx(4 * SIZE.parameters / parts)
    assert bytes_of(plan, "optimizer") == pytest.approx(8 * SIZE.parameters / parts)
    assert plan.host_copy_bytes() == pytest.approx(12 * SIZE.parameters * plan.rank_fraction())
    assert {moment.name for moment in plan.moments()} >= {"loss", "backward pass", "optimizer step"}
    assert all(term.nbytes > 0 for moment in plan.moments() for term in moment.terms)


@pytest.mark.parametrize("backend", ["local", "fsdp", "deepspeed"])
def test_what_saves_memory_saves_it(backend: str) -> None:
    sizes = MeshSizes(shard=1 if backend == "local" else 4)
    plain = training(backend, sizes=sizes)
    recomputed, adapted = training(backend, sizes=sizes, checkpointing=True), training(backend, sizes=sizes, lora=4)
    assert recomputed.saved_activations() < plain.saved_activations()
    assert recomputed.layer_backward() > plain.layer_backward(), "which it computes again, layer by layer"
    assert adapted.num_trained == adapted.num_adapter_parameters() < plain.num_trained == SIZE.parameters
    assert adapted.num_frozen == SIZE.parameters and bytes_of(adapted, "optimizer") < bytes_of(plain, "optimizer")
    reference = training(backend, sizes=sizes, reference=True)
    assert max(m.nbytes for m in reference.moments()) > max(m.nbytes for m in plain.moments())
    headless = training(backend, sizes=sizes, has_head=False, uses_logits=False)
    assert headless.num_trained == SIZE.parameters - SIZE.embedding
    assert len(headless.terms_at_loss()) < len(plain.terms_at_loss())


def test_offloaded_weights_are_on_the_host() -> None:
    plan = training(offload=True)
    assert plan.offloaded_bytes() == pytest.approx(16 * SIZE.parameters / 4) and training().offloaded_bytes() == 0
    with pytest.raises(ValueError, match="empty"):
        bytes_of(plan, "optimizer")


# -- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_engines_that_share_a_model_have_a_part_of_it_each(engine: str) -> None:
    one, two = (Serving(SIZE, engine, 2, True, 80e9, 100, 28, 64, tensor=ranks) for ranks in (1, 2))
    assert one.weights == 2 * two.weights == 2 * SIZE.parameters and one.length == 128
    generation, update = one.moments()
    assert update.nbytes > generation.nbytes, "the weights that arrive"
    assert one.sequences == 64 and Serving(SIZE, engine, 2, True, 80e9, 100, 28, 8).sequences == 8


def test_quantized_layers_take_a_byte_for_each_weight() -> None:
    full, quantized = (Serving(SIZE, "vllm", 2, True, 80e9, 100, 28, 64, quantized=is_on) for is_on in (False, True))
    layers = SIZE.parameters - SIZE.root_parameters
    assert full.weights - quantized.weights == layers > 0 and quantized.cache_bytes() == full.cache_bytes() + layers


def test_vllm_is_refused_where_no_sequence_fits() -> None:
    fits = Serving(SIZE, "vllm", 2, True, 80e9, 100, 28, 64)
    assert fits.refusals() == () and fits.num_fitting() * fits.sequence(fits.length) <= fits.cache_bytes()
    assert fits.describe_cache() == f"{fits.num_fitting()} sequences of 128 tokens"
    assert fits.beside_trainer() > fits.weights
    (reason,) = Serving(SIZE, "vllm", 2, True, 2e9, 100, 28, 64).refusals()
    assert "rollout.gpu_memory_utilization (0.6)" in reason and reason.endswith("does not fit: weights")
    assert Serving(SIZE, "hf", 2, True, 2e9, 100, 28, 64).refusals() == ()
    on_host = Serving(SIZE, "vllm", 4, False, None, 100, 28, 64)
    assert on_host.sequence(128) * 2 <= on_host.cache_bytes() <= 4 << 30
