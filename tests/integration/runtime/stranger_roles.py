"""Ranks whose sockets strangers meet, and the stranger: another user, who connects to every port that another one owns."""

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

#: Arguments: uid of the victim, seconds, connections to hold at most, hexadecimal bytes to send over each.
STRANGER = """
import os, resource, socket, sys, time
os.setgroups([]); os.setgid(65534); os.setuid(65534)
victim, seconds, most, *words = sys.argv[1:]
held, end, told = [], time.monotonic() + float(seconds), False
before = set(sys.stdin.readline().split())
while time.monotonic() < end and len(held) < int(most):
    lines = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
    doors = [l[1] for l in lines if l[3] == "0A" and l[7] == victim and l[1] not in before]
    for door in doors:
        address, port = door.split(":")
        where = socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)
        for word in words or [""]:
            sock = socket.socket()
            sock.settimeout(0.5)
            try:
                sock.connect(where)
                sock.sendall(bytes.fromhex(word))
            except OSError:
                continue
            held.append(sock)
    if not told:
        print("looking", flush=True)
        told = True
print(len(held), flush=True)
sys.stdin.read()
"""


def listening(uid: int) -> list[str]:
    """Ports of a user as /proc/net/tcp has them."""
    with open("/proc/net/tcp") as lines:
        rows = [line.split() for line in lines][1:]
    return [row[1] for row in rows if row[3] == "0A" and row[7] == str(uid)]


class Stranger:
    """The other user at work; `with`. Ports that were open before are not the run's, and left alone."""

    def __init__(self, seconds: float, most: int, *words: bytes) -> None:
        self._arguments = [str(os.getuid()), str(seconds), str(most), *(word.hex() for word in words)]

    def __enter__(self) -> Stranger:
        command = [sys.executable, "-S", "-c", STRANGER, *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def look(self, leave: list[str]) -> None:
        """Begins, and leaves some ports alone."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(" ".join(leave) + "\n")
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

    def ports(self) -> list[int]:
        """TCP ports that this process listens on."""
        return sorted(c.laddr.port for c in psutil.Process().net_connections("inet") if c.status == "LISTEN")

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
        """Forms the group; between gloo's listening and its connecting waits until the file is there."""
        from torch.distributed import ProcessGroupGloo

        from rlhpc.runtime.comm import meshes

        meshes.PROOF_S = patience
        create = ProcessGroupGloo.create_device

        def create_and_wait(**options: Any) -> Any:
            device = create(**options)
            Path(f"{path}-{self.rank}").touch()
            deadline = time.monotonic() + 30
            while not os.path.exists(path) and time.monotonic() < deadline:
                time.sleep(0.01)
            return device

        ProcessGroupGloo.create_device = staticmethod(create_and_wait)
        return float(self.all_reduce(torch.tensor(float(self.rank))))
