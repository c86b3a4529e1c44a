"""How far rounding alone moves what a model says: its layers' results are rounded otherwise, again and again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def rounded_otherwise(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """While the block runs, what each layer without layers in it says is off by up to half a unit of the last place of
    `dtype`, as if another kernel had made it. The same numbers are drawn each time; torch's own generators are left alone.

    Args:
        module: Any; its parameters may be sharded.
        dtype: The coarsest that whoever is compared computes in.
    """
    generator, most = torch.Generator().manual_seed(0), torch.finfo(dtype).eps

    def off(layer: nn.Module, given: Any, said: Any) -> Any:
        if not isinstance(said, torch.Tensor) or not said.is_floating_point():
            return None
        by = torch.rand(said.shape, generator=generator).sub_(0.5).mul_(most).to(said.device)
        return (said.float() * (1 + by)).to(said.dtype)

    with ExitStack() as hooks:
        for layer in module.modules():
            if next(layer.children(), None) is None:
                hooks.callback(layer.register_forward_hook(off).remove)
        yield
