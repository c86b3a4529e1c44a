"""Common base of the engines hf and vllm: options, request checks, and checks of weight updates."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rlhpc.config.parallel import splits_sums
from rlhpc.config.typed import select
from rlhpc.language.engines.base import Completion, Request, RolloutBackend
from rlhpc.language.multi_policy import policies_of
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.text import format_names
from rlhpc.runtime.trace_recorder import span

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlhpc.language.config.run import LanguageConfig
    from rlhpc.weights.delta import Elements

T = TypeVar("T", bound="torch.Tensor | Elements")

_DTYPES = ("float32", "bfloat16", "float16")
#: `rollout.quantization` → dtype of the factors of products.
_QUANTIZED_DTYPES = {"fp8": "float8_e4m3fn"}
#: Number of concurrent sequences if neither the configuration nor the engine sets one.
_DEFAULT_BATCH_SIZE = 64


def first_output(output: Any) -> torch.Tensor:
    """Returns the hidden states among a layer's outputs: the only output, or the first of several."""
    hidden_states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden_states


@contextmanager
def observed_outputs(
    layers: Sequence[nn.Module],
    on_output: Callable[[int, torch.Tensor], None],
    hidden_states_of: Callable[[Any], torch.Tensor] = first_output,
) -> Iterator[None]:
    """Calls `on_output` with the index and the hidden states `[tokens, hidden size]` of each layer that runs in the block.

    Args:
        layers: Layers, in order.
        on_output: See `RolloutBackend.observed_layers`.
        hidden_states_of: Function that returns the hidden states, `[…, hidden size]`, of a layer's output.
    """

    def make_hook(index: int) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
            on_output(index, hidden_states_of(output).flatten(0, -2))

        return hook

    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            hooks.callback(layer.register_forward_hook(make_hook(index)).remove)
        yield


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine, from the sections `rollout` and `actor.model`.

    Attributes:
        model_path: Hugging Face folder or hub name.
        device: Device of the computation, such as `cpu` or `cuda:0`.
        dtype: Dtype of the weights: float32, bfloat16 or float16.
        max_batch_size: Number of concurrent sequences; None selects the engine's default.
        max_model_len: Maximum number of tokens of prompt and response; None selects the model's context.
        gpu_memory_utilization: Fraction of the accelerator's memory for vLLM.
        attn_implementation: Attention implementation of transformers.
        trust_remote_code: Whether to run code that comes with the model.
        engine_kwargs: Further arguments of the engine's constructor.
        sleep_mode: Whether the engine frees the accelerator between rollouts (`actor.offload_in_rollout`); false for
            configurations without this key, such as those of SFT.
        keeps_cache: `rollout.keep_cache_on_update`.
        expert_parallel: `rollout.parallel.expert`.
        returns_experts: `rollout.routing_replay`.
        adapters: Rank and alpha of unmerged adapters (`rollout.merge_adapters`); None if they are merged.
        policies: Names of the policies, each with such adapters (`agent.policies`); empty for a single policy.
        quantization: `rollout.quantization`; None if products are computed in `dtype`.
        batch_invariant: `rollout.batch_invariant`.
        exact: Whether the engine computes with the trainer's bits (`runner.deterministic`).
    """

    model_path: str
    device: str = "cpu"
    dtype: str = "float32"
    max_batch_size: int | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.6
    attn_implementation: str = "sdpa"
    trust_remote_code: bool = False
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    sleep_mode: bool = False
    keeps_cache: bool = False
    expert_parallel: bool = False
    returns_experts: bool = False
    adapters: tuple[int, int] | None = None
    policies: tuple[str, ...] = ()
    quantization: str | None = None
    batch_invariant: bool = False
    exact: bool = False

    @classmethod
    def from_config(cls, cfg: LanguageConfig, model_path: str, device: str | torch.device) -> EngineOptions:
        """Reads and checks the options of a configuration.

        Raises:
            ConfigError: A value is out of range; the message names the key.
        """
        rollout, model = cfg.rollout, cfg.actor.model
        for key, configured_limit in (
            ("max_batch_size", rollout.max_batch_size),
            ("max_model_len", rollout.max_model_len),
        ):
            if configured_limit is not None and configured_limit < 1:
                raise ConfigError(f"rollout.{key} is {configured_limit}; at least 1 is needed")
        if not 0.0 < rollout.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"rollout.gpu_memory_utilization is {rollout.gpu_memory_utilization}; allowed: (0, 1]")
        check_quantized_dtype(cfg, device)
        return cls(
            model_path=str(model_path),
            device=str(device),
            dtype=engine_dtype(cfg, device),
            max_batch_size=rollout.max_batch_size,
            max_model_len=rollout.max_model_len,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            attn_implementation=model.attn_implementation,
            trust_remote_code=model.trust_remote_code,
            engine_kwargs={str(k): v for k, v in rollout.engine_kwargs.items()},
            sleep_mode=bool(select(cfg, "actor.offload_in_rollout")),
            keeps_cache=bool(select(cfg, "rollout.keep_cache_on_update")),
            expert_parallel=bool(select(cfg, "rollout.parallel.expert")),
            returns_experts=bool(select(cfg, "rollout.routing_replay")),
            adapters=(cfg.actor.lora.rank, cfg.actor.lora.alpha) if has_separate_adapters(cfg) else None,
            policies=policies_of(cfg).names,
            quantization=select(cfg, "rollout.quantization"),
            batch_invariant=bool(select(cfg, "rollout.batch_invariant")),
            exact=bool(select(cfg, "runner.deterministic")) and not splits_sums(cfg.actor.parallel),
        )

    @property
    def batch(self) -> int:
        """Number of concurrent sequences, `max_batch_size` or a default."""
        return _DEFAULT_BATCH_SIZE if self.max_batch_size is None else self.max_batch_size


def choices_of(cfg: LanguageConfig, engine: RolloutBackend) -> int:
    """Returns the number of experts that an engine returns per token (`RolloutBackend.choices`); 0 without routing replay.

    Raises:
        ConfigError: The engine does not return experts.
    """
    if not select(cfg, "rollout.routing_replay"):
        return 0
    if engine.choices is None:
        raise ConfigError(
            f"rollout.routing_replay: the engine {cfg.rollout.rollout_backend} does not say which experts it chose: take hf, "
            "or leave it false"
        )
    return engine.choices


def has_separate_adapters(cfg: LanguageConfig) -> bool:
    """Returns whether engines get LoRA adapters separately instead of merged into the weights."""
    return (select(cfg, "actor.lora.rank") or 0) > 0 and select(cfg, "rollout.merge_adapters") is False


def engine_dtype(cfg: LanguageConfig, device: str | torch.device) -> str:
    """Returns the dtype of an engine's weights on a device: `rollout.dtype`, or the model's dtype if it is `auto`.

    Raises:
        ConfigError: The dtype is unknown; the message names the key.
    """
    if cfg.rollout.dtype == "auto":
        from rlhpc.language.models.loading import compute_dtype

        return str(compute_dtype(cfg.actor.model, device)).removeprefix("torch.")
    if cfg.rollout.dtype not in _DTYPES:
        raise ConfigError(f"rollout.dtype is {cfg.rollout.dtype!r}; allowed: {', '.join(_DTYPES)}")
    return cfg.rollout.dtype


def check_quantized_dtype(cfg: LanguageConfig, device: str | torch.device) -> None:
    """Refuses `rollout.quantization` with weights in float32, which vLLM does not quantize.

    Raises:
        ConfigError: The engine's weights are in float32 on the device.
    """
    quantization = select(cfg, "rollout.quantization")
    if quantization is not None and engine_dtype(cfg, device) == "float32":
        raise ConfigError(
            f"rollout.quantization is {quantization!r}, which needs weights in bfloat16 or float16, and rollout.dtype is "
            f"{cfg.rollout.dtype!r}, which on {device} is float32: set rollout.dtype=bfloat16, or rollout.quantization=null"
        )


def engine_precision(cfg: LanguageConfig, device: str | torch.device) -> str:
    """Returns the coarsest dtype in which an engine computes: that of `rollout.quantization`, or of its weights."""
    return _QUANTIZED_DTYPES.get(select(cfg, "rollout.quantization")) or engine_dtype(cfg, device)


class WeightUpdateError(RlhpcError):
    """Invalid or incomplete weight update, after which the engine samples no tokens until a complete update."""


class EngineBase(RolloutBackend):
    """Base class of the engines hf and vllm, which checks requests and tracks unfinished requests.

    Completions of other requests that end during `generate` are returned by the next `step`. A subclass sets `context` and
    `vocabulary`, and implements `_queue`, `_advance`, `_abort` and `_drop`.
    """

    can_drop = True
    vocabulary: int
    """Size of the vocabulary; token ids are smaller."""

    def __init__(self) -> None:
        self._active_ids: set[int] = set()
        self._retained_completions: list[Completion] = []
        self._update_error: str = ""
        #: Number of tokens sampled so far, for traces.
        self.num_drawn = 0

    @abc.abstractmethod
    def _queue(self, requests: Sequence[Request]) -> None:
        """Queues checked requests."""

    @abc.abstractmethod
    def _advance(self) -> list[Completion]:
        """Advances the running requests; returns the completions of those that ended."""

    @abc.abstractmethod
    def _abort(self) -> list[Completion]:
        """Ends all requests; returns completions with their tokens so far."""

    @abc.abstractmethod
    def _drop(self, ids: Collection[int]) -> None:
        """Ends some running requests."""

    def _max_response_tokens(self, request: Request) -> int:
        """Returns the maximum number of tokens of the response."""
        return min(request.sampling.max_new_tokens, self.context - len(request.prompt_ids))

    def add(self, requests: Iterable[Request]) -> None:
        """Queues all of the requests, or none if one is invalid; see `RolloutBackend.add`.

        Raises:
            ValueError: Two unfinished requests have the same id.
        """
        new_requests = list(requests)
        ids = [request.id for request in new_requests]
        if len(set(ids)) < len(ids) or not self._active_ids.isdisjoint(ids):
            raise ValueError("two requests under way have the same id")
        for request in new_requests:
            self._check_request(request)
        self._queue(new_requests)
        self._active_ids.update(ids)

    def _check_request(self, request: Request) -> None:
        prompt, sampling = request.prompt_ids, request.sampling
        if not prompt:
            raise ConfigError(f"request {request.id} has an empty prompt")
        if len(prompt) >= self.context:
            raise ConfigError(
                f"request {request.id}: a prompt of {len(prompt)} tokens leaves no room in the context of {self.context} "
                "(rollout.max_model_len, at most the model's own); raise it or lower data.max_prompt_tokens"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.vocabulary:
            raise ConfigError(
                f"request {request.id} has token ids from {min(prompt)} to {max(prompt)}; the model's vocabulary is "
                f"{self.vocabulary}: is the tokenizer another model's?"
            )
        if not all(0 <= token < self.vocabulary for token in sampling.stop_token_ids):
            ids_text = format_names(sorted(sampling.stop_token_ids), limit=8)
            raise ConfigError(
                f"request {request.id} has stop_token_ids {ids_text}; the model's vocabulary is "
                f"{self.vocabulary}: take tokens of this model"
            )
        for key, option_value, is_valid, requirement in (
            ("max_new_tokens", sampling.max_new_tokens, sampling.max_new_tokens >= 1, "at least 1"),
            ("temperature", sampling.temperature, sampling.temperature >= 0.0, "at least 0"),
            ("top_p", sampling.top_p, 0.0 < sampling.top_p <= 1.0, "(0, 1]"),
            ("top_k", sampling.top_k, sampling.top_k == -1 or sampling.top_k >= 1, "-1, or at least 1"),
        ):
            if not is_valid:
                raise ConfigError(f"rollout.{key} is {option_value}; allowed: {requirement}")

    def step(self) -> list[Completion]:
        """Advances the running requests; see `RolloutBackend.step`.

        Raises:
            WeightUpdateError: The last weight update was not completed.
        """
        if self._update_error:
            raise WeightUpdateError(self._update_error)
        completions, self._retained_completions = self._retained_completions, []
        if len(self._active_ids) > len(completions):
            with span("engine step", "engine", batch=len(self._active_ids)) as engine_step:
                num_before = self.num_drawn
                completions += self._advance()
                engine_step.add(tokens=self.num_drawn - num_before)
        self._active_ids.difference_update(completion.id for completion in completions)
        return completions

    def unfinished(self) -> int:
        """Returns the number of unfinished requests; see `RolloutBackend.unfinished`."""
        return len(self._active_ids)

    def abort(self) -> list[Completion]:
        """Ends all requests; see `RolloutBackend.abort`."""
        completions, self._retained_completions = self._retained_completions, []
        self._active_ids.clear()
        return completions + self._abort()

    def drop(self, ids: Collection[int]) -> None:
        """Ends the given requests without completions; see `RolloutBackend.drop`."""
        running_ids = self._active_ids.intersection(ids)
        self._retained_completions = [
            completion for completion in self._retained_completions if completion.id not in running_ids
        ]
        if running_ids:
            self._drop(running_ids)
            self._active_ids -= running_ids

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completes requests; see `RolloutBackend.generate`. The next `step` returns other requests that end in the call."""
        self.add(requests)
        completions: dict[int, Completion | None] = {request.id: None for request in requests}
        num_missing, other_completions = len(completions), []
        while num_missing:
            for completion in self.step():
                if completion.id in completions:
                    completions[completion.id] = completion
                    num_missing -= 1
                else:
                    other_completions.append(completion)
        self._retained_completions += other_completions
        self._active_ids.update(completion.id for completion in other_completions)
        return [completion for completion in completions.values() if completion is not None]

    def _begin_update(self, version: int) -> None:
        self._update_error = (
            f"the update to version {version} of the rollout engine's weights did not arrive whole; "
            "send it again, or restart the rollout group"
        )

    def _end_update(self, version: int) -> None:
        self.version, self._update_error = version, ""


def checked_update(
    named_tensors: Iterable[tuple[str, T]],
    required_shapes: dict[str, tuple[int, ...]],
    optional: dict[str, tuple[int, ...]],
    *,
    complete: bool = True,
) -> Iterator[tuple[str, T]]:
    """Yields the tensors of a weight update after checking their names and shapes.

    Args:
        named_tensors: Hugging Face names and tensors.
        required_shapes: Shape of each required tensor.
        optional: Shape of each tensor that the update may omit: other names of tied weights, and buffers.
        complete: Whether all required tensors must be in the update.

    Raises:
        WeightUpdateError: A tensor is unknown, duplicate, missing or of a wrong shape; the message names it.
    """
    received_names: set[str] = set()
    for name, tensor in named_tensors:
        shape = required_shapes.get(name, optional.get(name))
        if shape is None:
            raise WeightUpdateError(f"a weight update brought {name!r}, which the rollout engine's model does not have")
        if tuple(tensor.shape) != shape:
            raise WeightUpdateError(
                f"a weight update brought {name!r} of shape {tuple(tensor.shape)}; the model's is {shape}"
            )
        if name in received_names:
            raise WeightUpdateError(f"a weight update brought {name!r} twice")
        received_names.add(name)
        yield name, tensor
    missing_names = sorted(required_shapes.keys() - received_names) if complete else []
    if missing_names:
        raise WeightUpdateError(f"a weight update left out {format_names(missing_names)}")
