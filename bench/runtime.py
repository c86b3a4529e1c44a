"""Launch, dispatch, channels and weights: rlhpc's runtime beside the limits of the machine, interleaved in one run.

Limits: importing torch in one interpreter; a ZeroMQ TCP round trip and a UNIX socket round trip between two processes; a warm
memory copy.

    python -m bench.runtime --repeat 5
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.machine import spread, write
from rlhpc import Channel, Cluster, NodePlacementStrategy, Session, Worker


class Peer(Worker):
    """The other end of every measurement."""

    def nothing(self) -> None: ...

    def ping(self, out: Channel, back: Channel, count: int, size: int) -> list[float]:
        """Seconds of `count` round trips of an array of `size` bytes."""
        item, times = np.ones(size, np.uint8), []
        for _ in range(count + 3):
            started = time.perf_counter()
            out.put(item, key="0")
            back.get(key="0")
            times.append(time.perf_counter() - started)
        return times[3:]

    def pong(self, out: Channel, back: Channel, count: int) -> None:
        for _ in range(count + 3):
            back.put(out.get(key="0"), key="0")

    def produce(self, channel: Channel, count: int) -> None:
        item = {"x": np.ones(1000, np.uint8)}
        for _ in range(count):
            channel.put(item, key="0")

    def consume(self, channel: Channel, count: int) -> float:
        channel.get(key="0")
        started = time.perf_counter()
        for _ in range(count - 1):
            channel.get(key="0")
        return (count - 1) / (time.perf_counter() - started)


def fork_echo(serve: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        serve()
        os._exit(0)
    return pid


def zeromq_round_trip(count: int = 500) -> float:
    """Median seconds over TCP on the loopback, two processes."""
    import zmq

    ready, port = os.pipe()

    def serve() -> None:
        sock = zmq.Context().socket(zmq.REP)
        number = sock.bind_to_random_port("tcp://127.0.0.1", 20000, 30000)
        os.write(port, str(number).encode())
        for _ in range(count + 10):
            sock.send(sock.recv())
        time.sleep(0.2)

    pid = fork_echo(serve)
    sock = zmq.Context().socket(zmq.REQ)
    sock.connect(f"tcp://127.0.0.1:{int(os.read(ready, 16))}")
    times = []
    for _ in range(count + 10):
        started = time.perf_counter()
        sock.send(b"x" * 1000)
        sock.recv()
        times.append(time.perf_counter() - started)
    os.waitpid(pid, 0)
    return float(np.median(times[10:]))


def unix_round_trip(count: int = 500) -> float:
    """Median seconds over a UNIX socket pair, two processes."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        for _ in range(count):
            theirs.send(theirs.recv(4096))

    pid = fork_echo(serve)
    times = []
    for _ in range(count):
        started = time.perf_counter()
        ours.send(b"x" * 1000)
        ours.recv(4096)
        times.append(time.perf_counter() - started)
    os.waitpid(pid, 0)
    return float(np.median(times))


def copy_rate(size: int) -> float:
    """Bytes a second of a warm memory copy."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    np.copyto(target, source)
    started = time.perf_counter()
    for _ in range(5):
        np.copyto(target, source)
    return 5 * size / (time.perf_counter() - started)


def seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def once() -> dict[str, float]:
    """One repetition of everything; a fresh session each time."""
    row: dict[str, float] = {}
    row["limit: import torch, one interpreter (s)"] = seconds(
        lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True)
    )
    row["limit: ZeroMQ TCP round trip (us)"] = zeromq_round_trip() * 1e6
    row["limit: UNIX socket round trip (us)"] = unix_round_trip() * 1e6
    big = 64 << 20
    row["limit: warm memory copy (GB/s)"] = copy_rate(big) / 1e9
    cluster = Cluster.local(1, 0)

    def launch(count: int, name: str) -> Any:
        return Peer.create_group().launch(cluster, NodePlacementStrategy([0] * count), name)

    started = time.perf_counter()
    eight = launch(8, "eight")
    row["cold start to 8 ready workers (s)"] = time.perf_counter() - started
    started = time.perf_counter()
    more = launch(8, "more")
    row["warm launch of 8 workers (s)"] = time.perf_counter() - started
    more.shutdown()
    eight.nothing().wait()
    row["dispatch to 8 workers (us)"] = float(np.median([seconds(eight.nothing().wait) for _ in range(200)])) * 1e6
    eight.shutdown()
    a, b = launch(1, "a"), launch(1, "b")
    a.nothing().wait()
    row["dispatch to 1 worker (us)"] = float(np.median([seconds(lambda: a.nothing().wait()) for _ in range(300)])) * 1e6
    for text, size, count in (("1 KB", 1000, 300), ("64 MiB", big, 5)):
        out, back = Channel.create("out", home="b"), Channel.create("back", home="a")
        ping, pong = a.ping(out, back, count, size), b.pong(out, back, count)
        pong.wait()
        row[f"channel, {text}, one way (us)"] = float(np.median(ping.wait()[0])) / 2 * 1e6
    channel = Channel.create("rate", home="b")
    produced, consumed = a.produce(channel, 5000), b.consume(channel, 5000)
    produced.wait()
    row["channel, 1 KB (items/s)"] = consumed.wait()[0]
    for group in (a, b):
        group.shutdown()
    session = Session.running()
    assert session is not None
    session.stop()
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes `results/runtime.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    for _ in range(args.repeat):
        rows.append(once())
        print(json.dumps(rows[-1]), flush=True)
    figures = {name: spread([row[name] for row in rows]) for name in rows[0]}
    median = {name: figure["median"] for name, figure in figures.items()}
    ratios = {
        "cold start / import torch": median["cold start to 8 ready workers (s)"]
        / median["limit: import torch, one interpreter (s)"],
        "dispatch to 1 worker / ZeroMQ TCP round trip": median["dispatch to 1 worker (us)"]
        / median["limit: ZeroMQ TCP round trip (us)"],
        "channel 1 KB one way / ZeroMQ TCP round trip": median["channel, 1 KB, one way (us)"]
        / median["limit: ZeroMQ TCP round trip (us)"],
        "channel 64 MiB rate / warm memory copy": (64 << 20) / median["channel, 64 MiB, one way (us)"] * 1e6
        / (median["limit: warm memory copy (GB/s)"] * 1e9),
    }  # fmt: skip
    path = write("runtime", f"python -m bench.runtime --repeat {args.repeat}", {"figures": figures, "ratios": ratios})
    for name, figure in figures.items():
        print(f"{name:48} {figure['min']:12.1f} {figure['median']:12.1f} {figure['max']:12.1f}")
    for name, ratio in ratios.items():
        print(f"{name:48} {ratio:12.2f}")
    print(path)


if __name__ == "__main__":
    main()
