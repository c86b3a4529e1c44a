"""Weight sync from one process to others, compared with one warm memory copy of the same bytes and with deltas.

    python -m bench.weights --repeat 7

One rank sends 290 tensors of bfloat16, 500 MB in total, to one and to four ranks on the same host, and to one rank on a
simulated other host (TCP over the loopback device). "Adopted": the receivers use the received memory directly. "Copied": each
receiver copies the data into its own tensors, like an engine with separate weights. The time is measured on the driver, from
the call until every receiver has applied the version.

    all                 every element changed
    1 % trained         88 of the tensors, 0.9 % of the bytes, are trained; the others are frozen (rollout.weight_delta=frozen)
    1 % of elements     one element in a hundred of every tensor changed (rollout.weight_delta=elements)
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from bench.machine import spread, write
from rlhpc import Cluster, NodePlacementStrategy, Session, Worker, WorkerGroup
from rlhpc.weights import make_sync
from rlhpc.weights.receiver import apply

TENSORS, BYTES = 290, 500_000_000
COPY = "memory copy"


class WeightFigure(NamedTuple):
    """Case of the measurement: receivers, and the selection of changed weights."""

    label: str
    group: str
    changed: str
    adopt: bool
    delta: str = "off"


ROWS = [
    *(
        WeightFigure(f"1 to {n}, {how}, all", f"r{n}", "all", how == "adopted")
        for n in (1, 4)
        for how in ("adopted", "copied")
    ),
    *(
        WeightFigure(f"1 to 4, {how}, 1 % {label}", "r4", changed, how == "adopted", delta)
        for how in ("adopted", "copied")
        for label, changed, delta in (("trained", "trained", "frozen"), ("of elements", "elements", "elements"))
    ),
    WeightFigure("1 to 1 over TCP, copied, all", "far", "all", False),
    WeightFigure("1 to 1 over TCP, copied, 1 % trained", "far", "trained", False, "frozen"),
    WeightFigure("1 to 1 over TCP, copied, 1 % of elements", "far", "elements", False, "elements"),
]


def make_tensors() -> list[tuple[str, torch.Tensor]]:
    """Returns tensors with the sizes of a transformer: some large, many small."""
    sizes = np.asarray([8.0 if i % 10 == 0 else 1.0 if i % 10 < 7 else 0.01 for i in range(TENSORS)])
    counts = np.maximum((sizes / sizes.sum() * BYTES / 2).astype(int), 1)
    return [(f"t{i}", torch.zeros(int(n), dtype=torch.bfloat16)) for i, n in enumerate(counts)]


def is_trained(name: str) -> bool:
    """Returns whether a tensor is trained in a model with mostly frozen weights: the small ones, and one of the others."""
    row_number = int(name[1:])
    return row_number % 10 >= 7 or row_number == 1


class WeightHolder(Worker):
    """A sender or a receiver of the weights."""

    def open(self, receivers: list[tuple[str, list[int]]], delta: str) -> None:
        self.held = make_tensors()
        self.module = torch.nn.Module()
        for name, tensor in self.held:
            self.module.register_buffer(name, tensor)
        self.sync = make_sync("auto", self, ("sender", 0), receivers, delta)
        self.frozen = frozenset(name for name, _ in self.held if delta == "frozen" and not is_trained(name))

    def close(self) -> None:
        self.sync.forget()

    def give(self, version: int) -> None:
        self.sync.send(version, self.held, frozen=self.frozen)

    def change(self, selection: str, seed: int) -> None:
        generator = np.random.default_rng(seed)
        for name, tensor in self.held:
            bits = tensor.view(torch.int16).numpy()
            if selection == "elements":
                element_indices = np.unique(generator.integers(0, bits.size, max(1, bits.size // 100)))
                bits[element_indices] ^= 1 + seed % 100
            elif selection == "all" or is_trained(name):
                bits ^= 1 + seed % 100

    def take(self, adopts: bool) -> int:
        # The module's buffers are these very tensors, so that they show what it adopted.
        return apply(self.sync, self.held, adopt=self.module if adopts else None)

    def value(self) -> list[int]:
        return [int(tensor.view(torch.int16).numpy().sum(dtype=np.int64)) for _, tensor in self.held]


def time_copy() -> float:
    """Returns the seconds of one warm copy of the same number of bytes."""
    source, target = np.ones(BYTES, np.uint8), np.ones(BYTES, np.uint8)
    np.copyto(target, source)
    start_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start_s


def measure(row: WeightFigure, sender: WorkerGroup, group: WorkerGroup) -> float:
    """Returns the seconds of one version, after all memory that it needs has been used before."""
    receivers = [(row.group, list(range(group.world_size)))]
    for handle in (sender.open(receivers, row.delta), group.open(receivers, row.delta)):
        handle.wait()
    duration_s = 0.0
    for version in range(6):
        sender.change(row.changed, version).wait()
        start_s = time.perf_counter()
        for handle in [sender.give(version), group.take(row.adopt)]:
            handle.wait()
        duration_s = time.perf_counter() - start_s
    (sent_digest,) = sender.value().wait()
    assert all(received_digest == sent_digest for received_digest in group.value().wait()), row
    sender.close().wait()
    return duration_s


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its figures to `results/weights.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    session = Session.start(tcp_address="127.0.0.1")
    cluster = Cluster.local(1, 0)
    sender = WeightHolder.create_group().launch(cluster, NodePlacementStrategy([0]), "sender")
    groups = {
        f"r{n}": WeightHolder.create_group().launch(cluster, NodePlacementStrategy([0] * n), f"r{n}") for n in (1, 4)
    }
    groups["far"] = WeightHolder.create_group().launch(
        cluster, NodePlacementStrategy([0]), "far", env_vars={"RLHPC_HOST_ID": "elsewhere"}
    )
    repetition_rows: list[dict[str, float]] = []
    for repeat in range(args.repeat + 1):
        repetition = {COPY: time_copy()}
        for row in ROWS:
            repetition[row.label] = measure(row, sender, groups[row.group])
        if repeat:
            repetition_rows.append(repetition)
            print({label: round(seconds, 4) for label, seconds in repetition.items()}, flush=True)
    figures = {
        f"{label} (s)": spread([repetition[label] for repetition in repetition_rows]) for label in repetition_rows[0]
    }
    label_pairs = [(row.label, COPY) for row in ROWS if row.changed == "all"]
    label_pairs += [(row.label, row.label.partition(", 1 %")[0] + ", all") for row in ROWS if row.changed != "all"]
    ratios = {
        f"{a} / {b}": float(np.median([repetition[a] / repetition[b] for repetition in repetition_rows]))
        for a, b in label_pairs
    }
    for name, ratio in ratios.items():
        print(f"{name:80} {ratio:8.3f}")
    print(write("weights", f"python -m bench.weights --repeat {args.repeat}", {"figures": figures, "ratios": ratios}))
    session.stop()


if __name__ == "__main__":
    main()
