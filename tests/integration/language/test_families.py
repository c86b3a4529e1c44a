"""Families of models in vLLM's build for CPUs: the check at the start admits the right ones, in each of many random models,
and refuses those in which something was put wrong on purpose. The trainer is transformers' model with the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm", "vllm")

import torch

from bench.families import FP8, check_seed, make_engine, randomize, save_family
from rlhpc import Worker
from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines import Request, SamplingParams, vllm_weights
from rlhpc.language.engines.common import WeightUpdateError
from rlhpc.language.evaluation.layer_mismatch import compare_texts
from rlhpc.language.training.trainer import TokenTrainer
from rlhpc.runtime.errors import ConfigError

#: Families that this build computes as transformers does.
RIGHT = ("qwen2", "qwen3", "mixtral", "qwen3_moe", "glm4_moe", "falcon_h1")
HYBRID = "falcon_h1"
MIXTURES = ("mixtral", "qwen3_moe", "glm4_moe")
MIXTURE = "glm4_moe"  # in no list
#: Most tests of faults try one family in CI, and all others where long tests are run.
EACH_RIGHT = [pytest.param(name, marks=() if name == MIXTURE else pytest.mark.long) for name in RIGHT]


@pytest.fixture(scope="module", params=EACH_RIGHT)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """An engine and its trainer's model."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_family(folder, request.param, "float32")
    engine = make_engine(folder, "float32")
    yield engine, model
    engine.close()


def test_a_family_is_admitted_with_any_weights(pair: tuple[Any, Any]) -> None:
    engine, model = pair
    for seed in range(1, 3):
        randomize(model, seed)
        assert check_seed(engine, model, "float32", seed).difference < 1e-4
    digests = engine.parameter_digests()
    norm = "model.final_layernorm.weight" if model.config.model_type == HYBRID else "model.norm.weight"
    assert {"model.embed_tokens.weight", norm} <= {name for name, digest in digests.items() if digest}


def test_layers_of_trainer_and_engine_agree(pair: tuple[Any, Any], tmp_path: Path) -> None:
    """By layer, in prefill and decoding; and a layer that is off is told."""
    engine, model = pair
    model.save_pretrained(tmp_path)
    cfg = default_section(GrpoConfig)
    cfg.actor.model.model_path, cfg.actor.model.dtype = str(tmp_path), "float32"
    trainer = TokenTrainer(cfg, Worker())
    engine.update_weights(100, trainer.named_weights())
    generator = torch.Generator().manual_seed(2)
    requests = [
        Request(number, tuple(torch.randint(3, 512, (length,), generator=generator).tolist()), SamplingParams(5), 1)
        for number, length in enumerate((3, 40))
    ]
    layers = compare_texts(trainer, engine, requests)["layers"]
    assert len(layers) == 2 and max(max(layer["prompt"], layer["answer"]) for layer in layers) < 1e-4
    with torch.no_grad():
        trainer.backend.module.model.layers[1].self_attn.o_proj.weight.mul_(1.5)
    layers = compare_texts(trainer, engine, requests)["layers"]
    assert layers[0]["largest"] < 1e-4 < 1e-2 < min(layers[1]["prompt"], layers[1]["answer"])


def pack_layers(worker: Any) -> None:
    """Makes the kernels of linear layers keep a copy of their weights, where vLLM has not packed them for this processor."""
    for layer in worker.model_runner.get_model().modules():
        if hasattr(layer, "cpu_linear") and layer.weight.numel():
            packed = layer.weight.detach().clone()
            layer.cpu_linear = lambda x, weight, bias, packed=packed: torch.nn.functional.linear(x, packed, bias)


def pack_once(monkeypatch: pytest.MonkeyPatch, engine: Any, family: str) -> None:
    """Makes kernels keep the weights that they packed when they were built: of experts, or of linear layers."""
    from vllm.model_executor.layers import utils

    if family in MIXTURES:
        monkeypatch.setattr(
            vllm_weights, "reload_packed", lambda worker, weights: worker.reload_weights(weights_iterator=weights)
        )
    else:
        dispatch = utils.dispatch_cpu_unquantized_gemm

        def keep_kernel(layer: Any, remove_weight: bool) -> None:
            kernel = getattr(layer, "cpu_linear", None)
            dispatch(layer, remove_weight)
            if kernel is not None:  # a convolution has none
                layer.cpu_linear = kernel

        monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep_kernel)
        engine._engine.collective_rpc(pack_layers)


def test_a_kernel_that_packs_once_is_refused(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = pair
    pack_once(monkeypatch, engine, model.config.model_type)
    randomize(model, 3)
    with pytest.raises(
        (ConfigError, WeightUpdateError), match=r"differ from the trainer's by|does not follow|did not load"
    ):
        check_seed(engine, model, "float32", 3)


@pytest.mark.long
@pytest.mark.parametrize("pair", [HYBRID], indirect=True)
def test_a_state_that_leaks_into_the_next_request_is_refused(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request starts with the state that its slot had last."""
    from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder as Builder

    engine, model = pair
    build = Builder._compute_common_metadata

    def keep_states(*args: Any, **kwargs: Any) -> Any:
        metadata = build(*args, **kwargs)
        starts = metadata.has_initial_states_p
        return metadata if starts is None else replace(metadata, has_initial_states_p=torch.ones_like(starts))

    monkeypatch.setattr(Builder, "_compute_common_metadata", keep_states)
    randomize(model, 5)
    with pytest.raises(ConfigError, match="differ from the trainer's by"):
        check_seed(engine, model, "float32", 5)


def test_a_parameter_of_the_engine_that_keeps_its_value_is_named(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a bias that an engine builds and the trainer's model has not: nothing that is sent reaches it."""
    engine, model = pair
    digests = engine.parameter_digests
    monkeypatch.setattr(
        type(engine), "parameter_digests", lambda self: {**digests(), "model.layers.0.self_attn.bias": 7}
    )
    randomize(model, 4)
    with pytest.raises(ConfigError, match=r"its parameters model\.layers\.0\.self_attn\.bias did not change"):
        check_seed(engine, model, "float32", 4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        *((family, "rope_theta", 100.0) for family in RIGHT),
        ("glm4_moe", "routed_scaling_factor", 2.5),
        ("qwen2", "tie_word_embeddings", False),
        ("qwen3", "rope_parameters", {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
        ("falcon_h1", "ssm_out_multiplier", 0.5),
    ],
)
def test_a_configuration_that_was_saved_otherwise_is_refused(tmp_path: Path, family: str, key: str, value: Any) -> None:
    """The engine reads a config.json in which one key has another value than the trainer's model."""
    model = save_family(tmp_path, family, "float32")
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    if key == "rope_theta" and "rope_parameters" in content:
        content["rope_parameters"]["rope_theta"] = value
    path.write_text(json.dumps({**content, key: value}))
    engine = make_engine(tmp_path, "float32")
    with pytest.raises(
        (ConfigError, WeightUpdateError), match=r"differ from the trainer's by|did not load|left out|no weight"
    ):
        check_seed(engine, model, "float32", 0)
    engine.close()


@pytest.mark.long
@pytest.mark.parametrize("family", RIGHT)
def test_an_engine_that_lacks_the_biases_of_the_model_is_refused(tmp_path: Path, family: str) -> None:
    """vLLM leaves out biases of the files that its own model has not, and says nothing."""
    model = save_family(tmp_path, family, "float32")
    for layer in model.model.layers:
        projection = layer.self_attn.o_proj
        assert projection.bias is None
        projection.bias = torch.nn.Parameter(torch.randn(projection.out_features))
    engine = make_engine(tmp_path, "float32")
    with pytest.raises((ConfigError, WeightUpdateError), match=r"o_proj\.bias"):
        check_seed(engine, model, "float32", 1)
    engine.close()


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """An engine that computes in 8 bits, and its trainer's model."""
    folder = tmp_path_factory.mktemp("fp8")
    model = save_family(folder, "qwen3", "bfloat16")
    engine = make_engine(folder, "bfloat16", "fp8")
    yield engine, model
    engine.close()


def test_an_engine_in_8_bits_follows_its_trainer_as_far_as_they_reach(quantized: tuple[Any, Any]) -> None:
    engine, model = quantized
    for seed in range(4):
        if seed:
            randomize(model, seed)
        assert check_seed(engine, model, "bfloat16", seed, FP8).difference > 0.02, "it computes in 8 bits"
    with pytest.raises(ConfigError, match="differ from the trainer's by"):
        for seed in range(4):
            check_seed(engine, model, "bfloat16", seed)


def test_a_layer_that_stays_in_8_bits_is_refused(quantized: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is sent, one projection never reaches the engine."""
    engine, model = quantized
    update = engine.update_weights
    stale = {name: p.detach().clone() for name, p in model.named_parameters() if "layers.1.mlp.down_proj" in name}
    monkeypatch.setattr(
        engine, "update_weights",
        lambda version, weights, **how: update(version, ((name, stale.get(name, p)) for name, p in weights), **how),
    )  # fmt: skip
    randomize(model, 7)
    with pytest.raises(
        ConfigError, match=r"differ from the trainer's by|layers\.1\.mlp\.down_proj\.weight did not change"
    ):
        check_seed(engine, model, "bfloat16", 7, FP8)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", RIGHT)
def test_right_engines_are_admitted_in_twenty_seeds(tmp_path: Path, family: str, dtype: str) -> None:
    """No refusal that is false."""
    model = save_family(tmp_path, family, dtype)
    engine = make_engine(tmp_path, dtype)
    for seed in range(20):
        if seed:
            randomize(model, seed)
        check_seed(engine, model, dtype, seed)
    engine.close()
