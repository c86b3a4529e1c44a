"""Ranks whose sockets strangers meet, and the stranger: another user, who connects to ports of theirs."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
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
