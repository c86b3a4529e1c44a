"""Ranks of a process group of weights; importable by the workers."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from rlhpc import Worker
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.process_group import WeightProcessGroup


class GroupRank(Worker):
    """Rank that sends and receives bytes over a group of all ranks of its worker group."""

    def open(self, name: str) -> None:
        addresses = tuple((self.group_name, rank) for rank in range(self.world_size))
        self.group = WeightProcessGroup("gloo", addresses, (self.group_name, self.rank), name)

    def broadcast(self, sizes: list[int]) -> list[list[int]]:
        """Passes buckets from the first rank to the others; returns what this rank has of each."""
        buckets = [self.group.memory(size) for size in sizes]
        for number, bucket in enumerate(buckets):
            if self.rank == 0:
                bucket.copy_(torch.arange(len(bucket), dtype=torch.uint8) + number)
            self.group.broadcast(bucket)
        self.group.confirm()
        self.group.wait()
        return [bucket.tolist() for bucket in buckets]

    def exchange(self) -> dict[int, list[int]]:
        """Sends a number to each other rank; returns what came from each."""
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        received = {rank: self.group.memory(2) for rank in peers}
        sends = [(rank, torch.tensor([self.rank, rank], dtype=torch.uint8)) for rank in peers]
        self.group.exchange(sends, list(received.items()))
        self.group.wait()
        return {rank: tensor.tolist() for rank, tensor in received.items()}

    def error_of_broadcast(self, patience_s: float = 60.0) -> str:
        """Returns the error with which a broadcast ends."""
        current().wait_deadline = patience_s
        try:
            self.broadcast([1 << 20])
        except RlhpcError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    def abort(self) -> None:
        """Takes part in a broadcast, and aborts before the others have confirmed it."""
        self.group.broadcast(self.group.memory(1 << 20))
        self.group.end(notifies=True)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def state(self) -> dict[str, Any]:
        """Returns what the group still holds."""
        return {"group": self.group._torch_group, "buffers": self.group._buffers, "work": self.group._work}
