"""Shard layout: the slices of checkpoint tensors that a rank holds.

A rank holds one slice of a DTensor (`rlhpc.checkpoint.tensor_slice`), or several slices if a dimension is divided twice.

    held_slices(module, mesh) → list[HeldSlice]: in the module's order, the same on every call; without communication
        .name, .shape, .dtype       the checkpoint tensor (each expert's matrix has a name; tied tensors are listed once)
        .tensor_slice               the slice that this rank holds
        .copy, .copies              number of this copy, and number of copies on all ranks; one rank holds copy 0 of a slice
        .frozen                     True if the tensor is not trained and no adapter is merged into it
        .view_in(module)            the values, as a view of this rank's memory that can be read and written
    tensor_slices(tensor) → list[(TensorSlice, TensorSlice)]: slices on this rank: in the full, and in the local tensor

Tensors of adapters are omitted unless `adapters=True`. The values of a slice do not include the product of an adapter; the
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

from rlhpc.checkpoint.tensor_slice import TensorSlice, cut, full_slice, slice_between
from rlhpc.training.lora import Factors, factors_of, frozen_names, layers_by_weight, merge_factors
from rlhpc.training.mesh import Mesh
from rlhpc.training.parameter_names import ParameterView, checkpoint_parts, plain


def tensor_slices(tensor: torch.Tensor) -> list[tuple[TensorSlice, TensorSlice]]:
    """Returns the slices of a full tensor that are on this rank, and the location of each slice in the local tensor.

    The result is correct for any placements, uneven shards and dimensions that are cut twice, because torch distributes the
    indices of a dimension in the same way as the tensor.
    """
    if not isinstance(tensor, DTensor):
        return [(full_slice(tensor.shape), full_slice(tensor.shape))]
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
        pairs.append((TensorSlice(starts, sizes), TensorSlice(local_starts, sizes)))
    return pairs


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a detached view of the local part of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def copy_full(target: torch.Tensor, full_tensor: torch.Tensor) -> None:
    """Copies the values of a full tensor into a tensor that may be sharded over the ranks."""
    for tensor_slice, local_slice in tensor_slices(target):
        cut(local_part(target), local_slice).copy_(cut(full_tensor, tensor_slice))


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
class HeldSlice:
    """Slice of a checkpoint tensor that this rank holds.

    Attributes:
        name: The tensor's name in the checkpoint.
        shape: Shape of the full tensor.
        dtype: Dtype of the tensor in the module.
        tensor_slice: Slice that this rank holds.
        parameter: Name of the tensor in the module; the slice is a view of this tensor.
        index: Index into the local part of the module's tensor.
        copy, copies: Number of this copy, and number of copies on all ranks.
        frozen: True if the values never change: the tensor is not trained, and no adapter is merged into it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor_slice: TensorSlice
    parameter: str
    index: tuple[int | slice, ...]
    copy: int
    copies: int
    frozen: bool

    def view_in(self, module: nn.Module) -> torch.Tensor:
        """Returns the values in the slice's shape, as a view of the module's memory."""
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


def held_slices(
    module: nn.Module,
    mesh: Mesh,
    *,
    with_adapters: bool = False,
    is_included: Callable[[str], bool] = lambda name: True,
) -> list[HeldSlice]:
    """Returns the slices of a module that this rank holds.

    Args:
        module: Module with parameters that are DTensors or replicated on every rank.
        mesh: Mesh that the module is sharded over.
        with_adapters: Also list the tensors of adapters, by their names in the module.
        is_included: Selects checkpoint names.

    Raises:
        ConfigError: See `checkpoint_parts`.
    """
    frozen_tensors = frozen_names(module)
    return [
        held_slice
        for name, tensor, views in _checkpoint_views(module, is_included, with_adapters=with_adapters)
        for held_slice in held_slices_of(name, tensor, views, mesh, is_frozen=plain(name) in frozen_tensors)
    ]


def _checkpoint_views(
    module: nn.Module, is_included: Callable[[str], bool], *, with_adapters: bool = False
) -> list[tuple[str, torch.Tensor, list[ParameterView]]]:
    """Returns each tensor of a module, with its name and its included checkpoint views."""
    tensors = {name: tensor for name, tensor in iter_tensors(module) if with_adapters or ".lora_" not in name}
    views_by_tensor = checkpoint_parts(module, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    return [
        (name, tensor, [view for view in views_by_tensor[name] if is_included(view.name)])
        for name, tensor in tensors.items()
    ]


def held_slices_of(
    name: str, tensor: torch.Tensor, parts: Sequence[ParameterView], mesh: Mesh | None, *, is_frozen: bool = False
) -> list[HeldSlice]:
    """Returns the slices of one tensor of a module (see `held_slices`).

    Args:
        name: Name of the tensor in the module.
        tensor: The tensor, or the same tensor with other placements.
        parts: Checkpoint tensors that the tensor is split into.
        mesh: Mesh that the tensor is sharded over; None if copies are not counted.
        is_frozen: Whether the tensor never changes.
    """
    copy_index, num_copies = (0, 1) if mesh is None else mesh.copies(tensor)
    return [
        HeldSlice(view.name, view.shape, tensor.dtype, overlap[0], name, overlap[1], copy_index, num_copies, is_frozen)
        for view in parts
        for tensor_slice, local_slice in tensor_slices(tensor)
        if (overlap := intersect(view.index, tensor_slice, local_slice)) is not None
    ]


def intersect(
    index: tuple[int | tuple[int, int], ...], tensor_slice: TensorSlice, local_slice: TensorSlice
) -> tuple[TensorSlice, tuple[int | slice, ...]] | None:
    """Returns the intersection of a slice with a view of the same tensor; None if it is empty.

    Args:
        index: Index of the view (`ParameterView.index`).
        tensor_slice: Slice of the full tensor.
        local_slice: The same slice in the local tensor.

    Returns:
        The intersection as a slice of the view, and as an index into the local tensor.
    """
    starts, stops, local_index = list[int](), list[int](), list[int | slice]()
    for selector, slice_start, slice_end, local_start in zip(
        index, tensor_slice.starts, tensor_slice.ends, local_slice.starts, strict=True
    ):
        view_start, view_end = (selector, selector + 1) if isinstance(selector, int) else selector
        overlap_start, overlap_end = max(slice_start, view_start), min(slice_end, view_end)
        if overlap_start >= overlap_end:
            return None
        if isinstance(selector, int):
            local_index.append(local_start + overlap_start - slice_start)
        else:
            starts.append(overlap_start - view_start)
            stops.append(overlap_end - view_start)
            local_index.append(
                slice(local_start + overlap_start - slice_start, local_start + overlap_end - slice_start)
            )
    return slice_between(starts, stops), tuple(local_index)


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
    gather_full: Callable[[torch.Tensor], torch.Tensor],
    *,
    by_rows: bool = False,
    is_included: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[HeldSlice, Callable[[], torch.Tensor]]]:
    """Yields the slices of this rank, with functions that return their values. All ranks iterate over the same tensors in the
    same order.

    Args:
        module: A sharded model, with or without adapters.
        mesh: Mesh that the model is sharded over; None if each rank holds the full model.
        gather_full: Gathers the full factors of an adapter.
        by_rows: Reshard matrices that are split by columns to row slices first, one matrix at a time, so that a slice is one
            run of bytes in a file.
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
        factors = None if layer is None else factors_of(layer, gather_full)
        resharded_tensor = _reshard_to_rows(tensor) if by_rows else tensor
        for held_slice in held_slices_of(name, resharded_tensor, views, mesh, is_frozen=plain(name) in frozen_tensors):
            if factors is None:
                yield held_slice, partial(held_slice.view, resharded_tensor)
            else:
                yield held_slice, partial(_merge_adapters, held_slice, resharded_tensor, factors)


@torch.no_grad()
def _merge_adapters(held_slice: HeldSlice, tensor: torch.Tensor, factors: Factors) -> torch.Tensor:
    """Returns a slice of a layer's weight with its adapter merged, from the rows of B and the columns of A."""
    rows, columns = held_slice.tensor_slice.slices
    output_indices, input_indices = (columns, rows) if factors.layer.fan_in_fan_out else (rows, columns)
    a, b = factors.a[:, input_indices], factors.b[output_indices]
    return merge_factors(
        factors.layer, held_slice.name, held_slice.view(tensor), a, b, factors.scale, held_slice.tensor_slice.starts
    )


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
    redistributed_tensor: torch.Tensor = device_tensor.redistribute(placements=placements)
    return redistributed_tensor
