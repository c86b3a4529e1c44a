"""Weight sync from two trainer ranks to two engine ranks: resharding compared with gathering and sending.

    python -m bench.reshard --repeat 5

The model is a transformer of 0.5, 1 and 2 GB of bfloat16. Each trainer rank holds half of the rows of each matrix, and each
engine rank needs half of the rows or of the columns. Gathered: all trainer ranks gather each matrix, the first rank writes
it, and both engine ranks read their slices. Shards: each trainer rank writes its shard, and the engine ranks combine their
slices. In both modes the engine ranks end with the same bytes in separate memory. Near: on one host, through shared memory.
Far: the engine is on a simulated other host, over TCP of the loopback device. The time is measured on the driver, from the
call until both engine ranks have the version. The memory is the peak resident memory of a rank during the sync, minus the
memory before.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench.machine import spread, write
from rlhpc import Cluster, NodePlacementStrategy, Session, Worker, WorkerGroup
from rlhpc.checkpoint.tensor_slice import TensorSlice, cut
from rlhpc.training.shard_layout import tensor_slices
from rlhpc.weights import Update, make_sync
from rlhpc.weights.reshard import Shard as Part
from rlhpc.weights.reshard import ShardSync

HIDDEN, INNER, WORDS = 2048, 5632, 32000
SIZES = {"0.5 GB": 2, "1 GB": 7, "2 GB": 17}
WAYS, WHERE = ("gathered", "shards"), ("near", "far")


def list_shapes(num_layers: int) -> dict[str, tuple[int, int]]:
    """Returns the shapes of a decoder's matrices."""
    shape_by_name = {"embed": (WORDS, HIDDEN)}
    for layer in range(num_layers):
        shape_by_name |= {f"layers.{layer}.{name}": (HIDDEN, HIDDEN) for name in "qkvo"}
        shape_by_name |= {f"layers.{layer}.{name}": (INNER, HIDDEN) for name in ("gate", "up")}
        shape_by_name[f"layers.{layer}.down"] = (HIDDEN, INNER)
    return {**shape_by_name, "head": (WORDS, HIDDEN)}


def slice_of(name: str, shape: tuple[int, int], rank: int) -> TensorSlice:
    """Returns the slice that an engine rank needs: rows or, after a divided activation, columns."""
    rows, columns = shape
    if name.endswith((".o", ".down")):
        return TensorSlice((0, rank * columns // 2), (rows, columns // 2))
    return TensorSlice((rank * rows // 2, 0), (rows // 2, columns))


class Resident:
    """Peak resident memory of this process since the last query."""

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self._kb("VmRSS")

    def mb(self) -> float:
        return (self._kb("VmHWM") - self.before) / 1024

    @staticmethod
    def _kb(key: str) -> int:
        match = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())
        assert match is not None
        return int(match[1])


class HalfTrainer(Worker):
    """Trainer rank with half of the rows of each matrix."""

    def open(self, num_layers: int, engine: str) -> None:
        self.init_process_group()
        mesh, self.resident_memory = init_device_mesh("cpu", (self.world_size,)), Resident()
        self.held: dict[str, DTensor] = {
            name: DTensor.from_local(torch.zeros(rows // 2, columns, dtype=torch.bfloat16), mesh, [Shard(0)])
            for name, (rows, columns) in list_shapes(num_layers).items()
        }
        receivers = [(engine, [0, 1])]
        self.shards = make_sync("shards", self, (self.group_name, 0), receivers, "off")
        self.gathered_sync = make_sync("broadcast", self, (self.group_name, 0), receivers, "off")

    def change(self, version: int) -> None:
        for tensor in self.held.values():
            tensor.to_local().fill_(version)

    def send_version(self, way: str, version: int) -> tuple[int, float]:
        """Returns the bytes that this rank sent, and its memory in MB."""
        self.resident_memory.begin()
        if way == "shards":
            assert isinstance(self.shards, ShardSync)
            self.shards.send_shards(version, list(self._parts()))
            return self.shards.sent_bytes, self.resident_memory.mb()
        full_tensors = ((name, tensor.full_tensor()) for name, tensor in self.held.items())
        if self.rank:
            for _ in full_tensors:
                pass
            return 0, self.resident_memory.mb()
        self.gathered_sync.send(version, full_tensors)
        return sum(tensor.numel() * 2 for tensor in self.held.values()), self.resident_memory.mb()

    def _parts(self) -> Iterator[Part]:
        for name, tensor in self.held.items():
            for global_slice, local_slice in tensor_slices(tensor):
                values = cut(tensor.to_local(), local_slice)
                yield Part(name, tuple(tensor.shape), torch.bfloat16, global_slice, lambda v=values: v)  # type: ignore[misc]


class HalfEngine(Worker):
    """Engine rank with its half of each matrix."""

    def open(self, num_layers: int) -> None:
        self.resident_memory = Resident()
        self.tensor_slices = {name: slice_of(name, shape, self.rank) for name, shape in list_shapes(num_layers).items()}
        self.local_shards = {
            name: torch.zeros(tensor_slice.sizes, dtype=torch.bfloat16)
            for name, tensor_slice in self.tensor_slices.items()
        }
        receivers = [(self.group_name, [0, 1])]
        self.shards = make_sync("shards", self, ("trainer", 0), receivers, complete_updates=True)
        self.gathered_sync = make_sync("broadcast", self, ("trainer", 0), receivers, complete_updates=True)
        assert isinstance(self.shards, ShardSync)
        self.shards.want({name: (tensor_slice,) for name, tensor_slice in self.tensor_slices.items()})

    def take(self, way: str) -> float:
        """Receives a version, and returns the memory in MB."""
        self.resident_memory.begin()
        update: Update = (self.shards if way == "shards" else self.gathered_sync).receive()
        for name, tensor in update.tensors:
            assert isinstance(tensor, torch.Tensor)
            self.local_shards[name].copy_(cut(tensor, self.tensor_slices[name]))
        return self.resident_memory.mb()

    def check(self, version: int) -> bool:
        return all(bool((tensor == version).all()) for tensor in self.local_shards.values())


def measure(trainer: WorkerGroup, engine: WorkerGroup, way: str, version: int) -> tuple[float, list[int], float, float]:
    """Returns the seconds, the bytes sent by each trainer rank, and the peak memory of trainers and engines in MB."""
    trainer.change(version).wait()
    start_s = time.perf_counter()
    handles = trainer.send_version(way, version), engine.take(way)
    sent_reports, received_mb = (handle.wait() for handle in handles)
    duration_s = time.perf_counter() - start_s
    assert all(engine.check(version).wait()), (way, version)
    return (
        duration_s,
        [sent_bytes for sent_bytes, _ in sent_reports],
        max(mb for _, mb in sent_reports),
        max(received_mb),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its figures to `results/reshard.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    figures, ratios, max_shares = {}, {}, {}
    for size, layers in SIZES.items():
        for location in WHERE:
            session = Session.start(tcp_address="127.0.0.1")
            cluster, two_ranks = Cluster.local(1, 0), NodePlacementStrategy([0, 0])
            trainer = HalfTrainer.create_group().launch(cluster, two_ranks, "trainer")
            env = {"RLHPC_HOST_ID": "elsewhere"} if location == "far" else {}
            engine = HalfEngine.create_group().launch(cluster, two_ranks, "engine", env_vars=env)
            for handle in (trainer.open(layers, "engine"), engine.open(layers)):
                handle.wait()
            results_by_way: dict[str, list[tuple[float, list[int], float, float]]] = {way: [] for way in WAYS}
            for repeat in range(args.repeat + 1):
                for way in WAYS if repeat % 2 else WAYS[::-1]:
                    measurement = measure(trainer, engine, way, 2 * repeat + WAYS.index(way))
                    if repeat:
                        results_by_way[way].append(measurement)
            label = f"{size}, {location}"
            for way in WAYS:
                figures[f"{label}, {way} (s)"] = spread([one[0] for one in results_by_way[way]])
                figures[f"{label}, {way}, trainer (MB)"] = spread([one[2] for one in results_by_way[way]])
                figures[f"{label}, {way}, engine (MB)"] = spread([one[3] for one in results_by_way[way]])
                sent_bytes = results_by_way[way][-1][1]
                max_shares[f"{label}, {way}"] = max(sent_bytes) / (sum(sent_bytes) / len(sent_bytes))
            measurement_pairs = zip(results_by_way["shards"], results_by_way["gathered"], strict=True)
            ratios[f"{label}: shards / gathered"] = float(np.median([a[0] / b[0] for a, b in measurement_pairs]))
            print(
                label,
                {way: round(float(np.median([one[0] for one in results_by_way[way]])), 3) for way in WAYS},
                flush=True,
            )
            session.stop()
    for name, ratio in ratios.items():
        print(f"{name:40} {ratio:8.3f}")
    content = {"figures": figures, "ratios": ratios, "most sent by a rank, of its share": max_shares}
    print(write("reshard", f"python -m bench.reshard --repeat {args.repeat}", content))


if __name__ == "__main__":
    main()
