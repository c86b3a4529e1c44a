"""Filesystem operations of processes below a folder, counted by `strace`.

An operation is a system call that names a file, lists a folder, or reads or writes a file's content. `close`, `lseek` and
`fstat` are not counted: a client of a network filesystem answers them by itself.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

#: System calls that are counted, with the operation that they are.
_CALLS = {
    "open": "open", "openat": "open", "stat": "stat", "lstat": "stat", "newfstatat": "stat", "statx": "stat",
    "readlink": "stat", "readlinkat": "stat", "access": "stat", "faccessat": "stat", "faccessat2": "stat",
    "getdents64": "list", "read": "read", "pread64": "read", "write": "write", "pwrite64": "write", "ftruncate": "write",
    "fsync": "sync", "fdatasync": "sync", "rename": "rename", "renameat": "rename", "renameat2": "rename",
    "link": "link", "linkat": "link", "symlink": "link", "symlinkat": "link", "unlink": "remove", "unlinkat": "remove",
    "rmdir": "remove", "mkdir": "mkdir", "mkdirat": "mkdir", "utimensat": "utime", "chmod": "chmod", "fchmod": "chmod",
    "fchmodat": "chmod",
}  # fmt: skip
#: System calls that send data over a socket.
_SENDS = ("sendto", "sendmsg", "writev")
_SENT = re.compile(r"^\(\d+<socket:.* = (\d+)$")
_LINE = re.compile(r"^\d+ +(?:<\.\.\. )?(\w+)(.*)$")


@dataclass
class Operations:
    """Operations in a time window.

    Attributes:
        seconds: Length of the window.
        counts: Number of operations by kind.
        paths: Number of operations by the path below the folder.
        commands: Programs that the processes have started, by name.
        sent_bytes: Bytes that the processes have sent over sockets.
    """

    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    commands: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0

    @property
    def per_s(self) -> float:
        return sum(self.counts.values()) / self.seconds


@contextmanager
def count_operations(pids: Sequence[int], folder: Path, log: Path) -> Iterator[Operations]:
    """Counts the operations of running processes and their children below a folder during the block.

    Args:
        pids: The processes.
        folder: The folder, without links in its path.
        log: File for the output of `strace`.
    """
    pid_arguments = [word for pid in pids for word in ("-p", str(pid))]
    tracer = subprocess.Popen(_build_strace_command(log, pid_arguments), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while any(_tracer_of(pid) != tracer.pid for pid in pids):
        if tracer.poll() is not None or time.monotonic() > deadline:
            tracer.kill()
            assert tracer.stderr is not None
            raise RuntimeError(f"strace did not attach to {pids}: {tracer.stderr.read()}")
        time.sleep(0.05)
    operations, start_time = Operations(), time.monotonic()
    try:
        yield operations
    finally:
        operations.seconds = time.monotonic() - start_time
        tracer.send_signal(signal.SIGINT)
        tracer.communicate(timeout=60)
        _read_log(operations, folder, log)


def _tracer_of(pid: int) -> int:
    match = re.search(r"^TracerPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(match[1]) if match else 0


def _read_log(operations: Operations, folder: Path, log: Path) -> None:
    below = re.compile(rf'[<"]({re.escape(str(folder))}[^">]*)')
    for line in log.read_text(errors="replace").splitlines():
        match = _LINE.match(line)
        if match is None or "resumed>" in line.partition("(")[0]:
            continue
        name, arguments = match[1], match[2]
        if name == "execve" and " = 0" in line:
            operations.commands[Path(arguments.partition('"')[2].partition('"')[0]).name] += 1
        if (name in _SENDS or name == "write") and (sent_match := _SENT.match(arguments)):
            operations.sent_bytes += int(sent_match[1])
        path = below.search(arguments)
        if name not in _CALLS or path is None or (name == "newfstatat" and ', ""' in arguments):
            continue
        operations.counts[_CALLS[name]] += 1
        operations.paths[path[1].removeprefix(str(folder))] += 1


def count_command_operations(command: Sequence[str], folder: Path, log: Path) -> Operations:
    """Runs a command, and counts its operations below a folder."""
    start_time = time.monotonic()
    subprocess.run(_build_strace_command(log, command), check=True, stdout=subprocess.DEVNULL, timeout=300)
    operations = Operations(time.monotonic() - start_time)
    _read_log(operations, folder, log)
    return operations


def _build_strace_command(log: Path, command: Sequence[str]) -> list[str]:
    return [
        "strace",
        "-f",
        "-y",
        "-qq",
        "-s",
        "0",
        "-e",
        f"trace={','.join([*_CALLS, *_SENDS, 'execve'])}",
        "-o",
        str(log),
        *command,
    ]
