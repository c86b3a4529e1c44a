"""What trainers hold on the host while an accelerator is theirs: FSDP's shards with `actor.fsdp.cpu_offload`.

No accelerator is there, so whatever moves a shard to one fails at once; on a machine that has one, what is loaded into the
copy is missed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from rlhpc.runtime.trace_recorder import recorder
from rlhpc.tracing.read import _read_file
from rlhpc.training.fsdp import FsdpBackend, _trace_collectives

SHAPES = {"embedding": (6, 4), "norm": (4,)}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One rank, whose device would be an accelerator."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():  # an engine of an earlier test in this process left its own
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def offloaded(mesh: DeviceMesh, fill: float) -> Any:
    """A backend's tensors as `cpu_offload` leaves them."""
    backend: Any = FsdpBackend.__new__(FsdpBackend)
    backend.rank, backend.optim, backend._steps = 0, SimpleNamespace(name="adam"), dict.fromkeys(SHAPES, int(fill))
    backend.write_identity = backend.check_identity = lambda folder: None
    backend.worker = SimpleNamespace(rank=0, all_gather_object=lambda plan: [plan], barrier=lambda: None)
    backend.module = nn.Module()
    for name, shape in SHAPES.items():
        local = torch.full(shape, fill)
        spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(local.shape, local.stride(), local.dtype))
        backend.module.register_parameter(name, nn.Parameter(DTensor(local, spec, requires_grad=True)))
    backend._moments = {
        name: {"exp_avg": torch.full(shape, fill + 1), "exp_avg_sq": torch.full(shape, fill + 2)}
        for name, shape in SHAPES.items()
    }
    return backend


def test_a_checkpoint_reaches_moments_that_lie_on_the_host(mesh: DeviceMesh, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        offloaded(mesh, 5.0).save(tmp_path)
    resumed = offloaded(mesh, 0.0)
    resumed._local_shards, resumed.optimizer = {}, None
    resumed.load(tmp_path)
    assert resumed._steps == dict.fromkeys(SHAPES, 5)
    for name, parameter in resumed._parameters():
        assert parameter.to_local().unique().tolist() == [5.0]
        held = resumed._moments[name]
        assert held["exp_avg"].unique().tolist() == [6.0]
        assert held["exp_avg_sq"].unique().tolist() == [7.0]


def train_sharded(rank: int, folder: str) -> None:
    """Trains a sharded module of two layers for a step, untraced and traced, and writes the spans of the traced step."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh, gradients = init_device_mesh("cpu", (2,)), list[list[torch.Tensor]]()
    for is_traced in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for submodule in [*module, module]:
            sharded: Any = fully_shard(submodule, mesh=mesh)
            sharded.set_force_sum_reduction_for_comms(True)
            if is_traced:
                _trace_collectives(sharded)
        if is_traced:
            identity = {"group": "actor", "rank": rank, "host": "h", "host_id": "h", "pid": 1}
            recorder.start(f"{folder}/actor-{rank}.jsonl", identity)
        module(torch.ones(2, 8) * (rank + 1)).sum().backward()
        recorder.stop(flush=True)
        local: list[Any] = [parameter.grad for parameter in module.parameters()]
        gradients.append([gradient.to_local() for gradient in local])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    dist.destroy_process_group()


def test_a_trace_has_the_collectives_of_sharded_training(tmp_path: Path) -> None:
    mp.spawn(train_sharded, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        rows = _read_file(tmp_path / f"actor-{rank}.jsonl", {}).spans
        num_bytes = (8 * 8 + 8) * 4
        gathers = [row[5]["bytes"] for row in rows if row[:2] == ["gather weights", "send"]]
        reductions = [row[5]["bytes"] for row in rows if row[:2] == ["reduce gradients", "send"]]
        assert len(gathers) >= 2 and set(gathers) == {num_bytes}
        assert reductions == [num_bytes] * 2
