"""Interface of generation engines on a rollout rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rlhpc.checkpoint.tensor_slice import Box
    from rlhpc.language.data.images import PromptImages
    from rlhpc.weights.delta import Elements


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


@dataclass(frozen=True)
class Request:
    """Request for one sequence. Its tokens depend only on model, prompt, sampling and `seed`, not on other requests."""

    id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int = 0
    seen: PromptImages | None = None
    """Images of the prompt, if it has any."""


@dataclass
class Completion:
    """One finished sequence.

    Attributes:
        id: Of its request.
        token_ids: The response, its stop token included.
        logprobs: One per token: of the distribution from which it was sampled (after temperature; before top-p and top-k).
        versions: One per token: the version of the weights that sampled it.
        finish_reason: `stop`, `length`, or `abort`.
        experts: `[tokens, choices]` int16 (`SaysExperts`): the routers' choices for each token of prompt and response, from
            the last time that the model read it; the last token is never read. None if not requested.
    """

    id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = "stop"
    experts: np.ndarray | None = None


class RolloutBackend(Protocol):
    """Engine in the process of a rollout rank. Not thread-safe: one thread calls it.

    Requests are added at any time. Each `step` advances the running requests and returns those that ended, in any order, so
    that the caller does not wait for the slowest. The weights may change between two steps: running requests continue with
    the new ones (after a recomputation of their cache, unless `rollout.keep_cache_on_update`), and `Completion.versions`
    records which version sampled each token.

    Optional features are in `SaysForkable`, `AwaitsWeights`, `TakesParts`, `TakesShards`, `TellsWeights`, `ScoresTexts`,
    `SaysExperts`, `DropsRequests`, `BoundedEngine`, `HasContext` and `ReadsInChunks`.
    """

    @property
    def version(self) -> int:
        """Version of the weights that the next step uses."""

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests.

        Raises:
            ConfigError: A prompt fills the context; the message has the lengths.
        """

    def step(self) -> list[Completion]:
        """Advances by a token or more; returns the requests that ended. Empty lists are normal."""

    def unfinished(self) -> int:
        """Returns the number of requests that were added and not yet returned."""

    def abort(self) -> list[Completion]:
        """Ends all running requests; returns the tokens of each so far, with `finish_reason` "abort"."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Adds requests, steps until all are done, and returns them in the order of `requests`."""

    def update_weights(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads all of the model's tensors, by their Hugging Face names, in place.

        Caches computed with the old weights are dropped, or not used for new requests. If the update is incomplete, the engine
        refuses further steps.
        """

    def offload(self) -> None:
        """Gives the accelerator's memory to another role: moves the weights to the host or drops them, and frees the cache."""

    def reload(self) -> None:
        """Reverses `offload`. The weights are undefined until the next `update_weights`."""

    def close(self) -> None:
        """Ends the engine."""


@runtime_checkable
class SaysForkable(Protocol):
    """Class of engines that declares whether its ranks may be forked; those of other classes may.

    If not, because it starts processes or threads, its ranks get a fresh interpreter.
    """

    forkable: bool


@runtime_checkable
class AwaitsWeights(Protocol):
    """Class of engines that can start without reading a model's weights; the first update then brings all of them."""

    awaiting: Mapping[str, Any]
    """The `rollout.engine_kwargs` for such a start."""


@runtime_checkable
class TakesParts(Protocol):
    """Engine that may accept updates of changed tensors alone."""

    updates_in_part: bool
    """Whether it accepts partial updates."""

    def update_weights(
        self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor | Elements]], *, complete: bool
    ) -> None:
        """Loads weights; see `RolloutBackend.update_weights`.

        If `complete` is false, tensors that do not come stay unchanged; a tensor may come as its changed `Elements`
        (`rlhpc.weights.delta.put`).
        """


@runtime_checkable
class TakesShards(Protocol):
    """Engine rank that declares which parts of which tensors it needs, and loads no others."""

    def wants(self) -> Mapping[str, Sequence[Box]]:
        """Returns the boxes that the rank needs of each tensor, by file names; other tensors are missing."""

    def update_shards(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads weights like `RolloutBackend.update_weights`, by the names in `wants`, all of them, in tensors of full shape.

        Elements outside the boxes of `wants` may have any value.
        """


@runtime_checkable
class TellsWeights(Protocol):
    """Engine that returns its current weights."""

    def held(self, name: str) -> torch.Tensor | None:
        """Returns the tensor of that name after the last update; None if it is stored in another form or dtype than it came
        in.
        """


@runtime_checkable
class ScoresTexts(Protocol):
    """Engine that computes the log-probs of a text."""

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Returns log-probs of a text's tokens but the first, at temperature 1, with the current weights.

        Running requests are not affected.

        Args:
            token_ids: The text, shorter than the engine's context: vLLM needs space for one token that it would sample next.
        """


@runtime_checkable
class SaysExperts(Protocol):
    """Engine that returns the experts of each token (`rollout.routing_replay`)."""

    choices: int
    """Experts of a token: those of all routers, one after the other. 0 if not requested."""


@runtime_checkable
class DropsRequests(Protocol):
    """Engine that can end some requests, and return the tokens of running ones."""

    def drop(self, ids: Collection[int]) -> None:
        """Ends those of the requests that still run; they are not returned."""

    def so_far(self, ids: Collection[int]) -> Mapping[int, list[int]]:
        """Returns the tokens sampled so far by running requests; requests without tokens may be missing."""


@runtime_checkable
class BoundedEngine(Protocol):
    """Engine that declares how many sequences it samples at a time; further requests wait in its queue."""

    capacity: int


@runtime_checkable
class HasContext(Protocol):
    """Engine that declares the longest sequence."""

    context: int
    """Most tokens of a prompt and its response."""


@runtime_checkable
class ReadsInChunks(Protocol):
    """Engine that reads a long prompt in several passes."""

    chunk: int
    """Most tokens of a pass."""


def taking_parts(engine: RolloutBackend) -> TakesParts | None:
    """Returns the engine, if it accepts partial updates; otherwise None."""
    return engine if isinstance(engine, TakesParts) and engine.updates_in_part else None


#: Factory of an engine: called with the configuration and `model_path`, `device` and `seed` by name; for an engine of several
#: ranks (`rollout.parallel`) also with a `multi_rank.EngineLink`, as `link`.
EngineFactory = Callable[..., RolloutBackend]


def beyond_context(key: str, limit: int, context: int) -> str:
    """Returns the message about a `max_model_len` beyond the model's context."""
    return f"{key} is {limit}; the model's context is {context} (at most that)"
