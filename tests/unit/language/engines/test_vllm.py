"""vLLM engine of a rollout rank: requests, weight updates in the middle of them, and LoRA adapters.

The engine itself is a stand-in (`fake_vllm`); the real one is tested in tests/integration/language/test_rollout_backends.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.extras import need_extra

need_extra("llm")

from rlhpc.checkpoint.tensor_slice import TensorSlice, full_slice
from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines.base import Request, SamplingParams
from rlhpc.language.engines.common import WeightUpdateError
from rlhpc.language.engines.vllm import Adapters, VLLMRollout, _compute_parameter_digests
from rlhpc.language.engines.vllm_weights import Loaded
from rlhpc.runtime.errors import ConfigError
from tests.unit.language.engines import fake_vllm
from tests.unit.language.engines.fake_vllm import RequestOutputKind, logprobs_of

Build = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlhpc.language.models.tiny import make_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, hidden=16, layers=1, heads=2)
    return folder


@pytest.fixture
def build(model: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Builds an engine with changed keys of the configuration; `device` is `cpu` or `cuda:0`, `replies` see `LLMEngine`."""

    def make(device: str = "cpu", folder: Path = model, replies: Any = None, **keys: Any) -> Any:
        engine = fake_vllm.install(monkeypatch, device.partition(":")[0])
        engine.default_replies.update(replies or {})
        cfg = default_section(GrpoConfig)
        for key, value in keys.items():
            OmegaConf.update(cfg, key.replace("__", "."), value)
        return VLLMRollout(cfg, model_path=str(folder), device=device, seed=3)

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    return make


def test_layers_in_graphs_are_not_observed(build: Build) -> None:
    layers = [torch.nn.Identity(), torch.nn.Identity()]
    engine = build(device="cuda:0")
    with pytest.raises(ConfigError, match=r"rollout\.engine_kwargs=\{enforce_eager: true\} alone"):
        engine.observed_layers(lambda index, states: None)
    eager = build(
        device="cuda:0", replies={"decoder_layers": lambda: layers}, rollout__engine_kwargs={"enforce_eager": True}
    )
    observed = list[tuple[int, list[float]]]()
    with eager.observed_layers(lambda index, states: observed.append((index, states.flatten().tolist()))):
        layers[1]((torch.ones(1, 1), torch.ones(1, 1)))
    layers[0](torch.ones(1, 1))
    assert observed == [(1, [2.0])]


def request(number: int, prompt: tuple[int, ...] = (5, 10), most: int = 4, **sampling: Any) -> Request:
    return Request(number, prompt, SamplingParams(max_new_tokens=most, **sampling), seed=2**63 + number)


def weights(engine: Any, value: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full(shape, value)) for name, shape in engine._required_shapes.items()]


# -- requests


def test_a_response_has_the_tokens_and_log_probs_of_the_engine(build: Build) -> None:
    engine = build()
    (completion,) = engine.generate([request(7)])
    assert completion.token_ids == [11, 12, 13, 14] and completion.logprobs == logprobs_of([11, 12, 13, 14])
    assert (completion.id, completion.finish_reason, completion.versions) == (7, "length", [engine.version] * 4)
    assert engine.unfinished() == 0 and engine.context == 64


def test_vllm_gets_the_sampling_parameters_and_the_models_end_tokens(build: Build) -> None:
    engine = build()
    engine.add([request(1, most=1000, temperature=0.5, top_p=0.9, top_k=3, stop_token_ids=(30,))])
    (running,) = engine._engine.requests.values()
    given = running.parameters
    assert (given.temperature, given.top_p, given.top_k, given.seed) == (0.5, 0.9, 3, 1)
    assert given.max_tokens == 62, "what the context leaves"
    assert set(given.stop_token_ids) == {30, *engine._end_ids} and engine._end_ids and given.ignore_eos
    assert given.output_kind is RequestOutputKind.FINAL_ONLY
    assert running.prompt == {"prompt_token_ids": [5, 10]} and running.lora_request is None


def test_a_stop_token_ends_a_response_and_is_part_of_it(build: Build) -> None:
    (completion,) = build().generate([request(1, stop_token_ids=(12,))])
    assert (completion.token_ids, completion.finish_reason) == ([11, 12], "stop")


def test_a_stop_text_ends_a_response_with_the_token_that_completes_it(build: Build) -> None:
    engine = build()
    stop = engine._tokenizer.decode([12, 13])
    with_text, without = engine.generate([request(1, stop=(stop,)), request(2)])
    assert (with_text.token_ids, with_text.finish_reason) == ([11, 12, 13], "stop")
    assert (without.token_ids, without.finish_reason) == ([11, 12, 13, 14], "length")
    assert not engine._engine.requests


def test_responses_under_way_can_be_looked_at_dropped_and_aborted(build: Build) -> None:
    engine = build()
    engine.add([request(1, most=30), request(2, most=30), request(3, most=30)])
    assert engine.step() == [] and engine.step() == []
    assert engine.sampled_tokens([1, 3]) == {1: [11, 12], 3: [11, 12]}
    engine.drop([2])
    aborted = engine.abort()
    assert [(each.id, each.token_ids, each.finish_reason) for each in aborted] == [
        (1, [11, 12], "abort"),
        (3, [11, 12], "abort"),
    ]
    assert aborted[0].logprobs == logprobs_of([11, 12]) and len(aborted[0].versions) == 2
    assert not engine.unfinished() and not engine._engine.requests


def test_filters_are_refused_where_vllm_has_no_log_probs_before_them(build: Build) -> None:
    engine = build(replies={"log_before_filters": lambda: False})
    engine.generate([request(1)])
    for filters in ({"top_p": 0.5}, {"top_k": 4}):
        with pytest.raises(ConfigError, match=r"rollout\.top_p or top_k is on"):
            engine.add([request(2, **filters)])


def test_errors_of_a_step_name_the_settings(build: Build) -> None:
    engine = build()
    engine.add([request(1)])
    engine._engine.error = RuntimeError("no KV cache blocks")
    with pytest.raises(ConfigError, match="VLLM_CPU_KVCACHE_SPACE"):
        engine.step()


def test_a_text_is_scored_beside_responses_that_nobody_loses(build: Build) -> None:
    engine = build()
    engine.add([request(1, most=1)])
    assert engine.score([5, 20, 30]) == logprobs_of([20, 30])
    assert engine.unfinished() == 1
    (completion,) = engine.step()
    assert completion.token_ids == [11]


# -- weight updates


def test_digests_of_parameters_have_the_engines_names() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    first = _compute_parameter_digests(worker)
    assert first.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    with torch.no_grad():
        model[1].bias.add_(1)
    changed = _compute_parameter_digests(worker)
    assert {name for name in first if first[name] != changed[name]} == {"1.bias"}


def test_tokens_have_the_version_of_the_weights_that_sampled_them(build: Build) -> None:
    engine = build()
    engine.update_weights(1, weights(engine))
    engine.add([request(1)])
    engine.step()
    engine.update_weights(2, weights(engine))
    engine.update_weights(3, weights(engine))
    engine.step()
    engine.update_weights(4, weights(engine))
    while not (completions := engine.step()):
        pass
    assert completions[0].versions == [1, 3, 4, 4] and engine.version == 4
    assert engine._engine.events.count(("reset", True)) == 4, "the cache of older weights is dropped"


def test_a_kept_cache_is_that_of_its_version(build: Build) -> None:
    engine = build(rollout__keep_cache_on_update=True)
    assert not engine._engine.arguments.async_scheduling
    salts = []
    for version in (1, 2):
        engine.update_weights(version, weights(engine))
        engine.add([request(version)])
        salts.append(engine._engine.requests[str(version)].prompt["cache_salt"])
    assert salts == ["1", "2"] and ("reset", True) not in engine._engine.events


def test_an_update_that_lacks_a_tensor_stops_the_engine_for_good(build: Build) -> None:
    """vLLM's layers are loaded partly then, which another update does not repair."""
    engine = build()
    engine.add([request(1)])
    with pytest.raises(WeightUpdateError, match="left out"):
        engine.update_weights(1, weights(engine)[:-1])
    with pytest.raises(WeightUpdateError, match="did not arrive whole"):
        engine.step()
    with pytest.raises(WeightUpdateError, match="update to version 1 of vLLM's weights broke off; restart the rollout"):
        engine.update_weights(2, weights(engine))


def test_an_update_that_vllm_did_not_load_is_noticed(build: Build) -> None:
    def lose(named: Any, *_: Any) -> Loaded:
        counts = {name: tensor.numel() for name, tensor in named}
        counts[lost] -= 1
        return Loaded(counts, ())

    engine = build(replies={"reload_counted": lose})
    lost = "model.norm.weight"
    with pytest.raises(WeightUpdateError, match=re.escape(f"{lost} (15 of 16 elements)")):
        engine.update_weights(1, weights(engine))
    assert engine.version != 1


def test_slices_of_a_rank_are_named_once_and_loaded(build: Build) -> None:
    """Tied weights have one name, and what loaders copy twice is wanted once."""
    loaded: dict[str, Any] = {}

    def tensor_slices(shapes: Any) -> dict[str, list[TensorSlice]]:
        return {name: [full_slice(shape)] * 2 for name, shape in shapes.items() if "norm" not in name}

    def load(named: Any, *_: Any) -> Loaded:
        loaded.update(named)
        return Loaded(dict(engine._expected_sizes), ())

    engine = build(replies={"wanted_slices": tensor_slices, "reload_counted": load})
    wants = engine.wants()
    assert wants.keys() == {name for name in engine._required_shapes if "norm" not in name}
    assert all(each == (full_slice(engine._required_shapes[name]),) for name, each in wants.items())
    shards = [(name, tensor) for name, tensor in weights(engine, 2.0) if name in wants]
    engine.update_shards(5, shards)
    assert engine.version == 5 and loaded.keys() >= wants.keys()
    with pytest.raises(WeightUpdateError, match="left out"):
        engine.update_shards(6, shards[1:])


def test_dropped_weights_are_demanded_before_the_next_token(build: Build) -> None:
    engine = build("cuda:0", actor__offload_in_rollout=True, rollout__dtype="float32")
    engine.offload()
    engine.reload()
    assert engine._engine.events[-3:] == [("sleep", 2, "keep"), "wake", ("reset", True)]
    engine.add([request(1)])
    with pytest.raises(WeightUpdateError, match="gave its weights away"):
        engine.step()
    engine.update_weights(1, weights(engine))
    assert engine.step() == []
    engine.close()
    assert engine.unfinished() == 0


def test_kernels_that_pack_experts_are_refused_on_an_accelerator(build: Build, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(
        "qwen3_moe", vocab_size=16, hidden_size=8, intermediate_size=8, moe_intermediate_size=4, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, num_experts=2, num_experts_per_tok=1,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    engine = build("cuda:0", tmp_path, rollout__dtype="float32")
    assert engine._engine.arguments.moe_backend == "triton"
    assert engine._expected_sizes["model.layers.0.mlp.experts.1.down_proj.weight"] == 32, (
        "named as in the model's files"
    )
    with pytest.raises(ConfigError, match=r"vLLM's MarlinExperts keep experts .*moe_backend: triton"):
        build("cuda:0", tmp_path, {"packing_kernels": lambda: ["MarlinExperts"]}, rollout__dtype="float32")


# -- adapters


SHAPES = {"model.layers.0.q_proj.weight": (6, 4)}
A, B = (f"base_model.model.model.layers.0.q_proj.lora_{factor}.weight" for factor in "AB")


def factors(rank: int = 2, prefix: str = "") -> dict[str, torch.Tensor]:
    return {prefix + A: torch.ones(rank, 4), prefix + B: torch.ones(6, rank)}


def test_a_rank_takes_the_next_kernel_that_vllm_has() -> None:
    ranks = [Adapters(rank, 1, SHAPES).arguments()["max_lora_rank"] for rank in (1, 8, 9, 300, 512)]
    assert ranks == [8, 8, 16, 320, 512]
    with pytest.raises(ConfigError, match=r"actor\.lora\.rank is 513, .*at most 512.*rollout\.merge_adapters=true"):
        Adapters(513, 1, SHAPES)
    assert Adapters(4, 1, SHAPES, ("a", "b")).arguments()["max_loras"] == 2


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({A: torch.ones(3, 4), B: torch.ones(6, 2)}, r"shape \(3, 4\); \(2, 4\) is wanted"),
        ({A.replace("q_proj", "k_proj"): torch.ones(2, 4)}, "the model has no such adapter"),
        ({f"other/{A}": torch.ones(2, 4)}, "brought 'other/"),
        ({A: torch.ones(2, 4)}, "left out .*lora_B"),
        ({}, "left out all adapters"),
    ],
)
def test_an_update_of_adapters_that_does_not_fit_is_refused(update: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        Adapters(2, 4, SHAPES).fitting(update.items())


def test_an_adapter_comes_once_in_an_update_and_in_each() -> None:
    adapters = Adapters(2, 4, {**SHAPES, "model.layers.1.q_proj.weight": (6, 4)})
    with pytest.raises(WeightUpdateError, match="twice"):
        adapters.fitting([*factors().items(), *factors().items()])
    both = {**factors(), **{name.replace("layers.0", "layers.1"): tensor for name, tensor in factors().items()}}
    assert adapters.fitting(both.items()).keys() == both.keys()
    with pytest.raises(WeightUpdateError, match=r"left out .*layers\.1"):
        adapters.fitting(factors().items())
    assert adapters.config(both) == {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


def test_each_policy_has_its_adapters() -> None:
    adapters = Adapters(2, 4, SHAPES, ("first", "second"))
    assert adapters.request(1) is None, "before the first update"
    with pytest.raises(WeightUpdateError, match="adapters of policy second"):
        adapters.fitting(factors(prefix="first/").items())
    update = {**factors(prefix="first/"), **factors(prefix="second/")}
    parts = adapters.by_policy(adapters.fitting(update.items()))
    assert [part.keys() for part in parts] == [{A, B}] * 2


def test_an_engine_with_adapters_samples_with_the_last_ones(build: Build) -> None:
    placed: list[Any] = []
    replies = {"set_adapter": lambda number, tensors, config: placed.append((number, config["r"])) or len(tensors)}
    engine = build(replies=replies, actor__lora__rank=2, rollout__merge_adapters=False)
    layer = next(name for name in engine._required_shapes if "q_proj" in name).removesuffix(".weight")
    rows, columns = engine._required_shapes[f"{layer}.weight"]
    update = {
        f"base_model.model.{layer}.lora_A.weight": torch.ones(2, columns),
        f"base_model.model.{layer}.lora_B.weight": torch.ones(rows, 2),
    }
    engine.update_weights(1, update.items())
    engine.add([request(1)])
    assert placed == [(1, 2)] and engine._engine.requests["1"].lora_request == ("actor", 1)
    assert engine._engine.arguments.enable_lora and engine.version == 1
    engine._engine.replies["set_adapter"] = lambda number, tensors, config: 0
    with pytest.raises(WeightUpdateError, match="no adapter of version 2"):
        engine.update_weights(2, update.items())


def test_buffers_are_digested_under_the_names_of_the_trainer(build: Build) -> None:
    engine = build(
        replies={
            "renamed_tensors": lambda names: {"layers.0.gate.e_score_correction_bias": "layers.0.expert_bias"},
            "_compute_parameter_digests": lambda: {"layers.0.gate.e_score_correction_bias": 1, "layers.0.weight": 2},
        }
    )
    assert engine.parameter_digests() == {"layers.0.expert_bias": 1, "layers.0.weight": 2}
