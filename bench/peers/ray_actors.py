"""Ray's rows of `bench.runtime`: plain actors, `ray.util.queue.Queue` and object references.

A program of its own, so that Ray may live in another Python than rlhpc (`--ray-python`); prints one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from ray.util.queue import Queue

from bench.peers.memory import list_descendants, measure_cpu_percent, read_pss_mb

MIB = 1 << 20
TENSORS, BYTES = 290, 500_000_000


@ray.remote(num_cpus=0)
class RayPeer:
    """Ray actor that takes part in every measurement. Imports torch, as the workers of the other contenders do."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self.held: list[np.ndarray] = []

    def idle(self) -> None: ...

    def pid(self) -> int:
        return os.getpid()

    def ping(self, out: Queue, back: Queue, count: int) -> list[float]:
        message, round_trips = {"x": np.ones(1000, np.uint8)}, []
        for _ in range(count + 3):
            start_s = time.perf_counter()
            out.put(message)
            back.get()
            round_trips.append(time.perf_counter() - start_s)
        return round_trips[3:]

    def pong(self, out: Queue, back: Queue, count: int) -> None:
        for _ in range(count + 3):
            back.put(out.get())

    def produce(self, channel: Queue, count: int) -> None:
        message = {"x": np.ones(1000, np.uint8)}
        for _ in range(count):
            channel.put(message)

    def consume(self, channel: Queue, count: int) -> float:
        channel.get()
        start_s = time.perf_counter()
        for _ in range(count - 1):
            channel.get()
        return (count - 1) / (time.perf_counter() - start_s)

    def give(self, size: int) -> np.ndarray:
        if not self.held or self.held[0].size != size:
            self.held = [np.ones(size, np.uint8)]
        return self.held[0]

    def give_dict(self, num_parts: int, size: int) -> dict[str, np.ndarray]:
        if len(self.held) != num_parts:
            self.held = [np.ones(size, np.uint8) for _ in range(num_parts)]
        return {f"t{i}": array for i, array in enumerate(self.held)}

    def take(self, item: Any) -> int:
        return len(item)

    def open(self) -> None:
        sizes = np.asarray([8.0 if i % 10 == 0 else 1.0 if i % 10 < 7 else 0.01 for i in range(TENSORS)])
        counts = np.maximum((sizes / sizes.sum() * BYTES / 2).astype(int), 1)
        self.held = [np.ones(int(n), np.uint16) for n in counts]

    def weights(self) -> list[np.ndarray]:
        return self.held

    def apply(self, came: list[np.ndarray]) -> None:
        for target, source in zip(self.held, came, strict=True):
            np.copyto(target, source)


def time_median(act: Callable[[], Any], count: int, warm: int = 2) -> float:
    durations = []
    for _ in range(count + warm):
        start_s = time.perf_counter()
        act()
        durations.append(time.perf_counter() - start_s)
    return statistics.median(durations[warm:])


def measure() -> dict[str, float]:
    """Measures one repetition, in a new Ray session."""
    row: dict[str, float] = {}
    start_s = time.perf_counter()
    ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False, object_store_memory=3 << 30)
    eight_peers = [RayPeer.remote() for _ in range(8)]
    ray.get([peer.idle.remote() for peer in eight_peers])
    row["cold start to 8 ready workers (s)"] = time.perf_counter() - start_s
    start_s = time.perf_counter()
    more_peers = [RayPeer.remote() for _ in range(8)]
    ray.get([peer.idle.remote() for peer in more_peers])
    row["warm launch of 8 workers (s)"] = time.perf_counter() - start_s
    for peer in more_peers:
        ray.kill(peer)
    row["dispatch to 8 workers (us)"] = (
        time_median(lambda: ray.get([p.idle.remote() for p in eight_peers]), 300, 20) * 1e6
    )
    workers = ray.get([peer.pid.remote() for peer in eight_peers])
    time.sleep(2.0)
    all_pids = [*list_descendants(os.getpid()), os.getpid()]
    row["idle CPU, 8 workers and all else (% of a core)"] = measure_cpu_percent(all_pids)
    system_pids = [pid for pid in all_pids if pid not in workers and pid != os.getpid()]
    row["idle memory, 8 workers (PSS, MB)"] = read_pss_mb(workers)
    row["idle memory, system processes (PSS, MB)"] = read_pss_mb(system_pids)
    row["idle memory, driver (PSS, MB)"] = read_pss_mb([os.getpid()])
    row["idle memory, a worker beyond the first (PSS, MB)"] = read_pss_mb(workers) / 8
    row["system processes"] = float(len(system_pids))
    for peer in eight_peers[5:]:
        ray.kill(peer)
    peer_a, peer_b, *remaining = eight_peers[:5]
    row["dispatch to 1 worker (us)"] = time_median(lambda: ray.get(peer_a.idle.remote()), 500, 20) * 1e6
    out_queue, back_queue = Queue(), Queue()
    pong_ref = peer_b.pong.remote(out_queue, back_queue, 100)
    row["channel, 1 KB, one way (us)"] = (
        statistics.median(ray.get(peer_a.ping.remote(out_queue, back_queue, 100))) / 2 * 1e6
    )
    ray.get(pong_ref)
    row["channel, 64 MiB, one way (ms)"] = (
        time_median(lambda: ray.get(peer_b.take.remote(peer_a.give.remote(64 * MIB))), 7) * 1e3
    )
    row["channel, 256 MiB dict of tensors, one way (ms)"] = (
        time_median(lambda: ray.get(peer_b.take.remote(peer_a.give_dict.remote(64, 4 * MIB))), 5) * 1e3
    )
    channel = Queue()
    produced_ref, consumed_ref = peer_a.produce.remote(channel, 1000), peer_b.consume.remote(channel, 1000)
    row["channel, 1 KB, one to one (items/s)"] = ray.get(consumed_ref)
    ray.get(produced_ref)
    four_peers = [peer_a, *remaining]
    production, consumed_ref = (
        [p.produce.remote(channel, 250) for p in four_peers],
        peer_b.consume.remote(channel, 1000),
    )
    row["channel, 1 KB, four to one (items/s)"] = ray.get(consumed_ref)
    ray.get(production)
    receivers = [peer_b, *remaining]
    ray.get([peer.open.remote() for peer in (peer_a, *receivers)])

    def sync() -> None:
        weights = peer_a.weights.remote()
        ray.get([receiver.apply.remote(weights) for receiver in receivers])

    row["weights, 500 MB, 1 to 4, copied (ms)"] = time_median(sync, 3, 1) * 1e3
    ray.shutdown()
    return row


if __name__ == "__main__":
    print("\n" + json.dumps(measure()))
