"""Process group of weight senders and receivers.

The group is separate from torch's default group, which an engine or a trainer uses for other communication. Its ranks meet in
a store over the run's sockets. If a rank is lost or aborts an update, the group ends for all ranks: the other ranks abort
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
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.comm.device_memory import current_device
from rlhpc.runtime.comm.store import ServiceStore
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded, RlhpcError
from rlhpc.runtime.registry import MEMBERS

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.0002, 0.02
#: Interval at which a waiting rank checks its peers in the registry's files, and the number of peers it checks each time. A
#: rank that finds a missing peer notifies all ranks.
_CHECK_INTERVAL_S, _PEERS_PER_CHECK = 0.5, 8
#: Keeps NCCL's watchdog from ending the process when a peer is lost. A group reads the variable when it is created.
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
#: Group and rank.
RankAddress = tuple[str, int]
#: Rank of the group, and the flat uint8 tensor sent to it or received from it.
Transfer = tuple[int, torch.Tensor]


class GroupLost(ChannelError):
    """End of the group before all ranks received the data."""


def group_ranks(addresses: Sequence[RankAddress]) -> list[tuple[str, list[int]]]:
    """Returns each group with its ranks, from (group, rank) pairs."""
    ranks_by_group: dict[str, list[int]] = {}
    for group, rank in addresses:
        ranks_by_group.setdefault(group, []).append(rank)
    return list(ranks_by_group.items())


class Presence:
    """Liveness of a set of ranks: whether each rank is still the same process as when this object was created.

    Args:
        addresses: Groups and ranks.
        local_address: Address of this process.
    """

    def __init__(self, addresses: tuple[RankAddress, ...], local_address: RankAddress) -> None:
        self._addresses = addresses
        for address in addresses:
            current().rank_record(*address)
        self._versions = {
            rank: self._version(rank) for rank, address in enumerate(addresses) if address != local_address
        }
        #: All ranks except this one.
        self.peers = sorted(self._versions)
        self._rotation = itertools.cycle(self.peers)

    def missing_ranks(self, max_ranks: int | None = None) -> list[int]:
        """Returns the ranks whose process was replaced, or that have left their group.

        Args:
            max_ranks: Number of ranks to check, in rotation; all by default.
        """
        ranks = itertools.islice(self._rotation, min(len(self.peers), max_ranks or len(self.peers)))
        return [rank for rank in ranks if self._is_missing(rank)]

    def _is_missing(self, rank: int) -> bool:
        return self._version(rank) != self._versions[rank] or current().has_left(*self._addresses[rank])

    def name(self, rank: int) -> str:
        """Returns a rank's name."""
        return "{}-{}".format(*self._addresses[rank])

    def names(self, ranks: Sequence[int]) -> str:
        """Returns the names of several ranks, joined by commas."""
        return ", ".join(map(self.name, ranks))

    def _version(self, rank: int) -> int:
        return current().registry.version(MEMBERS, self.name(rank))


class WeightProcessGroup:
    """This process's end of a process group of weight senders and receivers.

    Args:
        kind: `nccl` or `gloo`.
        addresses: Groups and ranks; the first member holds the store.
        local_address: Address of this process.
        name: Name that the first member chose.
    """

    def __init__(
        self, kind: str, addresses: tuple[RankAddress, ...], local_address: RankAddress, name: str = ""
    ) -> None:
        self.kind, self.addresses, self.name = kind, addresses, name or f"weights-{uuid.uuid4().hex}"
        self._rank = addresses.index(local_address)
        self._presence = Presence(addresses, local_address)
        self._torch_group: Any = None
        self._work: Future[None] | _Works | None = None
        self._peers: Sequence[int] = ()
        self._buffers: list[torch.Tensor] = []

    def memory(self, size: int) -> torch.Tensor:
        """Returns new memory for a bucket, `[size]` uint8."""
        device = current_device() if self.kind == "nccl" else None
        return torch.empty(size, dtype=torch.uint8) if device is None else device.empty(size)

    def broadcast(self, bucket: torch.Tensor) -> None:
        """Starts to send a bucket from the first rank to all others, or to receive it."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        peers = [0] if self._rank else self._presence.peers
        self._start_works(lambda torch_group: [torch_group.broadcast([bucket], options)], [bucket], peers)

    def confirm(self) -> None:
        """Starts an all-reduce that completes when all ranks have the data sent before it. The sender needs this, because a
        rank that forwards data may be lost after the sender has sent the data.
        """
        self._start_works(
            lambda torch_group: [torch_group.allreduce([self.memory(1).zero_()])], [], self._presence.peers
        )

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        """Starts concurrent sends to some ranks and receives from other ranks."""

        def begin(torch_group: Any) -> list[Any]:
            if self.kind == "nccl":
                torch_group._start_coalescing()
            async_works = [torch_group.send([flat_buffer], rank, 0) for rank, flat_buffer in sends]
            async_works += [torch_group.recv([flat_buffer], rank, 0) for rank, flat_buffer in receives]
            return [torch_group._end_coalescing()] if self.kind == "nccl" else async_works

        pending_transfers = [*sends, *receives]
        self._start_works(
            begin,
            [flat_buffer for _, flat_buffer in pending_transfers],
            sorted({rank for rank, _ in pending_transfers}),
        )

    def wait(self) -> None:
        """Waits until all started operations are done.

        Raises:
            DeadlineExceeded: A rank did not take part.
            GroupLost: A rank was lost, or has aborted.
        """
        if (async_work := self._work) is None:
            return
        # NCCL's own wait is the stream's, not the host's.
        self._wait_for_ranks(lambda: [] if async_work.done() else self._peers)
        try:
            async_work.result()
        except RuntimeError as error:
            raise self._group_lost(self._peers, str(error).strip().partition("\n")[0]) from error
        self._work, self._buffers = None, []

    def end(self, *, notifies: bool = False) -> None:
        """Ends the group without waiting for other ranks.

        Args:
            notifies: Notify the other ranks, which may be in the middle of an operation, so that they abort it too.
        """
        torch_group, async_work, buffers = self._torch_group, self._work, self._buffers
        self._torch_group, self._work, self._buffers = None, None, []
        if torch_group is not None and self.kind == "nccl":
            with contextlib.suppress(RuntimeError):
                torch_group.abort()
        elif async_work is not None:  # gloo cannot be aborted: the operation ends when a peer ends, or by its timeout
            threading.Thread(target=_keep_alive, args=(torch_group, async_work, buffers), daemon=True).start()
        for rank in {*self._presence.peers} - {*self._presence.missing_ranks()} if notifies else ():
            in_background(f"over-{self._presence.name(rank)}", functools.partial(self._notify, rank))

    # -- liveness ---------------------------------------------------------------------------------------------------

    def _notify(self, rank: int) -> None:
        with contextlib.suppress(RlhpcError):
            p2p.post(self._presence.name(self._rank), self._key, *self.addresses[rank])

    @property
    def _key(self) -> str:
        return f"over/{self.name}"

    def _check_peers(self) -> None:
        """Checks the liveness of some peers, in rotation.

        Raises:
            GroupLost: A rank has ended, or has aborted.
        """
        if missing_ranks := self._presence.missing_ranks(_PEERS_PER_CHECK):
            raise self._group_lost(missing_ranks, "its process has ended")
        with contextlib.suppress(queue.Empty):
            raise self._group_lost([], f"{p2p.poll(self._key)} has given it up", was_notified=True)

    def _group_lost(self, ranks: Sequence[int], reason: str, *, was_notified: bool = False) -> GroupLost:
        """Ends the group and returns the error to raise. Notifies the other ranks unless `was_notified` is set."""
        self.end(notifies=not was_notified)
        lost_names = self._presence.names(ranks) or "others"
        alternatives_text = ", or one of these," if len(ranks) > 1 else ""
        return GroupLost(
            f"{current().name} lost {lost_names}{alternatives_text} in an update of weights by {self.kind}: {reason}"
        )

    def _wait_for_ranks(self, find_missing: Callable[[], Sequence[int]]) -> None:
        """Waits until no rank is missing."""
        context, pause_s, start_time = current(), _MIN_PAUSE_S, time.monotonic()
        next_check = start_time + _CHECK_INTERVAL_S
        while ranks := find_missing():
            context.check()
            now = time.monotonic()
            if now > next_check:
                self._check_peers()
                next_check = now + _CHECK_INTERVAL_S
            if now - start_time > context.wait_deadline:
                self.end(notifies=True)
                raise DeadlineExceeded(
                    f"{context.name} waited {context.wait_deadline:.0f} s for {self._presence.names(ranks)} in an "
                    f"update of weights by {self.kind}"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    # -- torch's group ----------------------------------------------------------------------------------------------

    def _start_works(
        self, begin_transfers: Callable[[Any], list[Any]], buffers: list[torch.Tensor], peers: Sequence[int]
    ) -> None:
        torch_group = self._get_torch_group()
        self.wait()
        self._buffers, self._peers = buffers, peers
        try:
            async_works = begin_transfers(torch_group)
        except RuntimeError as error:
            raise self._group_lost(peers, str(error).strip().partition("\n")[0]) from error
        self._work = _Works(async_works) if self.kind == "nccl" else _as_future(async_works)

    def _get_torch_group(self) -> Any:
        if self._torch_group is None:
            context, num_ranks = current(), len(self.addresses)
            timeout_s = min(context.wait_deadline, 1800)
            store = ServiceStore(context, self.addresses[0][0], self.name, timeout_s, self.addresses[0][1])
            # Torch waits for all ranks without checking their liveness, so it is called when all are ready.
            store.set(f"at-it-{self._rank}", b"1")
            self._wait_for_ranks(functools.partial(_pending_ranks, store, [*self._presence.peers]))
            timeout_delta = datetime.timedelta(seconds=timeout_s)
            if self.kind == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout_delta
                with _without_watchdog():
                    self._torch_group = dist.ProcessGroupNCCL(store, self._rank, num_ranks, options)
                self.confirm()  # the first collective creates the communicator
                self.wait()
            else:
                self._torch_group = dist.ProcessGroupGloo(store, self._rank, num_ranks, timeout_delta)
        return self._torch_group


class _Works:
    """Handles of operations started with NCCL."""

    def __init__(self, async_works: Sequence[Any]) -> None:
        self._works = async_works

    def done(self) -> bool:
        return all(async_work.is_completed() for async_work in self._works)

    def result(self) -> None:
        for async_work in self._works:
            async_work.wait()
            if not async_work.is_success():
                raise RuntimeError("NCCL has failed")


def _pending_ranks(store: ServiceStore, pending_ranks: list[int]) -> list[int]:
    """Returns the ranks that are not ready yet. Waits at most `_CHECK_INTERVAL_S` for them with one request."""
    try:
        store.wait([f"at-it-{rank}" for rank in pending_ranks], datetime.timedelta(seconds=_CHECK_INTERVAL_S))
        return []
    except DeadlineExceeded:
        missing_keys = set(store.find_missing_keys([f"at-it-{rank}" for rank in pending_ranks]))
        return [rank for rank in pending_ranks if f"at-it-{rank}" in missing_keys]


def _as_future(async_works: Sequence[Any]) -> Future[None]:
    """Returns a future of operations started with gloo. A thread waits for them, because gloo reports the completion of
    point-to-point operations only to a waiter.
    """
    future: Future[None] = Future()

    def wait() -> None:
        try:
            for async_work in async_works:
                async_work.wait()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=wait, name="rlhpc-weights-group", daemon=True).start()
    return future


def _keep_alive(torch_group: Any, async_work: Any, buffers: list[torch.Tensor]) -> None:
    """Keeps a group, and the memory it may write to, alive until its operations end."""
    with contextlib.suppress(BaseException):
        async_work.result()
    del torch_group, buffers


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    previous_setting = os.environ.get(_WATCHDOG)
    os.environ[_WATCHDOG] = "0"
    try:
        yield
    finally:
        os.environ.pop(_WATCHDOG)
        if previous_setting is not None:
            os.environ[_WATCHDOG] = previous_setting
