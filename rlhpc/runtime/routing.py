"""Routed messages between two worker groups: each rank's part of a batch goes to the ranks that own the same rows.

The rows of a global batch belong to the ranks of each group in rank order, in equal parts. `send_to` splits a rank's rows by
their owners in the other group. `recv_from` merges the parts that the other group's ranks sent for this rank's rows. In
decoupled mode, any rank may take a request from the channel; the reply goes back to the rank that sent the request.

The driver imports this module, so the module imports torch only when a rank splits or merges a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhpc.runtime.channel import Channel
from rlhpc.runtime.comm.background import AsyncWork, JoinedWork
from rlhpc.runtime.comm.context import current


class Route(NamedTuple):
    """Route of a part of a batch between two ranks.

    Attributes:
        peer_rank: Rank at the other end.
        num_rows: Rows of the part.
    """

    peer_rank: int
    num_rows: int


class RoutedRequest(NamedTuple):
    """Part of a batch in decoupled mode, with the address for the reply.

    Attributes:
        batch: The rows.
        sender_rank: Rank that sent the part.
        part: Index of the part among those of its batch.
        reply_tag: Tag of the reply.
    """

    batch: Any
    sender_rank: int
    part: int
    reply_tag: str


class RequestOrigin(NamedTuple):
    """Address for the reply to a request, and its number of rows; see `RoutedRequest`."""

    sender_rank: int
    part: int
    reply_tag: str
    num_rows: int


def routes(batch_size: int, rank: int, world_size: int, peer_world_size: int) -> list[Route]:
    """Returns the ranks of the other group that own the same rows of a batch as this rank, in rank order.

    The result is the same for a sender and for a receiver.

    Raises:
        ValueError: The batch does not divide into equal parts for the ranks of each group.
    """
    for num_ranks in (world_size, peer_world_size):
        if batch_size < 1 or batch_size % num_ranks:
            raise ValueError(
                f"batch_size is {batch_size}; it must be a positive multiple of the ranks of both groups "
                f"({world_size} and {peer_world_size})"
            )
    rows_per_rank, rows_per_peer = batch_size // world_size, batch_size // peer_world_size
    first_row, last_row = rank * rows_per_rank, (rank + 1) * rows_per_rank - 1
    return [
        Route(peer, min(last_row, (peer + 1) * rows_per_peer - 1) - max(first_row, peer * rows_per_peer) + 1)
        for peer in range(first_row // rows_per_peer, last_row // rows_per_peer + 1)
    ]


def count_rows(batch: Any) -> int:
    """Returns the number of rows of a batch: a tensor, an array, a list, or a mapping with such values.

    Raises:
        ValueError: The batch is of a different type, or a mapping without such a value.
    """
    import numpy as np
    import torch

    if isinstance(batch, (torch.Tensor, np.ndarray)) and batch.ndim:
        return int(batch.shape[0])
    if isinstance(batch, list):
        return len(batch)
    if isinstance(batch, dict):
        columns = [
            column_value
            for column_value in batch.values()
            if isinstance(column_value, (torch.Tensor, np.ndarray, list, dict))
        ]
        if columns:
            return count_rows(columns[0])
    raise ValueError(
        f"the rows of a {type(batch).__name__} cannot be counted; give batch_size, or another function for it"
    )


def split_batch(batch: Any, part_sizes: Sequence[int]) -> list[Any]:
    """Splits a batch into parts of the given numbers of rows; a number, a text and None are in each part.

    Raises:
        ValueError: The batch is of an unknown type, or has a different number of rows; give `split_fn`.
    """
    import numpy as np
    import torch

    if batch is None or isinstance(batch, (bool, int, float, str)):
        return [batch for _ in part_sizes]
    if isinstance(batch, dict):
        columns = {key: split_batch(column_value, part_sizes) for key, column_value in batch.items()}
        return [{key: column_parts[index] for key, column_parts in columns.items()} for index in range(len(part_sizes))]
    if not isinstance(batch, (torch.Tensor, np.ndarray, list)):
        raise ValueError(f"a {type(batch).__name__} cannot be split; give split_fn")
    if (num_rows := count_rows(batch)) != sum(part_sizes):
        raise ValueError(f"a batch of {num_rows} rows was to be split into parts of {list(part_sizes)} rows")
    part_ends = np.cumsum(part_sizes).tolist()
    batch_parts = [
        batch[part_end - part_size : part_end] for part_size, part_end in zip(part_sizes, part_ends, strict=True)
    ]
    return [
        batch_part.contiguous() if isinstance(batch_part, torch.Tensor) else batch_part for batch_part in batch_parts
    ]


def merge_batches(batches: Sequence[Any]) -> Any:
    """Merges parts that `split_batch` has made, in order.

    Raises:
        ValueError: The parts are of different or unknown types; give `merge_fn`.
    """
    import numpy as np
    import torch

    first_batch = batches[0]
    if len(batches) == 1:
        return first_batch
    type_names = sorted({type(batch).__name__ for batch in batches})
    if len(type_names) > 1:
        raise ValueError(f"parts of different types cannot be merged: {', '.join(type_names)}; give merge_fn")
    if isinstance(first_batch, torch.Tensor):
        return torch.cat(list(batches))
    if isinstance(first_batch, np.ndarray):
        return np.concatenate(list(batches))
    if isinstance(first_batch, list):
        return [row for batch in batches for row in batch]
    if isinstance(first_batch, dict):
        if any(batch.keys() != first_batch.keys() for batch in batches):
            raise ValueError(
                f"parts with different keys cannot be merged: {[sorted(map(str, batch)) for batch in batches]}"
            )
        return {key: merge_batches([batch[key] for batch in batches]) for key in first_batch}
    if all(
        batch == first_batch or (batch != batch and first_batch != first_batch) for batch in batches
    ):  # NaN is the same as NaN
        return first_batch
    raise ValueError(f"different values of type {type_names[0]} cannot be merged; give merge_fn")


class RoutedMessages:
    """Base class of workers that exchange batches with another group, whose number of ranks may differ.

    Attributes:
        batch_router: Open requests in decoupled mode, by tag. A rank that answers requests sets `{tag: []}` for their tags.
    """

    group_name: str
    rank: int
    world_size: int

    def __init__(self) -> None:
        self.batch_router: dict[str, list[RequestOrigin]] = {}

    if TYPE_CHECKING:  # methods of `Worker`

        def send(self, obj: Any, dst_group_name: str, dst_rank: int, async_op: bool = False) -> AsyncWork | None: ...

        def recv(self, src_group_name: str, src_rank: int, async_op: bool = False) -> Any: ...

    def send_to(
        self,
        group_name: str,
        channel: Channel | None,
        data: Any,
        *,
        route_key: Any = None,
        mode: str | None = None,
        tag: str | None = None,
        async_op: bool = False,
        batch_size: int | None = None,
        split_fn: Callable[[Any, list[int]], list[Any]] | None = None,
        enable_p2p: bool = False,
        decoupled_mode: bool = False,
        send_queue_size: int = 0,
    ) -> AsyncWork | None:
        """Sends this rank's rows of a batch to the ranks of a group that own the same rows; they call `recv_from`.

        Args:
            group_name: Group that receives.
            channel: Channel between the groups; None with `enable_p2p`.
            data: This rank's rows: tensors, arrays, lists, or mappings of them; with `split_fn` anything.
            route_key: Stream of the message, such as a pipeline stage; streams do not mix.
            mode: Phase such as `train`, put before the tag: `recv_from` is called with `tag="train_<tag>"`. In decoupled mode,
                the reply has this tag, and the request has `tag` alone.
            tag: Kind of message; kinds do not mix.
            async_op: Return an `AsyncWork` at once.
            batch_size: Rows of all ranks of this group; by default `world_size` times the rows of `data`.
            split_fn: Splits `data` into parts, given their numbers of rows.
            enable_p2p: Send with `send` instead of through a channel. Messages then arrive in the order in which they were
                sent, whatever their tags and streams.
            decoupled_mode: Let any rank of the group take each part; as a reply, send each part to the rank whose request it
                answers. `data` is a reply if `batch_router` has the tag.
            send_queue_size: Number of parts of a request; 0 is one for each receiver that a sender has.

        Raises:
            ValueError: The rows do not divide among the ranks, or nothing has been requested.
        """
        self._check_way(channel, enable_p2p, decoupled_mode)
        num_peers, reply_tag = current().group_size(group_name), "_".join(filter(None, (mode, tag)))

        def split(part_sizes: list[int]) -> list[Any]:
            return split_batch(data, part_sizes) if split_fn is None else split_fn(data, part_sizes)

        def make_key(message_tag: str | None, src_rank: int | str, dst_rank: int | str) -> str:
            return _make_queue_key(self.group_name, group_name, message_tag, route_key, src_rank, dst_rank)

        if decoupled_mode and (tag or "") in self.batch_router:
            origins, self.batch_router[tag or ""] = self.batch_router[tag or ""], []
            if not origins:
                raise ValueError(
                    f"send_to: {self.group_name}-{self.rank} has received no request with tag {tag!r} to reply to"
                )
            batch_parts = [
                RoutedRequest(batch_part, origin.sender_rank, origin.part, origin.reply_tag)
                for batch_part, origin in zip(split([origin.num_rows for origin in origins]), origins, strict=True)
            ]
            targets = [(origin.sender_rank, make_key(origin.reply_tag, "", origin.sender_rank)) for origin in origins]
        else:
            num_rows_total = count_rows(data) * self.world_size if batch_size is None else batch_size
            if decoupled_mode:
                batch_parts = [
                    RoutedRequest(batch_part, self.rank, index, reply_tag)
                    for index, batch_part in enumerate(
                        split(_list_decoupled_sizes(num_rows_total, self.world_size, num_peers, send_queue_size))
                    )
                ]
                targets = [(0, make_key(tag, "", ""))] * len(batch_parts)
            else:
                planned_routes = routes(num_rows_total, self.rank, self.world_size, num_peers)
                batch_parts = split([planned_route.num_rows for planned_route in planned_routes])
                targets = [
                    (planned_route.peer_rank, make_key(reply_tag, self.rank, planned_route.peer_rank))
                    for planned_route in planned_routes
                ]
        async_works: list[AsyncWork] = []
        for batch_part, (peer_rank, queue_key) in zip(batch_parts, targets, strict=True):
            if channel is None or enable_p2p:
                async_work = self.send(batch_part, group_name, peer_rank, async_op)
            else:
                async_work = channel.put(batch_part, key=queue_key, async_op=async_op)
            async_works += [async_work] if async_work is not None else []
        return JoinedWork(async_works, lambda _: None) if async_op else None

    def recv_from(
        self,
        group_name: str,
        channel: Channel | None,
        *,
        route_key: Any = None,
        tag: str | None = None,
        async_op: bool = False,
        batch_size: int | None = None,
        merge_fn: Callable[[list[Any]], Any] | None = None,
        infer_batch_size_fn: Callable[[Any], int] | None = None,
        enable_p2p: bool = False,
        decoupled_mode: bool = False,
        recv_queue_size: int = 0,
    ) -> Any:
        """Receives this rank's rows of a batch, which the ranks of a group send with `send_to`, and merges them in order.

        Args:
            group_name: Group that sends.
            channel: Channel between the groups; None with `enable_p2p`.
            route_key, tag: As for `send_to`.
            async_op: Return an `AsyncWork` at once.
            batch_size: Rows of all ranks, to check the numbers of received rows; by default they are not checked.
            merge_fn: Merges the received parts.
            infer_batch_size_fn: Returns the number of rows of a part.
            enable_p2p: Receive with `recv`, as the sender sends.
            decoupled_mode: As for `send_to`. If `batch_router` has the tag, this rank receives requests and notes where they
                came from, and otherwise the replies to its own requests.
            recv_queue_size: Number of requests to wait for and merge; 0 is as many as there are senders for each receiver.
                Senders may end at different times. With more than 1, the last requests can then be too few for every
                receiver that waits.

        Raises:
            ValueError: A part has a different number of rows than `batch_size` implies.
        """
        self._check_way(channel, enable_p2p, decoupled_mode)
        num_peers = current().group_size(group_name)
        if decoupled_mode:
            rank = "" if (tag or "") in self.batch_router else self.rank
            num_rows_total = math.lcm(self.world_size, num_peers) if batch_size is None else batch_size
            # the other side's parts: a receiver of requests gets as many as it has senders
            part_sizes = _list_decoupled_sizes(num_rows_total, self.world_size, num_peers, recv_queue_size)
            receive_sources = [
                (0, _make_queue_key(group_name, self.group_name, tag, route_key, "", rank)) for _ in part_sizes
            ]
        else:
            num_rows_total = math.lcm(self.world_size, num_peers) if batch_size is None else batch_size
            planned_routes = routes(num_rows_total, self.rank, self.world_size, num_peers)
            part_sizes = [planned_route.num_rows for planned_route in planned_routes]
            receive_sources = [
                (
                    planned_route.peer_rank,
                    _make_queue_key(group_name, self.group_name, tag, route_key, planned_route.peer_rank, self.rank),
                )
                for planned_route in planned_routes
            ]
        expected_sizes = part_sizes if batch_size is not None else None
        count_batch = infer_batch_size_fn or count_rows

        def finish(received_parts: list[Any]) -> Any:
            batch_parts = (
                self._note_requests(tag or "", received_parts, count_batch) if decoupled_mode else received_parts
            )
            for batch_part, num_rows in zip(batch_parts, expected_sizes or (), strict=False):
                if (actual_rows := count_batch(batch_part)) != num_rows:
                    raise ValueError(
                        f"recv_from({group_name!r}, tag={tag!r}): {actual_rows} rows came where batch_size={batch_size} "
                        f"of {num_peers} and {self.world_size} ranks implies {num_rows}"
                    )
            return merge_fn(batch_parts) if merge_fn is not None else merge_batches(batch_parts)

        if channel is None or enable_p2p:
            received_parts = [self.recv(group_name, peer_rank, async_op) for peer_rank, _ in receive_sources]
        else:
            received_parts = [channel.get(key=key, async_op=async_op) for _, key in receive_sources]
        return JoinedWork(received_parts, finish) if async_op else finish(received_parts)

    def _note_requests(
        self, tag: str, received_requests: Sequence[RoutedRequest], count_batch: Callable[[Any], int]
    ) -> list[Any]:
        """Returns the batches of requests, whose origins it notes, or those of replies in the order of their parts."""
        if tag in self.batch_router:
            self.batch_router[tag] += [
                RequestOrigin(request.sender_rank, request.part, request.reply_tag, count_batch(request.batch))
                for request in received_requests
            ]
            return [request.batch for request in received_requests]
        return [request.batch for request in sorted(received_requests, key=lambda request: request.part)]

    @staticmethod
    def _check_way(channel: Channel | None, enable_p2p: bool, decoupled_mode: bool) -> None:
        if channel is None and not enable_p2p:
            raise ValueError("send_to and recv_from need a channel, or enable_p2p=True")
        if decoupled_mode and enable_p2p:
            raise ValueError(
                "decoupled_mode needs a channel, from which any rank can take a request; leave out enable_p2p"
            )


def _make_queue_key(
    src_group: str, dst_group: str, tag: str | None, route_key: Any, src_rank: int | str, dst_rank: int | str
) -> str:
    """Returns the key of the queue for messages of a kind between two ranks; "" instead of a rank means any."""
    stream = "" if route_key is None else route_key
    return f"route/{src_group}/{dst_group}/{tag or ''}/{stream}/{src_rank}/{dst_rank}"


def _list_decoupled_sizes(batch_size: int, world_size: int, peer_world_size: int, max_parts: int) -> list[int]:
    """Returns the numbers of rows of the parts that one rank sends, or receives, in decoupled mode.

    Raises:
        ValueError: The batch does not divide among the ranks of the larger group, or `max_parts` is larger than the number of
            peers of a rank.
    """
    larger = max(world_size, peer_world_size)
    if batch_size < 1 or batch_size % larger:
        raise ValueError(
            f"batch_size is {batch_size}; it must be a positive multiple of the larger group's {larger} ranks"
        )
    num_parts = max(1, peer_world_size // world_size)
    if max_parts > num_parts:
        raise ValueError(
            f"the queue size is {max_parts}; a rank has {num_parts} peers of {peer_world_size}, so it is at most that"
        )
    return [batch_size // larger] * (max_parts or num_parts)
