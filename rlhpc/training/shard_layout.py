"""Shard layout: the slices of checkpoint tensors that a rank holds.

A rank's part of a DTensor is one box (`rlhpc.checkpoint.tensor_slice`) or, where a dimension was cut twice, several.

    regions(module, mesh) → list[Region]: in the module's order, the same on every call; without communication
        .name, .shape, .dtype       the tensor of the checkpoint (its own name: experts are views, tied ones come once)
        .box                        the slice that this rank holds
        .copy, .copies              number of this copy, and of copies on all ranks: exactly one rank has a box's copy 0
        .frozen                     not trained, and no adapter's product is merged into it
        .of(module)                 the values, a view of this rank's memory: write into it, or read it
    boxes(tensor) → list[(Box, Box)]: of a DTensor, or any tensor: in the full tensor, and in the local one

Adapters' own tensors are left out unless `adapters=True`. Their contribution to the layers they belong to is not in these
values, but in those of `pieces` and of `TrainingBackend.pieces`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from rlhpc.checkpoint.tensor_slice import Box, between, cut, full_box
from rlhpc.training.lora import Factors, factors_of, frozen_names, layers_by_weight, merged
from rlhpc.training.mesh import Mesh
from rlhpc.training.parameter_names import ParameterView, checkpoint_parts, plain


def boxes(tensor: torch.Tensor) -> list[tuple[Box, Box]]:
    """Returns the slices of a full tensor on this rank: boxes of it, and the location of each in the local tensor.

    Correct for any placements, uneven shards and dimensions that are cut twice, because torch itself distributes the
    dimension's indices as it did the tensor.
    """
    if not isinstance(tensor, DTensor):
        return [(full_box(tensor.shape), full_box(tensor.shape))]
    runs_by_dim = [
        _runs(size, tensor.device_mesh, tuple(_along(placement, dim, tensor.ndim) for placement in tensor.placements))
        for dim, size in enumerate(tensor.shape)
    ]
    pairs = []
    for runs in product(*runs_by_dim):
        starts, sizes, local_starts = zip(*runs, strict=True) if runs else ((), (), ())
        pairs.append((Box(starts, sizes), Box(local_starts, sizes)))
    return pairs


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor, detached: a view of its memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def copy_full(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copies a full tensor's values into a tensor of which this rank may hold a shard."""
    for box, local_box in boxes(target):
        cut(local_part(target), local_box).copy_(cut(full, box))


def _along(placement: Placement, dim: int, ndim: int) -> Placement:
    """Returns the effect of a placement on one dimension, as a placement of a vector."""
    sharded_dim = getattr(placement, "dim", None)
    if sharded_dim is None or sharded_dim % ndim != dim:
        return Replicate()
    factor = getattr(placement, "split_factor", None)
    vector_placement: Placement = type(placement)(0) if factor is None else type(placement)(0, split_factor=factor)  # type: ignore[call-arg]
    return vector_placement


@lru_cache(maxsize=4096)
def _runs(size: int, mesh: DeviceMesh, along: tuple[Placement, ...]) -> list[tuple[int, int, int]]:
    """Returns the runs of indices along a dimension that are on this rank: (start, size, start in the local tensor)."""
    if all(placement.is_replicate() for placement in along):
        return [(0, size, 0)]
    local_indices = distribute_tensor(torch.arange(size), mesh, along, src_data_rank=None).to_local().cpu()
    if not len(local_indices):
        return []
    breaks = (torch.nonzero(local_indices.diff() != 1).flatten() + 1).tolist()
    edges = list(zip([0, *breaks], [*breaks, len(local_indices)], strict=True))
    return [(int(local_indices[run_start]), run_end - run_start, run_start) for run_start, run_end in edges]


@dataclass(frozen=True)
class Region:
    """Box of a checkpoint's tensor that this rank holds.

    Attributes:
        name: The tensor's name in the checkpoint.
        shape: Shape of the full tensor.
        dtype: Dtype in which it is kept here.
        box: The slice that is here.
        parameter: The module's own name of the tensor that it is a view of.
        index: Index into that tensor's local part.
        copy, copies: Number of this copy, and of copies on all ranks.
        frozen: True if it never changes: it is not trained, and no adapter is merged into it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    parameter: str
    index: tuple[int | slice, ...]
    copy: int
    copies: int
    frozen: bool

    def of(self, module: nn.Module) -> torch.Tensor:
        """Returns the values, of the box's shape: a view of the rank's memory."""
        return self.view(named_tensor(module, self.parameter))

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the same view of another tensor that is cut like the parameter, such as a moment of its optimizer."""
        return local_part(tensor)[self.index]


def named_tensor(module: nn.Module, name: str) -> torch.Tensor:
    """Returns a parameter or buffer by name."""
    holder, _, attribute = name.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(holder), attribute)
    return tensor


def held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and persistent buffers, each tensor once, under the first of its names."""
    ids = set[int]()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in ids:
            ids.add(id(tensor))
            yield name, tensor


def regions(
    module: nn.Module,
    mesh: Mesh,
    *,
    adapters: bool = False,
    is_included: Callable[[str], bool] = lambda name: True,
) -> list[Region]:
    """Returns the regions of a module that this rank holds.

    Args:
        module: Its parameters are DTensors, or replicated on every rank.
        mesh: Mesh that it is sharded over.
        adapters: Whether adapters' own tensors are listed, by the module's names.
        is_included: Selects checkpoint names.

    Raises:
        ConfigError: See `checkpoint_parts`.
    """
    frozen_tensors = frozen_names(module)
    return [
        region
        for name, tensor, views in _checkpoint_views(module, is_included, adapters=adapters)
        for region in regions_of(name, tensor, views, mesh, frozen=plain(name) in frozen_tensors)
    ]


def _checkpoint_views(
    module: nn.Module, is_included: Callable[[str], bool], *, adapters: bool = False
) -> list[tuple[str, torch.Tensor, list[ParameterView]]]:
    """Returns name and tensor of each of a module's tensors, with the included ones of its tensors in a checkpoint."""
    tensors = {name: tensor for name, tensor in held(module) if adapters or ".lora_" not in name}
    views_by_tensor = checkpoint_parts(module, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    return [
        (name, tensor, [view for view in views_by_tensor[name] if is_included(view.name)])
        for name, tensor in tensors.items()
    ]


def regions_of(
    name: str, tensor: torch.Tensor, parts: Sequence[ParameterView], mesh: Mesh | None, *, frozen: bool = False
) -> list[Region]:
    """Returns the regions of one tensor of a module (see `regions`).

    Args:
        name: The module's name of it.
        tensor: The tensor, or the same one with other placements.
        parts: Its tensors in a checkpoint.
        mesh: Mesh that it is sharded over; None if copies are not counted.
        frozen: Whether it never changes.
    """
    copy_index, num_copies = (0, 1) if mesh is None else mesh.copies(tensor)
    return [
        Region(view.name, view.shape, tensor.dtype, overlap[0], name, overlap[1], copy_index, num_copies, frozen)
        for view in parts
        for box, local_box in boxes(tensor)
        if (overlap := within(view.index, box, local_box)) is not None
    ]


def within(
    index: tuple[int | tuple[int, int], ...], box: Box, local: Box
) -> tuple[Box, tuple[int | slice, ...]] | None:
    """Returns the intersection of a box of a module's tensor and a part of it (`ParameterView.index`): as a box of the part,
    and as an index into the local tensor, in which the box lies at `local`; None if it is empty.
    """
    starts, stops, local_index = list[int](), list[int](), list[int | slice]()
    for selector, box_start, box_end, local_start in zip(index, box.starts, box.ends, local.starts, strict=True):
        view_start, view_end = (selector, selector + 1) if isinstance(selector, int) else selector
        overlap_start, overlap_end = max(box_start, view_start), min(box_end, view_end)
        if overlap_start >= overlap_end:
            return None
        if isinstance(selector, int):
            local_index.append(local_start + overlap_start - box_start)
        else:
            starts.append(overlap_start - view_start)
            stops.append(overlap_end - view_start)
            local_index.append(slice(local_start + overlap_start - box_start, local_start + overlap_end - box_start))
    return between(starts, stops), tuple(local_index)


def names_and_shapes(
    module: nn.Module, is_included: Callable[[str], bool] = lambda name: True
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns shape and dtype of every tensor in a checkpoint of a module, in the module's order, without adapters' own."""
    return {
        view.name: (view.shape, tensor.dtype)
        for _, tensor, views in _checkpoint_views(module, is_included)
        for view in views
    }


@torch.no_grad()
def pieces(
    module: nn.Module,
    mesh: Mesh | None,
    full: Callable[[torch.Tensor], torch.Tensor],
    *,
    rows: bool = False,
    is_included: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[Region, Callable[[], torch.Tensor]]]:
    """Yields the boxes that this rank has, with functions that return their values. All ranks iterate over the same tensors
    in the same order.

    Args:
        module: A sharded model, with adapters or without.
        mesh: Mesh that it is sharded over; None if each rank has all of it.
        full: Gathers a full tensor, for adapters.
        rows: Ranks with columns of a matrix exchange them for rows first, one matrix at a time: a box is then one run of
            bytes in a file.
        is_included: Selects checkpoint names.

    Raises:
        RlhpcError: Raised when values are read: adapters are merged into the module's own weights, too.
    """
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()  # gathered weights are not shards
    frozen_tensors, layers = frozen_names(module), layers_by_weight(module)
    for name, tensor, views in _checkpoint_views(module, is_included):
        if not views:
            continue
        layer = layers.get(id(tensor))
        adapted = None if layer is None else factors_of(layer, full)
        sharded = _rows_of(tensor) if rows else tensor
        for region in regions_of(name, sharded, views, mesh, frozen=plain(name) in frozen_tensors):
            if adapted is None:
                yield region, partial(region.view, sharded)
            else:
                yield region, partial(_merge_adapters, region, sharded, adapted)


@torch.no_grad()
def _merge_adapters(region: Region, tensor: torch.Tensor, adapted: Factors) -> torch.Tensor:
    """Returns a part of a layer's weight merged with its adapters: rows of B times columns of A."""
    rows, columns = region.box.slices
    output_indices, input_indices = (columns, rows) if adapted.layer.fan_in_fan_out else (rows, columns)
    a, b = adapted.a[:, input_indices], adapted.b[output_indices]
    return merged(adapted.layer, region.name, region.view(tensor), a, b, adapted.scale, region.box.starts)


def _rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same tensor, cut along its first dimension only."""
    if not isinstance(tensor, DTensor) or tensor.ndim < 2:
        return tensor
    sharded_dims = [getattr(placement, "dim", 0) % tensor.ndim for placement in tensor.placements]
    if not any(sharded_dims):
        return tensor
    placements: list[Any] = [
        Shard(0) if dim else placement for dim, placement in zip(sharded_dims, tensor.placements, strict=True)
    ]
    moved: Any = tensor.detach()
    if moved.device.type != moved.device_mesh.device_type:  # on the host, where the mesh's ranks cannot exchange it
        moved = moved.to(moved.device_mesh.device_type)
    redistributed: torch.Tensor = moved.redistribute(placements=placements)
    return redistributed
