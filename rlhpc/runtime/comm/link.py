"""One connection of bulk data: its messages, each with an HMAC under the connection's own key and a count, and raw bytes."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from collections.abc import Callable

from rlhpc.runtime.registry import Keys

PROOF = 32
SIZE = struct.Struct("!H")
#: A transfer without a sign of life from the other host for this long is over, as a silent rank is (`leases.LOST_S`).
LOST_S = 180
#: How often a waiting receiver checks whether the run has failed.
LOOK_S = 0.2
#: Bytes that one system call asks for: few enough that the receiver can check the run in between.
CHUNK = 8 << 20


class Link:
    """An authenticated connection: messages with an HMAC under its own key, and raw bytes."""

    def __init__(self, sock: socket.socket, keys: Keys, sends: bytes, hears: bytes) -> None:
        self.sock = sock
        self._secret = hashlib.sha256(b"rlhpc bulk " + keys.secret).digest()
        self._roles, self._counts = (sends, hears), [0, 0]
        self._key = b""

    def proof(self, role: bytes, transcript: bytes) -> bytes:
        return hmac.digest(self._secret, role + transcript, "sha256")

    def agree(self, transcript: bytes) -> None:
        self._key = self.proof(b"link", transcript)

    def _mac(self, direction: int, body: bytes) -> bytes:
        self._counts[direction] += 1
        return hmac.digest(self._key, self._roles[direction] + b"%d " % self._counts[direction] + body, "sha256")

    def say(self, body: bytes) -> None:
        self.sock.sendall(SIZE.pack(len(body)) + body + self._mac(0, body))

    def hear(self, check: Callable[[], None]) -> bytes:
        """Receives the next message.

        Raises:
            ConnectionError: The other side is gone, or the message is somebody else's.
        """
        (size,) = SIZE.unpack(self.exactly(SIZE.size, check))
        message = self.exactly(size + PROOF, check)
        if not hmac.compare_digest(message[size:], self._mac(1, message[:size])):
            raise ConnectionError("a message is not the other side's")
        return message[:size]

    def exactly(self, size: int, check: Callable[[], None]) -> bytes:
        data = bytearray(size)
        self.fill(memoryview(data), check)
        return bytes(data)

    def fill(self, target: memoryview, check: Callable[[], None]) -> None:
        """Receives until `target` is full; raises `ConnectionError` with how much had come if it does not get there."""
        at = 0
        while at < len(target):
            try:
                count = self.sock.recv_into(target[at : at + CHUNK], 0, socket.MSG_WAITALL)
            except BlockingIOError:  # nothing came for the socket's timeout
                check()
                continue
            except OSError as error:
                raise ConnectionError(f"{error.strerror} after {at} of {len(target)} bytes") from None
            if not count:
                raise ConnectionError(f"its end came after {at} of {len(target)} bytes")
            at += count


def tune(sock: socket.socket) -> None:
    """Sets socket options. Buffer sizes stay the kernel's, which grows them as the path needs; a size set here is capped."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_S // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, LOST_S // 9)
    wake_every(sock, LOOK_S)
    # A peer that takes nothing must not hold a sender for ever.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", LOST_S, 0))


def wake_every(sock: socket.socket, seconds: float) -> None:
    """Sets the kernel's own timeout: with Python's the socket would not block, and each piece would cost one more call."""
    whole = int(seconds)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6)))
