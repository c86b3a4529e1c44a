"""Ranks that give and take, and may be lost."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from rlhpc import Channel, Worker
from rlhpc.runtime.comm.context import current

RANKS = [("lossy", [0, 1])]


class Loser(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []

    def pid(self) -> int:
        return os.getpid()

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    def take(self, item: Any) -> None: ...

    def give(self, how: str, count: int, size: int, channel: Channel | None) -> None:
        """Sends to rank 1 of the others, or to both by broadcast."""
        for _ in range(count):
            item = np.ones(size, np.uint8)
            if how == "send":
                self.send(item, "lossy", 1)
            elif how == "put":
                assert channel is not None
                channel.put(item, key="0")
            else:
                self.broadcast(item, RANKS, (self.group_name, self.rank))

    def settle(self, size: int) -> None:
        """Sends to itself, so that its segments are looked through."""
        for _ in range(8):
            self.send(np.ones(size, np.uint8), self.group_name, self.rank)
            self.recv(self.group_name, self.rank)

    def hold(self, count: int) -> None:
        self.held = [self.recv("stays", 0) for _ in range(count)]

    def receive(self, count: int) -> int:
        return sum(int(self.recv("stays", 0).sum()) for _ in range(count))

    def receive_broadcasts(self, count: int) -> int:
        return sum(int(self.broadcast(None, RANKS, ("stays", 0)).sum()) for _ in range(count))

    def get(self, channel: Channel) -> Any:
        return channel.get()

    def getters(self, name: str) -> int:
        """How many wait for an item of a channel that is kept here."""
        service = current().service
        with service.lock:
            return sum(len(queue.getters) for queue in service.channel(name).queues.values())

    def put_small(self, channel: Channel, count: int) -> int:
        for number in range(count):
            channel.put(number)
        return count

    def cache_attributes(self) -> None:
        """From now on a file's attributes are what they were when they were first asked for."""
        stat, cached = os.stat, dict[Any, Any]()

        def cached_stat(path: Any, *args: Any, **options: Any) -> Any:
            if not str(path).endswith(".json"):
                return stat(path, *args, **options)
            if path not in cached:
                cached[path] = stat(path, *args, **options)
            return cached[path]

        os.stat = cached_stat  # type: ignore[assignment]
