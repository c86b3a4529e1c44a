"""Engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from rlhpc.config.constraints import (
    COUNT,
    ENGINE_DTYPES,
    FREE,
    INTERVAL_OR_0,
    NOT_NEGATIVE,
    POSITIVE,
    Range,
    Registered,
)
from rlhpc.config.sections import WeightSyncConfig


@dataclass
class ServingConfig:
    """Memory and precision of an engine for a language model."""

    max_batch_size: Annotated[int | None, COUNT, FREE] = None
    """Sequences that a rank makes at a time; null takes vLLM's own number for an accelerator, and 64 otherwise."""
    max_model_len: Annotated[int | None, COUNT] = None
    """Longest prompt and response together; null takes the model's context."""
    dtype: Annotated[str, ENGINE_DTYPES] = "auto"
    """Precision of the engine's weights: float32, bfloat16, float16, or auto: the model's `dtype`, as it is on the engine's
    device."""
    gpu_memory_utilization: Annotated[float, Range(0, 1, above=True), FREE] = 0.6
    """Fraction of the accelerator's memory that vLLM takes."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine's constructor."""


@dataclass
class GenerationConfig(ServingConfig):
    """Engine and sampling of a language model."""

    rollout_backend: Annotated[str, Registered("rlhpc.language.engines.registry:ENGINES")] = "hf"
    """Generation engine of language models: `hf`, `vllm`, or `module:Class`."""
    max_new_tokens: Annotated[int, COUNT] = 256
    """Maximum number of tokens of a response."""


@dataclass
class EngineConfig(GenerationConfig):
    """Engine of a model that answers: in evaluation, and in training on its answers."""

    top_p: Annotated[float, Range(0, 1, above=True)] = 1.0
    """Nucleus sampling (top-p); 1 is off."""
    top_k: Annotated[int, Range(1, also=(-1, "off"))] = -1
    """Number of most likely tokens kept in sampling; -1 is off."""
    max_turns: Annotated[int, COUNT] = 1
    """Maximum number of turns of a multi-turn episode (`rollout.agent`)."""
    agent: Annotated[str | None, Registered("rlhpc.language.agents.registry:AGENTS")] = None
    """Multi-turn episodes with tools: a registered name, or `module:Class`; null is one response a prompt."""


@dataclass
class EngineParallelConfig:
    """Ranks of an engine, and the division of the model among them (`rollout_backend: vllm`)."""

    tensor: Annotated[int | None, COUNT] = None
    """Ranks over which each layer of an engine is divided; null takes the accelerators that the placement gives a process
    (`rollout: 0-7:0-3` is four engines of two ranks)."""
    expert: bool = False
    """Expert parallelism: divides the experts of a mixture among an engine's ranks, rather than each expert (not on CPUs)."""


@dataclass
class GrpoRolloutConfig(WeightSyncConfig, EngineConfig):
    """The rollout group."""

    parallel: Annotated[EngineParallelConfig, FREE] = field(default_factory=EngineParallelConfig)
    """Engines of several ranks."""
    temperature: Annotated[float, NOT_NEGATIVE] = 1.0
    """Temperature of sampling in training; the losses use the same."""
    probe_interval: Annotated[int, INTERVAL_OR_0] = 10
    """Versions of the weights between two probes: engine and trainer score a fixed text, and a difference that rounding does
    not explain ends the run. The first two versions are looked at as well; 0 leaves only version 0. What is compared at the
    start of a run does not depend on it."""
    probe_tolerance: Annotated[float | None, POSITIVE] = None
    """How far the text's log-probs may differ, a token on average; null is 0.001 in float32 (on an accelerator 0.02);
    in half precision, and for the changed weights of the start, six times what the trainer finds rounding to make of it."""
    merge_adapters: bool = True
    """With `actor.lora.rank`, whether adapters are merged into the weights that engines get. False sends them as they are, and
    nothing else (`vllm`, which then computes with them): an update is small, and each token costs a little more."""
    keep_cache_on_update: bool = False
    """Sequences under way go on with the keys and values that older weights made, rather than have them recomputed (exact, and
    slow for long ones): for `algorithm.max_staleness`. Log-probs are those that tokens were drawn with either way."""
    routing_replay: bool = False
    """A mixture is trained with the experts that the engine (`hf`) chose for each token, weighted by its routers: rounding
    then sends no token to other experts in the trainer than in the engine."""
