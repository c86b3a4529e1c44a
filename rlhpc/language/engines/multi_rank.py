"""Engine group: several ranks that form one engine; the leader broadcasts commands, and the followers repeat them.

Each rank's engine holds a part of the model, and all ranks compute the same step at the same time, because their kernels wait
for each other. Therefore all ranks must get the same requests in the same order and make the same steps. The leader broadcasts
each command before running it. Weights, requests and seeds determine the sampled tokens, so the leader sends only a checksum
of them, which the other ranks compare with their own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlhpc.language.engines.base import Completion, Request, RolloutBackend
from rlhpc.runtime.errors import RlhpcError

if TYPE_CHECKING:
    import torch

#: Names of the leader's commands, the first elements of command tuples; all but the last two are engine methods.
_ADD, _STEP, _GENERATE, _SCORE, _ABORT, _DROP, _OFFLOAD, _RELOAD_WEIGHTS, _RELOAD, _WEIGHTS, _END = (
    "add", "step", "generate", "score", "abort", "drop", "offload", "reload_weights", "reload", "weights", "end",
)  # fmt: skip
#: Commands, and the checksum of the sequences that the leader has finished.
Commands = tuple[list[tuple[Any, ...]], int]


class EngineLink(Protocol):
    """Connection between the ranks of an engine group."""

    @property
    def rank(self) -> int:
        """Index of this rank in the group; rank 0 is the leader."""

    @property
    def device_index(self) -> int:
        """Index of this rank's accelerator among the visible accelerators of the process."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    @property
    def ident(self) -> str:
        """Unique name of the engine, common to its ranks on this host."""

    def form(self) -> None:
        """Initializes torch's default process group with the engine's ranks."""

    def broadcast(self, commands: Commands) -> None:
        """Broadcasts commands; only rank 0 calls it."""

    def receive(self) -> Commands:
        """Waits for the commands of rank 0; called by the other ranks."""

    def handle_failure(self, error: BaseException) -> None:
        """Returns if all ranks of the engine still run after a failed computation; otherwise waits for termination."""


class EngineDivergenceError(RlhpcError):
    """Divergence of an engine's ranks, which sampled different tokens; none of them may continue."""


class _Checksum:
    """Running checksum of the finished sequences, in order."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            tokens = np.asarray((completion.id, *completion.token_ids), np.int64).tobytes()
            self.value = zlib.crc32(completion.finish_reason.encode(), zlib.crc32(tokens, self.value))


class Leader(RolloutBackend):
    """Engine of the leader, which makes the other ranks of the group repeat each call.

    Commands that need no immediate computation (added and aborted requests) are sent with the next step.

    Args:
        engine: This rank's engine.
        link: Connection to the other ranks.
    """

    def __init__(self, engine: RolloutBackend, link: EngineLink) -> None:
        self._engine = engine
        self._link = link
        self._checksum = _Checksum()
        self._queued_commands: list[tuple[Any, ...]] = []
        self.capacity = engine.capacity
        self.context = engine.context
        self.chunk = engine.chunk
        self.choices = engine.choices
        self.can_drop = engine.can_drop
        self.can_score = engine.can_score

    @property
    def version(self) -> int:  # type: ignore[override]
        """Version of the weights that the next step uses."""
        return self._engine.version

    @property
    def can_compute(self) -> bool:  # type: ignore[override]
        """True if the engine of this rank can compute; see `RolloutBackend.can_compute`."""
        return self._engine.can_compute

    def add(self, requests: Iterable[Request]) -> None:
        """Adds requests; see `RolloutBackend.add`."""
        new_requests = list(requests)
        self._engine.add(new_requests)
        self._queued_commands.append((_ADD, new_requests))

    def step(self) -> list[Completion]:
        """Advances all ranks; see `RolloutBackend.step`."""
        return self._run_jointly((_STEP,), self._engine.step)

    def unfinished(self) -> int:
        """Returns the number of unfinished requests; see `RolloutBackend.unfinished`."""
        return self._engine.unfinished()

    def abort(self) -> list[Completion]:
        """Ends all running requests; see `RolloutBackend.abort`."""
        completions = self._engine.abort()
        self._checksum.update(completions)
        self._queued_commands.append((_ABORT,))
        return completions

    def drop(self, ids: Collection[int]) -> None:
        """Ends some requests; see `RolloutBackend.drop`."""
        self._engine.drop(ids)
        self._queued_commands.append((_DROP, list(ids)))

    def sampled_tokens(self, ids: Collection[int]) -> Mapping[int, list[int]]:
        """Returns the tokens of running requests; see `RolloutBackend.sampled_tokens`."""
        return self._engine.sampled_tokens(ids)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completes requests; see `RolloutBackend.generate`."""
        return self._run_jointly((_GENERATE, list(requests)), lambda: self._engine.generate(requests))

    def score(self, token_ids: Sequence[int], policy: int = 0) -> list[float]:
        """Returns the log-probs of a text; see `RolloutBackend.score`."""
        self._broadcast((_SCORE, list(token_ids), policy))
        with _handle_joint_failure(self._link):
            return self._engine.score(token_ids, policy)

    def parameter_digests(self) -> dict[str, int]:
        """Returns the digests of this rank's parameters; see `RolloutBackend.parameter_digests`."""
        return self._engine.parameter_digests()

    def update_weights(
        self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]], *, complete: bool = True
    ) -> None:
        """Loads this rank's weights while the other ranks load theirs; see `RolloutBackend.update_weights`."""
        self.begin_weights()
        assert complete, "engines of several ranks take complete updates"
        self._engine.update_weights(version, named_tensors)

    def begin_weights(self) -> None:
        """Makes the other ranks start to load their weights."""
        self._broadcast((_WEIGHTS,))

    def offload(self) -> None:
        """Frees the accelerator memory of all ranks; see `RolloutBackend.offload`."""
        self._broadcast((_OFFLOAD,))
        self._engine.offload()

    def reload_weights(self) -> None:
        """Reloads the weights of all ranks; see `RolloutBackend.reload_weights`."""
        self._broadcast((_RELOAD_WEIGHTS,))
        self._engine.reload_weights()

    def reload(self) -> None:
        """Reverses `offload` on all ranks; see `RolloutBackend.reload`."""
        self._broadcast((_RELOAD,))
        self._engine.reload()

    def end(self) -> None:
        """Makes the other ranks return from `FollowerEngine.follow`."""
        self._broadcast((_END,))

    def close(self) -> None:
        """Shuts down this rank's engine; the other ranks shut down their own."""
        self._engine.close()

    def _run_jointly(
        self, command: tuple[Any, ...], compute_completions: Callable[[], list[Completion]]
    ) -> list[Completion]:
        self._broadcast(command)
        with _handle_joint_failure(self._link):
            completions = compute_completions()
        self._checksum.update(completions)
        return completions

    def _broadcast(self, command: tuple[Any, ...]) -> None:
        commands, self._queued_commands = [*self._queued_commands, command], []
        with _handle_joint_failure(self._link):
            self._link.broadcast((commands, self._checksum.value))


class FollowerEngine:
    """Engine of a follower, which repeats the leader's commands.

    Args:
        engine: This rank's engine.
        link: Connection to the leader.
        load_weights: Function that receives and loads the next weights.
        check_weights: Function that checks the last weights after a reload.
    """

    def __init__(
        self,
        engine: RolloutBackend,
        link: EngineLink,
        load_weights: Callable[[], object],
        check_weights: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._link = link
        self._load_weights = load_weights
        self._check_weights = check_weights
        self._checksum = _Checksum()

    def follow(self) -> None:
        """Repeats the leader's commands until its `end`.

        Raises:
            EngineDivergenceError: This rank sampled other tokens than the leader.
        """
        with _handle_joint_failure(self._link):
            while True:
                commands, checksum = self._link.receive()
                for command, *arguments in commands:
                    # The leader's checksum includes aborts of this message, which this rank has repeated by now.
                    if command in (_STEP, _GENERATE, _END) and checksum != self._checksum.value:
                        raise EngineDivergenceError(
                            f"rank {self._link.rank} of {self._link.ident} has drawn other tokens than rank 0 with the same "
                            "requests and weights: nobody goes on with either; restart the rollout group, and report "
                            "model and version of vLLM"
                        )
                    if command == _END:
                        return
                    self._repeat(command, arguments)

    def _repeat(self, command: str, arguments: list[Any]) -> None:
        if command == _WEIGHTS:
            self._load_weights()
            return
        output = getattr(self._engine, command)(*arguments)
        if command == _RELOAD:
            self._check_weights()
        if command in (_STEP, _GENERATE, _ABORT):
            self._checksum.update(output)


@contextmanager
def _handle_joint_failure(link: EngineLink) -> Iterator[None]:
    """Passes errors within the block to `link.handle_failure`, because another rank's end may be their cause."""
    try:
        yield
    except (RuntimeError, RlhpcError) as error:
        if not isinstance(error, EngineDivergenceError):
            link.handle_failure(error)
        raise
