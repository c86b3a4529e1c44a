"""Engine group: the ranks that form one engine; the leader decides, and the others repeat its commands.

Each rank has an engine of the same model, holds a part of it, and computes the same step at the same time: their kernels wait
for each other within a step. So all of them must get the same requests in the same order, and take the same steps. The leader
broadcasts each command before it runs it. The sampled tokens follow from the weights, the requests and their seeds, so they
are not sent, but a checksum of them is compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlhpc.language.engines.base import Completion, Request, RolloutBackend
from rlhpc.runtime.errors import RlhpcError

if TYPE_CHECKING:
    import torch

#: Commands of the leader; a tuple begins with one of these.
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


class EnginesDiffer(RlhpcError):
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
        self._before: list[tuple[Any, ...]] = []
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
        self._before.append((_ADD, batch))

    def step(self) -> list[Completion]:
        """Advances all ranks; see `RolloutBackend.step`."""
        return self._drawn((_STEP,), self._engine.step)

    def unfinished(self) -> int:
        """Returns the number of unfinished requests; see `RolloutBackend.unfinished`."""
        return self._engine.unfinished()

    def abort(self) -> list[Completion]:
        """Ends all running requests; see `RolloutBackend.abort`."""
        aborted = self._engine.abort()
        self._checksum.update(aborted)
        self._before.append((_ABORT,))
        return aborted

    def drop(self, ids: Collection[int]) -> None:
        """Ends some requests; see `RolloutBackend.drop`."""
        self._engine.drop(ids)
        self._before.append((_DROP, list(ids)))

    def so_far(self, ids: Collection[int]) -> Mapping[int, list[int]]:
        """Returns the tokens of running requests; see `RolloutBackend.so_far`."""
        return self._engine.so_far(ids)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completes requests; see `RolloutBackend.generate`."""
        return self._drawn((_GENERATE, list(requests)), lambda: self._engine.generate(requests))

    def score(self, token_ids: Sequence[int], policy: int = 0) -> list[float]:
        """Returns the log-probs of a text; see `RolloutBackend.score`."""
        self._tell((_SCORE, list(token_ids), policy))
        with _SuppressConsequences(self._link):
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
        self._tell((_WEIGHTS,))

    def offload(self) -> None:
        """Frees all ranks' accelerators; see `RolloutBackend.offload`."""
        self._tell((_OFFLOAD,))
        self._engine.offload()

    def reload(self) -> None:
        """Returns to all ranks' accelerators; see `RolloutBackend.reload`."""
        self._tell((_RELOAD,))
        self._engine.reload()

    def end(self) -> None:
        """Releases the other ranks until the next command."""
        self._tell((_END,))

    def close(self) -> None:
        """Ends this rank's engine; the other ranks end theirs."""
        self._engine.close()

    def _drawn(self, command: tuple[Any, ...], act: Callable[[], list[Completion]]) -> list[Completion]:
        self._tell(command)
        with _SuppressConsequences(self._link):
            completions = act()
        self._checksum.update(completions)
        return completions

    def _tell(self, command: tuple[Any, ...]) -> None:
        commands, self._before = [*self._before, command], []
        with _SuppressConsequences(self._link):
            self._link.broadcast((commands, self._checksum.check))


class FollowerEngine:
    """Follower's side of an engine group.

    Args:
        engine: This rank's engine.
        link: Connection to rank 0.
        take_weights: Loads the weights that come next.
    """

    def __init__(self, engine: RolloutBackend, link: EngineLink, take_weights: Callable[[], object]) -> None:
        self._engine = engine
        self._link = link
        self._take = take_weights
        self._checksum = _Checksum()

    def follow(self) -> None:
        """Repeats the commands of rank 0 until it releases this rank.

        Raises:
            EnginesDiffer: This rank has sampled other tokens.
        """
        with _SuppressConsequences(self._link):
            while True:
                commands, checksum = self._link.receive()
                for command, *arguments in commands:
                    # Aborts sent in this message are in rank 0's checksum already, and by now in this one's.
                    if command in (_STEP, _GENERATE, _END) and checksum != self._checksum.check:
                        raise EnginesDiffer(
                            f"rank {self._link.rank} of {self._link.ident} has drawn other tokens than rank 0 with the same "
                            "requests and weights: nobody goes on with either; restart the rollout group, and report "
                            "model and version of vLLM"
                        )
                    if command == _END:
                        return
                    self._repeat(command, arguments)

    def _repeat(self, command: str, arguments: list[Any]) -> None:
        engine = self._engine
        if command == _ADD:
            engine.add(arguments[0])
        elif command == _STEP:
            self._checksum.update(engine.step())
        elif command == _GENERATE:
            self._checksum.update(engine.generate(arguments[0]))
        elif command == _ABORT:
            self._checksum.update(engine.abort())
        elif command == _DROP:
            engine.drop(arguments[0])
        elif command == _SCORE:
            engine.score(*arguments)
        elif command == _OFFLOAD:
            engine.offload()
        elif command == _RELOAD:
            engine.reload()
        else:
            self._take()


class _SuppressConsequences:
    """Context that suppresses consequential errors: if a rank of the engine has ended, the others' are of no interest."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (RuntimeError, RlhpcError)) and not isinstance(error, EnginesDiffer):
            self._link.handle_failure(error)
