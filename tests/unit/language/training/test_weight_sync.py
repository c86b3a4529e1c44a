"""How far what an engine says of a text may be from what its trainer says."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.config.training import GrpoActorConfig
from rlhpc.language.engines.base import Completion
from rlhpc.language.models.builtin import resolve_model
from rlhpc.language.models.logprobs import token_scores
from rlhpc.language.training.prompt_dispatch import PromptMap, weight_shards
from rlhpc.language.training.weight_sync import (
    ActorWeights,
    Probe,
    Prober,
    check_probe,
    long_text,
    probe_text,
    sample_probe,
    sync_of,
)
from rlhpc.runtime.errors import ConfigError
from rlhpc.weights.verification import WeightsDiffer
from tests.extras import need_extra

need_extra("llm")
import transformers

#: A run that sends shards by itself: two ranks hold the weights in halves, and vLLM loads slices.
SHARDED = {"num_shards": 2}
VLLM = ("rollout.rollout_backend=vllm",)
ADAPTERS = ("actor.lora.rank=4", "rollout.merge_adapters=false")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: resolve_model(f"builtin:{name}", tmp_path_factory.getbasetemp()) for name in ("tiny", "tiny_vl")}


@pytest.mark.parametrize(
    ("settings", "prompts", "strategy"),
    [
        (VLLM, SHARDED, "shards"),
        ((*VLLM, "rollout.weight_sync=AUTO"), SHARDED, "shards"),
        ((*VLLM, "actor.lora.rank=4"), SHARDED, "shards"),
        (VLLM, {}, "auto"),
        (VLLM, {**SHARDED, "sources": (0, 1)}, "auto"),
        ((*VLLM, "rollout.weight_delta=elements"), SHARDED, "auto"),
        ((*VLLM, "rollout.quantization=fp8"), SHARDED, "auto"),
        ((*VLLM, *ADAPTERS), SHARDED, "auto"),
        ((*VLLM, *ADAPTERS, "rollout.weight_sync=shards"), SHARDED, "auto"),
        ((*VLLM, "rollout.weight_sync=broadcast"), SHARDED, "broadcast"),
        ((*VLLM, "rollout.weight_sync=nccl"), SHARDED, "nccl"),
        (("rollout.rollout_backend=hf",), SHARDED, "auto"),
        (("rollout.rollout_backend=hf", "rollout.weight_sync=shards"), {}, "shards"),
    ],
)
def test_auto_sends_shards_where_trainer_and_engine_can(
    settings: tuple[str, ...], prompts: dict[str, Any], strategy: str, folders: dict[str, str]
) -> None:
    def name_for(model: str) -> str:
        words = [*settings, f"actor.model.model_path={folders[model]}"]
        return sync_of(
            OmegaConf.merge(OmegaConf.structured(GrpoConfig), OmegaConf.from_dotlist(words)),
            PromptMap(2, 2, 2, 2, **prompts),
        )

    assert name_for("tiny") == strategy
    if strategy == "shards" and "rollout.weight_sync=shards" not in settings:
        assert name_for("tiny_vl").lower() == "auto", "models that look at pictures are sent whole"


@pytest.mark.parametrize(
    ("settings", "ranks", "num_shards"),
    [
        (("training_backend=local",), 4, 1),
        (("training_backend=deepspeed",), 4, 1),
        (("training_backend=fsdp",), 1, 1),
        (("training_backend=fsdp",), 4, 4),
        (("training_backend=fsdp", "parallel.replicate=2"), 4, 2),
        (("training_backend=fsdp", "parallel.replicate=4"), 4, 1),
        (("training_backend=fsdp", "parallel.shard=2", "parallel.tensor=2"), 4, 4),
    ],
)
def test_ranks_that_hold_shards(settings: tuple[str, ...], ranks: int, num_shards: int) -> None:
    assert (
        weight_shards(
            OmegaConf.merge(OmegaConf.structured(GrpoActorConfig), OmegaConf.from_dotlist([*settings])), ranks
        )
        == num_shards
    )


class Engine:
    """Is off by so much, a token."""

    def __init__(self, off: float) -> None:
        self.off = off

    def score(self, token_ids):
        return [-1.0 - self.off] * (len(token_ids) - 1)


@pytest.mark.parametrize(
    ("dtypes", "device", "tolerance", "most"),
    [
        ({"float32"}, "cpu", None, 0.001),
        ({"float32"}, "cuda", None, 0.02),
        ({"float32", "bfloat16"}, "cpu", None, 0.25),
        ({"bfloat16"}, "cuda", None, 0.25),
        ({"float32"}, "cuda", 0.005, 0.005),
    ],
)
def test_rounding_is_no_difference(dtypes, device, tolerance, most) -> None:
    probe = Probe((3, 1, 2), (-1.0, -1.0), "float32")
    for off in (0.99 * most, -0.99 * most):
        assert check_probe(Engine(off), probe, 3, tolerance, dtypes, "actor-0", device) == pytest.approx(abs(off))
    for off in (1.01 * most, float("nan")):
        with pytest.raises(WeightsDiffer, match=rf"version 3 .*actor-0.*rounding explains {most:g}"):
            check_probe(Engine(off), probe, 3, tolerance, dtypes, "actor-0", device)


class Scoring:
    """Scores as a trainer does, and as an engine whose kernels round otherwise: in float32."""

    def __init__(self, std: float, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, initializer_range=std,
        )  # fmt: skip
        self.model: Any = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
        self.backend = SimpleNamespace(module=self.model, dtype=dtype)

    def forward(self, batch: Any, *, temperature: float) -> Any:
        with torch.no_grad():
            return token_scores(self.model, batch, temperature)

    def score(self, token_ids: tuple[int, ...]) -> list[float]:
        ids, exact = torch.tensor([token_ids]), copy.deepcopy(self.model).float()
        with torch.no_grad():
            said = exact(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        return said.squeeze(1).tolist()

    def step(self, size: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += size * parameter.std().nan_to_num() * torch.randn_like(parameter)


@pytest.mark.parametrize("std", [0.02, 0.15, 0.5])
def test_what_rounding_explains_is_found_out_for_each_model(std: float) -> None:
    """Sound updates pass, and an engine that has kept old weights is noticed, whatever size the log-probs' rounding has."""
    trainer = Scoring(std, torch.bfloat16)
    prober = Prober(trainer, probe_text(64, 20), 0, torch.bfloat16)
    gaps, stale = [], copy.deepcopy(trainer)
    for version in range(60):
        gaps.append(check_probe(trainer, prober.ask(), version, None, {"bfloat16"}, "actor-0"))
        trainer.step(10.0 ** (version % 3 - 3))
    probe = prober.ask()
    assert 0 < max(gaps) < 6 * probe.rounding and probe.rounding < 20 * max(gaps)
    with pytest.raises(WeightsDiffer, match="rounding explains"):
        check_probe(stale, probe, 60, None, {"bfloat16"}, "actor-0")


def test_in_single_precision_nothing_is_rounded_otherwise() -> None:
    trainer = Scoring(0.15, torch.float32)
    text = probe_text(64, 20)
    alone = Prober(trainer, text, 0, torch.float32).ask()
    # A trainer in single precision, and an engine that is not.
    beside = Prober(trainer, text, 0, torch.bfloat16)
    found = [beside.ask() for _ in range(3)]
    assert alone.rounding == 0.0 < found[0].rounding == found[2].rounding
    assert all(probe.logprobs == alone.logprobs for probe in found), "what is rounded otherwise is no longer"
    half = copy.deepcopy(trainer)
    half.model.bfloat16()
    check_probe(half, found[2], 1, None, {"float32", "bfloat16"}, "actor-0")


class Drawing:
    """Takes requests that fit into a context, and draws as many tokens as there is room for."""

    can_score = False

    def __init__(self, context: int) -> None:
        self.context, self.lengths = context, list[int]()

    def generate(self, requests):
        completions = []
        for request in requests:
            room = self.context - len(request.prompt_ids)
            assert len(request.prompt_ids) > 0 < room, (len(request.prompt_ids), self.context)
            count = min(room, request.sampling.max_new_tokens)
            self.lengths.append(len(request.prompt_ids) + count)
            completions.append(Completion(request.id, [1] * count, [-1.0] * count, [0] * count))
        return completions


@given(
    prompt=st.integers(1, 5000), response=st.integers(1, 5000), context=st.integers(3, 9000),
    window=st.sampled_from([0, 24, 512, 4096]), chunk=st.sampled_from([0, 64, 2048]),
)  # fmt: skip
def test_what_is_drawn_fits_and_is_longer_than_a_window_where_the_runs_own_sequences_may_be(
    prompt: int, response: int, context: int, window: int, chunk: int
) -> None:
    longest, engine = min(prompt + response, context - 1), Drawing(context)
    length = long_text(prompt + response, window, chunk, context)
    draws = sample_probe(engine, 50, prompt, response, length, 0, 0)  # type: ignore[arg-type]
    assert all(1 <= len(one.sampled_logprobs) <= response and len(one.token_ids) <= longest for one in draws)
    if longest > max(window, chunk) + 64 and prompt > max(window, chunk) + 64:
        assert max(engine.lengths) > max(window, chunk)


class Excluding:
    """Engine whose code excludes the model."""

    can_score = False

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def generate(self, requests):
        raise self.error


@pytest.mark.parametrize(
    "error", [AssertionError(), NotImplementedError(), RuntimeError("Unexpected head dim size, 32")]
)
def test_a_check_in_an_engines_code_is_refused_with_its_line(error: BaseException) -> None:
    text = str(error) or type(error).__name__
    expected = rf"cannot generate with this model .*{text} \(.*test_weight_sync\.py, line \d+: raise"
    with pytest.raises(ConfigError, match=expected):
        sample_probe(Excluding(error), 50, 5, 5, 20, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError):
        sample_probe(Excluding(torch.OutOfMemoryError()), 50, 5, 5, 20, 0, 0)  # type: ignore[arg-type]


class Weights:
    """A trainer's weights, and which of them were gathered.

    Attributes:
        backend: Says whether the ranks hold different parts of the weights.
        gathered: Names in the order in which they were requested.
    """

    def __init__(self, lockstep: bool) -> None:
        self.backend = SimpleNamespace(lockstep=lockstep)
        self.gathered: list[str] = []

    def named_weights(self, without=()):
        for name in ("embed.weight", "layer.weight"):
            if name not in without:
                self.gathered.append(name)
                yield name, torch.zeros(2)

    def frozen_names(self) -> frozenset[str]:
        return frozenset({"embed.weight"})


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_rank_that_does_not_send_gathers_weights_only_if_the_ranks_hold_parts_of_them(lockstep: bool) -> None:
    weights = Weights(lockstep)
    worker: Any = SimpleNamespace(rank=1)
    sender = ActorWeights(worker, default_section(GrpoConfig), PromptMap(1, 1, 1, 2), weights)  # type: ignore[arg-type]
    sender.send(0, [0], None)
    sender.send(1, [0], None)
    sender.send_all_weights(1, [1])
    sender.refresh_reference(1)
    every = ["embed.weight", "layer.weight"]
    assert weights.gathered == ([*every, "layer.weight", *every, *every] if lockstep else [])
