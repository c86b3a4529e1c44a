"""Sections of engines and of the rollout group."""

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
    Choices,
    Range,
    Registered,
)
from rlhpc.config.sections import WeightSyncConfig


@dataclass
class ServingConfig:
    """Memory and precision of an engine for a language model."""

    max_batch_size: Annotated[int | None, COUNT, FREE] = None
    """Number of concurrent sequences of a rank; null is vLLM's default on an accelerator, and 64 otherwise."""
    max_model_len: Annotated[int | None, COUNT] = None
    """Maximum number of tokens of prompt and response; null is the model's context."""
    dtype: Annotated[str, ENGINE_DTYPES] = "auto"
    """Precision of the engine's weights: float32, bfloat16, float16, or auto: the model's `dtype` on the engine's device."""
    gpu_memory_utilization: Annotated[float, Range(0, 1, above=True), FREE] = 0.6
    """Fraction of the accelerator's memory that vLLM uses."""
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
    """Engine of a model that generates responses in evaluation or in training."""

    top_p: Annotated[float, Range(0, 1, above=True)] = 1.0
    """Nucleus sampling (top-p); 1 is off."""
    top_k: Annotated[int, Range(1, also=(-1, "off"))] = -1
    """Number of most likely tokens to sample from; -1 for all."""
    batch_invariant: Annotated[bool, FREE] = False
    """Turns on vLLM's batch-invariant mode, in which a request's tokens and log-probs do not depend on the other requests:
    slower, on GPUs of compute capability 8.0 or higher, and for models whose kernels vLLM has in this mode. The engine `hf` is
    batch-invariant on CPUs as it is."""
    max_turns: Annotated[int, COUNT] = 1
    """Maximum number of turns of a multi-turn episode (`rollout.agent`)."""
    agent: Annotated[str | None, Registered("rlhpc.language.agents.registry:AGENTS")] = None
    """Agent of multi-turn episodes with tools: a registered name, or `module:Class`; null is one response per prompt."""


@dataclass
class EngineParallelConfig:
    """Ranks of an engine, and the division of the model among them (`rollout_backend: vllm`)."""

    tensor: Annotated[int | None, COUNT] = None
    """Number of ranks over which each layer of an engine is divided; null is the number of accelerators per process in the
    placement (`rollout: 0-7:0-3` is four engines of two ranks)."""
    expert: bool = False
    """Expert parallelism: distributes whole experts over an engine's ranks instead of dividing each expert (not on CPUs)."""


@dataclass
class GrpoRolloutConfig(WeightSyncConfig, EngineConfig):
    """Settings of the rollout group."""

    parallel: Annotated[EngineParallelConfig, FREE] = field(default_factory=EngineParallelConfig)
    """Engines of several ranks."""
    quantization: Annotated[str | None, Choices("fp8")] = None
    """Precision of the products of linear layers in the engine (`vllm`): fp8 (weights by output channel, inputs by token), or
    null for the engine's dtype, which must be half precision. Weights arrive in this dtype, and the engine quantizes them.
    Training then needs a correction for the gap to the trainer (`algorithm.tis_cap`, or one of `algorithm.corrections`)."""
    temperature: Annotated[float, NOT_NEGATIVE] = 1.0
    """Temperature of sampling in training; the losses use the same."""
    probe_interval: Annotated[int, INTERVAL_OR_0] = 10
    """Number of weight versions between two weight probes: engine and trainer score a fixed text, and a difference beyond
    rounding ends the run. The first two versions are probed as well; with 0, only version 0 is. The comparison at the start
    of a run does not depend on this key."""
    probe_tolerance: Annotated[float | None, POSITIVE] = None
    """Maximum mean difference of the text's log-probs per token; null is 0.001 in float32 (0.02 on an accelerator); in half
    precision, and for the changed weights at the start, it is six times the effect of rounding that the trainer measures."""
    merge_adapters: bool = True
    """With `actor.lora.rank`, whether adapters are merged into the weights that engines get. False sends only the adapters
    (`vllm`, which then applies them itself): updates are small, and each token costs a little more."""
    keep_cache_on_update: bool = False
    """Whether running sequences keep their KV cache from older weights after an update, instead of recomputing it (which is
    exact, and slow for long sequences); for `algorithm.max_staleness`. Log-probs are those of the sampling distribution in
    both cases."""
    routing_replay: bool = False
    """Whether a mixture-of-experts model is trained with the experts that the engine (`hf`) chose for each token, weighted by
    the trainer's routers, so that rounding does not route tokens to different experts in trainer and engine."""
