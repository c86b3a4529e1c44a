"""What the ranks of the weight tests do; importable by the workers."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from rlhpc import Worker
from rlhpc.runs.device import worker_device
from rlhpc.runtime.comm import device_memory
from rlhpc.runtime.comm.context import current
from rlhpc.weights import frozen_names, make_sync
from rlhpc.weights.receiver import TransferTotals, apply, transfer_metrics
from rlhpc.weights.transport import BroadcastSync, GlooSync
from tests.stand_in_device import StandIn

#: The trainer's accelerator.
CARD = "stand-in"
RECEIVERS: list[tuple[str, list[int]]] = [("near", [0, 1]), ("far", [0, 1])]


class InParts(BroadcastSync):
    """In parts of which these networks have several."""

    chunk_bytes = 64 << 10


class ByGroup(InParts, GlooSync):
    """Over a process group, as between accelerators."""


def network(seed: int, sync: str) -> torch.nn.Module:
    torch.manual_seed(seed)
    more = [torch.nn.Linear(300, 300).bfloat16() for _ in range(0 if sync == "auto" else 20)]
    made = torch.nn.Sequential(
        torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 300).bfloat16(), *more
    )
    made[0].requires_grad_(False)
    return made


def on_card(folder: str, address: str = CARD) -> Any:
    """Has this process compute on a stand-in for an accelerator, whose memory is in a folder; or on none again.

    Another than the trainer's can read that one's memory.
    """
    device = StandIn(Path(folder), address, peers=(CARD,)) if folder else None
    device_memory.use(device)
    return device


def digest(tensors: Any) -> str:
    """Of names and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors):
        found.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


class Trainer(Worker):
    """Has the weights, changes some of them, and sends them."""

    def open(self, delta: str, sync: str = "auto", card: str = "", to: Any = RECEIVERS) -> None:
        self.module = network(0, sync).to(worker_device(self))
        device = on_card(card)
        for tensor in self.module.state_dict(keep_vars=True).values() if device else ():
            tensor.data = device.tensor(tensor.data)
        self.sync = make_sync(sync, self, (self.group_name, 0), to, delta)

    def open_pair(self, card: str) -> None:
        """Sends to the receiver of the same rank, which has the same accelerator, and waits for it, because buffers may take
        less than half of a version, and less than its largest weight (360 kB)."""
        device = on_card(card, f"{CARD}-{self.rank}")
        device.budget = 4 * InParts.chunk_bytes
        self.module = network(0, "parts")
        for tensor in self.module.state_dict(keep_vars=True).values():
            tensor.data = device.tensor(tensor.data)
        self.sync = InParts(self, (self.group_name, self.rank), [("near", [self.rank])], "off")
        self.sync.require_readers()

    def send(self, version: int, part: float) -> str:
        """Changes about this part of the elements of what is trained.

        Returns:
            The digest of what receivers should have now.
        """
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.requires_grad:
                    chosen = torch.rand(parameter.shape, generator=generator) < part
                    parameter.add_(chosen.to(parameter.device), alpha=0.5)
        self.sync.send(version, self.module.state_dict().items(), frozen=frozen_names(self.module))
        return digest(self.module.state_dict().items())

    def has_patience(self, seconds: float) -> None:
        current().wait_deadline = seconds

    def carried(self) -> tuple[int, int]:
        """Parts that were in no segment; bytes of the buffers on the card."""
        return self.sync._endpoint.transport.num_staged, current().service.device_channel.pool.bytes  # type: ignore[attr-defined]


class Actor(Worker):
    """Follows a trainer; rank 1 as an engine does that takes in all weights at once."""

    def __init__(self) -> None:
        super().__init__()
        self.totals = TransferTotals()

    def open(self, delta: str, adopt: bool, sync: str = "auto", card: str = "", address: str = CARD) -> None:
        on_card(card, address)
        self.module, self.adopt = network(1 + self.rank, sync).requires_grad_(False).to(worker_device(self)), adopt
        self.whole = self.rank == 1
        self.sync = make_sync(sync, self, ("trainer", 0), RECEIVERS, delta, complete_updates=self.whole)

    def open_pair(self, card: str) -> None:
        """Receives from the trainer of the same rank."""
        on_card(card, f"{CARD}-{self.rank}")
        self.module, self.adopt, self.whole = network(1 + self.rank, "parts").requires_grad_(False), False, False
        self.sync = InParts(self, ("trainer", self.rank), [("near", [self.rank])], "off")

    def take_late(self, seconds: float) -> tuple[int, str]:
        """Takes the next version, but has something else to do before."""
        time.sleep(seconds)
        return self.take()

    def take(self) -> tuple[int, str]:
        if self.whole:
            update = self.sync.receive()
            return update.version, digest(update.tensors)
        adopt = self.module if self.adopt else None
        version = apply(self.sync, self.module.state_dict().items(), adopt=adopt, totals=self.totals)
        return version, digest(self.module.state_dict().items())

    def roads(self) -> dict[str, float]:
        """The metrics of the versions since the last call."""
        return transfer_metrics([self.totals.pop()])

    def fall(self, how: str) -> None:
        """Begins with a version, and in the middle of it breaks off, dies, or does nothing more."""
        if how == "stalls":
            self.sync._endpoint._transport.receive = lambda *_: time.sleep(10)  # type: ignore[attr-defined]
        for number, _ in enumerate(self.sync.receive().tensors):
            if number == 0:  # the sender does not get far without it, and the others begin, too
                time.sleep(1)
            if number == 30:
                break
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        self.sync.forget()
