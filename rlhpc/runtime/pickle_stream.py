"""Length-prefixed pickles over a private socket pair between a driver and its fork server (parent and child)."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")
_SEND_TIMEOUT = struct.pack("ll", 180, 0)


def send(sock: socket.socket, message: Any) -> None:
    """Pickles and sends one message, after its length.

    Raises:
        OSError: The other side has ended, or has read nothing until the timeout; the connection has ended.
    """
    payload = pickle.dumps(message)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
    try:
        sock.sendall(_LENGTH.pack(len(payload)) + payload)
    except BlockingIOError:
        sock.shutdown(socket.SHUT_RDWR)  # half a message may be on its way
        raise


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    chunks = []
    while size:
        chunk = sock.recv(min(size, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def receive(sock: socket.socket) -> Any | None:
    """Receives one message; returns None if the other side has ended."""
    try:
        header = _exactly(sock, _LENGTH.size)
        payload = _exactly(sock, _LENGTH.unpack(header)[0]) if header else None
    except (ConnectionError, OSError):
        return None
    return None if payload is None else pickle.loads(payload)
