"""What the ranks of a block hear: they train on the same samples, which come to the first of them."""

from __future__ import annotations

from typing import Any

from rlhpc.config.parallel import Sizes
from rlhpc.runtime.channel import Channel, QueueEmpty
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.runtime.worker import Worker

_MESSAGE, _EMPTY, _LATE = "message", "empty", "late"


class BlockChannel:
    """A channel whose messages to a block's key all its ranks get, in the same order, if all ask in the same order.

    Args:
        channel: The channel.
        worker: The rank.
        sizes: Of the worker's group.
    """

    def __init__(self, channel: Channel, worker: Worker, sizes: Sizes) -> None:
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
