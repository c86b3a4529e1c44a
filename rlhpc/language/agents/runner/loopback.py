"""First program in a sandbox without a network: sets limits, forwards a port of the loopback address to the model's
socket, then executes the command. Like `main.py`, it needs only the standard library and Python 3.8 or newer.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
from typing import Any

#: Port of the model in the sandbox.
PORT = 8000
_SET_PDEATHSIG, _SIOCGIFFLAGS, _SIOCSIFFLAGS, _UP = 1, 0x8913, 0x8914, 1
_CAPBSET_DROP, _NO_NEW_PRIVS, _CAPABILITY_VERSION = 24, 38, 0x20080522
_READ_ONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
#: Niceness, so that the command has a lower priority than the rank, which generates its replies.
_NICE = 10
#: Mappable memory of a process as a multiple of the memory limit, because much mapped memory is never used.
_MAPPED_FACTOR = 4


def main() -> None:
    """Prepares the sandbox, then executes a command. The program's arguments are settings as JSON, and the command.

    The settings are `socket`, the model's socket; `fixed`, a folder that the command can neither change nor move; and
    resource limits.
    """
    relay_spec, command = json.loads(sys.argv[1]), sys.argv[2:]
    _enable_loopback()
    if relay_spec["fixed"]:
        _make_read_only(relay_spec["fixed"])
    _set_limits(relay_spec)
    _drop_capabilities()
    if relay_spec["socket"]:
        _start_relay(relay_spec["socket"])
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def _start_relay(path: str) -> None:
    """Relays the port to the model's socket, in a child process."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", PORT))
        listener.listen(64)
        pid = os.getpid()
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == pid:
                _relay_connections(listener, path)
            os._exit(0)


def _make_read_only(folder: str) -> None:
    """Makes a folder read-only in the sandbox. All folders above it also become mounts, so that they cannot be renamed."""
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source_path: str, target: str, mount_flags: int) -> None:
        if libc.mount(os.fsencode(source_path), os.fsencode(target), None, ctypes.c_ulong(mount_flags), None):
            raise OSError(ctypes.get_errno(), f"mount: {os.strerror(ctypes.get_errno())}", target)

    mount("none", "/", _REC | _PRIVATE)
    path_names = os.path.realpath(folder).strip("/").split("/")
    for depth in range(1, len(path_names) + 1):
        mount_point = "/" + "/".join(path_names[:depth])
        mount(mount_point, mount_point, _BIND | _REC)
    current_flags = os.statvfs(mount_point).f_flag & (
        os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_RELATIME
    )
    flags = {os.ST_NOSUID: 2, os.ST_NODEV: 4, os.ST_NOEXEC: 8, os.ST_NOATIME: 1024, os.ST_RELATIME: 1 << 21}
    locked_flags = sum(mount_flag for statvfs_flag, mount_flag in flags.items() if current_flags & statvfs_flag)
    mount("none", mount_point, _BIND | _REMOUNT | _READ_ONLY | locked_flags)
    os.chdir(os.getcwd())  # re-enters the folder through the new mounts


def _drop_capabilities() -> None:
    """Drops the capabilities with which the command could undo its mounts."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    if libc.capset(ctypes.c_char_p(struct.pack("Ii", _CAPABILITY_VERSION, 0)), ctypes.c_char_p(bytes(24))):
        raise OSError(ctypes.get_errno(), "capset")
    libc.prctl(_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0)


def _set_limits(relay_spec: dict[str, Any]) -> None:
    """Sets the limits of each process. The guard in `main.py` limits the sum over all processes."""
    os.nice(_NICE)
    bounds = {resource.RLIMIT_CORE: 0}
    if relay_spec.get("memory_mb"):
        bounds[resource.RLIMIT_DATA] = _MAPPED_FACTOR * relay_spec["memory_mb"] << 20
    if relay_spec.get("disk_mb"):
        bounds[resource.RLIMIT_FSIZE] = relay_spec["disk_mb"] << 20
    for resource_id, limit_value in bounds.items():
        _, hard_limit = resource.getrlimit(resource_id)
        limit_value = limit_value if hard_limit == resource.RLIM_INFINITY else min(limit_value, hard_limit)
        resource.setrlimit(resource_id, (limit_value, limit_value))


def _enable_loopback() -> None:
    """Brings up the loopback interface of the new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
        if not flags & _UP:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _UP))


def _relay_connections(listener: socket.socket, path: str) -> None:
    while True:
        client_socket, _ = listener.accept()
        model_socket = socket.socket(socket.AF_UNIX)
        try:
            model_socket.connect(path)
        except OSError:
            client_socket.close()
            continue
        for source_socket, target in ((client_socket, model_socket), (model_socket, client_socket)):
            threading.Thread(target=_copy_stream, args=(source_socket, target), daemon=True).start()


def _copy_stream(source_socket: socket.socket, target: socket.socket) -> None:
    """Copies all data of one socket to another socket."""
    try:
        while True:
            chunk = source_socket.recv(1 << 16)
            if not chunk:
                break
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)  # the other direction may continue
    except OSError:
        pass


if __name__ == "__main__":
    main()
