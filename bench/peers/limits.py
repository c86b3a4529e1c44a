"""Limits of this machine, the reference for the figures of `bench.runtime`."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20


def fork_child(serve: Callable[[], None]) -> int:
    """Forks a child that runs `serve` and ends; returns its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            serve()
        finally:
            os._exit(0)
    return pid


def _time_median(act: Callable[[], Any], count: int, warm: int = 10) -> float:
    durations = []
    for _ in range(warm + count):
        start_s = time.perf_counter()
        act()
        durations.append(time.perf_counter() - start_s)
    return float(np.median(durations[warm:]))


def time_zeromq_round_trip(count: int = 500) -> float:
    """Returns the median seconds of 1 KB there and back over TCP on the loopback, between two processes."""
    import zmq

    port_pipe, port = os.pipe()

    def serve() -> None:
        sock = zmq.Context().socket(zmq.REP)
        os.write(port, str(sock.bind_to_random_port("tcp://127.0.0.1")).encode())
        for _ in range(count + 10):
            sock.send(sock.recv())
        time.sleep(0.2)

    pid = fork_child(serve)
    context = zmq.Context()
    sock = context.socket(zmq.REQ)
    sock.connect(f"tcp://127.0.0.1:{int(os.read(port_pipe, 16))}")

    def act() -> None:
        sock.send(b"x" * 1000)
        sock.recv()

    seconds = _time_median(act, count)
    os.waitpid(pid, 0)
    sock.close()
    context.term()
    return seconds


def time_socket_round_trip(family: int, count: int = 500) -> float:
    """Returns the median seconds of 1 KB there and back between two processes, over a plain socket."""
    if family == socket.AF_UNIX:
        parent_socket, child_socket = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            parent_socket = socket.create_connection(listener.getsockname())
            child_socket, _ = listener.accept()
        for endpoint in (parent_socket, child_socket):
            endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def serve() -> None:
        for _ in range(count + 10):
            child_socket.send(child_socket.recv(4096))

    pid = fork_child(serve)

    def act() -> None:
        parent_socket.send(b"x" * 1000)
        parent_socket.recv(4096)

    seconds = _time_median(act, count)
    os.waitpid(pid, 0)
    parent_socket.close()
    child_socket.close()
    return seconds


def time_copy(size: int) -> float:
    """Returns the seconds of a warm copy of `size` bytes."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    return _time_median(lambda: np.copyto(target, source), 5, warm=1)


def time_fresh_copy(size: int) -> float:
    """Returns the seconds of a copy into pages that were never touched."""
    source = np.ones(size, np.uint8)

    def act() -> None:
        with mmap.mmap(-1, size) as pages:
            target = np.frombuffer(pages, np.uint8)
            np.copyto(target, source)
            del target

    return _time_median(act, 3, warm=1)


def time_shared_memory_copy(size: int) -> float:
    """Returns the seconds of a copy into mapped pages of a file in /dev/shm."""
    source = np.ones(size, np.uint8)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(size)
        pages = mmap.mmap(file.fileno(), size)
        target = np.frombuffer(pages, np.uint8)
        return _time_median(lambda: np.copyto(target, source), 5, warm=1)


def time_gloo(size: int) -> float:
    """Returns the seconds of `torch.distributed.send` of `size` bytes to a process of this host, by gloo."""
    code = (
        "import sys, time, torch, torch.distributed as d\n"
        "rank, path, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])\n"
        "d.init_process_group('gloo', init_method='file://' + path, rank=rank, world_size=2)\n"
        "x, times = torch.ones(size, dtype=torch.uint8), []\n"
        "for _ in range(8):\n"
        "    d.barrier()\n"
        "    started = time.perf_counter()\n"
        "    d.send(x, 1) if rank == 0 else d.recv(x, 0)\n"
        "    d.barrier()\n"
        "    times.append(time.perf_counter() - started)\n"
        "print(sorted(times[1:])[3])\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), f"{folder}/store", str(size)], stdout=subprocess.PIPE
            )
            for rank in (0, 1)
        ]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    return float(outputs[0])


def time_dd(size: int, folder: Path) -> float:
    """Returns the seconds of `dd` of `size` bytes into a file, with one fsync at its end."""
    target = folder / "dd"
    start_s = time.perf_counter()
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=4M", f"count={size // (4 * MIB)}", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)
    duration_s = time.perf_counter() - start_s
    target.unlink()
    return duration_s


def measure() -> dict[str, float]:
    """Returns one row of measurements: name with unit → value."""
    start_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    row = {"interpreter and import torch (s)": time.perf_counter() - start_s}
    row["ZeroMQ TCP round trip, 1 KB (us)"] = time_zeromq_round_trip() * 1e6
    row["TCP round trip, 1 KB (us)"] = time_socket_round_trip(socket.AF_INET) * 1e6
    row["UNIX socket round trip, 1 KB (us)"] = time_socket_round_trip(socket.AF_UNIX) * 1e6
    row["memory copy, 64 MiB (ms)"] = time_copy(64 * MIB) * 1e3
    row["memory copy, 256 MiB (ms)"] = time_copy(256 * MIB) * 1e3
    row["memory copy, 500 MB (ms)"] = time_copy(500_000_000) * 1e3
    row["memory copy into fresh pages, 64 MiB (ms)"] = time_fresh_copy(64 * MIB) * 1e3
    row["copy into shared memory, 64 MiB (ms)"] = time_shared_memory_copy(64 * MIB) * 1e3
    row["gloo send and recv, 64 MiB (ms)"] = time_gloo(64 * MIB) * 1e3
    with tempfile.TemporaryDirectory(dir=".") as folder:
        row["dd with fsync, 256 MiB (ms)"] = time_dd(256 * MIB, Path(folder)) * 1e3
    return row


if __name__ == "__main__":
    print(json.dumps(measure()))
