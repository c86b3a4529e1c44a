"""A layer that is trained in float16, for the tests of backends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from rlhpc.config.sections import DeepspeedConfig, FsdpConfig, GradScalerConfig, OptimConfig, ParallelConfig
from rlhpc.training.backend import Blueprint


class HalfBlueprint(Blueprint):
    """A layer that computes in float16."""

    dtype = torch.float16

    def build(self, *, empty: bool = False) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    def named_weights(self, module: Any, full: Any, excluded_names: Any = ()) -> Any:
        yield from ((name, full(tensor)) for name, tensor in module.named_parameters())

    def frozen_names(self, module: nn.Module) -> frozenset[str]:
        return frozenset()


def actor(scale: float = 64.0, interval: int = 1, *, stage: int = 2) -> Any:
    """The section `actor`, with clipping."""
    return SimpleNamespace(
        training_backend="local", optim=OptimConfig(clip_grad=0.5), fsdp=FsdpConfig(),
        deepspeed=DeepspeedConfig(zero_stage=stage), parallel=ParallelConfig(),
        grad_scaler=GradScalerConfig(init_scale=scale, growth_interval=interval),
    )  # fmt: skip


def batches(*factors: float) -> list[torch.Tensor]:
    """Inputs, whose gradients overflow with a factor of 1e4."""
    return [torch.linspace(-1, 1, 8).reshape(2, 4) * factor for factor in factors]


def loss(module: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    value = module(batch.half()).float().square().mean()
    return value, {"loss": value}
