"""rlhpc's rows of `bench.runtime`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.peers.memory import list_descendants, measure_cpu_percent, read_pss_mb
from rlhpc import Channel, Cluster, NodePlacementStrategy, Session, Worker

MIB = 1 << 20


class RuntimePeer(Worker):
    """Worker that takes part in every measurement."""

    def idle(self) -> None: ...

    def ping(self, out: Channel, back: Channel, count: int, item: Any) -> list[float]:
        """Returns the seconds of `count` round trips of `item`."""
        round_trips = []
        for _ in range(count + 3):
            start_s = time.perf_counter()
            out.put(item, key="0")
            back.get(key="0")
            round_trips.append(time.perf_counter() - start_s)
        return round_trips[3:]

    def pong(self, out: Channel, back: Channel, count: int) -> None:
        for _ in range(count + 3):
            back.put(out.get(key="0"), key="0")

    def send_and_receive(self, other: str, count: int, size: int) -> list[float]:
        """Returns the seconds of `count` round trips of a tensor by `send` and `recv`."""
        message, round_trips = torch.ones(size, dtype=torch.uint8), []
        for _ in range(count + 3):
            start_s = time.perf_counter()
            self.send(message, other, 0)
            self.recv(other, 0)
            round_trips.append(time.perf_counter() - start_s)
        return round_trips[3:]

    def receive_and_send(self, other: str, count: int) -> None:
        for _ in range(count + 3):
            self.send(self.recv(other, 0), other, 0)

    def produce(self, channel: Channel, count: int) -> None:
        message = {"x": np.ones(1000, np.uint8)}
        for _ in range(count):
            channel.put(message, key="0")

    def consume(self, channel: Channel, count: int) -> float:
        """Returns items a second."""
        channel.get(key="0")
        start_s = time.perf_counter()
        for _ in range(count - 1):
            channel.get(key="0")
        return (count - 1) / (time.perf_counter() - start_s)


def time_call(function: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


def measure() -> dict[str, float]:
    """Measures one repetition, in a new session."""
    row: dict[str, float] = {}
    cluster = Cluster.local(1, 0)

    def launch(count: int, name: str) -> Any:
        return RuntimePeer.create_group().launch(cluster, NodePlacementStrategy([0] * count), name)

    start_s = time.perf_counter()
    eight_workers = launch(8, "eight")
    row["cold start to 8 ready workers (s)"] = time.perf_counter() - start_s
    more_workers = None
    start_s = time.perf_counter()
    more_workers = launch(8, "more")
    row["warm launch of 8 workers (s)"] = time.perf_counter() - start_s
    more_workers.shutdown()
    eight_workers.idle().wait()
    row["dispatch to 8 workers (us)"] = (
        float(np.median([time_call(eight_workers.idle().wait) for _ in range(300)])) * 1e6
    )

    workers = [record["pid"] for record in eight_workers._records]
    system_pids = [pid for pid in list_descendants(os.getpid()) if pid not in workers]
    time.sleep(1.0)
    row["idle CPU, 8 workers and all else (% of a core)"] = measure_cpu_percent([*workers, *system_pids, os.getpid()])
    row["idle memory, 8 workers (PSS, MB)"] = read_pss_mb(workers)
    row["idle memory, system processes (PSS, MB)"] = read_pss_mb(system_pids)
    row["idle memory, driver (PSS, MB)"] = read_pss_mb([os.getpid()])
    row["system processes"] = float(len(system_pids))
    eight_mb = read_pss_mb([*workers, *system_pids, os.getpid()])
    eight_workers.shutdown()
    a, b = launch(1, "a"), launch(1, "b")
    b.shutdown()
    a.idle().wait()
    time.sleep(0.5)
    one_mb = read_pss_mb([a._records[0]["pid"], *system_pids, os.getpid()])
    row["idle memory, a worker beyond the first (PSS, MB)"] = (eight_mb - one_mb) / 7
    b = launch(1, "b")
    b.idle().wait()
    row["dispatch to 1 worker (us)"] = float(np.median([time_call(lambda: a.idle().wait()) for _ in range(500)])) * 1e6
    tensors = {f"t{i}": torch.ones(4 * MIB, dtype=torch.uint8) for i in range(64)}
    for message_text, message, count in (
        ("1 KB, one way (us)", {"x": np.ones(1000, np.uint8)}, 500),
        ("64 MiB, one way (ms)", torch.ones(64 * MIB, dtype=torch.uint8), 7),
        ("256 MiB dict of tensors, one way (ms)", tensors, 5),
    ):
        out_channel, back_channel = Channel.create("out", home="b"), Channel.create("back", home="a")
        ping_handle, pong_handle = (
            a.ping(out_channel, back_channel, count, message),
            b.pong(out_channel, back_channel, count),
        )
        pong_handle.wait()
        factor = 1e6 if message_text.endswith("(us)") else 1e3
        row[f"channel, {message_text}"] = float(np.median(ping_handle.wait()[0])) / 2 * factor
    ping_handle, pong_handle = a.send_and_receive("b", 7, 64 * MIB), b.receive_and_send("a", 7)
    pong_handle.wait()
    row["send and recv, 64 MiB, one way (ms)"] = float(np.median(ping_handle.wait()[0])) / 2 * 1e3
    channel = Channel.create("rate", home="b")
    produce_handle, consume_handle = a.produce(channel, 5000), b.consume(channel, 5000)
    produce_handle.wait()
    row["channel, 1 KB, one to one (items/s)"] = consume_handle.wait()[0]
    four_workers = launch(4, "four")
    produce_handle, consume_handle = four_workers.produce(channel, 2500), b.consume(channel, 10000)
    produce_handle.wait()
    row["channel, 1 KB, four to one (items/s)"] = consume_handle.wait()[0]
    for group in (a, b, four_workers):
        group.shutdown()
    session = Session.running()
    assert session is not None
    session.stop()
    return row


if __name__ == "__main__":
    print(json.dumps(measure()))
