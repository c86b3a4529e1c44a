"""What has come to an actor of each prompt: the group of answers, and the columns that other groups make of it."""

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
    """Groups and their columns, by step and position, in whatever order they come.

    A rank that is lost while it hands a group over has sent it to some who wait for it and not to others. The prompt is drawn
    again, and by engines whose tokens depend on company it then has other answers. So columns are kept with the answers that
    they are of; those that are whole first are trained on, and what else comes of the prompt is dropped.

    Args:
        makers: The groups of processes that each send one column.
    """

    def __init__(self, makers: frozenset[str]) -> None:
        self._makers = sorted(makers)
        self._step = 0
        self._groups: dict[_Place, dict[bytes, SampleGroup]] = {}
        self._columns: dict[_Place, dict[bytes, dict[str, torch.Tensor]]] = {}
        self._given: set[_Place] = set()

    def begin(self, step: int) -> None:
        """From now on, what comes of earlier steps is dropped."""
        self._step = step
        self._groups = {place: found for place, found in self._groups.items() if place[0] >= step}
        self._columns = {place: found for place, found in self._columns.items() if place[0] >= step}
        self._given = {place for place in self._given if place[0] >= step}

    def take(self, message: Mapping[str, Any]) -> None:
        """Takes in a message; one about an earlier step, or a prompt whose answers were given away, is dropped."""
        place = message["step"], message["position"]
        if place[0] < self._step or place in self._given:
            return
        if "maker" in message:
            values = torch.from_numpy(np.array(message["values"]))
            self._columns.setdefault(place, {}).setdefault(message["draw"], {})[message["maker"]] = values
        else:
            group = SampleGroup.unpack(dict(message))
            self._groups.setdefault(place, {}).setdefault(group.draw, group)

    def missing(self, step: int, positions: Sequence[int]) -> dict[str, list[int]]:
        """Positions of which something has not come, by who makes it; the groups of answers are by ""."""
        found: dict[str, list[int]] = {}
        for position in positions:
            for maker in self._lacking((step, position)):
                found.setdefault(maker, []).append(position)
        return found

    def whole(self, step: int, position: int) -> tuple[SampleGroup, Mapping[str, torch.Tensor]]:
        """Gives away what has come of a position: the group, and its columns by maker."""
        place = step, position
        groups, columns = self._groups.pop(place), self._columns.pop(place, {})
        self._given.add(place)
        draw = next(draw for draw in groups if columns.get(draw, {}).keys() >= {*self._makers})
        return groups[draw], columns.get(draw, {})

    def clear(self) -> None:
        """Forgets everything."""
        self._step = 0
        self._groups.clear()
        self._columns.clear()
        self._given.clear()

    def _lacking(self, place: _Place) -> list[str]:
        """Who has not sent what they make of a place, for the answers of which most is there."""
        groups, columns = self._groups.get(place, {}), self._columns.get(place, {})
        if not groups:
            return ["", *(maker for maker in self._makers if not any(maker in found for found in columns.values()))]
        return min(
            ([maker for maker in self._makers if maker not in columns.get(draw, {})] for draw in groups), key=len
        )


_MESSAGE, _EMPTY, _LATE = "message", "empty", "late"


class BlockChannel:
    """A channel whose messages to a block's key all its ranks get, in the same order, if all ask in the same order.

    Args:
        channel: The channel.
        worker: The rank.
        sizes: Of the worker's group.
    """

    def __init__(self, channel: Channel, worker: Worker, sizes: MeshSizes) -> None:
        self._channel, self._worker = channel, worker
        self._first = sizes.first_of(sizes.data_of(worker.rank))
        self._others = [self._first + lane for lane in range(1, sizes.block)]
        self.key = str(sizes.data_of(worker.rank))

    def get(self, timeout: float) -> Any:
        """The next message.

        Raises:
            DeadlineExceeded: None came in this time.
        """
        if self._worker.rank != self._first:
            return self._heard()
        try:
            message = self._channel.get(key=self.key, timeout=timeout)
        except DeadlineExceeded as error:
            self._tell(_LATE, str(error))
            raise
        return self._tell(_MESSAGE, message)

    def get_nowait(self) -> Any:
        """The next message.

        Raises:
            QueueEmpty: None is there.
        """
        if self._worker.rank != self._first:
            return self._heard()
        try:
            message = self._channel.get_nowait(key=self.key)
        except QueueEmpty:
            self._tell(_EMPTY, None)
            raise
        return self._tell(_MESSAGE, message)

    def _tell(self, what: str, message: Any) -> Any:
        for rank in self._others:
            self._worker.send((what, message), self._worker.group_name, rank)
        return message

    def _heard(self) -> Any:
        what, message = self._worker.recv(self._worker.group_name, self._first)
        if what == _EMPTY:
            raise QueueEmpty
        if what == _LATE:
            raise DeadlineExceeded(message)
        return message
