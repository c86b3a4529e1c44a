"""What the ranks of the tests of slices do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from rlhpc.checkpoint.tensor_slice import cut
from rlhpc.config.parallel import MeshSizes
from rlhpc.config.sections import ParallelConfig
from rlhpc.training.mesh import Mesh
from rlhpc.training.shard_layout import held_slices, tensor_slices
from tests.forked import Rank


def mesh_of(rank: Rank, parallel: dict[str, Any]) -> Mesh:
    return Mesh(MeshSizes.from_config(ParallelConfig(**parallel), rank.world_size), rank.rank, "cpu")


def placed(rank: Rank) -> list[tuple[str, bool]]:
    """Of tensors cut in all the ways that there are: whether the slices' values are those of the whole tensor, and cover what
    the rank holds."""
    mesh = mesh_of(rank, {"shard": 2, "tensor": 2}).world
    whole = torch.arange(7 * 10 * 3).view(7, 10, 3)
    even = torch.arange(8 * 12).view(8, 12)
    cases = {
        "replicated": (whole, (Replicate(), Replicate())),
        "uneven rows": (whole, (Shard(0), Replicate())),
        "rows and columns, uneven": (whole, (Shard(0), Shard(1))),
        "last dimension, by its other number": (even, (Replicate(), Shard(-1))),
        "rows twice": (even, (Shard(0), Shard(0))),
        "rows twice, as FSDP cuts tensor-parallel ones": (even, (_StridedShard(0, split_factor=2), Shard(0))),
        "packed": (even, (Replicate(), _StridedShard(0, split_factor=2))),
    }
    found = []
    for name, (tensor, placements) in cases.items():
        held = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        local, covered, right = held.to_local(), 0, True
        for tensor_slice, here in tensor_slices(held):
            right &= torch.equal(cut(tensor, tensor_slice), cut(local, here))
            covered += tensor_slice.numel
        found.append((name, right and covered == local.numel()))
    return found


def held(rank: Rank, parallel: dict[str, Any], model: str, experts: bool) -> list[tuple[Any, ...]]:
    """A model's slices on this rank: name, whole shape, slice, values, and which copy it is."""
    from transformers import AutoModelForCausalLM

    mesh = mesh_of(rank, parallel)
    module: nn.Module = AutoModelForCausalLM.from_pretrained(Path(model), dtype=torch.float32)
    for layer in module.model.layers:
        if experts:
            for name, value in list(layer.mlp.experts.named_parameters()):
                shared = distribute_tensor(value.detach(), mesh.expert, [Shard(0)], src_data_rank=None)
                setattr(layer.mlp.experts, name, nn.Parameter(shared))
            fully_shard(layer.mlp.experts, mesh=mesh.expert_fsdp)
        if mesh.tensor is not None:
            for linear, dim in ((layer.self_attn.q_proj, 0), (layer.self_attn.o_proj, 1)):
                shared = distribute_tensor(linear.weight.detach(), mesh.tensor, [Shard(dim)], src_data_rank=None)
                linear.weight = nn.Parameter(shared)
        fully_shard(layer, mesh=mesh.fsdp)
    fully_shard(module, mesh=mesh.fsdp)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    return [
        (one.name, one.shape, one.tensor_slice, one.view_in(module).clone(), one.copy, one.copies)
        for one in held_slices(module, mesh)
    ]  # fmt: skip
