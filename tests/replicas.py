"""A training backend around a module that is there, for tests of what is trained with it."""

from __future__ import annotations

from collections.abc import Callable, Container
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from rlhpc.config.sections import ParallelConfig
from rlhpc.training import ReplicatedBackend
from rlhpc.training.backend import Blueprint, Full, Named


class Ready(Blueprint):
    """A module that is there already."""

    keeps_weights = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def build(self, *, empty: bool = False) -> nn.Module:
        return self.module

    def named_weights(self, module: nn.Module, full: Full, without: Container[str] = ()) -> Named:
        yield from ((name, full(tensor)) for name, tensor in module.state_dict().items())

    def frozen_names(self, module: nn.Module) -> frozenset[str]:
        return frozenset()


def replicated(
    module: nn.Module, optim: Any, reduce: Callable[[torch.Tensor], torch.Tensor] = lambda t: t, ranks: int = 1
) -> ReplicatedBackend:
    """The local backend of one of `ranks` that reduce with `reduce`."""
    actor: Any = SimpleNamespace(optim=optim, parallel=ParallelConfig())
    worker: Any = SimpleNamespace(rank=0, world_size=ranks, accelerators=(), all_reduce=reduce, barrier=lambda: None)
    return ReplicatedBackend(Ready(module), actor, worker)
