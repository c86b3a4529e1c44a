"""What a rank of a trainer holds of a language model, as it is sent to engines part by part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rlhpc.language.tokens.scalar import VALUE_HEAD
from rlhpc.training import lora
from rlhpc.training.contract import Full
from rlhpc.training.merging import merged
from rlhpc.training.mesh import Mesh
from rlhpc.training.regions import Region, named_tensor, regions
from rlhpc.weights.boxes import Box
from rlhpc.weights.reshard import Shard


class _AnyCopy:
    """Who has which copy does not matter here: routes take the rank with the least to send."""

    @staticmethod
    def copies(tensor: torch.Tensor) -> tuple[int, int]:
        return 0, 1


def shards_of(module: nn.Module, full: Full, dtype: torch.dtype) -> list[Shard]:
    """The parts that this rank holds, by the names of the model's files, adapters merged in; all ranks call it.

    Args:
        module: The trained model.
        full: Gathers adapters' own matrices, which are small.
        dtype: As weights are sent.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # gathered weights would be whole, and nobody's part
    factors = lora.factors(module, full)
    found = []
    for region in regions(module, cast(Mesh, _AnyCopy())):
        if region.name.startswith(f"{VALUE_HEAD}."):
            continue  # no engine has one
        box = Box(region.box.start, region.box.shape)
        adapted = factors.get(id(named_tensor(module, region.parameter)))
        values: Callable[[], torch.Tensor] = partial(region.of, module)
        if adapted is not None:
            values = partial(_merged, region, module, box, adapted)
        kept = region.dtype if not region.dtype.is_floating_point else dtype
        found.append(Shard(region.name, region.shape, kept, box, values, region.frozen and adapted is None))
    return found


@torch.no_grad()
def _merged(region: Region, module: nn.Module, box: Box, factors: lora.Factors) -> torch.Tensor:
    """A part of a layer's weight with what its adapters add there: rows of B times columns of A."""
    (first, second), (rows, columns) = box
    if factors.layer.fan_in_fan_out:
        a, b = factors.a[:, first : first + rows], factors.b[second : second + columns]
    else:
        a, b = factors.a[:, second : second + columns], factors.b[first : first + rows]
    value = region.of(module)
    return merged(factors.layer, region.name, value, a, b, factors.scale, (first, second))
