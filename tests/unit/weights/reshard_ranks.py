"""What the ranks of the tests of shards to shards do; importable by the workers."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rlhpc import Worker
from rlhpc.checkpoint.tensor_slice import TensorSlice, cut
from rlhpc.runs.device import worker_device
from rlhpc.training.shard_layout import tensor_slices
from rlhpc.weights import make_sync, reshard, reshard_collective, transport
from rlhpc.weights.reshard import Shard as Part
from rlhpc.weights.reshard import ShardSync
from rlhpc.weights.sender import ChunkWindow
from rlhpc.weights.transport_select import GLOO

EXPERTS = 4
#: Tensors of a model's files. The embedding, and norms, never change.
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (202, 64),
    **{
        f"layers.{layer}.{name}": shape
        for layer in (2, 10, 0)
        for name, shape in {
            "norm.weight": (64,), "q_proj.weight": (128, 64), "o_proj.weight": (64, 128), "bias": (128,),
            **{f"experts.{e}.up.weight": (96, 64) for e in range(EXPERTS)},
        }.items()
    },
    "head.weight": (202, 64),
}  # fmt: skip
FROZEN = re.compile(r".*(embed|norm)")
RECEIVERS: list[tuple[str, list[int]]] = [("near", [0, 1]), ("far", [0, 1])]
#: By layout, the mesh and where a matrix is cut that an engine cuts by rows, or by columns.
LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any], list[Any]]] = {
    "4": ((4,), [Shard(0)], [Shard(0)]),
    "2x2": ((2, 2), [Shard(0), Shard(0)], [Shard(0), Shard(1)]),
    "copies": ((2, 2), [Replicate(), Shard(0)], [Replicate(), Shard(0)]),
    "whole": ((4,), [Replicate()], [Replicate()]),
}


def whole(name: str, version: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + (0 if FROZEN.match(name) else 1000 * version))
    return torch.randn(SHAPES[name], generator=generator)


def wanted(rank: int) -> dict[str, tuple[TensorSlice, ...]]:
    """What rank 0 or 1 of an engine of two wants: rows of some, columns of others, all of norms, experts one by one."""
    found: dict[str, tuple[TensorSlice, ...]] = {}
    for name, shape in SHAPES.items():
        if "norm" in name:
            found[name] = (TensorSlice((0,), shape),)
        elif "experts" in name:
            if int(name.split(".")[3]) % 2 == rank:
                found[name] = (TensorSlice((0, 0), shape),)
        elif "o_proj" in name:
            found[name] = (TensorSlice((0, 64 * rank), (64, 64)),)
        else:
            half = shape[0] // 2
            found[name] = (TensorSlice((half * rank, *(0 for _ in shape[1:])), (half, *shape[1:])),)
    return found


#: A model that shows in a process's memory: 24 matrices of 8 MB.
LARGE: dict[str, tuple[int, int]] = {f"layers.{layer}.weight": (1024, 2048) for layer in range(24)}
#: Of glibc's `mallopt`: from how many bytes on memory is a mapping of its own, which is gone as soon as it is freed.
_MMAP_THRESHOLD = -3
#: Bytes of a part of a stream, in that test.
PART = 4 << 20


class Begun(ChunkWindow):
    """Of readers that have begun with a version, as those have that are not busy with something else."""

    def __init__(self, pool: Any, readers: Any, **options: Any) -> None:
        super().__init__(pool, readers, **options)
        self._started = set(range(len(readers)))


def small_parts(part: int = PART) -> None:
    reshard.CHUNK_BYTES = reshard._MIN_CHUNK_BYTES = part
    transport.ChunkWindow = Begun  # type: ignore[misc]


class ByGroup(ShardSync):
    """Over a process group, as between accelerators, and in many loads."""

    transport = GLOO

    def __init__(self, *args: Any) -> None:  # what `make_sync` gives
        super().__init__(*args)
        small_parts(64 << 10)
        reshard_collective.READY_S = 60.0


class Resident:
    """The most memory that this process has resident from here on, beyond what it has now."""

    def __init__(self) -> None:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 64 << 10)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._kb("VmRSS")

    def peak(self) -> int:
        """Bytes."""
        return (self._kb("VmHWM") - self._before) * 1024

    @staticmethod
    def _kb(key: str) -> int:
        found = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1])


class Trainer(Worker):
    """Holds its shards of tensors that the whole group could make, and sends them."""

    def open(self, layout: str, delta: str, experts: bool, sync: str) -> None:
        self.init_process_group()
        sizes, self.rows, self.columns = LAYOUTS[layout]
        self.mesh = init_device_mesh("cpu", sizes)
        self.line = init_device_mesh("cpu", (self.world_size,))
        self.experts = experts
        self.sync = make_sync(sync, self, (self.group_name, 0), RECEIVERS, delta)

    def _shards(self, version: int) -> Iterator[Part]:
        fused = dict[str, DTensor]()
        for name, shape in SHAPES.items():
            full, layer = whole(name, version), ".".join(name.split(".")[:2])
            if "experts" in name and self.experts:  # whole experts, one a rank, fused as a module has them
                if layer not in fused:
                    every = [whole(f"{layer}.experts.{e}.up.weight", version) for e in range(EXPERTS)]
                    fused[layer] = distribute_tensor(torch.stack(every), self.line, [Shard(0)], src_data_rank=None)
                number = int(name.split(".")[3])
                for tensor_slice, local in tensor_slices(fused[layer]):
                    if tensor_slice.starts[0] <= number < tensor_slice.ends[0]:
                        values = fused[layer].to_local()[number - tensor_slice.starts[0] + local.starts[0]]
                        yield Part(name, shape, full.dtype, TensorSlice((0, 0), shape), lambda v=values: v)  # type: ignore[misc]
                continue
            held = distribute_tensor(
                full, self.mesh, self.columns if "o_proj" in name else self.rows, src_data_rank=None
            )
            for tensor_slice, local in tensor_slices(held):
                yield Part(
                    name, shape, full.dtype, tensor_slice,
                    lambda h=held, b=local: cut(h.to_local(), b), bool(FROZEN.match(name)),  # type: ignore[misc]
                )  # fmt: skip

    def send(self, version: int) -> int:
        """The bytes that this rank sent."""
        assert isinstance(self.sync, ShardSync)
        device = worker_device(self)
        shards = [replace(part, values=lambda part=part: part.values().to(device)) for part in self._shards(version)]  # type: ignore[misc]
        self.sync.send_shards(version, shards)
        return self.sync.sent_bytes

    def forget(self) -> None:
        self.sync.forget()

    def open_large(self, sync: str) -> None:
        self.init_process_group()
        line = init_device_mesh("cpu", (self.world_size,))
        self.large = {
            name: distribute_tensor(torch.ones(shape), line, [Shard(0)], src_data_rank=None)
            for name, shape in LARGE.items()
        }
        self.sync = make_sync(sync, self, (self.group_name, 0), RECEIVERS[:1], "off")
        small_parts()

    def send_large(self, version: int) -> int:
        """The most memory that it took."""
        assert isinstance(self.sync, ShardSync)
        parts = [
            Part(name, tuple(held.shape), held.dtype, tensor_slice, lambda h=held: h.to_local())  # type: ignore[misc]
            for name, held in self.large.items()
            for tensor_slice, _ in tensor_slices(held)
        ]
        memory = Resident()
        self.sync.send_shards(version, parts)
        return memory.peak()


class Engine(Worker):
    """One rank of an engine of two."""

    def open(self, everything: bool = False, sync: str = "shards") -> None:
        self.wanted = None if everything else wanted(self.rank)
        self.sync = make_sync(sync, self, ("trainer", 0), RECEIVERS, complete_updates=True)
        assert isinstance(self.sync, ShardSync)
        self.sync.want(self.wanted)

    def open_large(self, sync: str) -> None:
        self.sync = make_sync(sync, self, ("trainer", 0), RECEIVERS[:1], complete_updates=True)
        small_parts()
        assert isinstance(self.sync, ShardSync)
        self.sync.want(
            {name: (TensorSlice((512 * self.rank, 0), (512, columns)),) for name, (_, columns) in LARGE.items()}
        )

    def take_large(self) -> tuple[int, float]:
        """The most memory that it took, and the sum of what came."""
        memory, total = Resident(), 0.0
        for _, tensor in self.sync.receive().tensors:
            assert isinstance(tensor, torch.Tensor)
            total += float(tensor[512 * self.rank : 512 * self.rank + 512].sum(dtype=torch.float64))
        return memory.peak(), total

    def die(self) -> None:
        """Begins with a version, and ends in the middle of it."""
        for number, _ in enumerate(self.sync.receive().tensors):
            if number == 6:
                os.kill(os.getpid(), signal.SIGKILL)

    def take(self) -> tuple[int, list[str], list[str], int]:
        """The version, names in the order in which they came, those that are not as they were sent, and bytes passed on."""
        update = self.sync.receive()
        names, wrong = [], []
        for name, tensor in update.tensors:
            names.append(name)
            expected = whole(name, update.version)
            for tensor_slice in (
                (TensorSlice((0,) * expected.dim(), tuple(expected.shape)),)
                if self.wanted is None
                else self.wanted[name]
            ):
                if not torch.equal(cut(tensor, tensor_slice), cut(expected, tensor_slice)):
                    wrong.append(name)
        assert isinstance(self.sync, ShardSync) and update.transfer is not None
        carried = update.transfer.bytes_by_transport
        assert carried.total() > 0 and {*carried} <= {"shards_host", "shards_gloo"}, "each slice is counted"
        return update.version, names, wrong, self.sync.sent_bytes
