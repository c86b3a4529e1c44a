"""Interface of generation engines on a rollout rank."""

from __future__ import annotations

import abc
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rlhpc.runtime.former_names import former_members

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rlhpc.checkpoint.tensor_slice import Box
    from rlhpc.language.data.images import PromptImages


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request."""

    max_new_tokens: int = 256
    """Most tokens of a response; a prompt near the end of the context gets fewer."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Nucleus; 1 is off."""
    top_k: int = -1
    """Most likely tokens kept; -1 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the model's end tokens; the response includes the one that ended it."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, such as `</tool>`; its tokens include the one that ended it."""
    policy: int = 0
    """Index of the policy that samples, if there are several (`agent.policies`)."""


@former_members(seen="images")
@dataclass(frozen=True)
class Request:
    """Request for one sequence. Its tokens depend only on model, prompt, sampling and `seed`, not on other requests."""

    id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int = 0
    images: PromptImages | None = None
    """Images of the prompt, if it has any."""


@dataclass
class Completion:
    """One finished sequence.

    Attributes:
        id: Id of the request.
        token_ids: Tokens of the response, with its stop token.
        logprobs: One per token: of the distribution from which it was sampled (after temperature; before top-p and top-k).
        versions: One per token: the version of the weights that sampled it.
        finish_reason: `stop`, `length`, or `abort`.
        experts: `[tokens, choices]` int16: the routers' choices for each token of prompt and response, from the last time
            that the model read it; the last token is never read. None if not requested.
    """

    id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = "stop"
    experts: np.ndarray | None = None


class RolloutBackend(abc.ABC):
    """Base class of the engines in the process of a rollout rank. Not thread-safe: one thread calls it.

    Requests are added at any time. Each `step` advances the running requests and returns those that ended, in any order, so
    that the caller does not wait for the slowest. The weights may change between two steps: running requests continue with
    the new ones (after a recomputation of their cache, unless `rollout.keep_cache_on_update`), and `Completion.versions`
    records which version sampled each token.

    An engine implements the abstract methods. The attributes tell what it can do besides; their defaults are those of an
    engine that can do nothing more.
    """

    version: int = 0
    """Version of the weights that the next step uses."""
    capacity: int = sys.maxsize
    """Number of sequences that it samples at a time; further requests wait in its queue."""
    context: int = 0
    """Most tokens of a prompt and its response; 0 if it does not tell."""
    chunk: int = 0
    """Most tokens of a pass over a long prompt; 0 if it reads a prompt in one pass."""
    choices: int | None = None
    """Experts of a token (`Completion.experts`): those of all routers, one after the other. 0 if not requested
    (`rollout.routing_replay`); None if it cannot return them."""
    can_drop: bool = False
    """Whether it can end some requests and return the tokens of running ones (`drop`, `so_far`)."""
    can_score: bool = False
    """Whether it computes the log-probs of a text (`score`)."""
    takes_partial_updates: bool = False
    """Whether `update_weights` takes `complete`, and then updates of changed tensors alone."""
    takes_shards: bool = False
    """Whether it loads only the parts of tensors that it needs (`wants`, `update_shards`)."""
    forkable: ClassVar[bool] = True
    """Whether its ranks may be forked. If not, because it starts processes or threads, they get a fresh interpreter."""
    awaiting: ClassVar[Mapping[str, Any] | None] = None
    """The `rollout.engine_kwargs` for a start without reading a model's weights; the first update then brings all of them.
    None if it always reads them."""

    @abc.abstractmethod
    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests.

        Raises:
            ConfigError: A prompt fills the context; the message has the lengths.
        """

    @abc.abstractmethod
    def step(self) -> list[Completion]:
        """Advances the running requests by one or more tokens; returns those that ended, often none."""

    @abc.abstractmethod
    def unfinished(self) -> int:
        """Returns the number of requests that were added and not yet returned."""

    @abc.abstractmethod
    def abort(self) -> list[Completion]:
        """Ends all running requests; returns the tokens of each so far, with `finish_reason` "abort"."""

    @abc.abstractmethod
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Adds requests, steps until all are done, and returns them in the order of `requests`."""

    @abc.abstractmethod
    def update_weights(self, version: int, named_tensors: Iterable[tuple[str, Any]], *, complete: bool = True) -> None:
        """Loads all of the model's tensors, by their Hugging Face names, in place.

        Caches computed with the old weights are dropped, or not used for new requests. If the update is incomplete, the engine
        refuses further steps.

        Args:
            version: Version of the weights.
            named_tensors: Name and tensor, in any order; with `takes_partial_updates` a tensor may come as its changed
                `Elements` (`rlhpc.weights.delta.put`).
            complete: Passed only with `takes_partial_updates`: if false, tensors that do not come stay unchanged.
        """

    @abc.abstractmethod
    def offload(self) -> None:
        """Gives the accelerator's memory to another role: moves the weights to the host or drops them, and frees the cache."""

    @abc.abstractmethod
    def reload(self) -> None:
        """Reverses `offload`. The weights are undefined until the next `update_weights`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the engine."""

    def drop(self, ids: Collection[int]) -> None:
        """Ends the requests that are still running, without returning them (`can_drop`)."""
        raise NotImplementedError(f"{type(self).__name__} cannot end single requests")

    def so_far(self, ids: Collection[int]) -> Mapping[int, list[int]]:
        """Returns the tokens sampled so far by running requests; requests without tokens may be missing (`can_drop`)."""
        return {}

    def score(self, token_ids: Sequence[int], policy: int = 0) -> list[float]:
        """Returns log-probs of a text's tokens but the first, at temperature 1, with the current weights (`can_score`).

        Running requests are not affected.

        Args:
            token_ids: The text, shorter than the engine's context: vLLM needs space for one token that it would sample next.
            policy: Index of the policy, if there are several (`agent.policies`).
        """
        raise NotImplementedError(f"{type(self).__name__} cannot score texts")

    def wants(self) -> Mapping[str, Sequence[Box]] | None:
        """Returns the slices that the rank needs of each tensor, by file names; tensors without any are missing.

        None without `takes_shards`: it needs all of them.
        """
        return None

    def update_shards(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads weights like `update_weights`, by the names in `wants`, all of them, in tensors of full shape
        (`takes_shards`).

        Elements outside the slices of `wants` may have any value.
        """
        raise NotImplementedError(f"{type(self).__name__} takes complete tensors")

    def held(self, name: str) -> torch.Tensor | None:
        """Returns the tensor of that name after the last update; None if it is stored in another form or dtype than it came
        in, or if the engine does not return its weights.
        """
        return None


def with_base_class(engine: type) -> type[RolloutBackend]:
    """Returns an engine class as a subclass of `RolloutBackend`, if it only has the methods of one."""
    warnings.warn(
        f"{engine.__module__}.{engine.__qualname__} does not derive from rlhpc.language.engines.RolloutBackend; two releases "
        "from now it must",
        FutureWarning,
        stacklevel=3,
    )
    attributes = {
        "can_drop": hasattr(engine, "drop") and hasattr(engine, "so_far"),
        "can_score": hasattr(engine, "score"),
        "takes_partial_updates": bool(getattr(engine, "updates_in_part", False)),
        "takes_shards": hasattr(engine, "wants") and hasattr(engine, "update_shards"),
    }
    missing = {name: _refused(name) for name in RolloutBackend.__abstractmethods__ if not hasattr(engine, name)}
    return type(engine.__name__, (engine, RolloutBackend), {"__module__": engine.__module__, **missing, **attributes})


def _refused(name: str) -> Callable[..., Any]:
    """Returns a method for an engine that lacks one; a judge's engine, for example, only needs `generate` and `close`."""

    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no method {name}")

    return refuse


#: Factory of an engine: called with the configuration and `model_path`, `device` and `seed` by name; for an engine of several
#: ranks (`rollout.parallel`) also with a `multi_rank.EngineLink`, as `link`.
EngineFactory = Callable[..., RolloutBackend]


def beyond_context(key: str, limit: int, context: int) -> str:
    """Returns the message about a `max_model_len` beyond the model's context."""
    return f"{key} is {limit}; the model's context is {context} (at most that)"
