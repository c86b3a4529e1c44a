"""Engine group: the ranks that form one engine; the leader decides, and the others repeat its commands.

Each rank has an engine of the same model, holds a part of it, and computes the same step at the same time: their kernels wait
for each other within a step. So all of them must get the same requests in the same order, and take the same steps. The leader
broadcasts each command before it runs it. The sampled tokens follow from the weights, the requests and their seeds, so they
are not sent, but a checksum of them is compared.
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

#: Commands of the leader; a tuple begins with one of these, and all but the last two are methods of the engine.
_ADD, _STEP, _GENERATE, _SCORE, _ABORT, _DROP, _OFFLOAD, _RELOAD, _WEIGHTS, _END = (
    "add", "step", "generate", "score", "abort", "drop", "offload", "reload", "weights", "end",
)  # fmt: skip
#: Commands, and the checksum of the leader's finished sequences so far.
Commands = tuple[list[tuple[Any, ...]], int]


class EngineLink(Protocol):
    """Connection of the ranks of one engine."""

    @property
    def rank(self) -> int:
        """Number of this rank in the engine; rank 0 is the leader."""

    @property
    def size(self) -> int:
        """Ranks of the engine."""

    @property
    def ident(self) -> str:
        """Name that the engine's ranks on this host share, and no other engine has."""

    def form(self) -> None:
        """Forms torch's default process group of the engine's ranks."""

    def broadcast(self, commands: Commands) -> None:
        """Broadcasts commands; called by rank 0 alone."""

    def receive(self) -> Commands:
        """Waits for the commands of rank 0; called by the other ranks."""

    def handle_failure(self, error: BaseException) -> None:
        """Handles a failed joint computation: returns if no rank of the engine has ended; otherwise waits until this one is
        ended.
        """


class EngineDivergenceError(RlhpcError):
    """Error of ranks of an engine that have sampled different tokens. No rank may continue."""


class _Checksum:
    """Running checksum of the finished sequences, in order."""

    def __init__(self) -> None:
        self.check = 0

    def update(self, done: Sequence[Completion]) -> None:
        for completion in done:
            tokens = np.asarray((completion.id, *completion.token_ids), np.int64).tobytes()
            self.check = zlib.crc32(completion.finish_reason.encode(), zlib.crc32(tokens, self.check))


class Leader(RolloutBackend):
    """Leader's side of an engine group: an engine that makes the other ranks repeat each call.

    Commands that need no immediate computation (requests, aborts) are sent with the next step.

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
        self.can_drop = engine.can_drop
        self.can_score = engine.can_score

    @property
    def version(self) -> int:  # type: ignore[override]
        """Version of the weights; see `RolloutBackend.version`."""
        return self._engine.version

    def add(self, requests: Iterable[Request]) -> None:
        """Adds requests; see `RolloutBackend.add`."""
        batch = list(requests)
        self._engine.add(batch)
        self._queued_commands.append((_ADD, batch))

    def step(self) -> list[Completion]:
        """Advances all ranks; see `RolloutBackend.step`."""
        return self._run_jointly((_STEP,), self._engine.step)

    def unfinished(self) -> int:
        """Returns the number of unfinished requests; see `RolloutBackend.unfinished`."""
        return self._engine.unfinished()

    def abort(self) -> list[Completion]:
        """Ends all running requests; see `RolloutBackend.abort`."""
        aborted = self._engine.abort()
        self._checksum.update(aborted)
        self._queued_commands.append((_ABORT,))
        return aborted

    def drop(self, ids: Collection[int]) -> None:
        """Ends some requests; see `RolloutBackend.drop`."""
        self._engine.drop(ids)
        self._queued_commands.append((_DROP, list(ids)))

    def so_far(self, ids: Collection[int]) -> Mapping[int, list[int]]:
        """Returns the tokens of running requests; see `RolloutBackend.so_far`."""
        return self._engine.so_far(ids)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completes requests; see `RolloutBackend.generate`."""
        return self._run_jointly((_GENERATE, list(requests)), lambda: self._engine.generate(requests))

    def score(self, token_ids: Sequence[int], policy: int = 0) -> list[float]:
        """Returns the log-probs of a text; see `RolloutBackend.score`."""
        self._broadcast((_SCORE, list(token_ids), policy))
        with _joint_computation(self._link):
            return self._engine.score(token_ids, policy)

    def update_weights(
        self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]], *, complete: bool = True
    ) -> None:
        """Loads weights, as the other ranks do with theirs; see `RolloutBackend.update_weights`."""
        self.begin_weights()
        assert complete, "engines of several ranks take complete updates"
        self._engine.update_weights(version, named_tensors)

    def begin_weights(self) -> None:
        """Makes the other ranks load their weights, as this rank is about to do."""
        self._broadcast((_WEIGHTS,))

    def offload(self) -> None:
        """Frees all ranks' accelerators; see `RolloutBackend.offload`."""
        self._broadcast((_OFFLOAD,))
        self._engine.offload()

    def reload(self) -> None:
        """Returns to all ranks' accelerators; see `RolloutBackend.reload`."""
        self._broadcast((_RELOAD,))
        self._engine.reload()

    def end(self) -> None:
        """Releases the other ranks until the next command."""
        self._broadcast((_END,))

    def close(self) -> None:
        """Ends this rank's engine; the other ranks end theirs."""
        self._engine.close()

    def _run_jointly(self, command: tuple[Any, ...], act: Callable[[], list[Completion]]) -> list[Completion]:
        self._broadcast(command)
        with _joint_computation(self._link):
            completions = act()
        self._checksum.update(completions)
        return completions

    def _broadcast(self, command: tuple[Any, ...]) -> None:
        commands, self._queued_commands = [*self._queued_commands, command], []
        with _joint_computation(self._link):
            self._link.broadcast((commands, self._checksum.check))


class FollowerEngine:
    """Follower's side of an engine group.

    Args:
        engine: This rank's engine.
        link: Connection to rank 0.
        load_weights: Loads the weights that come next.
    """

    def __init__(self, engine: RolloutBackend, link: EngineLink, load_weights: Callable[[], object]) -> None:
        self._engine = engine
        self._link = link
        self._load_weights = load_weights
        self._checksum = _Checksum()

    def follow(self) -> None:
        """Repeats the commands of rank 0 until it releases this rank.

        Raises:
            EngineDivergenceError: This rank has sampled other tokens.
        """
        with _joint_computation(self._link):
            while True:
                commands, checksum = self._link.receive()
                for command, *arguments in commands:
                    # Aborts sent in this message are in rank 0's checksum already, and by now in this one's.
                    if command in (_STEP, _GENERATE, _END) and checksum != self._checksum.check:
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
        if command in (_STEP, _GENERATE, _ABORT):
            self._checksum.update(output)


@contextmanager
def _joint_computation(link: EngineLink) -> Iterator[None]:
    """Suppresses consequential errors: if a rank of the engine has ended, the errors of the others are of no interest."""
    try:
        yield
    except (RuntimeError, RlhpcError) as error:
        if not isinstance(error, EngineDivergenceError):
            link.handle_failure(error)
        raise
