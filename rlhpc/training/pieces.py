"""What a rank has of a model's weights as checkpoints and engines want them: box by box, adapters merged, nothing gathered.

pieces(module, mesh, full) → (Region, what gives its values) one at a time; all ranks iterate to the end, because adapters'
factors, which are small, are made whole for each layer. The values are a view of the rank's memory, or new ones where an
adapter is merged (`TrainingBackend.pieces` gives them in the dtype of the computation).
names_and_shapes(module) → of every tensor of the checkpoint, on whatever rank its parts are
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from rlhpc.training.lora import Factors, factors_of, frozen_names, layers_by_weight
from rlhpc.training.merging import merged
from rlhpc.training.mesh import Mesh
from rlhpc.training.names import checkpoint_parts, plain
from rlhpc.training.regions import Region, held, regions_of


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in held(module) if ".lora_" not in name}


def names_and_shapes(
    module: nn.Module, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor in a checkpoint of a module, in the module's order, without adapters' own."""
    tensors = _own(module)
    parts = checkpoint_parts(module, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    return {
        part.name: (part.shape, tensor.dtype)
        for name, tensor in tensors.items()
        for part in parts[name]
        if wanted(part.name)
    }


@torch.no_grad()
def pieces(
    module: nn.Module,
    mesh: Mesh | None,
    full: Callable[[torch.Tensor], torch.Tensor],
    *,
    rows: bool = False,
    wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[Region, Callable[[], torch.Tensor]]]:
    """The boxes that this rank has, with what gives their values. All ranks iterate, over the same tensors in the same order.

    Args:
        module: A divided model, with adapters or without.
        mesh: How it is divided; None if each rank has all of it.
        full: Makes a tensor whole: for adapters.
        rows: Ranks that have columns of a matrix exchange them for rows first, a matrix at a time: a box is then one run of
            bytes in a file.
        wanted: Of which checkpoint names.

    Raises:
        RlhpcError: Asked for the values: adapters are merged into the module's own weights, too.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # gathered weights would be whole, and nobody's part
    tensors = _own(module)
    parts = checkpoint_parts(module, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    constant, layers = frozen_names(module), layers_by_weight(module)
    for name, tensor in tensors.items():
        chosen = [part for part in parts[name] if wanted(part.name)]
        if not chosen:
            continue
        layer = layers.get(id(tensor))
        adapted = None if layer is None else factors_of(layer, full)
        cut = _rows_of(tensor) if rows else tensor
        for region in regions_of(name, cut, chosen, mesh, frozen=plain(name) in constant):
            yield region, partial(region.view, cut) if adapted is None else partial(_merged, region, cut, adapted)


@torch.no_grad()
def _merged(region: Region, tensor: torch.Tensor, adapted: Factors) -> torch.Tensor:
    """A part of a layer's weight with what its adapters add there: rows of B times columns of A."""
    rows, columns = region.box.slices
    out, into = (columns, rows) if adapted.layer.fan_in_fan_out else (rows, columns)
    a, b = adapted.a[:, into], adapted.b[out]
    return merged(adapted.layer, region.name, region.view(tensor), a, b, adapted.scale, region.box.starts)


def _rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, cut along its first dimension alone."""
    if not isinstance(tensor, DTensor) or tensor.ndim < 2:
        return tensor
    other = [getattr(one, "dim", 0) % tensor.ndim for one in tensor.placements]
    if not any(other):
        return tensor
    placements: list[Any] = [Shard(0) if dim else one for dim, one in zip(other, tensor.placements, strict=True)]
    moved: Any = tensor.detach()
    if moved.device.type != moved.device_mesh.device_type:  # on the host, where the mesh's ranks cannot exchange it
        moved = moved.to(moved.device_mesh.device_type)
    found: torch.Tensor = moved.redistribute(placements=placements)
    return found
