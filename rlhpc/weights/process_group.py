"""A process group of those who send weights and those who take them in.

It is no part of torch's default group, which an engine or a trainer has for itself, and it meets in a store over the run's
own sockets. Who is lost in the middle, or breaks off, ends it for all: the others abort it at once, since a communicator with
a dead peer waits for ever, and take what they lack by another road.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.runtime.comm import p2p
from rlhpc.runtime.comm.background import in_background
from rlhpc.runtime.comm.collectives import ServiceStore
from rlhpc.runtime.comm.device_memory import own
from rlhpc.runtime.context import current
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded, RlhpcError
from rlhpc.runtime.registry import MEMBERS

_SHORTEST_S, _LONGEST_S = 0.0002, 0.02
#: How often somebody who waits looks who is still there, and at how many: in files, as all do. Who finds one gone tells all.
_LOOK_S, _AT_A_LOOK = 0.5, 8
#: Has NCCL's watchdog leave the process alone, which it would end where a peer is lost. A group reads it when it is made.
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
#: Group and rank.
Who = tuple[str, int]
#: A rank of the group, and what goes to it or comes from it: flat, uint8.
Parcel = tuple[int, torch.Tensor]


class GroupLost(ChannelError):
    """The group ended before all had what was sent."""


class Presence:
    """Which of some ranks are still the processes that they were when this was made.

    Args:
        members: Groups and ranks.
        me: Which of them this is.
    """

    def __init__(self, members: tuple[Who, ...], me: Who) -> None:
        self._members = members
        for who in members:
            current().member(*who)
        self._known = {rank: self._version(rank) for rank, who in enumerate(members) if who != me}
        #: All but this one.
        self.others = sorted(self._known)
        self._turn = itertools.cycle(self.others)

    def gone(self, most: int | None = None) -> list[int]:
        """Those whose process is another, or whose group goes on without them.

        Args:
            most: How many are looked at, in turn: all, if not given.
        """
        ranks = itertools.islice(self._turn, min(len(self.others), most or len(self.others)))
        return [rank for rank in ranks if self._has_gone(rank)]

    def _has_gone(self, rank: int) -> bool:
        return self._version(rank) != self._known[rank] or current().has_left(*self._members[rank])

    def name(self, rank: int) -> str:
        """What a rank is called."""
        return "{}-{}".format(*self._members[rank])

    def names(self, ranks: Sequence[int]) -> str:
        """What some are called."""
        return ", ".join(map(self.name, ranks))

    def _version(self, rank: int) -> int:
        return current().registry.version(MEMBERS, self.name(rank))


class WeightProcessGroup:
    """This process's end.

    Args:
        kind: `nccl` or `gloo`.
        members: Groups and ranks; the first holds the store.
        me: Which of them this is.
        name: As the first has named it.
    """

    def __init__(self, kind: str, members: tuple[Who, ...], me: Who, name: str = "") -> None:
        self.kind, self.members, self.name = kind, members, name or f"weights-{uuid.uuid4().hex}"
        self._rank = members.index(me)
        self._presence = Presence(members, me)
        self._made: Any = None
        self._work: Future[None] | _Works | None = None
        self._peers: Sequence[int] = ()
        self._kept: list[torch.Tensor] = []

    def memory(self, size: int) -> torch.Tensor:
        """Memory for a bucket, uint8."""
        device = own() if self.kind == "nccl" else None
        return torch.empty(size, dtype=torch.uint8) if device is None else device.empty(size)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Begins to send a bucket from the first to all, or to take it."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        peers = [0] if self._rank else self._presence.others
        self._begin(lambda made: [made.broadcast([flat], options)], [flat], peers)

    def confirm(self) -> None:
        """Begins to hear from all that they have what came before: who passes it on may be lost when the first has sent it."""
        self._begin(lambda made: [made.allreduce([self.memory(1).zero_()])], [], self._presence.others)

    def exchange(self, sends: Sequence[Parcel], takes: Sequence[Parcel]) -> None:
        """Begins to send to some, and to take from others, all at a time."""

        def begin(made: Any) -> list[Any]:
            if self.kind == "nccl":
                made._start_coalescing()
            works = [made.send([flat], rank, 0) for rank, flat in sends]
            works += [made.recv([flat], rank, 0) for rank, flat in takes]
            return [made._end_coalescing()] if self.kind == "nccl" else works

        parcels = [*sends, *takes]
        self._begin(begin, [flat for _, flat in parcels], sorted({rank for rank, _ in parcels}))

    def settle(self) -> None:
        """Waits until what was begun is done.

        Raises:
            DeadlineExceeded: Somebody did not take part.
            GroupLost: Somebody was lost, or has broken off.
        """
        if (work := self._work) is None:
            return
        # NCCL's own wait is the stream's, not the host's.
        self._wait(lambda: [] if work.done() else self._peers)
        try:
            work.result()
        except RuntimeError as error:
            raise self._lost(self._peers, str(error).strip().partition("\n")[0]) from error
        self._work, self._kept = None, []

    def end(self, *, tell: bool = False) -> None:
        """Ends it, without waiting for anybody.

        Args:
            tell: Others may be in the middle of something: they give it up, too.
        """
        made, work, kept = self._made, self._work, self._kept
        self._made, self._work, self._kept = None, None, []
        if made is not None and self.kind == "nccl":
            with contextlib.suppress(RuntimeError):
                made.abort()
        elif work is not None:  # gloo cannot be aborted: what nobody waits for ends when a peer does, or in time
            threading.Thread(target=_outlive, args=(made, work, kept), daemon=True).start()
        for rank in {*self._presence.others} - {*self._presence.gone()} if tell else ():
            in_background(f"over-{self._presence.name(rank)}", functools.partial(self._tell, rank))

    # -- who is there -----------------------------------------------------------------------------------------------

    def _tell(self, rank: int) -> None:
        with contextlib.suppress(RlhpcError):
            p2p.post(self._presence.name(self._rank), self._key, *self.members[rank])

    @property
    def _key(self) -> str:
        return f"over/{self.name}"

    def _look(self) -> None:
        """
        Raises:
            GroupLost: Somebody has gone, or broken off.
        """
        if gone := self._presence.gone(_AT_A_LOOK):
            raise self._lost(gone, "its process has ended")
        with contextlib.suppress(queue.Empty):
            raise self._lost([], f"{p2p.poll(self._key)} has given it up", known=True)

    def _lost(self, ranks: Sequence[int], why: str, *, known: bool = False) -> GroupLost:
        """Ends it; tells the others, unless they know."""
        self.end(tell=not known)
        whom = self._presence.names(ranks) or "others"
        more = ", or one of these," if len(ranks) > 1 else ""
        return GroupLost(f"{current().name} lost {whom}{more} in an update of weights by {self.kind}: {why}")

    def _wait(self, missing: Callable[[], Sequence[int]]) -> None:
        """Waits until nobody is missing."""
        context, pause, start = current(), _SHORTEST_S, time.monotonic()
        look = start + _LOOK_S
        while ranks := missing():
            context.check()
            now = time.monotonic()
            if now > look:
                self._look()
                look = now + _LOOK_S
            if now - start > context.wait_deadline:
                self.end(tell=True)
                raise DeadlineExceeded(
                    f"{context.name} waited {context.wait_deadline:.0f} s for {self._presence.names(ranks)} in an "
                    f"update of weights by {self.kind}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)

    # -- torch's group ----------------------------------------------------------------------------------------------

    def _begin(self, begin: Callable[[Any], list[Any]], kept: list[torch.Tensor], peers: Sequence[int]) -> None:
        made = self._form()
        self.settle()
        self._kept, self._peers = kept, peers
        try:
            works = begin(made)
        except RuntimeError as error:
            raise self._lost(peers, str(error).strip().partition("\n")[0]) from error
        self._work = _Works(works) if self.kind == "nccl" else _waited_for(works)

    def _form(self) -> Any:
        if self._made is None:
            context, size = current(), len(self.members)
            limit = min(context.wait_deadline, 1800)
            store = ServiceStore(context, self.members[0][0], self.name, limit, self.members[0][1])
            # Torch waits for all without looking who is there: it is asked once all are at it.
            store.set(f"at-it-{self._rank}", b"1")
            self._wait(functools.partial(_not_at_it, store, [*self._presence.others]))
            timeout = datetime.timedelta(seconds=limit)
            if self.kind == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                with _left_alone():
                    self._made = dist.ProcessGroupNCCL(store, self._rank, size, options)
                self.confirm()  # its communicator is made by the first thing that all take part in
                self.settle()
            else:
                self._made = dist.ProcessGroupGloo(store, self._rank, size, timeout)
        return self._made


class _Works:
    """What NCCL was asked for."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> None:
        for work in self._works:
            work.wait()
            if not work.is_success():
                raise RuntimeError("NCCL has failed")


def _not_at_it(store: ServiceStore, left: list[int]) -> list[int]:
    """Who is left of those who have yet to come; waits a moment for the first of them."""
    try:
        while left:
            store.wait([f"at-it-{left[0]}"], datetime.timedelta(seconds=_LOOK_S))
            del left[0]
    except DeadlineExceeded:
        left[:] = [rank for rank in left if not store.check([f"at-it-{rank}"])]
    return left


def _waited_for(works: Sequence[Any]) -> Future[None]:
    """What gloo was asked for. Of what goes from one to another it says whether it is done only to who waits."""
    future: Future[None] = Future()

    def wait() -> None:
        try:
            for work in works:
                work.wait()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=wait, name="rlhpc-weights-group", daemon=True).start()
    return future


def _outlive(made: Any, work: Any, kept: list[torch.Tensor]) -> None:
    """Holds a group, and memory that it may write to, for as long as it is at work."""
    with contextlib.suppress(BaseException):
        work.result()
    del made, kept


@contextlib.contextmanager
def _left_alone() -> Iterator[None]:
    before = os.environ.get(_WATCHDOG)
    os.environ[_WATCHDOG] = "0"
    try:
        yield
    finally:
        os.environ.pop(_WATCHDOG)
        if before is not None:
            os.environ[_WATCHDOG] = before
