"""Group receiver of an actor: joins each prompt's group with the columns that other groups compute for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlhpc.config.parallel import MeshSizes
from rlhpc.language.rollout.sample_group import SampleGroup
from rlhpc.runtime.channel import Channel, QueueEmpty
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.runtime.worker import Worker

#: Step and position of a prompt.
_Place = tuple[int, int]


class Arrivals:
    """Groups and their columns by step and position, in any order of arrival.

    A rollout rank that is lost while it sends a group may have reached only some of the receivers. The prompt is sampled
    again, and engines whose tokens depend on the batch then give other answers. So columns are stored with their answers.
    The first complete set is trained on; later messages about the prompt are dropped.

    Args:
        makers: Names of the worker groups that each send one column.
    """

    def __init__(self, makers: frozenset[str]) -> None:
        self._makers = sorted(makers)
        self._step = 0
        self._groups: dict[_Place, dict[bytes, SampleGroup]] = {}
        self._columns: dict[_Place, dict[bytes, dict[str, torch.Tensor]]] = {}
        self._delivered: set[_Place] = set()

    def begin(self, step: int) -> None:
        """Starts a step: messages about earlier steps are dropped from now on."""
        self._step = step
        self._groups = {place: draws for place, draws in self._groups.items() if place[0] >= step}
        self._columns = {place: draws for place, draws in self._columns.items() if place[0] >= step}
        self._delivered = {place for place in self._delivered if place[0] >= step}

    def take(self, message: Mapping[str, Any]) -> None:
        """Stores a message; drops one about an earlier step or about a prompt that was already delivered."""
        place = message["step"], message["position"]
        if place[0] < self._step or place in self._delivered:
            return
        if "maker" in message:
            values = torch.from_numpy(np.array(message["values"]))
            self._columns.setdefault(place, {}).setdefault(message["draw"], {})[message["maker"]] = values
        else:
            group = SampleGroup.unpack(dict(message))
            self._groups.setdefault(place, {}).setdefault(group.draw, group)

    def missing(self, step: int, positions: Sequence[int]) -> dict[str, list[int]]:
        """Returns the positions with missing messages, by worker group; missing groups of answers stand under ""."""
        positions_by_maker: dict[str, list[int]] = {}
        for position in positions:
            for maker in self._lacking((step, position)):
                positions_by_maker.setdefault(maker, []).append(position)
        return positions_by_maker

    def pop_complete(self, step: int, position: int) -> tuple[SampleGroup, Mapping[str, torch.Tensor]]:
        """Removes and returns a complete position: the group, and its columns by worker group."""
        place = step, position
        groups, columns = self._groups.pop(place), self._columns.pop(place, {})
        self._delivered.add(place)
        draw = next(draw for draw in groups if columns.get(draw, {}).keys() >= {*self._makers})
        return groups[draw], columns.get(draw, {})

    def clear(self) -> None:
        """Removes everything."""
        self._step = 0
        self._groups.clear()
        self._columns.clear()
        self._delivered.clear()

    def _lacking(self, place: _Place) -> list[str]:
        """Returns the worker groups whose message is missing, for the answers that lack the fewest."""
        groups, columns = self._groups.get(place, {}), self._columns.get(place, {})
        if not groups:
            return [
                "",
                *(
                    maker
                    for maker in self._makers
                    if not any(maker in columns_by_maker for columns_by_maker in columns.values())
                ),
            ]
        return min(
            ([maker for maker in self._makers if maker not in columns.get(draw, {})] for draw in groups), key=len
        )


_MESSAGE, _EMPTY, _TIMEOUT = "message", "empty", "late"


class BlockChannel:
    """Channel of a model-parallel block: all ranks of the block get each message under its key, in the same order, if
    they call the methods in the same order.

    Args:
        channel: The channel.
        worker: The rank.
        sizes: Mesh sizes of the worker's group.
    """

    def __init__(self, channel: Channel, worker: Worker, sizes: MeshSizes) -> None:
        self._channel = channel
        self._worker = worker
        self._first = sizes.first_of(sizes.data_of(worker.rank))
        self._followers = [self._first + lane for lane in range(1, sizes.block)]
        self.key = str(sizes.data_of(worker.rank))

    def get(self, timeout: float) -> Any:
        """Returns the next message.

        Raises:
            DeadlineExceeded: No message arrived within `timeout` seconds.
        """
        if self._worker.rank != self._first:
            return self._receive_forwarded()
        try:
            message = self._channel.get(key=self.key, timeout=timeout)
        except DeadlineExceeded as error:
            self._tell(_TIMEOUT, str(error))
            raise
        return self._tell(_MESSAGE, message)

    def get_nowait(self) -> Any:
        """Returns the next message if one is there.

        Raises:
            QueueEmpty: The channel has no message for the block.
        """
        if self._worker.rank != self._first:
            return self._receive_forwarded()
        try:
            message = self._channel.get_nowait(key=self.key)
        except QueueEmpty:
            self._tell(_EMPTY, None)
            raise
        return self._tell(_MESSAGE, message)

    def _tell(self, status: str, message: Any) -> Any:
        for rank in self._followers:
            self._worker.send((status, message), self._worker.group_name, rank)
        return message

    def _receive_forwarded(self) -> Any:
        status, message = self._worker.recv(self._worker.group_name, self._first)
        if status == _EMPTY:
            raise QueueEmpty
        if status == _TIMEOUT:
            raise DeadlineExceeded(message)
        return message
