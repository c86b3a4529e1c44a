"""Length-prefixed pickles over private sockets and pipes between a process and its children."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("!Q")
_SEND_TIMEOUT = struct.pack("ll", 180, 0)


def encode(message: Any) -> bytes:
    """Pickles a message; returns its length and the pickle."""
    payload = pickle.dumps(message)
    return _LENGTH.pack(len(payload)) + payload


def send(sock: socket.socket, message: Any) -> None:
    """Pickles a message and sends it, after its length.

    Raises:
        OSError: The other side has ended, or has not read for 180 s; the connection cannot be used any more.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
    try:
        sock.sendall(encode(message))
    except BlockingIOError:
        sock.shutdown(socket.SHUT_RDWR)  # a part of the message may already be sent
        raise


def _read_exactly(read_bytes: Callable[[int], bytes], num_bytes: int) -> bytes:
    chunks = []
    while num_bytes:
        chunk = read_bytes(min(num_bytes, 1 << 20))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        num_bytes -= len(chunk)
    return b"".join(chunks)


def decode(read: Callable[[int], bytes]) -> Any:
    """Reads and unpickles one message; does not read beyond its end.

    Args:
        read: Returns at most the given number of bytes, and b"" at the end of the stream.

    Raises:
        EOFError: The other side has ended.
    """
    (num_bytes,) = _LENGTH.unpack(_read_exactly(read, _LENGTH.size))
    return pickle.loads(_read_exactly(read, num_bytes))


def receive(sock: socket.socket) -> Any | None:
    """Receives one message; returns None if the other side has ended."""
    payload = None
    with contextlib.suppress(EOFError, OSError):
        payload = decode(sock.recv)
    return payload
