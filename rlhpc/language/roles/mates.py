"""The ranks of a rollout group that are one engine: how they hear of each other, and who does what in a call.

Neighbouring ranks are an engine (`rollout.parallel`). The first takes prompts, has answers judged and decides; the others
repeat what its engine does (`engines.lockstep`). A call to the group reaches all of them: the first carries it out, the others
follow it until it is done.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from rlhpc.language.config import GrpoConfig
from rlhpc.language.engines.base import RolloutBackend
from rlhpc.language.engines.lockstep import Follower, Leader, Told
from rlhpc.runtime.comm import p2p
from rlhpc.runtime.context import current
from rlhpc.runtime.errors import CallAborted, RlhpcError
from rlhpc.runtime.worker import Worker

Found = TypeVar("Found")
#: What an engine's first rank tells the others (`p2p.post`).
_TOLD = "engine"
#: How long another rank may take to tell what it had begun when a call is given up.
_BEGUN_S = 5.0
#: How long the driver may take to notice that a rank of the engine has ended, and to end the others.
_NOTICED_S, _ENDED_S = 10.0, 60.0


def ranks_of_engine(cfg: GrpoConfig) -> int:
    """How many neighbouring ranks are one engine; what the placement says has been written down by now."""
    return cfg.rollout.parallel.tensor or 1


def first_of_engine(rank: int, cfg: GrpoConfig) -> int:
    """The rank that decides for an engine of which a rank is one."""
    return rank - rank % ranks_of_engine(cfg)


class RunLink:
    """The way between ranks of one engine, through their inboxes (`lockstep.Link`).

    Args:
        worker: This rank.
        size: Ranks of the engine.
    """

    def __init__(self, worker: Worker, size: int) -> None:
        self._worker, self._group, self.size = worker, worker.group_name, size
        first = worker.rank - worker.rank % size
        self.ranks, self.rank = range(first, first + size), worker.rank - first
        self._first = f"{self._group}-{first}"
        context = current()
        records = [context.member(self._group, rank) for rank in self.ranks]
        self.ident = f"{context.host}-{self._first}-{records[0]['incarnation']}"
        self.call = 0

    def form(self) -> None:
        """See `Link.form`."""
        self._worker.init_process_group(self.ranks)

    def tell(self, told: Told) -> None:
        """See `Link.tell`."""
        for rank in self.ranks[1:]:
            if not p2p.post((self.call, told), _TOLD, self._group, rank):
                raise RlhpcError(f"{self._group}-{rank} has ended, and it is one engine with {self._first}")

    def hear(self) -> Told:
        """See `Link.hear`."""
        aborted: float | None = None
        while True:
            try:
                call, told = p2p.await_post(_TOLD, current().wait_deadline, self._first)
            except CallAborted:
                # The first rank may be computing already, and wait for this one where it hears of nothing.
                aborted = aborted or time.monotonic()
                if time.monotonic() - aborted > _BEGUN_S:
                    raise
                time.sleep(0.01)
                continue
            if call == self.call:  # otherwise of one that was given up
                found: Told = told
                return found

    def mourn(self, error: BaseException) -> None:
        """See `Link.mourn`."""
        if isinstance(error, CallAborted):
            return
        context, until = current(), time.monotonic() + _NOTICED_S
        others = [rank for rank in self.ranks if rank != self._worker.rank]
        with contextlib.suppress(RlhpcError):
            while time.monotonic() < until:
                if any(context.has_left(self._group, rank) for rank in others):
                    self._worker.log.info("a rank of this engine has ended, and so must this one")
                    time.sleep(_ENDED_S)  # the driver ends this process
                time.sleep(0.05)


class Part:
    """A rank's part in its engine.

    Args:
        engine: This rank's own.
        link: To the others; None where there are none.
        take_weights: Takes in the weights that come next; called where another rank decides when.

    Attributes:
        engine: What generation calls.
        follows: Whether another rank decides.
    """

    def __init__(self, engine: Any, link: RunLink | None, take_weights: Callable[[], object]) -> None:
        self._link = link
        self.follows = link is not None and link.rank > 0
        self._leader = Leader(engine, link) if link is not None and not self.follows else None
        self._follower = Follower(engine, link, take_weights) if link is not None and self.follows else None
        self.engine: RolloutBackend = self._leader or engine

    def begin_weights(self) -> None:
        """Has the others take in weights, as this rank is about to do."""
        if self._leader is not None:
            self._leader.begin_weights()

    def follow(self) -> None:
        """Does what the first rank does, until its call is over. Who is told to leave meanwhile leaves behind that: the first
        may have something to hand back."""
        assert self._follower is not None
        Worker.before_leaving(lambda: None)
        self._follower.follow()
        Worker.before_leaving(None)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A call that all ranks of the engine get."""
        if self._link is not None:
            self._link.call += 1
        try:
            yield
        except CallAborted:
            if self._leader is not None:
                with contextlib.suppress(RlhpcError):
                    self._leader.end()
            raise
        if self._leader is not None:
            self._leader.end()


class _HasPart(Protocol):
    part: Part


def led(method: Callable[..., Found]) -> Callable[..., Found]:
    """A method that the first rank of an engine carries out, and the others follow: they return {}."""

    @functools.wraps(method)
    def call(self: _HasPart, *args: Any, **kwargs: Any) -> Any:
        with self.part.call():
            if not self.part.follows:
                return method(self, *args, **kwargs)
            self.part.follow()
            return {}

    return call
