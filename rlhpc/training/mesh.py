"""Device mesh of a trained model: the ranks that share weights, and the ranks that get different samples.

The mesh is `(replicate, shard, context, tensor)` over all ranks in rank order, so that the ranks of a tensor group are
neighbours on a node and replicas are far apart. transformers' plan cuts dense weights over `tensor`, and FSDP2 shards them
over `fsdp = shard × context`; with replicas FSDP2 gets the two-dimensional mesh `(replicate, fsdp)`. Experts are on a second
mesh over the same ranks, `(replicate, expert_fsdp, expert)`. Tokens of all sequences are exchanged along `expert`.

Interface for other modules:

    MeshSizes.from_config(cfg.actor.parallel, ranks) → MeshSizes        (rlhpc.config.parallel; needs no torch)
        .data, .data_of(rank)               → number of blocks, and the block of a rank; blocks get different samples
        .block, .lane_of(rank)              → ranks of a block (context × tensor), and a rank's position; 0 is the leader
    Mesh(sizes, rank, device_type)          → all ranks call it after `init_process_group`
        .sizes, .rank, .world               → the DeviceMesh of the dense weights
        .fsdp, .tensor, .context            → sub-meshes; `tensor` and `context` are None where the size is 1
        .expert, .expert_fsdp               → sub-meshes of the second mesh; None without experts
        .copies(tensor)                     → (number of this rank's copy, number of copies) of a parameter's shards
    held_slices(module, mesh)               → rlhpc.training.shard_layout: slices in checkpoint tensors
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from rlhpc.config.parallel import MeshSizes
from rlhpc.runtime.devices import collective_backends

#: Dimensions of `MeshSizes` that each mesh dimension combines.
_COMBINED_DIMS = {"fsdp": ("shard", "context"), "expert_fsdp": (), "expert": ()}
_EXPERT_DIMS = frozenset({"expert_fsdp", "expert"})


@dataclass
class Mesh:
    """Device meshes of a trained model.

    Args:
        sizes: Sizes from `actor.parallel`.
        rank: This rank.
        device: Kind of the device, such as `cpu`.

    Attributes:
        world: All ranks, by (replicate, shard, context, tensor), without dimensions of size 1 other than shard.
        fsdp: Sub-mesh over which FSDP2 shards dense weights.
        tensor: Sub-mesh of the ranks that split matrices; None if there is one such rank.
        context: Sub-mesh of the ranks that split sequences; None if there is one such rank.
        expert: Sub-mesh of the ranks that split experts; None if there is no expert parallelism.
        expert_fsdp: Sub-mesh over which FSDP2 shards experts.
    """

    sizes: MeshSizes
    rank: int
    device: str
    world: DeviceMesh = field(init=False)
    fsdp: DeviceMesh = field(init=False)
    tensor: DeviceMesh | None = field(init=False, default=None)
    context: DeviceMesh | None = field(init=False, default=None)
    expert: DeviceMesh | None = field(init=False, default=None)
    expert_fsdp: DeviceMesh | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        sizes = self.sizes
        dim_sizes = {name: getattr(sizes, name) for name in ("replicate", "shard", "context", "tensor")}
        dim_names = tuple(name for name, size in dim_sizes.items() if size > 1 or name == "shard")
        self.world = init_device_mesh(
            self.device, tuple(dim_sizes[name] for name in dim_names), mesh_dim_names=dim_names
        )
        self.tensor = self.world["tensor"] if sizes.tensor > 1 else None
        self.context = self.world["context"] if sizes.context > 1 else None
        shard_dim = "shard"
        if sizes.context > 1:
            self.world["shard", "context"]._flatten("fsdp")
            shard_dim = "fsdp"
        self.fsdp = self.world["replicate", shard_dim] if sizes.replicate > 1 else self.world[shard_dim]
        if sizes.expert > 1:
            expert_shards = sizes.ranks // sizes.replicate // sizes.expert
            expert_dims = {"replicate": sizes.replicate, "expert_fsdp": expert_shards, "expert": sizes.expert}
            expert_sizes = {name: size for name, size in expert_dims.items() if name != "replicate" or size > 1}
            expert_mesh = init_device_mesh(
                self.device, tuple(expert_sizes.values()), mesh_dim_names=tuple(expert_sizes)
            )
            self.expert = expert_mesh["expert"]
            self.expert_fsdp = (
                expert_mesh["replicate", "expert_fsdp"] if sizes.replicate > 1 else expert_mesh["expert_fsdp"]
            )

    @property
    def data(self) -> int:
        """Data coordinate of this rank: the number of its block."""
        return self.sizes.data_of(self.rank)

    @property
    def lane(self) -> int:
        """This rank's position among the ranks with the same samples."""
        return self.sizes.lane_of(self.rank)

    @property
    def block(self) -> list[int]:
        """Ranks with the same samples, including this one."""
        first_rank = self.sizes.first_of(self.data)
        return list(range(first_rank, first_rank + self.sizes.block))

    def copies(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Returns the number of this rank's copy of its shard of a tensor, and the number of copies on all ranks. A tensor
        that is not sharded has one copy per rank.
        """
        if not isinstance(tensor, DTensor):
            return self.rank, self.sizes.ranks
        dim_names = tensor.device_mesh.mesh_dim_names or ("shard",)
        sharded_dims = {
            name for name, placement in zip(dim_names, tensor.placements, strict=True) if not placement.is_replicate()
        }
        if sharded_dims & _EXPERT_DIMS or _EXPERT_DIMS & set(dim_names):
            coordinates = {"replicate": self.sizes.coordinates(self.rank)["replicate"]}
            expert_rank = self.rank % (self.sizes.ranks // self.sizes.replicate)
            coordinates["expert_fsdp"], coordinates["expert"] = divmod(expert_rank, self.sizes.expert)
            dim_sizes = {"replicate": self.sizes.replicate, "expert": self.sizes.expert}
            dim_sizes["expert_fsdp"] = self.sizes.ranks // math.prod(dim_sizes.values())
        else:
            coordinates = self.sizes.coordinates(self.rank)
            dim_sizes = {name: getattr(self.sizes, name) for name in coordinates}
        sharded_dims = {size_name for name in sharded_dims for size_name in (_COMBINED_DIMS.get(name) or (name,))}
        copy_index, num_copies = 0, 1
        for name in sorted(dim_sizes):
            if name not in sharded_dims:
                copy_index, num_copies = copy_index * dim_sizes[name] + coordinates[name], num_copies * dim_sizes[name]
        return copy_index, num_copies


def form_single_rank_group(device: str) -> None:
    """Forms torch's default process group with one rank, unless a group exists. Sharding needs a process group."""
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(collective_backends(device), store=dist.HashStore(), rank=0, world_size=1)


def ranks_per_shard(tensor: torch.Tensor, num_ranks: int) -> int:
    """Returns the number of ranks that hold the same shard of a tensor."""
    if not isinstance(tensor, DTensor):
        return num_ranks
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return num_ranks // math.prod(size for placement, size in sizes if not placement.is_replicate())
