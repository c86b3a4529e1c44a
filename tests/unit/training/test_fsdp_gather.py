"""Full weights from the shards of several ranks: gathered in buckets, equal to those gathered one by one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rlhpc.training.fsdp import BucketGather

RANKS = 4
#: Rows that divide, that do not, that are fewer than ranks, and one alone; matrices, vectors and more dimensions.
SHAPES = [(8, 3), (10, 4), (3, 5), (1,), (7,), (6, 2, 3), (64, 16), (5, 1)]


def check(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    calls: Counter[str] = Counter()
    gather_into = dist.all_gather_into_tensor

    def counted(*arguments: Any, **options: Any) -> Any:
        calls["buckets"] += 1
        return gather_into(*arguments, **options)

    def one_by_one(tensor: Any) -> Any:
        calls["alone"] += 1
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    for sizes, names, placements in (
        ((RANKS,), ("shard",), (Shard(0),)),
        ((2, 2), ("replicate", "shard"), (Replicate(), Shard(0))),
    ):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        torch.manual_seed(0)
        whole = {str(index): torch.randn(shape) for index, shape in enumerate(SHAPES)}
        tensors: dict[str, torch.Tensor] = {
            name: distribute_tensor(tensor, mesh, placements) for name, tensor in whole.items()
        }
        columns = distribute_tensor(torch.ones(4, 8), mesh, (*placements[:-1], Shard(1)))
        mixed = {**tensors, "buffer": torch.arange(3), "columns": columns}
        for dtype in (None, torch.bfloat16):
            calls.clear()
            with mock.patch.object(dist, "all_gather_into_tensor", counted):
                gather = BucketGather(mixed, one_by_one, dtype, bucket_bytes=400)
                found = {name: gather(tensor) for name, tensor in mixed.items()}
            for name, tensor in whole.items():
                expected = tensor if dtype is None else tensor.to(dtype)
                assert torch.equal(found[name], expected), name
            assert torch.equal(found["buffer"], torch.arange(3)) and found["columns"].shape == (4, 8)
            assert calls["alone"] == 2 and 2 <= calls["buckets"] <= 4, calls
        # Weights that are left out are not gathered, and others may be asked for in another order.
        gather = BucketGather(tensors, one_by_one, None)
        for name in ("3", "1", "7"):
            assert torch.equal(gather(tensors[name]), whole[name])
    dist.destroy_process_group()


def test_buckets_hold_what_each_weight_holds(tmp_path: Path) -> None:
    if dist.is_initialized():  # by an earlier test of this process, which the ranks are forks of
        dist.destroy_process_group()
    mp.start_processes(check, args=(str(tmp_path / "store"),), nprocs=RANKS, start_method="fork")
