"""Ranks whose sockets strangers meet, and the stranger: another user, who connects to ports of theirs."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch

from rlhpc import Worker

#: Arguments: seconds, connections to hold at most, hexadecimal bytes to send over each.
STRANGER = """
import os, socket, sys, time
os.setgroups([]); os.setgid(65534); os.setuid(65534)
seconds, most, *words = sys.argv[1:]
doors = [door.rsplit(":", 1) for door in sys.stdin.readline().split()]
held, end, told = [], time.monotonic() + float(seconds), False
while time.monotonic() < end and len(held) < int(most):
    for address, port in doors:
        for word in words:
            sock = socket.socket()
            sock.settimeout(0.5)
            try:
                sock.connect((address, int(port)))
                sock.sendall(bytes.fromhex(word))
            except OSError:
                continue
            held.append(sock)
    if not told:
        print("looking", flush=True)
        told = True
    time.sleep(0.01)
print(len(held), flush=True)
sys.stdin.read()
"""


def doors(pid: int | None = None) -> list[str]:
    """`address:port` of each TCP port that a process listens on; any user can see them in /proc/net/tcp."""
    connections = psutil.Process(pid).net_connections("inet")
    return sorted(f"{c.laddr.ip}:{c.laddr.port}" for c in connections if c.status == "LISTEN")


class Stranger:
    """The other user at work; `with`. He connects to the ports that he is told, for other tests have theirs on this machine:
    to each a hundred times a second at most, so that a rank that a busy machine lets wait for a second has still seen it."""

    def __init__(self, seconds: float, most: int, *words: bytes) -> None:
        self._arguments = [str(seconds), str(most), *(word.hex() for word in words)]

    def __enter__(self) -> Stranger:
        command = [sys.executable, "-S", "-c", STRANGER, *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def look(self, at: list[str]) -> None:
        """Begins with these ports; returns once he has been at each."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(" ".join(at) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "looking\n"

    def count(self) -> int:
        """Connections that it has made, once it is through."""
        assert self._process.stdout
        return int(self._process.stdout.readline())

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


class Meeting(Worker):
    """A rank that forms groups and looks at its own sockets."""

    def form(self) -> list[float]:
        """The group's own mesh, one of each pair, and one of the rank alone; what each of them adds up."""
        import torch.distributed as dist

        self.init_process_group()
        groups = [None, *(dist.new_group([first, first + 1]) for first in range(0, self.world_size, 2))]
        sums = []
        for group in (groups[0], groups[1 + self.rank // 2]):
            tensor = torch.tensor(float(self.rank))
            dist.all_reduce(tensor, group=group)
            sums.append(float(tensor))
        return sums

    def count_requests(self) -> None:
        """Counts, in the rank that holds the keys of process groups, the requests of all ranks."""
        from rlhpc.runtime.comm.key_value_store import KeyValueStore

        requests = self.requests = Counter[bytes]()
        execute, wait, when_set = KeyValueStore.execute, KeyValueStore.wait, KeyValueStore.when_set

        def counted_execute(store: KeyValueStore, op: bytes, *arguments: bytes) -> bytes:
            requests[op] += 1
            return execute(store, op, *arguments)

        def counted_when_set(store: KeyValueStore, *arguments: Any) -> None:
            requests[b"wait"] += 1
            when_set(store, *arguments)

        def counted_wait(store: KeyValueStore, keys: list[bytes], timeout: float) -> list[bytes] | None:
            values = wait(store, keys, timeout)
            requests[b"wait"] += values is not None  # the holder itself waits in short pieces
            return values

        KeyValueStore.execute = counted_execute  # type: ignore[method-assign, assignment]
        KeyValueStore.wait = counted_wait  # type: ignore[method-assign, assignment]
        KeyValueStore.when_set = counted_when_set  # type: ignore[method-assign, assignment]

    def counted_requests(self) -> int:
        """Requests since the last call."""
        count = self.requests.total()
        self.requests.clear()
        return count

    def form_own(self) -> int:
        """Forms the group of all ranks; returns what this process has open then."""
        self.init_process_group()
        return len(os.listdir("/proc/self/fd")) - 1  # the list itself is open meanwhile

    def form_mesh(self, tensor: int) -> list[float]:
        """Forms the groups of a mesh of data × tensor ranks, and sums the ranks of each of the two."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (self.world_size // tensor, tensor), mesh_dim_names=("data", "tensor"))
        sums = []
        for name in ("data", "tensor"):
            ranks = torch.tensor(float(self.rank))
            dist.all_reduce(ranks, group=mesh.get_group(name))
            sums.append(float(ranks))
        return sums

    def form_slowly(self, slow_rank: int, seconds: float, patience: float) -> float:
        """Forms the group while one rank takes long between publishing its address and connecting."""
        from rlhpc.runtime.comm import gloo_auth
        from rlhpc.runtime.comm import store as stores

        gloo_auth.PROOF_S = patience
        if self.rank == slow_rank:
            multi_get = stores.ServiceStore.multi_get

            def slow_multi_get(store: Any, keys: list[str]) -> list[bytes]:
                addresses = multi_get(store, keys)
                if len(keys) == self.world_size:
                    time.sleep(seconds)
                return addresses

            stores.ServiceStore.multi_get = slow_multi_get  # type: ignore[method-assign, assignment]
        return float(self.all_reduce(torch.tensor(float(self.rank))))

    def alone(self) -> float:
        """A group of one rank, as sharded training and vLLM make it; then it goes."""
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        return float(tensor.sum())

    def leave_group(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()

    def doors(self) -> list[str]:
        """TCP ports that this process listens on."""
        return doors()

    def idle_cpu(self) -> float:
        """Share of a core that the process takes while it does nothing."""
        began = time.process_time()
        time.sleep(0.5)
        return (time.process_time() - began) / 0.5

    def same(self, *objects: Any) -> tuple[Any, ...]:
        return objects

    def may_open(self, files: int) -> None:
        """Lowers the limit of what this process may have open."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def open_files(self, files: int) -> int:
        """Opens so many at a time, as a checkpoint does; returns how many the process has open then."""
        with contextlib.ExitStack() as stack:
            for _ in range(files):
                stack.enter_context(open("/dev/null"))
            return len(os.listdir("/proc/self/fd"))

    def limits(self) -> tuple[int, int]:
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    def form_late(self, path: str, patience: float) -> float:
        """Forms the group; between gloo's listening and its connecting says where it listens, and waits until the file is
        there."""
        from torch.distributed import ProcessGroupGloo

        from rlhpc.runtime.comm import gloo_auth

        gloo_auth.PROOF_S = patience
        create = ProcessGroupGloo.create_device

        def create_and_wait(**options: Any) -> Any:
            device = create(**options)
            said = Path(f"{path}.{self.rank}")
            said.write_text(" ".join(doors()))
            said.rename(f"{path}-{self.rank}")
            deadline = time.monotonic() + 30
            while not os.path.exists(path) and time.monotonic() < deadline:
                time.sleep(0.01)
            return device

        ProcessGroupGloo.create_device = staticmethod(create_and_wait)
        return float(self.all_reduce(torch.tensor(float(self.rank))))
