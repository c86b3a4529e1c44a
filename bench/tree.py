"""Share of a version of the weights that leaves the sender, by the number of other hosts that receive it.

    python -m bench.tree --repeat 5

One rank sends 128 MB of float32 in chunks of 8 MB to one rank on each of 1, 2, 4 and 8 hosts. The hosts are simulated by
processes of this machine, so the seconds depend on one memory bus and these cores. The relevant figures are how often the
sender sends the bytes of a version, and the maximum that any other host sends.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

import torch

from bench.machine import goal, spread, write
from rlhpc import Cluster, NodePlacementStrategy, Session, Worker, WorkerGroup
from rlhpc.runtime.comm.context import current
from rlhpc.weights import make_sync
from rlhpc.weights.receiver import apply
from rlhpc.weights.transport import WeightSender

HOSTS = (1, 2, 4, 8)
TENSORS, ELEMENTS, PART = 128, 1 << 18, 8 << 20
BYTES = TENSORS * ELEMENTS * 4


class TreeHolder(Worker):
    """A sender or a receiver of the weights."""

    def open(self, receivers: list[tuple[str, list[int]]]) -> None:
        self.tensors = [(f"t{i}", torch.zeros(ELEMENTS)) for i in range(TENSORS)]
        self.sender = WeightSender(self, receivers, "off", PART)
        self.sync = make_sync("auto", self, ("sender", 0), receivers, "off")

    def give(self, version: int) -> None:
        for _, tensor in self.tensors:
            tensor.fill_(version)
        self.sender.send(version, self.tensors)

    def take(self) -> bool:
        version = apply(self.sync, self.tensors)
        return all(bool((tensor == version).all()) for _, tensor in self.tensors)

    def sent(self) -> int:
        return current().service.bytes_sent()


def measure(
    sender: WorkerGroup, receiver_groups: Sequence[WorkerGroup], num_versions: int = 4
) -> tuple[float, float, float]:
    """Returns the seconds of an update, the copies that the sender sent, and the most copies that another host sent."""
    receivers = [(group.name, [0]) for group in receiver_groups]
    for handle in [group.open(receivers) for group in (sender, *receiver_groups)]:
        handle.wait()
    start_bytes = [group.sent().wait()[0] for group in (sender, *receiver_groups)]
    start_s = time.perf_counter()
    for version in range(num_versions):
        handles = [sender.give(version), *(group.take() for group in receiver_groups)]
        assert all(is_equal for handle in handles[1:] for is_equal in handle.wait())
        handles[0].wait()
    duration_s = (time.perf_counter() - start_s) / num_versions
    end_bytes = [group.sent().wait()[0] for group in (sender, *receiver_groups)]
    copies_sent = [
        (bytes_now - bytes_then) / BYTES / num_versions
        for bytes_now, bytes_then in zip(end_bytes, start_bytes, strict=True)
    ]
    return duration_s, copies_sent[0], max(copies_sent[1:])


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its figures to `results/tree.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    session, cluster = Session.start(tcp_address="127.0.0.1"), Cluster.local(1, 0)
    sender = TreeHolder.create_group().launch(cluster, NodePlacementStrategy([0]), "sender")
    receiver_groups = [
        TreeHolder.create_group().launch(
            cluster, NodePlacementStrategy([0]), f"host{i}", env_vars={"RLHPC_HOST_ID": f"h{i}"}
        )
        for i in range(max(HOSTS))
    ]
    version_rows: list[dict[str, float]] = []
    for repeat in range(args.repeat + 1):
        row: dict[str, float] = {}
        for count in HOSTS:
            name = f"{count} hosts" if count > 1 else "1 host"
            seconds, times_from_sender, max_times_from_other = measure(sender, receiver_groups[:count])
            row |= {
                f"{name} (s)": seconds,
                f"{name}: times from the sender": times_from_sender,
                f"{name}: from another": max_times_from_other,
            }
        print({name: round(value, 3) for name, value in row.items()}, flush=True)
        if repeat:
            version_rows.append(row)
    figures = {name: spread([row[name] for row in version_rows]) for name in version_rows[0]}
    goals = [
        goal(name, figures[name]["median"], at_most=2.5) for name in figures if name.endswith("times from the sender")
    ]
    print(write("tree", f"python -m bench.tree --repeat {args.repeat}", {"figures": figures, "goals": goals}))
    session.stop()


if __name__ == "__main__":
    main()
