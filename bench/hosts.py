"""Transfer of payloads and weights between two hosts, compared with a plain TCP connection of the same processes.

    python -m bench.hosts --repeat 7

The hosts are two network, UTS and mount namespaces of this machine, joined by a veth pair, each with a name, an address and a
/dev/shm of its own; making them needs root. The driver, its fork server and rank `near` live on one, the other ranks on the
other; they meet through the registry as ranks on two nodes do. In every repetition the same two processes exchange, in turn:

- bytes over one TCP stream: `sendall` from a warm buffer, `recv_into` a warm buffer; this is the limit;
- the same number of bytes through channels, and through send and recv; a dict of tensors; tensors by gloo;
- 500 MB of weights to one and to four receivers on the other host, and how many bytes crossed the wire for it.

One way is half of a round trip. Rates are bytes over the median time; ratios are medians of the repetitions' ratios.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.machine import goal, spread, write
from bench.weights import BYTES, WeightHolder
from rlhpc import Channel, Cluster, NodePlacementStrategy, Session, Worker

MIB = 1 << 20
ADDRESSES = ("10.78.0.1", "10.78.0.2")
INTERFACE = "veth0"
_SETUP = """set -e
hostname "$1"
mount -t tmpfs -o mode=1777 shm /dev/shm
ip link set lo up
echo ready
exec sleep infinity
"""


class Host:
    """Simulated host: a sleeping process in separate namespaces, which end with it."""

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "--propagation", "slave", "sh", "-c", _SETUP, "sh", name],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise SystemExit("bench.hosts: the namespaces could not be made (see above)")

    @property
    def enter(self) -> list[str]:
        """Returns the command prefix that runs a command on this host."""
        return ["nsenter", f"--target={self.process.pid}", "--net", "--uts", "--mount", f"--wd={Path.cwd()}"]


def connect(hosts: Sequence[Host]) -> None:
    """Connects two hosts by a pair of virtual network interfaces."""
    near_pid, far_pid = (str(host.process.pid) for host in hosts)
    subprocess.run(
        [
            "ip",
            "link",
            "add",
            INTERFACE,
            "netns",
            near_pid,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            far_pid,
        ],
        check=True,
    )
    for host, address in zip(hosts, ADDRESSES, strict=True):
        for ip_command in (f"addr add {address}/24 dev {INTERFACE}", f"link set {INTERFACE} up"):
            subprocess.run([*host.enter, "ip", *ip_command.split()], check=True)


def can_create_namespaces() -> bool:
    """Returns whether this user may create network namespaces: root of a container often may not."""
    if os.geteuid() != 0:
        return False
    probe = ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "probe0", "type", "veth"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def run_far_rank() -> None:
    """Runs a rank like `rlhpc.runtime.worker_process`, with this host's address in place of the driver's."""
    from rlhpc.runtime import worker_process

    spec = worker_process._read_spec(int(sys.argv[1]))
    spec.tcp_address = ADDRESSES[1]
    status = worker_process.run_worker(spec)
    sys.stdout.flush()
    os._exit(status)


# -- what the ranks do ------------------------------------------------------------------------------------------------


def make_tensors(size: int, count: int = 16) -> dict[str, torch.Tensor]:
    """Returns `size` bytes in float32 tensors."""
    return {f"layer{i}": torch.full((size // count // 4,), float(i)) for i in range(count)}


class HostPeer(Worker):
    """Worker that takes part in every measurement, one on each host."""

    def open(self, address: str, listens: bool) -> None:
        """Opens the plain TCP connection."""
        self.tcp: socket.socket
        if listens:
            with socket.create_server((address, 5599), backlog=1) as listener:
                self.tcp = listener.accept()[0]
        else:
            time.sleep(1.0)
            self.tcp = socket.create_connection((address, 5599))
        self.tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.out, self.back = np.ones(256 * MIB, np.uint8), np.ones(256 * MIB, np.uint8)

    def _fill(self, size: int) -> None:
        buffer, offset = self.back.data[:size], 0
        while offset < size:
            offset += self.tcp.recv_into(buffer[offset:])

    def _time_round_trips(self, count: int, run_round_trip: Callable[[], Any]) -> list[float]:
        """Returns the one-way seconds of each of `count` round trips, after one warm-up."""
        one_way_times = []
        for _ in range(count + 1):
            start_s = time.perf_counter()
            run_round_trip()
            one_way_times.append((time.perf_counter() - start_s) / 2)
        return one_way_times[1:]

    def raw(self, count: int, size: int, goes_first: bool) -> list[float]:
        payload = self.out.data[:size]

        def round_trip() -> None:
            if goes_first:
                self.tcp.sendall(payload)
            self._fill(size)
            if not goes_first:
                self.tcp.sendall(payload)

        return self._time_round_trips(count, round_trip)

    def exchange_by_channel(self, count: int, item: Any, out: Channel, back: Channel, goes_first: bool) -> list[float]:
        def round_trip() -> None:
            if goes_first:
                out.put(item, key="0")
                back.get(key="0")
            else:
                back.put(out.get(key="0"), key="0")

        return self._time_round_trips(count, round_trip)

    def exchange_by_send(self, count: int, item: Any, goes_first: bool) -> list[float]:
        peer_name = "far" if goes_first else "near"

        def round_trip() -> None:
            if goes_first:
                self.send(item, peer_name, 0)
                self.recv(peer_name, 0)
            else:
                self.send(self.recv(peer_name, 0), peer_name, 0)

        return self._time_round_trips(count, round_trip)

    def join_gloo(self, rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        torch.distributed.init_process_group("gloo", f"tcp://{ADDRESSES[0]}:5598", rank=rank, world_size=2)
        self.tensor = torch.ones(64 * MIB, dtype=torch.uint8)

    def exchange_by_gloo(self, count: int, goes_first: bool) -> list[float]:
        def round_trip() -> None:
            if goes_first:
                torch.distributed.send(self.tensor, 1)
                torch.distributed.recv(self.tensor, 1)
            else:
                torch.distributed.recv(self.tensor, 0)
                torch.distributed.send(self.tensor, 0)

        return self._time_round_trips(count, round_trip)

    def make(self, kind: str, size: int) -> None:
        self.item = make_tensors(size) if kind == "dict" else np.ones(size, np.uint8)


class Exchange(HostPeer):
    """Worker that stores its payloads, so that calls stay small."""

    def channel(self, count: int, out: Channel, back: Channel, goes_first: bool) -> list[float]:
        return self.exchange_by_channel(count, self.item, out, back, goes_first)

    def messages(self, count: int, goes_first: bool) -> list[float]:
        return self.exchange_by_send(count, self.item, goes_first)


# -- the driver -------------------------------------------------------------------------------------------------------


def read_wire_bytes() -> int:
    """Returns the bytes that this host has sent."""
    result = subprocess.run(["ip", "-s", "-j", "link", "show", INTERFACE], capture_output=True, text=True, check=True)
    return int(json.loads(result.stdout)[0]["stats64"]["tx"]["bytes"])


def run_both_ends(near: Any, far: Any, method: str, *args: Any) -> list[float]:
    """Runs both ends of a measurement; returns the one-way seconds of each repetition."""
    handles = [getattr(near, method)(*args, True), getattr(far, method)(*args, False)]
    one_way_times: list[float] = handles[0].wait()[0]
    handles[1].wait()
    return one_way_times


def measure_weights(sender: Any, group: Any, name: str, count: int, adopts: bool) -> tuple[float, float]:
    """Returns the seconds until all ranks have applied a version that is new in every tensor, and how often its bytes crossed
    the wire.
    """
    receivers = [(name, list(range(count)))]
    for handle in (sender.open(receivers, "off"), group.open(receivers, "off")):
        handle.wait()
    for version in range(3):  # the first two map the memory that versions come into in turn; what counts is later ones
        sender.change("all", version).wait()
        bytes_before, start_s = read_wire_bytes(), time.perf_counter()
        for handle in [sender.send(version), group.take(adopts)]:
            handle.wait()
        duration_s = time.perf_counter() - start_s
        num_copies = (read_wire_bytes() - bytes_before) / BYTES
    (sent_digest,) = sender.value().wait()
    assert all(received_digest == sent_digest for received_digest in group.value().wait())
    sender.close().wait()
    return duration_s, num_copies


def measure(repeat: int, wrapper: str) -> None:
    """Runs the measurements from the driver on the near host."""
    os.environ["OMP_NUM_THREADS"] = "1"
    cluster = Cluster.local(2, 0, [{"label": "far", "node_ranks": "1", "python_interpreter": wrapper}])
    Session.start(tcp_address=ADDRESSES[0])

    def launch(cls: Any, count: int, name: str, is_far: bool) -> Any:
        strategy = NodePlacementStrategy([0] * count, "far") if is_far else NodePlacementStrategy([0] * count)
        return cls.create_group().launch(cluster, strategy, name)

    near_peer, far_peer = launch(Exchange, 1, "near", False), launch(Exchange, 1, "far", True)
    sender = launch(WeightHolder, 1, "sender", False)
    receivers = {n: launch(WeightHolder, n, f"r{n}", True) for n in (1, 4)}
    handles = [near_peer.open(ADDRESSES[0], True), far_peer.open(ADDRESSES[0], False)]
    handles += [near_peer.join_gloo(0), far_peer.join_gloo(1)]
    for handle in handles:
        handle.wait()
    out_channel, back_channel = Channel.create("out", home="far"), Channel.create("back", home="near")
    rows: list[dict[str, float]] = []
    for repetition in range(repeat + 1):
        row: dict[str, float] = {}
        for payload_text, transfer_kind, size, num_round_trips in (
            ("1 KB", "array", 1000, 200),
            ("64 MiB", "array", 64 * MIB, 5),
            ("256 MiB dict", "dict", 256 * MIB, 3),
        ):
            for handle in (near_peer.make(transfer_kind, size), far_peer.make(transfer_kind, size)):
                handle.wait()
            runs: dict[str, Callable[[], list[float]]] = {
                "TCP": functools.partial(run_both_ends, near_peer, far_peer, "raw", num_round_trips, size),
                "channel": functools.partial(
                    run_both_ends, near_peer, far_peer, "channel", num_round_trips, out_channel, back_channel
                ),
                "send/recv": functools.partial(run_both_ends, near_peer, far_peer, "messages", num_round_trips),
            }
            if payload_text == "64 MiB":
                runs["gloo"] = functools.partial(
                    run_both_ends, near_peer, far_peer, "exchange_by_gloo", num_round_trips
                )
            for name, run_contender in runs.items():
                row[f"{name}, {payload_text} (ms)"] = float(np.median(run_contender())) * 1e3
            row[f"TCP again, {payload_text} (ms)"] = float(np.median(runs["TCP"]())) * 1e3
        for count, group in receivers.items():
            for is_adopted in (False, True):
                receive_mode = "adopted" if is_adopted else "copied"
                seconds, num_copies = measure_weights(sender, group, f"r{count}", count, is_adopted)
                row[f"weights 1 to {count}, {receive_mode} (ms)"] = seconds * 1e3
                row[f"weights 1 to {count}, {receive_mode}: times over the wire"] = num_copies
        if repetition:
            rows.append(row)
        print(json.dumps({name: round(value, 3) for name, value in row.items()}), flush=True)
    figures = {name: spread([row[name] for row in rows]) for name in rows[0]}
    ratios: dict[str, float] = {}
    for name in figures:
        transfer_kind, _, size_text = name.removesuffix(" (ms)").partition(", ")
        if transfer_kind in ("channel", "send/recv", "gloo") and size_text != "1 KB":
            limits = [min(row[f"TCP, {size_text} (ms)"], row[f"TCP again, {size_text} (ms)"]) for row in rows]
            ratios[f"{transfer_kind} {size_text}: rate / TCP"] = float(
                np.median([limit / row[name] for row, limit in zip(rows, limits, strict=True)])
            )
        elif transfer_kind.startswith("weights") and "times" not in name:
            size = 256 * MIB
            limits = [min(row["TCP, 256 MiB dict (ms)"], row["TCP again, 256 MiB dict (ms)"]) for row in rows]
            ratios[f"{transfer_kind}, {size_text}: time / TCP's for the bytes"] = float(
                np.median([row[name] / (limit / size * BYTES) for row, limit in zip(rows, limits, strict=True)])
            )
    for name, figure in figures.items():
        print(f"{name:48} {figure['min']:10.2f} {figure['median']:10.2f} {figure['max']:10.2f}")
    for name, ratio in ratios.items():
        print(f"{name:48} {ratio:10.2f}")
    goals = [
        goal(name, ratios[name], at_least=0.8) for name in ratios if name.endswith("rate / TCP") and "gloo" not in name
    ]
    goals += [
        goal(name, figure["median"], at_most=1.05) for name, figure in figures.items() if name.endswith("over the wire")
    ]
    content = {"figures": figures, "ratios": ratios, "goals": goals}
    if repeat >= 5:
        print(write("hosts", f"python -m bench.hosts --repeat {repeat}", content))
    for group in (near_peer, far_peer, sender, *receivers.values()):
        group.shutdown()
    session = Session.running()
    assert session is not None
    session.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Creates the hosts, measures between them, and writes `results/hosts.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7, help="results are written from 5 on (%(default)s)")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        measure(args.repeat, args.measure)
        return 0
    if not can_create_namespaces():
        print(
            "bench.hosts: two network namespaces with a veth pair are needed, and only root may make them",
            file=sys.stderr,
        )
        return 2
    hosts: list[Host] = []
    with tempfile.TemporaryDirectory(prefix="rlhpc-bench-") as folder:
        try:
            hosts += [Host("bench-near"), Host("bench-far")]
            connect(hosts)
            wrapper = Path(folder) / "python"
            command = [*hosts[1].enter, sys.executable, "-c", "from bench.hosts import run_far_rank as r; r()"]
            wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$3"\n')
            wrapper.chmod(0o755)
            measure_command = [
                sys.executable,
                "-m",
                "bench.hosts",
                "--repeat",
                str(args.repeat),
                "--measure",
                str(wrapper),
            ]
            return subprocess.run([*hosts[0].enter, *measure_command], check=False).returncode
        finally:
            for host in hosts:
                host.process.kill()
                host.process.wait()


if __name__ == "__main__":
    raise SystemExit(main())
