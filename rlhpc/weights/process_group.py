"""Process group of weight senders and receivers.

It is separate from torch's default group, which an engine or a trainer uses for its own communication. Its ranks meet in a
store over the run's own sockets. If a rank is lost or aborts an update, the group ends for all ranks: the other ranks abort
it at once, because a communicator with a dead peer waits forever, and get the missing weights by another transport.
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
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.comm.device_memory import current_device
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded, RlhpcError
from rlhpc.runtime.registry import MEMBERS

_SHORTEST_S, _LONGEST_S = 0.0002, 0.02
#: Interval at which a waiting rank checks its peers in the registry's files, and the number of peers it checks each time. A
#: rank that finds a missing peer notifies all ranks.
_LOOK_S, _AT_A_LOOK = 0.5, 8
#: Keeps NCCL's watchdog from ending the process when a peer is lost. A group reads the variable when it is created.
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
#: Group and rank.
RankAddress = tuple[str, int]
#: Rank of the group, and the flat uint8 tensor sent to it or received from it.
Parcel = tuple[int, torch.Tensor]


class GroupLost(ChannelError):
    """End of the group before all ranks received the data."""


class Presence:
    """Liveness of a set of ranks: whether each one is still the process that it was when this object was created.

    Args:
        members: Groups and ranks.
        me: The member that this process is.
    """

    def __init__(self, members: tuple[RankAddress, ...], me: RankAddress) -> None:
        self._members = members
        for member in members:
            current().member(*member)
        self._versions = {rank: self._version(rank) for rank, member in enumerate(members) if member != me}
        #: All ranks except this one.
        self.peers = sorted(self._versions)
        self._turn = itertools.cycle(self.peers)

    def missing_ranks(self, max_ranks: int | None = None) -> list[int]:
        """Returns the ranks whose process was replaced, or that have left their group.

        Args:
            max_ranks: Number of ranks to check, in rotation; all by default.
        """
        ranks = itertools.islice(self._turn, min(len(self.peers), max_ranks or len(self.peers)))
        return [rank for rank in ranks if self._has_gone(rank)]

    def _has_gone(self, rank: int) -> bool:
        return self._version(rank) != self._versions[rank] or current().has_left(*self._members[rank])

    def name(self, rank: int) -> str:
        """Returns a rank's name."""
        return "{}-{}".format(*self._members[rank])

    def names(self, ranks: Sequence[int]) -> str:
        """Returns the names of several ranks, joined by commas."""
        return ", ".join(map(self.name, ranks))

    def _version(self, rank: int) -> int:
        return current().registry.version(MEMBERS, self.name(rank))


class WeightProcessGroup:
    """This process's end of the group.

    Args:
        kind: `nccl` or `gloo`.
        members: Groups and ranks; the first holds the store.
        me: The member that this process is.
        name: Name that the first member chose.
    """

    def __init__(self, kind: str, members: tuple[RankAddress, ...], me: RankAddress, name: str = "") -> None:
        self.kind, self.members, self.name = kind, members, name or f"weights-{uuid.uuid4().hex}"
        self._rank = members.index(me)
        self._presence = Presence(members, me)
        self._torch_group: Any = None
        self._work: Future[None] | _Works | None = None
        self._peers: Sequence[int] = ()
        self._buffers: list[torch.Tensor] = []

    def memory(self, size: int) -> torch.Tensor:
        """Allocates memory for a bucket, uint8."""
        device = current_device() if self.kind == "nccl" else None
        return torch.empty(size, dtype=torch.uint8) if device is None else device.empty(size)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Starts to send a bucket from the first rank to all others, or to receive it."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        peers = [0] if self._rank else self._presence.peers
        self._begin(lambda torch_group: [torch_group.broadcast([flat], options)], [flat], peers)

    def confirm(self) -> None:
        """Starts an all-reduce that completes when all ranks have the data before it. A rank that forwards data may be lost
        after the first rank has sent it.
        """
        self._begin(lambda torch_group: [torch_group.allreduce([self.memory(1).zero_()])], [], self._presence.peers)

    def exchange(self, sends: Sequence[Parcel], takes: Sequence[Parcel]) -> None:
        """Starts to send to some ranks and to receive from others, all at the same time."""

        def begin(torch_group: Any) -> list[Any]:
            if self.kind == "nccl":
                torch_group._start_coalescing()
            works = [torch_group.send([flat], rank, 0) for rank, flat in sends]
            works += [torch_group.recv([flat], rank, 0) for rank, flat in takes]
            return [torch_group._end_coalescing()] if self.kind == "nccl" else works

        transfers = [*sends, *takes]
        self._begin(begin, [flat for _, flat in transfers], sorted({rank for rank, _ in transfers}))

    def settle(self) -> None:
        """Waits until the operations that were started are done.

        Raises:
            DeadlineExceeded: A rank did not take part.
            GroupLost: A rank was lost, or has aborted.
        """
        if (work := self._work) is None:
            return
        # NCCL's own wait is the stream's, not the host's.
        self._wait(lambda: [] if work.done() else self._peers)
        try:
            work.result()
        except RuntimeError as error:
            raise self._group_lost(self._peers, str(error).strip().partition("\n")[0]) from error
        self._work, self._buffers = None, []

    def end(self, *, tell: bool = False) -> None:
        """Ends the group without waiting for other ranks.

        Args:
            tell: Notify the other ranks, which may be in the middle of an operation, so that they abort it too.
        """
        torch_group, work, buffers = self._torch_group, self._work, self._buffers
        self._torch_group, self._work, self._buffers = None, None, []
        if torch_group is not None and self.kind == "nccl":
            with contextlib.suppress(RuntimeError):
                torch_group.abort()
        elif work is not None:  # gloo cannot be aborted: the operation ends when a peer ends, or by its timeout
            threading.Thread(target=_outlive, args=(torch_group, work, buffers), daemon=True).start()
        for rank in {*self._presence.peers} - {*self._presence.missing_ranks()} if tell else ():
            in_background(f"over-{self._presence.name(rank)}", functools.partial(self._tell, rank))

    # -- liveness ---------------------------------------------------------------------------------------------------

    def _tell(self, rank: int) -> None:
        with contextlib.suppress(RlhpcError):
            p2p.post(self._presence.name(self._rank), self._key, *self.members[rank])

    @property
    def _key(self) -> str:
        return f"over/{self.name}"

    def _look(self) -> None:
        """Checks some of the peers.

        Raises:
            GroupLost: A rank has ended, or has aborted.
        """
        if missing_ranks := self._presence.missing_ranks(_AT_A_LOOK):
            raise self._group_lost(missing_ranks, "its process has ended")
        with contextlib.suppress(queue.Empty):
            raise self._group_lost([], f"{p2p.poll(self._key)} has given it up", notified=True)

    def _group_lost(self, ranks: Sequence[int], why: str, *, notified: bool = False) -> GroupLost:
        """Ends the group and returns the error to raise; notifies the other ranks unless they have been `notified`."""
        self.end(tell=not notified)
        lost_names = self._presence.names(ranks) or "others"
        alternatives = ", or one of these," if len(ranks) > 1 else ""
        return GroupLost(
            f"{current().name} lost {lost_names}{alternatives} in an update of weights by {self.kind}: {why}"
        )

    def _wait(self, missing: Callable[[], Sequence[int]]) -> None:
        """Waits until no rank is missing."""
        context, pause, start = current(), _SHORTEST_S, time.monotonic()
        next_check = start + _LOOK_S
        while ranks := missing():
            context.check()
            now = time.monotonic()
            if now > next_check:
                self._look()
                next_check = now + _LOOK_S
            if now - start > context.wait_deadline:
                self.end(tell=True)
                raise DeadlineExceeded(
                    f"{context.name} waited {context.wait_deadline:.0f} s for {self._presence.names(ranks)} in an "
                    f"update of weights by {self.kind}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)

    # -- torch's group ----------------------------------------------------------------------------------------------

    def _begin(self, begin: Callable[[Any], list[Any]], buffers: list[torch.Tensor], peers: Sequence[int]) -> None:
        torch_group = self._form()
        self.settle()
        self._buffers, self._peers = buffers, peers
        try:
            works = begin(torch_group)
        except RuntimeError as error:
            raise self._group_lost(peers, str(error).strip().partition("\n")[0]) from error
        self._work = _Works(works) if self.kind == "nccl" else _as_future(works)

    def _form(self) -> Any:
        if self._torch_group is None:
            context, size = current(), len(self.members)
            limit = min(context.wait_deadline, 1800)
            store = ServiceStore(context, self.members[0][0], self.name, limit, self.members[0][1])
            # Torch waits for all ranks without checking their liveness, so it is called when all are ready.
            store.set(f"at-it-{self._rank}", b"1")
            self._wait(functools.partial(_not_at_it, store, [*self._presence.peers]))
            timeout = datetime.timedelta(seconds=limit)
            if self.kind == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                with _left_alone():
                    self._torch_group = dist.ProcessGroupNCCL(store, self._rank, size, options)
                self.confirm()  # the first collective creates the communicator
                self.settle()
            else:
                self._torch_group = dist.ProcessGroupGloo(store, self._rank, size, timeout)
        return self._torch_group


class _Works:
    """Handles of operations started with NCCL."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> None:
        for work in self._works:
            work.wait()
            if not work.is_success():
                raise RuntimeError("NCCL has failed")


def _not_at_it(store: ServiceStore, pending_ranks: list[int]) -> list[int]:
    """Returns the ranks that are not ready yet; waits a moment for the first of them."""
    try:
        while pending_ranks:
            store.wait([f"at-it-{pending_ranks[0]}"], datetime.timedelta(seconds=_LOOK_S))
            del pending_ranks[0]
    except DeadlineExceeded:
        pending_ranks[:] = [rank for rank in pending_ranks if not store.check([f"at-it-{rank}"])]
    return pending_ranks


def _as_future(works: Sequence[Any]) -> Future[None]:
    """Returns a future of operations started with gloo, which reports completion of point-to-point operations only to a
    waiter.
    """
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


def _outlive(torch_group: Any, work: Any, buffers: list[torch.Tensor]) -> None:
    """Keeps a group, and the memory it may write to, alive until its operations end."""
    with contextlib.suppress(BaseException):
        work.result()
    del torch_group, buffers


@contextlib.contextmanager
def _left_alone() -> Iterator[None]:
    previous_setting = os.environ.get(_WATCHDOG)
    os.environ[_WATCHDOG] = "0"
    try:
        yield
    finally:
        os.environ.pop(_WATCHDOG)
        if previous_setting is not None:
            os.environ[_WATCHDOG] = previous_setting
