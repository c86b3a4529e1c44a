"""Shard layout: the slices of checkpoint tensors that a rank holds.

A rank holds one box of a DTensor (`rlhpc.checkpoint.tensor_slice`), or several boxes if a dimension is cut twice.

    regions(module, mesh) → list[Region]: in the module's order, the same on every call; without communication
        .name, .shape, .dtype       the checkpoint tensor (each expert's matrix has a name; tied tensors are listed once)
        .box                        the slice that this rank holds
        .copy, .copies              number of this copy, and number of copies on all ranks; one rank holds copy 0 of a box
        .frozen                     True if the tensor is not trained and no adapter is merged into it
        .of(module)                 the values, as a view of this rank's memory that can be read and written
    boxes(tensor) → list[(Box, Box)]: boxes of any tensor on this rank, in the full tensor and in the local tensor

Tensors of adapters are omitted unless `adapters=True`. The values of a region do not include the product of an adapter; the
values of `pieces` and `TrainingBackend.pieces` do.
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

from rlhpc.checkpoint.tensor_slice import Box, box_between, cut, full_box
from rlhpc.training.lora import Factors, factors_of, frozen_names, layers_by_weight, merged
from rlhpc.training.mesh import Mesh
from rlhpc.training.parameter_names import ParameterView, checkpoint_parts, plain


def boxes(tensor: torch.Tensor) -> list[tuple[Box, Box]]:
    """Returns the boxes of a full tensor that are on this rank, and the location of each box in the local tensor.

    The result is correct for any placements, uneven shards and dimensions that are cut twice, because torch distributes the
    indices of a dimension in the same way as the tensor.
    """
    if not isinstance(tensor, DTensor):
        return [(full_box(tensor.shape), full_box(tensor.shape))]
    runs_by_dim = [
        _runs(
            size,
            tensor.device_mesh,
            tuple(_placement_along(placement, dim, tensor.ndim) for placement in tensor.placements),
        )
        for dim, size in enumerate(tensor.shape)
    ]
    pairs = []
    for runs in product(*runs_by_dim):
        starts, sizes, local_starts = zip(*runs, strict=True) if runs else ((), (), ())
        pairs.append((Box(starts, sizes), Box(local_starts, sizes)))
    return pairs


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a detached view of the local part of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def copy_full(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copies the values of a full tensor into a tensor that may be sharded over the ranks."""
    for box, local_box in boxes(target):
        cut(local_part(target), local_box).copy_(cut(full, box))


def _placement_along(placement: Placement, dim: int, ndim: int) -> Placement:
    """Returns the placement of a vector of indices along one dimension that corresponds to a placement of the tensor."""
    sharded_dim = getattr(placement, "dim", None)
    if sharded_dim is None or sharded_dim % ndim != dim:
        return Replicate()
    split_factor = getattr(placement, "split_factor", None)
    options = {} if split_factor is None else {"split_factor": split_factor}
    vector_placement: Placement = type(placement)(0, **options)  # type: ignore[call-arg]
    return vector_placement


@lru_cache(maxsize=4096)
def _runs(size: int, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> list[tuple[int, int, int]]:
    """Returns the index runs of a dimension that are on this rank: (start, size, start in the local tensor)."""
    if all(placement.is_replicate() for placement in placements):
        return [(0, size, 0)]
    local_indices = distribute_tensor(torch.arange(size), mesh, placements, src_data_rank=None).to_local().cpu()
    if not len(local_indices):
        return []
    breaks = (torch.nonzero(local_indices.diff() != 1).flatten() + 1).tolist()
    edges = list(zip([0, *breaks], [*breaks, len(local_indices)], strict=True))
    return [(int(local_indices[run_start]), run_end - run_start, run_start) for run_start, run_end in edges]


@dataclass(frozen=True)
class Region:
    """Box of a checkpoint tensor that this rank holds.

    Attributes:
        name: The tensor's name in the checkpoint.
        shape: Shape of the full tensor.
        dtype: Dtype of the tensor in the module.
        box: Slice that this rank holds.
        parameter: Name of the tensor in the module; the region is a view of this tensor.
        index: Index into the local part of the module's tensor.
        copy, copies: Number of this copy, and number of copies on all ranks.
        frozen: True if the values never change: the tensor is not trained, and no adapter is merged into it.
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
        """Returns the values in the box's shape, as a view of the module's memory."""
        return self.view(named_tensor(module, self.parameter))

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the same view of another tensor that is sharded like the parameter, such as an optimizer moment."""
        return local_part(tensor)[self.index]


def named_tensor(module: nn.Module, name: str) -> torch.Tensor:
    """Returns a parameter or buffer by name."""
    owner_name, _, attribute = name.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(owner_name), attribute)
    return tensor


def iter_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and tensors of parameters and persistent buffers. A tied tensor is yielded once, by its first name."""
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
        module: Module with parameters that are DTensors or replicated on every rank.
        mesh: Mesh that the module is sharded over.
        adapters: Also list the tensors of adapters, by their names in the module.
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
    """Returns each tensor of a module, with its name and its included checkpoint views."""
    tensors = {name: tensor for name, tensor in iter_tensors(module) if adapters or ".lora_" not in name}
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
        name: Name of the tensor in the module.
        tensor: The tensor, or the same tensor with other placements.
        parts: Checkpoint tensors that the tensor is split into.
        mesh: Mesh that the tensor is sharded over; None if copies are not counted.
        frozen: Whether the tensor never changes.
    """
    copy_index, num_copies = (0, 1) if mesh is None else mesh.copies(tensor)
    return [
        Region(view.name, view.shape, tensor.dtype, overlap[0], name, overlap[1], copy_index, num_copies, frozen)
        for view in parts
        for box, local_box in boxes(tensor)
        if (overlap := intersect(view.index, box, local_box)) is not None
    ]


def intersect(
    index: tuple[int | tuple[int, int], ...], box: Box, local: Box
) -> tuple[Box, tuple[int | slice, ...]] | None:
    """Returns the intersection of a box with a view of the same tensor; None if it is empty.

    Args:
        index: Index of the view (`ParameterView.index`).
        box: Box of the full tensor.
        local: The same box in the local tensor.

    Returns:
        The intersection as a box of the view, and as an index into the local tensor.
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
    return box_between(starts, stops), tuple(local_index)


def names_and_shapes(
    module: nn.Module, is_included: Callable[[str], bool] = lambda name: True
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns shape and dtype of each tensor in a module's checkpoint, in the module's order, without adapters."""
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
    """Yields the regions of this rank, with functions that return their values. All ranks iterate over the same tensors in the
    same order.

    Args:
        module: A sharded model, with or without adapters.
        mesh: Mesh that the model is sharded over; None if each rank holds the full model.
        full: Gathers the full factors of an adapter.
        rows: Reshard matrices that are split by columns to row slices first, one matrix at a time, so that a box is one run
            of bytes in a file.
        is_included: Selects checkpoint names.

    Raises:
        RlhpcError: The module's weights already contain the adapters; raised when the values are read.
    """
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()  # gathered weights are not shards
    frozen_tensors, layers = frozen_names(module), layers_by_weight(module)
    for name, tensor, views in _checkpoint_views(module, is_included):
        if not views:
            continue
        layer = layers.get(id(tensor))
        factors = None if layer is None else factors_of(layer, full)
        resharded = _reshard_to_rows(tensor) if rows else tensor
        for region in regions_of(name, resharded, views, mesh, frozen=plain(name) in frozen_tensors):
            if factors is None:
                yield region, partial(region.view, resharded)
            else:
                yield region, partial(_merge_adapters, region, resharded, factors)


@torch.no_grad()
def _merge_adapters(region: Region, tensor: torch.Tensor, adapted: Factors) -> torch.Tensor:
    """Returns a slice of a layer's weight with its adapter merged, from the rows of B and the columns of A."""
    rows, columns = region.box.slices
    output_indices, input_indices = (columns, rows) if adapted.layer.fan_in_fan_out else (rows, columns)
    a, b = adapted.a[:, input_indices], adapted.b[output_indices]
    return merged(adapted.layer, region.name, region.view(tensor), a, b, adapted.scale, region.box.starts)


def _reshard_to_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Redistributes a tensor so that it is sharded along its first dimension only, and returns it."""
    if not isinstance(tensor, DTensor) or tensor.ndim < 2:
        return tensor
    sharded_dims = [getattr(placement, "dim", 0) % tensor.ndim for placement in tensor.placements]
    if not any(sharded_dims):
        return tensor
    placements: list[Any] = [
        Shard(0) if dim else placement for dim, placement in zip(sharded_dims, tensor.placements, strict=True)
    ]
    device_tensor: Any = tensor.detach()
    if (
        device_tensor.device.type != device_tensor.device_mesh.device_type
    ):  # the mesh's ranks cannot exchange tensors on the host
        device_tensor = device_tensor.to(device_tensor.device_mesh.device_type)
    redistributed: torch.Tensor = device_tensor.redistribute(placements=placements)
    return redistributed
