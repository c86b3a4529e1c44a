"""Ranks that compute on a device of the lane's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhpc import Channel, Worker
from rlhpc.runtime.comm import device_memory
from rlhpc.runtime.comm.context import current
from tests.stand_in_device import StandIn


class OnDevice(Worker):
    """Args: folder of the stand-in's memory, its address (empty: no device), and what else it is made with."""

    def __init__(self, folder: Path, address: str, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.device = StandIn(folder, address, **(options or {})) if address else None
        device_memory.use(self.device)
        self.known: dict[str, Channel] = {}

    def on_device(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.device is None else self.device.tensor(values)

    def message(self, number: int, size: int) -> dict[str, Any]:
        pictures = self.on_device(torch.full((size, 3), number, dtype=torch.uint8))
        return {
            "pictures": pictures, "again": pictures, "state": self.on_device(torch.arange(size) * 0.5 + number),
            "array": np.full(size, number), "note": (number, "text"), "small": torch.tensor([number]),
        }  # fmt: skip

    def form(self, got: dict[str, Any]) -> dict[str, Any]:
        """What came, and which of its tensors are on the device."""
        there = [] if self.device is None else [k for k, v in got.items() if k != "array" and self.held(v)]
        return {**got, "there": there, "same": got["pictures"] is got["again"]}

    def held(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and self.device is not None and self.device.holds(value)

    def put(self, channel: Channel, sizes: list[int], turns: Channel | None = None) -> int:
        """Puts messages, each once the one before has been taken; how many went by the lane."""
        before, channel = self.crossed(), self.known.setdefault(channel.name, channel)
        for number, size in enumerate(sizes):
            channel.put(self.message(number, size))
            if turns is not None:
                turns.get()
        return self.crossed() - before

    def get(self, channel: Channel, count: int, turns: Channel | None = None) -> list[dict[str, Any]]:
        found = []
        for _ in range(count):
            found.append(self.form(channel.get()))
            if turns is not None:
                turns.put(0)
        return found

    def crossed(self) -> int:
        return current().service.device_channel.pool.num_device_messages

    def park(self) -> int:
        current().service.device_channel.park()
        return current().service.device_channel.pool.bytes

    def tell(self, sizes: list[int], group: str, rank: int) -> int:
        before = self.crossed()
        for number, size in enumerate(sizes):
            self.send(self.message(number, size), group, rank)
            self.recv(group, rank)
        return self.crossed() - before

    def hear(self, count: int, group: str, rank: int) -> list[dict[str, Any]]:
        found = []
        for _ in range(count):
            found.append(self.form(self.recv(group, rank)))
            self.send(0, group, rank)
        return found

    def tell_all(self, sizes: list[int], groups: list[tuple[str, list[int]]], src: tuple[str, int]) -> Any:
        before, found = self.crossed(), []
        mine = (self.group_name, self.rank) == src
        for number, size in enumerate(sizes):
            got = self.broadcast(self.message(number, size) if mine else None, groups, src=src)
            found.append(None if mine else self.form(got))
        return self.crossed() - before if mine else found


class OnCard(Worker):
    """Args: the kind of accelerator that it computes on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.ground = torch.randn(512, 512, device=kind)
        self.known: dict[str, Channel] = {}

    def pour(self, channel: Channel, turns: Channel, count: int, size: int) -> int:
        """Puts messages whose making takes the accelerator longer than the host takes to send them; how many crossed."""
        before, channel = (
            current().service.device_channel.num_device_messages,
            self.known.setdefault(channel.name, channel),
        )
        for number in range(count):
            late = self.ground
            for _ in range(20):
                late = (late @ self.ground).clamp(-1, 1)
            values = torch.zeros(size, device=self.kind).add_(late.sum() * 0 + number)
            channel.put({"values": values, "number": number})
            values.fill_(-1)  # the sender goes on
            turns.get()
        return current().service.device_channel.num_device_messages - before

    def drain(self, channel: Channel, turns: Channel, count: int) -> list[tuple[float, float, str]]:
        """The least and the greatest number of each message, and where it came to."""
        found = []
        for _ in range(count):
            values = channel.get()["values"]
            low, high = values.aminmax()
            found.append((low, high, values.device.type))
            turns.put(0)
        return [(float(low), float(high), where) for low, high, where in found]

    def park(self) -> int:
        current().service.device_channel.park()
        return current().service.device_channel.pool.bytes
