"""What a generation engine does for a rollout rank."""

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
    """How tokens are drawn."""

    max_new_tokens: int = 256
    """Most tokens of a response; a prompt near the end of the context gets fewer."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Nucleus; 1 is off."""
    top_k: int = -1
    """Most likely tokens kept; -1 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the model's own; the one that ended it is the response's last."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, such as `</tool>`; its tokens keep the one that ended it."""
    policy: int = 0
    """Which of several policies draws (`agent.policies`)."""


@dataclass(frozen=True)
class Request:
    """One sequence to be made. What is drawn depends on model, prompt, sampling and `seed` alone, not on its neighbours."""

    id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int = 0
    seen: PromptImages | None = None
    """What the prompt shows, if it shows something."""


@dataclass
class Completion:
    """One finished sequence.

    Attributes:
        id: Of its request.
        token_ids: The response, its stop token included.
        logprobs: One per token: of the distribution it was drawn from (after temperature; before top-p and top-k).
        versions: One per token: the version of the weights that drew it.
        finish_reason: `stop`, `length`, or `abort`.
        experts: `[tokens, choices]` int16 (`SaysExperts`): what the model's routers chose for each token of the prompt and the
            response that it read, which is all but the last, when it read it last. None where nobody asked.
    """

    id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = "stop"
    experts: np.ndarray | None = None


class RolloutBackend(Protocol):
    """An engine in the rollout rank's process. Not thread-safe: one thread calls it.

    Requests are added at any time; each `step` advances those under way and gives back those that ended, in any order,
    so that whoever waits for one does not wait for the slowest. Between two steps the weights may change: what is under
    way goes on under the new ones (after a recomputation of its cache, unless `rollout.keep_cache_on_update`), and
    `Completion.versions` tells which token is whose.

    What only some engines say or can do is in `SaysForkable`, `AwaitsWeights`, `TakesParts`, `TakesShards`, `TellsWeights`,
    `ScoresTexts`, `SaysExperts`, `DropsRequests`, `BoundedEngine`, `HasContext` and `ReadsInChunks`.
    """

    @property
    def version(self) -> int:
        """Version of the weights that the next step uses."""

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests.

        Raises:
            ConfigError: A prompt leaves no room in the context; names the lengths.
        """

    def step(self) -> list[Completion]:
        """Advances by a token or more; returns what ended. Empty lists are normal."""

    def unfinished(self) -> int:
        """Number of requests that were added and have not been given back."""

    def abort(self) -> list[Completion]:
        """Ends all that is under way; gives back what each has so far, `finish_reason` "abort"."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Adds, steps until all are done, and gives them back in the order of `requests`."""

    def update_weights(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes in all of the model's tensors, by their Hugging Face names, in place; drops caches made with the old,
        or gives them to no new request.

        Either all of them are taken in, or the engine refuses to step on.
        """

    def offload(self) -> None:
        """Gives the accelerator's memory to another role: weights to the host or away, cache freed."""

    def reload(self) -> None:
        """Takes back what `offload` moved away. Weights are whatever the next `update_weights` brings."""

    def close(self) -> None:
        """Ends the engine."""


@runtime_checkable
class SaysForkable(Protocol):
    """A class of engines that says whether its ranks may be forked; those of one that does not say so are.

    Where it says no, because it starts processes or threads of its own, its ranks get a fresh interpreter.
    """

    forkable: bool


@runtime_checkable
class AwaitsWeights(Protocol):
    """A class of engines that can start without reading a model's weights, all of which the first update then brings."""

    awaiting: Mapping[str, Any]
    """The `rollout.engine_kwargs` that have it start so."""


@runtime_checkable
class TakesParts(Protocol):
    """An engine that may take in only what has changed."""

    updates_in_part: bool
    """Whether it takes parts."""

    def update_weights(
        self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor | Elements]], *, complete: bool
    ) -> None:
        """See `RolloutBackend.update_weights`. Where `complete` is false, what does not come stays as it is; a tensor may come
        as its changed `Elements` (`rlhpc.weights.delta.put`)."""


@runtime_checkable
class TakesShards(Protocol):
    """An engine rank that says which parts of which tensors it wants, and takes no more than these."""

    def wants(self) -> Mapping[str, Sequence[Box]]:
        """The boxes of each tensor, by the names of the model's files. Tensors that it wants nothing of are missing."""

    def update_shards(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """`RolloutBackend.update_weights` with all tensors that `wants` names, by these names, of full shape; what it does not
        want of them may be anything."""


@runtime_checkable
class TellsWeights(Protocol):
    """An engine that shows what it works with."""

    def held(self, name: str) -> torch.Tensor | None:
        """The tensor of that name as it is after the last update; None if it is kept in another form or dtype than it
        came in."""


@runtime_checkable
class ScoresTexts(Protocol):
    """An engine that says how likely it finds a text."""

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of a text's tokens but the first, at temperature 1, by the present weights. What is under way goes on.

        Args:
            token_ids: The text, shorter than the engine's context: vLLM wants room for a token that it would draw next.
        """


@runtime_checkable
class SaysExperts(Protocol):
    """An engine that says which experts of a mixture have seen a token (`rollout.routing_replay`)."""

    choices: int
    """How many a token: those of all routers, one after the other. 0 if it was not asked."""


@runtime_checkable
class DropsRequests(Protocol):
    """An engine that ends some requests and goes on with others, and shows what there is of those under way."""

    def drop(self, ids: Collection[int]) -> None:
        """Ends requests, those that are still under way; nothing of them is given back."""

    def so_far(self, ids: Collection[int]) -> Mapping[int, list[int]]:
        """The tokens drawn so far for requests under way; those of which there is nothing yet may be missing."""


@runtime_checkable
class BoundedEngine(Protocol):
    """An engine that says how many sequences it makes at a time; what is added beyond waits in it, and for it."""

    capacity: int


@runtime_checkable
class HasContext(Protocol):
    """An engine that says how long a sequence may be."""

    context: int
    """Most tokens of a prompt and its response."""


@runtime_checkable
class ReadsInChunks(Protocol):
    """An engine that reads a long prompt in several passes."""

    chunk: int
    """Most tokens of a pass."""


def taking_parts(engine: RolloutBackend) -> TakesParts | None:
    """The engine, if it can take in only what has changed; otherwise None."""
    return engine if isinstance(engine, TakesParts) and engine.updates_in_part else None


#: What makes an engine: called with the configuration and `model_path`, `device` and `seed` by name; for one of several ranks
#: (`rollout.parallel`) with a `lockstep.Link`, too, as `link`.
EngineFactory = Callable[..., RolloutBackend]


def beyond_context(key: str, limit: int, context: int) -> str:
    """Returns the message about a `max_model_len` that the model's context does not reach."""
    return f"{key} is {limit}; the model's context is {context} (at most that)"
