"""An engine over several ranks: the first decides, the others repeat.

Each rank has its own engine of the same model, of which it holds a part, and computes what the first one does at the same
time: their kernels wait for each other within a step. So all of them must be given the same requests in the same order, and
take the same steps. The first tells the others what it does before it does it; what they draw follows from the weights, the
requests and their seeds, so nothing of it travels. That it is the same is compared all the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlhpc.language.engines.base import BoundedEngine, Completion, DropsRequests, Request, RolloutBackend, ScoresTexts
from rlhpc.runtime.errors import RlhpcError

if TYPE_CHECKING:
    import torch

#: What the first rank tells the others; a tuple begins with one of these.
ADD, STEP, GENERATE, SCORE, ABORT, DROP, OFFLOAD, RELOAD, WEIGHTS, END = (
    "add", "step", "generate", "score", "abort", "drop", "offload", "reload", "weights", "end",
)  # fmt: skip
#: Operations, and the check of what the first rank has seen end so far.
Told = tuple[list[tuple[Any, ...]], int]


class EngineLink(Protocol):
    """What ranks of one engine have of each other."""

    @property
    def rank(self) -> int:
        """This rank's number in the engine; 0 decides."""

    @property
    def size(self) -> int:
        """Ranks of the engine."""

    @property
    def ident(self) -> str:
        """A name that the engine's ranks on this host share, and no other engine has."""

    def form(self) -> None:
        """Forms torch's default process group of the engine's ranks."""

    def tell(self, told: Told) -> None:
        """Tells the others; only rank 0 does."""

    def hear(self) -> Told:
        """Waits for what rank 0 tells; only the others do."""

    def mourn(self, error: BaseException) -> None:
        """Called when computing together has failed: returns if no rank of the engine has ended, and otherwise waits to be
        ended, too."""


class EnginesDiffer(RlhpcError):
    """The ranks of an engine have drawn different tokens. Nobody may go on."""


class _Seen:
    """A running check of what has ended, in order."""

    def __init__(self) -> None:
        self.check = 0

    def saw(self, done: Sequence[Completion]) -> None:
        for completion in done:
            tokens = np.asarray((completion.id, *completion.token_ids), np.int64).tobytes()
            self.check = zlib.crc32(completion.finish_reason.encode(), zlib.crc32(tokens, self.check))


class Leader:
    """The engine as rank 0 has it: a `RolloutBackend` that has the others repeat what it is asked.

    What does not need them at once (requests, aborts) goes with the next step.

    Args:
        engine: This rank's own.
        link: To the others.
    """

    def __init__(self, engine: RolloutBackend, link: EngineLink) -> None:
        self._engine, self._link, self._seen = engine, link, _Seen()
        self._before: list[tuple[Any, ...]] = []

    @property
    def version(self) -> int:
        """See `RolloutBackend.version`."""
        return self._engine.version

    @property
    def capacity(self) -> int:
        """See `BoundedEngine.capacity`."""
        assert isinstance(self._engine, BoundedEngine)
        return self._engine.capacity

    def add(self, requests: Iterable[Request]) -> None:
        """See `RolloutBackend.add`."""
        batch = list(requests)
        self._engine.add(batch)
        self._before.append((ADD, batch))

    def step(self) -> list[Completion]:
        """See `RolloutBackend.step`."""
        return self._drawn((STEP,), self._engine.step)

    def unfinished(self) -> int:
        """See `RolloutBackend.unfinished`."""
        return self._engine.unfinished()

    def abort(self) -> list[Completion]:
        """See `RolloutBackend.abort`."""
        found = self._engine.abort()
        self._seen.saw(found)
        self._before.append((ABORT,))
        return found

    def drop(self, ids: Collection[int]) -> None:
        """See `DropsRequests.drop`."""
        engine = self._engine
        assert isinstance(engine, DropsRequests)
        engine.drop(ids)
        self._before.append((DROP, list(ids)))

    def so_far(self, ids: Collection[int]) -> Mapping[int, list[int]]:
        """See `DropsRequests.so_far`."""
        engine = self._engine
        assert isinstance(engine, DropsRequests)
        return engine.so_far(ids)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `RolloutBackend.generate`."""
        return self._drawn((GENERATE, list(requests)), lambda: self._engine.generate(requests))

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `ScoresTexts.score`."""
        engine = self._engine
        assert isinstance(engine, ScoresTexts)
        self._tell((SCORE, list(token_ids)))
        with _Mourning(self._link):
            return engine.score(token_ids)

    def update_weights(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `RolloutBackend.update_weights`: the others take in theirs."""
        self.begin_weights()
        self._engine.update_weights(version, named_tensors)

    def begin_weights(self) -> None:
        """Has the others take in weights, each by itself, as this rank is about to do."""
        self._tell((WEIGHTS,))

    def offload(self) -> None:
        """See `RolloutBackend.offload`."""
        self._tell((OFFLOAD,))
        self._engine.offload()

    def reload(self) -> None:
        """See `RolloutBackend.reload`."""
        self._tell((RELOAD,))
        self._engine.reload()

    def end(self) -> None:
        """Lets the others go, until there is something to be done again."""
        self._tell((END,))

    def close(self) -> None:
        """Ends this rank's engine; the others end theirs."""
        self._engine.close()

    def _drawn(self, what: tuple[Any, ...], act: Callable[[], list[Completion]]) -> list[Completion]:
        self._tell(what)
        with _Mourning(self._link):
            done = act()
        self._seen.saw(done)
        return done

    def _tell(self, what: tuple[Any, ...]) -> None:
        told, self._before = [*self._before, what], []
        with _Mourning(self._link):
            self._link.tell((told, self._seen.check))


class FollowerEngine:
    """The engine as the other ranks have it.

    Args:
        engine: This rank's own.
        link: To rank 0.
        take_weights: Takes in the weights that come next.
    """

    def __init__(self, engine: RolloutBackend, link: EngineLink, take_weights: Callable[[], object]) -> None:
        self._engine, self._link, self._take, self._seen = engine, link, take_weights, _Seen()

    def follow(self) -> None:
        """Repeats what rank 0 does until it lets this rank go.

        Raises:
            EnginesDiffer: This rank has drawn other tokens.
        """
        with _Mourning(self._link):
            while True:
                told, check = self._link.hear()
                for what, *given in told:
                    # Aborts told with this are in rank 0's check already, and by now in this one's.
                    if what in (STEP, GENERATE, END) and check != self._seen.check:
                        raise EnginesDiffer(
                            f"rank {self._link.rank} of {self._link.ident} has drawn other tokens than rank 0 with the same "
                            "requests and weights: nobody goes on with either; restart the rollout group, and report "
                            "model and version of vLLM"
                        )
                    if what == END:
                        return
                    self._repeat(what, given)

    def _repeat(self, what: str, given: list[Any]) -> None:
        engine = self._engine
        if what == ADD:
            engine.add(given[0])
        elif what == STEP:
            self._seen.saw(engine.step())
        elif what == GENERATE:
            self._seen.saw(engine.generate(given[0]))
        elif what == ABORT:
            self._seen.saw(engine.abort())
        elif what == DROP:
            assert isinstance(engine, DropsRequests)
            engine.drop(given[0])
        elif what == SCORE:
            assert isinstance(engine, ScoresTexts)
            engine.score(given[0])
        elif what == OFFLOAD:
            engine.offload()
        elif what == RELOAD:
            engine.reload()
        else:
            self._take()


class _Mourning:
    """Where a rank of the engine has ended, the error of the others is a consequence, which nobody needs to hear."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (RuntimeError, RlhpcError)) and not isinstance(error, EnginesDiffer):
            self._link.mourn(error)
