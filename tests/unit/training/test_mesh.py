"""Meshes of a trained model: who shares weights, who gets other samples, and how many copies of a shard there are."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlhpc.config.parallel import MeshSizes
from rlhpc.training.mesh import Mesh, form_single_rank_group, ranks_per_shard
from tests.unit.training.fake_groups import group


def dense(mesh: Mesh) -> torch.Tensor:
    """A weight that FSDP2 cuts over the ranks that share no samples, and that tensor ranks have a part of each."""
    return DTensor.from_local(torch.zeros(2, 4), mesh.fsdp, [*[Replicate()] * (mesh.fsdp.ndim - 1), Shard(0)])


def experts(mesh: Mesh) -> torch.Tensor:
    """Experts, which the ranks of `expert` have different ones of."""
    assert mesh.expert is not None
    return DTensor.from_local(torch.zeros(2, 4), mesh.expert, [Shard(0)])


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ({"shard": 4}, ("shard",)),
        ({"replicate": 2, "shard": 2}, ("replicate", "shard")),
        ({"shard": 2, "context": 2}, ("shard", "context")),
        ({"replicate": 2, "shard": 2, "tensor": 2}, ("replicate", "shard", "tensor")),
    ],
)
def test_each_copy_of_a_shard_has_a_number_of_its_own(sizes: dict[str, int], names: tuple[str, ...]) -> None:
    shape = MeshSizes(**sizes)
    numbers = defaultdict(list)
    for rank in range(shape.ranks):
        with group(rank, shape.ranks):
            mesh = Mesh(shape, rank, "cpu")
            assert mesh.world.mesh_dim_names == names
            assert (mesh.tensor is not None) == (shape.tensor > 1) and (mesh.context is not None) == (shape.context > 1)
            assert rank == mesh.block[mesh.lane] and len(mesh.block) == shape.block
            tensor = dense(mesh)
            number, count = mesh.copies(tensor)
            numbers[mesh.fsdp.get_coordinate()[-1]].append(number)
            assert count == ranks_per_shard(tensor, shape.ranks) and mesh.copies(torch.zeros(3)) == (rank, shape.ranks)
    assert all(sorted(copies) == list(range(count)) for copies in numbers.values())


def test_experts_are_on_a_mesh_of_their_own() -> None:
    shape = MeshSizes(replicate=2, shard=4, expert=2)
    numbers = defaultdict(list)
    for rank in range(8):
        with group(rank, 8):
            mesh = Mesh(shape, rank, "cpu")
            assert mesh.expert_fsdp is not None and mesh.expert_fsdp.mesh_dim_names == ("replicate", "expert_fsdp")
            number, count = mesh.copies(experts(mesh))
            numbers[rank % 2].append(number)
            assert count == 4
    assert all(sorted(copies) == [0, 1, 2, 3] for copies in numbers.values())


def test_a_single_rank_gets_a_group() -> None:
    try:
        form_single_rank_group("cpu")
        form_single_rank_group("cpu")  # it has one
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
