"""What the ranks of the tests of contracts do."""

from __future__ import annotations

import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import get_total_norm

from tests.forked import Rank


def not_done(rank: Rank) -> tuple[str, float]:
    """What torch says of a norm over parameters of two meshes; how far packed columns are from what they were after a
    checkpoint."""
    warnings.simplefilter("ignore")
    one = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("b", "c"))
    parts = [
        distribute_tensor(torch.ones(4, 4), one, [Shard(0)]),
        distribute_tensor(torch.ones(4, 4), two, [Shard(0), Shard(0)]),
    ]
    try:
        get_total_norm(parts)
        said = ""
    except Exception as error:
        said = str(error)
    given, columns = torch.arange(32.0).view(8, 4), [_StridedShard(0, split_factor=2)]
    expected = distribute_tensor(given, one, columns, src_data_rank=None).to_local()
    packed = distribute_tensor(given * 0, one, columns, src_data_rank=None)
    folder = [tempfile.mkdtemp(prefix="rlhpc-packed-") if rank.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    whole = distribute_tensor(given, one, [Shard(0)], src_data_rank=None)
    dcp.save({"packed": whole}, storage_writer=HuggingFaceStorageWriter(folder[0], save_distributed=True))
    dcp.load({"packed": packed}, storage_reader=HuggingFaceStorageReader(folder[0]))
    return said, float((packed.to_local() - expected).abs().max())
