"""What the ranks of the weight tests do; importable by the workers."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from rlhpc import Worker
from rlhpc.runs.device import own_device
from rlhpc.weights import frozen_names, make_sync
from rlhpc.weights.target import apply

RECEIVERS: list[tuple[str, list[int]]] = [("near", [0, 1]), ("far", [0, 1])]


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    made = torch.nn.Sequential(
        torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 300).bfloat16()
    )
    made[0].requires_grad_(False)
    return made


def digest(tensors: Any) -> str:
    """Of names and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors):
        found.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


class Trainer(Worker):
    """Has the weights, changes some of them, and sends them."""

    def open(self, delta: str) -> None:
        self.module = network(0).to(own_device(self))
        self.sync = make_sync("auto", self, (self.group_name, 0), RECEIVERS, delta)

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


class Actor(Worker):
    """Follows a trainer; rank 1 as an engine does that takes in all weights at once."""

    def open(self, delta: str, adopt: bool) -> None:
        self.module, self.adopt = network(1 + self.rank).requires_grad_(False).to(own_device(self)), adopt
        self.whole = self.rank == 1
        self.sync = make_sync("auto", self, ("trainer", 0), RECEIVERS, delta, whole=self.whole)

    def take(self) -> tuple[int, str]:
        if self.whole:
            update = self.sync.receive()
            return update.version, digest(update.tensors)
        version = apply(self.sync, self.module.state_dict().items(), adopt=self.module if self.adopt else None)
        return version, digest(self.module.state_dict().items())
