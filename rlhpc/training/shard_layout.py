"""Which parts of which checkpoint tensors a rank holds.

A rank's part of a DTensor is one box (`rlhpc.checkpoint.tensor_slice`) or, where a dimension was cut twice, several.

    regions(module, mesh) → list[Region]: in the module's order, the same on every call; no rank talks to another
        .name, .shape, .dtype       the tensor of the checkpoint (its own name: experts are views, tied ones come once)
        .box                        what of it this rank holds
        .copy, .copies              which of how many copies on all ranks this is: exactly one rank has a box's copy 0
        .frozen                     not trained, and no adapter's product is merged into it
        .of(module)                 the values, a view of this rank's memory: write into it, or read it
    boxes(tensor) → list[(Box, Box)]: of a DTensor, or any tensor: in the whole tensor, and in the local one

Adapters' own tensors are left out unless `adapters=True`; what they add to the layers they belong to is not in these values,
but in those of `training.pieces.pieces`, and of `TrainingBackend.pieces`.
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

from rlhpc.checkpoint.tensor_slice import Box, between, whole
from rlhpc.training.lora import Factors, factors_of, frozen_names, layers_by_weight, merged
from rlhpc.training.mesh import Mesh
from rlhpc.training.parameter_names import ParameterView, checkpoint_parts, plain


def boxes(tensor: torch.Tensor) -> list[tuple[Box, Box]]:
    """What of a whole tensor is on this rank: boxes of it, and where each lies in the local tensor.

    Right for whatever placements, uneven shards and those that are cut twice in the same dimension, because nothing is worked
    out here: torch distributes the dimension's indices as it did the tensor.
    """
    if not isinstance(tensor, DTensor):
        return [(whole(tensor.shape), whole(tensor.shape))]
    every: list[list[tuple[int, int, int]]] = []
    for dim, size in enumerate(tensor.shape):
        along = tuple(_along(placement, dim, tensor.ndim) for placement in tensor.placements)
        every.append(_runs(size, tensor.device_mesh, along))
    found = []
    for runs in product(*every):
        sizes = tuple(size for _, size, _ in runs)
        found.append((Box(tuple(start for start, _, _ in runs), sizes), Box(tuple(at for _, _, at in runs), sizes)))
    return found


def _along(placement: Placement, dim: int, ndim: int) -> Placement:
    """What a placement does to one dimension, as a placement of a vector."""
    cut = getattr(placement, "dim", None)
    if cut is None or cut % ndim != dim:
        return Replicate()
    factor = getattr(placement, "split_factor", None)
    made: Placement = type(placement)(0) if factor is None else type(placement)(0, split_factor=factor)  # type: ignore[call-arg]
    return made


@lru_cache(maxsize=4096)
def _runs(size: int, mesh: DeviceMesh, along: tuple[Placement, ...]) -> list[tuple[int, int, int]]:
    """Runs of indices along a dimension that are on this rank: (start, size, where the run starts in the local tensor)."""
    if all(placement.is_replicate() for placement in along):
        return [(0, size, 0)]
    held = distribute_tensor(torch.arange(size), mesh, along, src_data_rank=None).to_local().cpu()
    if not len(held):
        return []
    breaks = (torch.nonzero(held.diff() != 1).flatten() + 1).tolist()
    edges = list(zip([0, *breaks], [*breaks, len(held)], strict=True))
    return [(int(held[a]), b - a, a) for a, b in edges]


@dataclass(frozen=True)
class Region:
    """A box of a checkpoint's tensor that this rank holds.

    Attributes:
        name: The tensor's name in the checkpoint.
        shape: Of the whole tensor.
        dtype: As it is kept here.
        box: What of it is here.
        parameter: The module's own name of the tensor that it is a view of.
        index: Of that tensor's local part.
        copy, copies: Which copy of how many, over all ranks.
        frozen: Whether it never changes: it is not trained, and nothing is merged into it.
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
        """The values, of the box's shape: a view of what the rank holds."""
        return self.view(named_tensor(module, self.parameter))

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same view of another tensor that is cut like the parameter, such as a moment of its optimizer."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.detach()[self.index]


def named_tensor(module: nn.Module, name: str) -> torch.Tensor:
    """A parameter or buffer."""
    holder, _, attribute = name.rpartition(".")
    found: torch.Tensor = getattr(module.get_submodule(holder), attribute)
    return found


def held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, each tensor once, under the first of its names."""
    seen = set[int]()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def regions(
    module: nn.Module,
    mesh: Mesh,
    *,
    adapters: bool = False,
    wanted: Callable[[str], bool] = lambda name: True,
) -> list[Region]:
    """What this rank holds of a module.

    Args:
        module: Its parameters are DTensors, or whole on every rank.
        mesh: Who holds what.
        adapters: Whether adapters' own tensors are listed, by the module's names.
        wanted: Of which checkpoint names.

    Raises:
        ConfigError: See `checkpoint_parts`.
    """
    tensors = {name: tensor for name, tensor in held(module) if adapters or ".lora_" not in name}
    parts = checkpoint_parts(module, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    constant = frozen_names(module)
    found = list[Region]()
    for name, tensor in tensors.items():
        chosen = [part for part in parts[name] if wanted(part.name)]
        found += regions_of(name, tensor, chosen, mesh, frozen=plain(name) in constant)
    return found


def regions_of(
    name: str, tensor: torch.Tensor, parts: Sequence[ParameterView], mesh: Mesh | None, *, frozen: bool = False
) -> list[Region]:
    """Of one tensor of a module: see `regions`.

    Args:
        name: The module's name of it.
        tensor: The tensor, or the same cut in another way.
        parts: What it is in a checkpoint.
        mesh: Who holds what; None if nobody asks for copies.
        frozen: Whether it never changes.
    """
    copy, copies = (0, 1) if mesh is None else mesh.copies(tensor)
    found = []
    for part in parts:
        for box, local in boxes(tensor):
            if (cut := within(part.index, box, local)) is not None:
                found.append(Region(part.name, part.shape, tensor.dtype, cut[0], name, cut[1], copy, copies, frozen))
    return found


def within(
    index: tuple[int | tuple[int, int], ...], box: Box, local: Box
) -> tuple[Box, tuple[int | slice, ...]] | None:
    """What a box of a module's tensor and a part of it (`ParameterView.index`) have in common: as a box of the part, and as an
    index of the local tensor, where `local` says that the box lies; None if that is nothing."""
    start, stop, where = list[int](), list[int](), list[int | slice]()
    for one, a, b, at in zip(index, box.starts, box.ends, local.starts, strict=True):
        low, high = (one, one + 1) if isinstance(one, int) else one
        first, last = max(a, low), min(b, high)
        if first >= last:
            return None
        if isinstance(one, int):
            where.append(at + first - a)
        else:
            start.append(first - low)
            stop.append(last - low)
            where.append(slice(at + first - a, at + last - a))
    return between(start, stop), tuple(where)


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
