"""Weights from one process to others of a host: rlhpc's sync beside one warm memory copy of the same bytes.

    python -m bench.weights --repeat 7

290 tensors of bfloat16, 500 MB in all, from one rank to one and to four. "Adopted": the receivers look at the memory that
came; "copied": each copies it into its own tensors, as an engine has to that keeps its weights elsewhere. The time is from
the call until every receiver has the version applied, seen from the driver.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

import numpy as np
import torch

from bench.machine import spread, write
from rlhpc import Cluster, NodePlacementStrategy, Session, Worker
from rlhpc.weights import make_sync

TENSORS, BYTES = 290, 500_000_000


def tensors(value: float) -> list[tuple[str, torch.Tensor]]:
    """Sizes as a transformer has them: some large, many small."""
    sizes = np.asarray([8.0 if i % 10 == 0 else 1.0 if i % 10 < 7 else 0.01 for i in range(TENSORS)])
    counts = np.maximum((sizes / sizes.sum() * BYTES / 2).astype(int), 1)
    return [(f"t{i}", torch.full((int(n),), value, dtype=torch.bfloat16)) for i, n in enumerate(counts)]


class Holder(Worker):
    """A sender or a receiver of the weights."""

    def open(self, receivers: list[tuple[str, list[int]]]) -> None:
        self.held = tensors(0.0)
        self.module = torch.nn.Module()
        for name, tensor in self.held:
            self.module.register_buffer(name, tensor)
        self.sync = make_sync("auto", self, ("sender", 0), receivers)

    def send(self, version: int) -> None:
        self.sync.sync(version, self.held)

    def change(self, value: float) -> None:
        for _, tensor in self.held:
            tensor.fill_(value)

    def take(self, adopt: bool) -> int:
        version: int = self.sync.apply(self.held, adopt=self.module if adopt else None)
        self.held = list(self.module.state_dict().items())
        return version

    def value(self) -> set[float]:
        return {float(tensor[0]) for _, tensor in self.held} | {float(tensor[-1]) for _, tensor in self.held}


def copy_seconds() -> float:
    """One warm copy of as many bytes."""
    source, target = np.ones(BYTES, np.uint8), np.ones(BYTES, np.uint8)
    np.copyto(target, source)
    started = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes `results/weights.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    cluster = Cluster.local(1, 0)
    sender = Holder.create_group().launch(cluster, NodePlacementStrategy([0]), "sender")
    rows: list[dict[str, float]] = []
    groups = {n: Holder.create_group().launch(cluster, NodePlacementStrategy([0] * n), f"r{n}") for n in (1, 4)}
    version = 0
    for repeat in range(args.repeat + 1):
        row = {"memory copy (s)": copy_seconds()}
        for count, group in groups.items():
            receivers = [(f"r{count}", list(range(count)))]
            for handle in (sender.open(receivers), group.open(receivers)):
                handle.wait()
            for adopt in (False, True):
                # The first one maps the memory; what counts is every later one.
                for warm in (True, False):
                    version += 1
                    sender.change(float(version % 97)).wait()
                    started = time.perf_counter()
                    handles = [sender.send(version), group.take(adopt)]
                    for handle in handles:
                        handle.wait()
                    seconds = time.perf_counter() - started
                    assert all(value == {float(version % 97)} for value in group.value().wait())
                    if not warm:
                        row[f"1 to {count}, {'adopted' if adopt else 'copied'} (s)"] = seconds
        if repeat:
            rows.append(row)
            print(row, flush=True)
    figures = {name: spread([row[name] for row in rows]) for name in rows[0]}
    ratios = {
        f"{name.removesuffix(' (s)')} / memory copy": float(np.median([r[name] / r["memory copy (s)"] for r in rows]))
        for name in figures if name != "memory copy (s)"
    }  # fmt: skip
    for name, ratio in ratios.items():
        print(f"{name:40} {ratio:8.2f}")
    print(write("weights", f"python -m bench.weights --repeat {args.repeat}", {"figures": figures, "ratios": ratios}))
    session = Session.running()
    assert session is not None
    session.stop()


if __name__ == "__main__":
    main()
