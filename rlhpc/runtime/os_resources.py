"""Operating system resources of a process: CPU affinity, open files, memory, and signals at the end of its parent."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.host import node_name

PCI = Path("/sys/bus/pci/devices")


def parse_cores(cores_text: str) -> set[int]:
    """Parses a list of cores in Linux's notation: `0-3,8` → 0, 1, 2, 3, 8."""
    ranges = (range_text.partition("-") for range_text in cores_text.strip().split(",") if range_text)
    return {
        core for first_core, _, last_core in ranges for core in range(int(first_core), int(last_core or first_core) + 1)
    }


def cores_near(addresses: Iterable[str], pci: Path = PCI) -> set[int]:
    """Returns the cores of the devices' NUMA nodes; empty if the kernel does not report them.

    Args:
        addresses: PCI addresses of the devices, such as `0000:1b:00.0`.
        pci: Sysfs folder of PCI devices.
    """
    cores: set[int] = set()
    for address in addresses:
        try:
            cores |= parse_cores((pci / address / "local_cpulist").read_text())
        except OSError:
            return set()
    return cores


def bind_near(addresses: Sequence[str], num_threads: int, pci: Path = PCI) -> str:
    """Binds the calling thread, and the threads and processes that it starts later, to the granted cores near devices.

    Ranks with devices near the same cores share these cores. A rank keeps all its cores if fewer cores than threads are near
    its devices.

    Args:
        addresses: PCI addresses of the rank's accelerators.
        num_threads: Number of cores that the rank needs.
        pci: See `cores_near`.

    Returns:
        Text with the action and its reason, for the log.
    """
    cores = os.sched_getaffinity(0)
    near_cores = cores_near(addresses, pci) & cores
    if not near_cores:
        return "not bound: the kernel does not tell of a granted core that is near its accelerators"
    if near_cores == cores:
        return f"not bound: all its {len(cores)} cores are near its accelerators"
    if len(near_cores) < num_threads:
        return (
            f"not bound: {len(near_cores)} of its {len(cores)} cores are near its accelerators, and it has {num_threads} "
            "threads"
        )
    os.sched_setaffinity(0, near_cores)
    return f"bound to {len(near_cores)} of its {len(cores)} cores, those near its accelerators ({', '.join(addresses)})"


#: Minimum limit of open files that a run needs.
MIN_OPEN_FILES = 64
#: Maximum limit of open files that a process sets. Programs that close all possible descriptors, such as older versions of
#: srun, would take seconds with a higher limit.
_MAX_OPEN_FILES = 65_536


def open_files_of_rank(world_size: int) -> int:
    """Returns the number of files that a rank opens to form the process group of all ranks of its worker group.

    The rank that stores the group's keys opens most: two sockets for each other rank, and a constant number besides.
    """
    return 2 * world_size + 24


def open_files_of_driver(num_ranks: int) -> int:
    """Returns the number of files that a driver opens to start and call so many ranks, in all its groups."""
    return 3 * num_ranks + 32


def max_ranks_of_driver(max_open_files: int) -> int:
    """Returns the number of ranks that a driver can start if it may open so many files."""
    return max(0, (max_open_files - 32) // 3)


def file_limit() -> int | None:
    """Returns the number of files that this process may open after `raise_limit`; None if there is no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    return max(soft, _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES))


def raise_limit(required_limit: int = MIN_OPEN_FILES, limit_purpose: str = "a run") -> None:
    """Raises this process's soft limit of open files to the hard limit, at most to 65536; child processes inherit it.

    Args:
        required_limit: Number of open files that are needed.
        limit_purpose: Purpose of the files, for the message.

    Raises:
        ConfigError: The hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_limit = file_limit()
    if soft_limit is not None and soft < soft_limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard))
            soft = soft_limit
    if 0 <= soft < required_limit:
        raise ConfigError(
            f"a process may open {soft} files on node {node_name()}; {limit_purpose} needs {required_limit} or more. "
            f"Raise the limit "
            f"with ulimit -n {required_limit}, have it raised (limits.conf, for Slurm's nodes LimitNOFILE of slurmd), "
            f"or start "
            "fewer ranks"
        )


def readable_descriptors(descriptors: Iterable[int], timeout_s: float | None = None) -> set[int]:
    """Waits until a descriptor can be read or its other side has closed; returns all such descriptors.

    Does not use `select.select`, which refuses descriptors above 1023.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}


def is_short_of_descriptors() -> bool:
    """Returns whether about three quarters of this process's file descriptors are in use.

    Opens a descriptor to find out, because the kernel assigns the lowest free number.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest_fd = os.eventfd(0, os.EFD_CLOEXEC)
    except OSError:
        return True
    os.close(lowest_fd)
    return soft != resource.RLIM_INFINITY and lowest_fd >= soft * 3 // 4


_MEMINFO, _CGROUP_ROOT, _PROCESS_CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def free_memory() -> int:
    """Returns the bytes of free memory of this host, or of this process's control groups (job, container) if that is less."""
    return max(0, min([_read_meminfo("MemAvailable"), *_free_in_cgroups()]))


def total_memory() -> int:
    """Returns the bytes of this host's memory, or the limit of the control groups of this process if that is less."""
    limits_bytes = [_read_meminfo("MemTotal")]
    for name in ("memory.max", "memory.limit_in_bytes"):
        for folder in _iter_cgroup_folders():
            with contextlib.suppress(OSError, ValueError):  # no such controller, no right to read it, or "max"
                limits_bytes.append(int((folder / name).read_text()))
    return min(limits_bytes)


def _read_meminfo(field: str) -> int:
    """Returns a field of /proc/meminfo in bytes."""
    lines = _MEMINFO.read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), 0)


def _free_in_cgroups() -> Iterator[int]:
    """Yields the remaining memory of each control group above this process, in either version of control groups."""
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in _iter_cgroup_folders():
            try:
                limit_text, used_bytes = (
                    (folder / limit_file).read_text().strip(),
                    int((folder / usage_file).read_text()),
                )
                inactive = [int(line.split()[1]) for line in (folder / "memory.stat").read_text().splitlines()
                            if line.startswith(("inactive_file ", "total_inactive_file "))]  # fmt: skip
            except (OSError, ValueError):
                continue  # no such controller, or no permission to read it
            if limit_text != "max":
                # The kernel drops files' pages before it kills a process.
                yield int(limit_text) - used_bytes + max(inactive, default=0)


def _iter_cgroup_folders() -> Iterator[Path]:
    """Yields the folders of this process's control groups, and their parent folders."""
    try:
        lines = _PROCESS_CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUP_ROOT / "memory" if controllers else _CGROUP_ROOT
        folder = root / path.lstrip("/")
        while True:
            yield folder
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, signal_number: int = signal.SIGKILL) -> None:
    """Makes the kernel send this process a signal when its parent dies; exits at once if the parent has already died."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os._exit(1)


#: Program that binds a child to its parent and then executes a command. A function between fork and exec would run Python in
#: a copy of this process, and other threads may have held locks at the fork. Arguments: the parent's pid, the signal, the
#: command.
_BIND_AND_EXECUTE = """
import ctypes, os, signal, sys
parent, number, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, int(number))
if os.getppid() != int(parent):
    os._exit(1)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
try:
    os.execvp(command[0], command)
except OSError as error:
    os.write(2, f"{command[0]}: {error.strerror}\\n".encode())
    os._exit(127)
"""


def start_bound_to_parent(
    command: Sequence[str], number: int = signal.SIGKILL, **options: Any
) -> subprocess.Popen[bytes]:
    """Starts a command with no signal blocked, which gets a signal when this process or the calling thread ends.

    Args:
        command: The command.
        number: Number of the signal.
        options: Options of `subprocess.Popen`.

    Raises:
        OSError: The command does not exist.
    """
    if shutil.which(command[0], path=(options.get("env") or os.environ).get("PATH", os.defpath)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    python = [sys.executable, "-I", "-S", "-c", _BIND_AND_EXECUTE, str(os.getpid()), str(int(number))]
    return subprocess.Popen([*python, *command], **options)


def outlive_parent() -> None:
    """Undoes `die_with_parent`."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)


def reaped_children() -> Iterator[tuple[int, int]]:
    """Yields pid and wait status of each child of this process that has ended; does not wait for others."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def kill_group(pid: int, signal_number: int) -> None:
    """Signals a process that leads its own session, and the processes that it has started."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal_number)


def adopt_orphans() -> None:
    """Makes orphaned descendants of this process its direct children, so that it can end and reap them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
