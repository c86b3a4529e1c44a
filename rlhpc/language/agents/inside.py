"""The first thing in a sandbox without a network: leads a port of the loopback address to the model's socket, then becomes the
command. As `runner.py`: the standard library, any Python from 3.8 on.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
import threading

#: Where the model is, in there.
PORT = 8000
_SET_PDEATHSIG, _SIOCGIFFLAGS, _SIOCSIFFLAGS, _UP = 1, 0x8913, 0x8914, 1


def main() -> None:
    """Arguments: the socket, then the command."""
    path, command = sys.argv[1], sys.argv[2:]
    _raise_loopback()
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
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


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
