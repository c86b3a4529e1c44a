"""Identity of this machine: the only module that determines it, for comparing or naming hosts."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from pathlib import Path

#: Where UNIX sockets and shared memory are.
SOCKET_ROOT, SHM_ROOT = Path("/tmp"), Path("/dev/shm")


def node_name() -> str:
    """Returns this machine's host name, for messages and records."""
    return os.uname().nodename


def names_here(environ: Mapping[str, str]) -> frozenset[str]:
    """Returns all names that Slurm may use for this node: its host name, in full and short, and `SLURMD_NODENAME`."""
    name = node_name()
    return frozenset({name, name.split(".")[0], environ.get("SLURMD_NODENAME", "")} - {""})


def host_id() -> str:
    """Returns the identity of the machine whose shared memory and UNIX sockets this process can reach.

    A machine with several /tmp or /dev/shm (private ones of jobs, containers) counts as several hosts: processes of one do not
    see the files of another. `RLHPC_HOST_ID` overrides it, so that a test can make two hosts out of one.
    """
    return os.environ.get("RLHPC_HOST_ID") or _machine()


@functools.cache
def _machine() -> str:
    """Returns the identity of the machine, computed once: each message of this process first checks whether it goes to another
    host.
    """
    return ":".join([node_name(), _boot_id(), *map(_folder_id, (SOCKET_ROOT, SHM_ROOT))])


def _folder_id(folder: Path) -> str:
    try:
        status = folder.stat()
    except OSError:
        return "none"
    return f"{status.st_dev:x}.{status.st_ino:x}"


def process_key(endpoint: Mapping[str, str]) -> str:
    """Returns the unique key of a process of the run, made from the endpoint that its service publishes."""
    return f"{endpoint['host']} {endpoint['ipc']}"


def process_id() -> str:
    """Returns `pid.namespace` of this process, by which processes that share its folders determine whether it runs."""
    return f"{os.getpid()}.{pid_namespace()}"


@functools.cache
def pid_namespace() -> int:
    """Returns the inode of this process's PID namespace; 0 if it cannot be determined."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def has_ended(process: str) -> bool:
    """Returns whether a process (`process_id`) is known to have ended; of another PID namespace that is never known."""
    pid, _, namespace = process.partition(".")
    return namespace == str(pid_namespace()) and not _runs(int(pid))


def _runs(pid: int) -> bool:
    """Returns whether a process of this PID namespace runs; a process that has ended but has not been reaped does not."""
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
    """Returns `name/boot id/pid namespace`: the scope in which a pid identifies a process."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{node_name()}/{_boot_id()}/{namespace}"


@functools.cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def state_folder(name: str) -> Path:
    """Returns this user's folder for data that outlives runs: `$XDG_STATE_HOME/rlhpc/<name>`, by default below
    `~/.local/state`. It may not exist.
    """
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "rlhpc" / name
