"""What a request to a channel's home is answered with: over a socket, or by waking a thread of the same process."""

from __future__ import annotations

import pickle
import queue
from collections.abc import Callable
from typing import Any

from rlhpc.runtime.comm.queues import Item, Outlook, Refusal
from rlhpc.runtime.comm.unix import Connection

#: Sends frames to a peer: over its connection, or by its ZeroMQ identity.
Reply = Callable[[Connection | bytes, list[Any]], None]


class RemoteAnswer:
    """Answers a request that came over a socket."""

    __slots__ = ("number", "outlook", "peer", "reply")

    def __init__(self, reply: Reply, peer: Connection | bytes, number: bytes) -> None:
        self.reply, self.peer, self.number = reply, peer, number
        self.outlook: Outlook | None = None

    @property
    def who(self) -> str:
        """The connection's name: when it closes, what was not acknowledged over it goes back to the queue."""
        return self.peer.name if isinstance(self.peer, Connection) else self.peer.hex()

    def frames(self, *frames: Any) -> None:
        self.reply(self.peer, [self.number, b"ok", *frames])

    def __call__(self, items: list[Item] | str) -> bool:
        if isinstance(self.peer, Connection) and self.peer.closed:
            return False
        if not self.number:
            return True  # posted: nobody is waiting for an answer
        if isinstance(items, str):
            kind = b"refused" if isinstance(items, Refusal) else b"error"
            self.reply(self.peer, [self.number, kind, items.encode()])
            return True
        if self.outlook is not None:
            self.frames(pickle.dumps(tuple(self.outlook)))
            return True
        head = pickle.dumps([(item.number, len(item.frames)) for item in items])
        self.frames(head, *(frame for item in items for frame in item.frames))
        return True


class LocalAnswer:
    """Answers a thread of this process."""

    __slots__ = ("abandoned", "items", "wakes")

    def __init__(self) -> None:
        self.items: list[Item] | str | None = None
        self.abandoned = False
        #: An item here tells the thread to check again.
        self.wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __call__(self, items: list[Item] | str) -> bool:
        if self.abandoned:
            return False
        self.items = items
        self.wakes.put(None)
        return True
