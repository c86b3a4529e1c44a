"""The first thing in a sandbox without a network: sets its limits, leads a port of the loopback address to the model's socket,
then becomes the command. As `main.py`: the standard library, any Python from 3.8 on.
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

#: Where the model is, in there.
PORT = 8000
_SET_PDEATHSIG, _SIOCGIFFLAGS, _SIOCSIFFLAGS, _UP = 1, 0x8913, 0x8914, 1
_CAPBSET_DROP, _NO_NEW_PRIVS, _CAPABILITY_VERSION = 24, 38, 0x20080522
_READ_ONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
#: Lower than that of the rank, which draws what the command asks for.
_NICE = 10
#: A process may map this many times the memory that all of them may use: much of what is mapped is never used.
_MAPPED = 4


def main() -> None:
    """Arguments: what to do, in JSON, then the command.

    `socket`: of the model; `fixed`: a folder that cannot be changed or moved from in here; and limits.
    """
    spec, command = json.loads(sys.argv[1]), sys.argv[2:]
    _raise_loopback()
    if spec["fixed"]:
        _fix(spec["fixed"])
    _limit(spec)
    _drop_capabilities()
    if spec["socket"]:
        _open_door(spec["socket"])
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def _open_door(path: str) -> None:
    """Leads the port to the model's socket, by a process of its own."""
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(("127.0.0.1", PORT))
        door.listen(64)
        own = os.getpid()
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == own:
                _lead(door, path)
            os._exit(0)


def _fix(folder: str) -> None:
    """Makes a folder read-only for what runs in here. All folders above it become mounts, too: these cannot be renamed."""
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, flags: int) -> None:
        if libc.mount(os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(flags), None):
            raise OSError(ctypes.get_errno(), f"mount: {os.strerror(ctypes.get_errno())}", target)

    mount("none", "/", _REC | _PRIVATE)
    parts = os.path.realpath(folder).strip("/").split("/")
    for size in range(1, len(parts) + 1):
        place = "/" + "/".join(parts[:size])
        mount(place, place, _BIND | _REC)
    own_flags = os.statvfs(place).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_RELATIME)
    flags = {os.ST_NOSUID: 2, os.ST_NODEV: 4, os.ST_NOEXEC: 8, os.ST_NOATIME: 1024, os.ST_RELATIME: 1 << 21}
    locked = sum(flag for known, flag in flags.items() if own_flags & known)
    mount("none", place, _BIND | _REMOUNT | _READ_ONLY | locked)
    os.chdir(os.getcwd())  # which was of the files as they were before


def _drop_capabilities() -> None:
    """Takes away what would let the command undo its mounts."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(64):
        libc.prctl(_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0)
    if libc.capset(ctypes.c_char_p(struct.pack("Ii", _CAPABILITY_VERSION, 0)), ctypes.c_char_p(bytes(24))):
        raise OSError(ctypes.get_errno(), "capset")
    libc.prctl(_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0)


def _limit(spec: dict[str, Any]) -> None:
    """Bounds each process; what all of them use together is bounded by the guard outside (`main.py`)."""
    os.nice(_NICE)
    bounds = {resource.RLIMIT_CORE: 0}
    if spec.get("memory_mb"):
        bounds[resource.RLIMIT_DATA] = _MAPPED * spec["memory_mb"] << 20
    if spec.get("disk_mb"):
        bounds[resource.RLIMIT_FSIZE] = spec["disk_mb"] << 20
    for kind, most in bounds.items():
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _raise_loopback() -> None:
    """A new network has none that is up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, asked))[1]
        if not flags & _UP:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _UP))


def _lead(door: socket.socket, path: str) -> None:
    while True:
        came, _ = door.accept()
        there = socket.socket(socket.AF_UNIX)
        try:
            there.connect(path)
        except OSError:
            came.close()
            continue
        for one, other in ((came, there), (there, came)):
            threading.Thread(target=_pass, args=(one, other), daemon=True).start()


def _pass(one: socket.socket, other: socket.socket) -> None:
    try:
        while True:
            data = one.recv(1 << 16)
            if not data:
                break
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)  # the other direction may go on
    except OSError:
        pass


if __name__ == "__main__":
    main()
