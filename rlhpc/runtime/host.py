"""Identity of this host and its processes. All other modules compare and name hosts with these functions."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from pathlib import Path

#: Folders of UNIX sockets and of shared memory.
SOCKET_ROOT, SHM_ROOT = Path("/tmp"), Path("/dev/shm")


def node_name() -> str:
    """Returns this machine's host name, for messages and records."""
    return os.uname().nodename


def node_names(environ: Mapping[str, str]) -> frozenset[str]:
    """Returns all names that Slurm may use for this node: the full and the short host name, and `SLURMD_NODENAME`."""
    name = node_name()
    return frozenset({name, name.split(".")[0], environ.get("SLURMD_NODENAME", "")} - {""})


def host_id() -> str:
    """Returns the identity of this host. Processes with the same host id share UNIX sockets and shared memory.

    A machine with several /tmp or /dev/shm folders, such as private ones of jobs or containers, counts as several hosts,
    because its processes do not see all files. Tests set `RLHPC_HOST_ID` to simulate several hosts on one machine.
    """
    return os.environ.get("RLHPC_HOST_ID") or _read_machine_id()


@functools.cache
def _read_machine_id() -> str:
    """Returns the host id of this machine. Computes it only once, because each message needs it to choose a transport."""
    return ":".join([node_name(), _read_boot_id(), *map(_make_folder_id, (SOCKET_ROOT, SHM_ROOT))])


def _make_folder_id(folder: Path) -> str:
    try:
        status = folder.stat()
    except OSError:
        return "none"
    return f"{status.st_dev:x}.{status.st_ino:x}"


def process_key(endpoint: Mapping[str, str]) -> str:
    """Returns the unique key of a process of the run, derived from the endpoint of the process's service."""
    return f"{endpoint['host']} {endpoint['ipc']}"


def process_id() -> str:
    """Returns `pid.namespace` of this process. Other processes that share its folders use it to check whether it runs."""
    return f"{os.getpid()}.{pid_namespace()}"


@functools.cache
def pid_namespace() -> int:
    """Returns the inode of this process's PID namespace; 0 if it cannot be determined."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def has_ended(process_id: str) -> bool:
    """Returns whether a process (`process_id`) is known to have ended; False for a process of another PID namespace."""
    pid, _, namespace = process_id.partition(".")
    return namespace == str(pid_namespace()) and not _is_running(int(pid))


def _is_running(pid: int) -> bool:
    """Returns whether a process of this PID namespace runs; False for a process that has ended but is not reaped yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self") == str(os.getpid()):  # else /proc shows another namespace
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return True


@functools.cache
def process_space() -> str:
    """Returns `name/boot id/PID namespace`: the scope in which a pid identifies a process."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{node_name()}/{_read_boot_id()}/{namespace}"


@functools.cache
def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def state_folder(name: str) -> Path:
    """Returns this user's folder for data that outlives runs: `$XDG_STATE_HOME/rlhpc/<name>`. The folder may not exist.

    The default of `XDG_STATE_HOME` is `~/.local/state`.
    """
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "rlhpc" / name
