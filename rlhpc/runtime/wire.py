"""Length-prefixed pickles over a private socket pair between a driver and its fork server (parent and child)."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")


def send(sock: socket.socket, message: Any) -> None:
    """Pickles and sends one message, after its length."""
    body = pickle.dumps(message)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def receive(sock: socket.socket) -> Any | None:
    """Receives one message; None when the other side is gone."""
    try:
        head = _exactly(sock, _LENGTH.size)
        body = _exactly(sock, _LENGTH.unpack(head)[0]) if head else None
    except (ConnectionError, OSError):
        return None
    return None if body is None else pickle.loads(body)
