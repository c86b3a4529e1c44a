"""Interface of generation engines: requests, completions and the engines' base class."""

from __future__ import annotations

import abc
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.former_names import former_members

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rlhpc.checkpoint.tensor_slice import TensorSlice
    from rlhpc.language.data.images import PromptImages


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request."""

    max_new_tokens: int = 256
    """Maximum number of tokens of a response; the context length may limit it further."""
    temperature: float = 1.0
    """Divisor of the logits; 0 selects the most likely token."""
    top_p: float = 1.0
    """Probability mass of nucleus sampling; 1 turns it off."""
    top_k: int = -1
    """Number of most likely tokens to sample from; -1 for all."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response in addition to the model's end tokens; the response includes the final token."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, such as `</tool>`; the response includes the token that completes the text."""
    policy: int = 0
    """Index of the policy that samples, in runs with several policies (`agent.policies`)."""


@former_members(seen="images")
@dataclass(frozen=True)
class Request:
    """Request for one response, which depends only on model, prompt, sampling and `seed`, not on other requests."""

    id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int = 0
    images: PromptImages | None = None
    """Images of the prompt; None if it has no images."""


@dataclass
class Completion:
    """Finished response to a request.

    Attributes:
        id: Id of the request.
        token_ids: Tokens of the response, including its stop token.
        logprobs: Log-prob of each token, after temperature and before top-p and top-k.
        versions: Version of the weights that sampled each token.
        finish_reason: `stop`, `length`, or `abort`.
        experts: `[tokens, choices]` int16, the routers' latest choices for each token of prompt and response except the last
            one, which the model never reads. None if not requested.
    """

    id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = "stop"
    experts: np.ndarray | None = None


class RolloutBackend(abc.ABC):
    """Base class of generation engines, which run in the process of a rollout rank. Engines are not thread-safe.

    Requests can be added at any time. Each `step` advances the running requests and returns those that ended, in any order, so
    that the caller does not wait for the slowest. The weights may change between two steps: running requests continue with
    the new weights (after their cache is recomputed, unless `rollout.keep_cache_on_update`), and `Completion.versions`
    records which version sampled each token.

    An engine implements the abstract methods. The attributes declare optional features, which are off by default.
    """

    version: int = 0
    """Version of the weights that the next step uses."""
    capacity: int = sys.maxsize
    """Maximum number of sequences sampled at the same time; further requests wait in the engine's queue."""
    context: int = 0
    """Maximum number of tokens of a prompt and its response; 0 if unknown."""
    chunk: int = 0
    """Maximum number of tokens in one pass of a chunked prefill; 0 if the engine reads a prompt in one pass."""
    choices: int | None = None
    """Number of experts per token in `Completion.experts`, over all routers. 0 if not requested
    (`rollout.routing_replay`); None if the engine cannot return them."""
    can_drop: bool = False
    """Whether the engine can end single requests and return the tokens of running ones (`drop`, `sampled_tokens`)."""
    can_score: bool = False
    """Whether the engine can compute the log-probs of a text (`score`)."""
    can_compute: bool = True
    """False between `reload_weights` and `reload` if the engine then has no memory for its cache."""
    takes_partial_updates: bool = False
    """Whether `update_weights` accepts `complete=False` and changed `Elements` of tensors."""
    takes_shards: bool = False
    """Whether the engine can load only the slices of tensors that it needs (`wants`, `update_shards`)."""
    forkable: ClassVar[bool] = True
    """Whether the engine's ranks may be forked. Engines that start processes or threads need a new interpreter instead."""
    preload: ClassVar[Sequence[str]] = ()
    """What a node imports once for the engine's ranks (`Worker.preloads`)."""
    awaiting: ClassVar[Mapping[str, Any] | None] = None
    """The `rollout.engine_kwargs` with which the engine starts without reading weights, before a first complete update.
    None if it always reads them."""

    @abc.abstractmethod
    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests.

        Raises:
            ConfigError: A prompt leaves no space in the context for a response; the message states the lengths.
        """

    @abc.abstractmethod
    def step(self) -> list[Completion]:
        """Advances the running requests by one or more tokens; returns the completions of those that ended."""

    @abc.abstractmethod
    def unfinished(self) -> int:
        """Returns the number of requests that were added and whose completions were not yet returned."""

    @abc.abstractmethod
    def abort(self) -> list[Completion]:
        """Ends all running requests; returns their tokens so far, with `finish_reason` "abort"."""

    @abc.abstractmethod
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Adds requests, steps until all are done, and returns them in the order of `requests`."""

    @abc.abstractmethod
    def update_weights(self, version: int, named_tensors: Iterable[tuple[str, Any]], *, complete: bool = True) -> None:
        """Loads all tensors of the model in place.

        The engine drops caches computed with the old weights, or does not use them for new requests. After an interrupted
        update, further steps fail.

        Args:
            version: Version of the weights.
            named_tensors: Hugging Face names and tensors, in any order; with `takes_partial_updates`, a tensor may be given as
                its changed `Elements` (`rlhpc.weights.delta.copy_update`).
            complete: Whether the update has all tensors; if false, missing tensors stay unchanged. Passed only with
                `takes_partial_updates`.
        """

    @abc.abstractmethod
    def offload(self) -> None:
        """Frees the accelerator's memory: moves the weights to the host or drops them, and frees the cache."""

    @abc.abstractmethod
    def reload(self) -> None:
        """Reverses `offload`. The weights are undefined until the next `update_weights`."""

    def reload_weights(self) -> None:
        """Takes the first part of `reload`: memory for the weights, so that they can be updated while another role still has
        memory on the accelerator. An engine that cannot compute before `reload` says so by `can_compute`.
        """
        self.reload()

    @abc.abstractmethod
    def close(self) -> None:
        """Shuts the engine down."""

    def drop(self, ids: Collection[int]) -> None:
        """Ends the given requests that still run, and returns no completions of them (`can_drop`)."""
        raise NotImplementedError(f"{type(self).__name__} cannot end single requests")

    def sampled_tokens(self, ids: Collection[int]) -> Mapping[int, list[int]]:
        """Returns the tokens sampled so far by running requests; requests without tokens may be missing (`can_drop`)."""
        return {}

    def score(self, token_ids: Sequence[int], policy: int = 0) -> list[float]:
        """Computes the log-probs of a text's tokens except the first, with the current weights (`can_score`).

        The temperature is 1. Running requests are not affected.

        Args:
            token_ids: Tokens of the text; fewer than the engine's context, because vLLM needs space for one sampled token.
            policy: Index of the policy, in runs with several policies (`agent.policies`).
        """
        raise NotImplementedError(f"{type(self).__name__} cannot score texts")

    def wants(self) -> Mapping[str, Sequence[TensorSlice]] | None:
        """Returns the slices of each tensor that this rank needs, by the tensors' names in the model's files.

        Tensors that this rank does not need are omitted. Returns None without `takes_shards`, because the engine then needs
        complete tensors.
        """
        return None

    def update_shards(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads all tensors named by `wants`, like `update_weights` (`takes_shards`).

        The tensors have their full shapes; elements outside the slices of `wants` may have any value.
        """
        raise NotImplementedError(f"{type(self).__name__} takes complete tensors")

    def parameter_digests(self) -> dict[str, int]:
        """Returns a digest of each of the engine's parameters, by the engine's names.

        Returns an empty dict if the engine does not give its parameters.
        """
        return {}

    def observed_layers(self, on_output: Callable[[int, torch.Tensor], None]) -> AbstractContextManager[None]:
        """Observes the hidden states after each decoder layer for the duration of the block, for comparisons by layer.

        Args:
            on_output: Called in each pass with the index of a layer and its hidden states `[tokens, hidden size]`, in the
                order of the tokens; padding may follow.

        Raises:
            ConfigError: The engine does not give its layers.
        """
        raise ConfigError(
            f"{type(self).__name__} does not give the hidden states of its layers; take the engine hf or vllm"
        )

    def held(self, name: str) -> torch.Tensor | None:
        """Returns the current tensor called `name`.

        Returns None if the engine stores it in a different form or dtype than received, or does not return weights.
        """
        return None


def with_base_class(engine: type) -> type[RolloutBackend]:
    """Wraps an engine class that does not derive from `RolloutBackend` in a subclass that does; issues a FutureWarning."""
    warnings.warn(
        f"{engine.__module__}.{engine.__qualname__} does not derive from rlhpc.language.engines.RolloutBackend; two releases "
        "from now it must",
        FutureWarning,
        stacklevel=3,
    )
    attributes: dict[str, Any] = {
        "can_drop": hasattr(engine, "drop") and hasattr(engine, "so_far"),
        "can_score": hasattr(engine, "score"),
        "takes_partial_updates": bool(getattr(engine, "updates_in_part", False)),
        "takes_shards": hasattr(engine, "wants") and hasattr(engine, "update_shards"),
    }
    missing_methods = {
        name: _make_unsupported_method(name) for name in RolloutBackend.__abstractmethods__ if not hasattr(engine, name)
    }
    if attributes["can_drop"]:
        attributes["sampled_tokens"] = engine.so_far  # type: ignore[attr-defined]
    return type(
        engine.__name__, (engine, RolloutBackend), {"__module__": engine.__module__, **missing_methods, **attributes}
    )


def _make_unsupported_method(name: str) -> Callable[..., Any]:
    """Returns a method that raises NotImplementedError, for engines that lack it, such as the engine of an LLM judge."""

    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no method {name}")

    return refuse


#: Factory of an engine: called with the configuration, and `model_path`, `device` and `seed` by name; for an engine of several
#: ranks (`rollout.parallel`) also with `link`, a `multi_rank.EngineLink`.
EngineFactory = Callable[..., RolloutBackend]


def context_error(key: str, configured_limit: int, context: int) -> str:
    """Returns the error message for a `max_model_len` that exceeds the model's context."""
    return f"{key} is {configured_limit}; the model's context is {context} (at most that)"
