"""Messages over UNIX sockets between processes of one host: ten times faster than ZeroMQ, which adds a thread on each side.

The socket is in a folder of mode 0700. Before other data from a peer is read, the kernel confirms the peer's user id and the
peer proves that it knows the generation's secret.

A message is a list of frames, encoded as their count, their sizes (little-endian), and their bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rlhpc.runtime.comm.payload import copy_shared
from rlhpc.runtime.registry import CurveKeys

_COUNT = struct.Struct("<I")
_CHUNK = 256 * 1024
_MAX_FRAMES = 1 << 16
_CRED = struct.Struct("3i")
_MAX_BUFFERS = 256
#: Seconds to wait for a listener whose queue of connections is full.
CONNECT_S = 60.0
_PAUSE_S = 0.02
#: Milliseconds between two checks of a sender whether to give up on a process that does not read.
_CHECK_MS = 200


def token_of(curve_keys: CurveKeys) -> bytes:
    """Returns the token with which a process proves that it knows the generation's secret."""
    return hashlib.sha256(b"rlhpc unix " + curve_keys.secret).digest()


def encode(frames: list[Any]) -> list[Any]:
    """Encodes a message as buffers for `sendmsg`; small messages become one buffer."""
    frame_sizes = [len(f) if isinstance(f, (bytes, bytearray)) else memoryview(f).nbytes for f in frames]
    header = struct.pack(f"<I{len(frame_sizes)}Q", len(frame_sizes), *frame_sizes)
    if sum(frame_sizes) < 16384:
        return [b"".join([header, *frames])]
    return [header, *(f for f, frame_size in zip(frames, frame_sizes, strict=True) if frame_size)]


class Decoder:
    """Decoder of received bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._num_required = _COUNT.size

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Adds received bytes; returns the messages that are now complete.

        Raises:
            ConnectionError: The bytes are not a message of this protocol.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= self._num_required:
            (num_frames,) = _COUNT.unpack_from(self._buffer)
            if num_frames > _MAX_FRAMES:
                raise ConnectionError(f"a message of {num_frames} frames is not one of ours")
            header_bytes = _COUNT.size + 8 * num_frames
            if len(self._buffer) < header_bytes:
                self._num_required = header_bytes
                break
            frame_sizes = struct.unpack_from(f"<{num_frames}Q", self._buffer, _COUNT.size)
            message_bytes = header_bytes + sum(frame_sizes)
            if len(self._buffer) < message_bytes:
                self._num_required = message_bytes
                break
            frames, frame_offset = [], header_bytes
            for frame_size in frame_sizes:
                frames.append(bytes(self._buffer[frame_offset : frame_offset + frame_size]))
                frame_offset += frame_size
            del self._buffer[:message_bytes]
            self._num_required = _COUNT.size
            messages.append(frames)
        return messages


def send_all(sock: socket.socket, buffers: list[Any]) -> None:
    """Sends all buffers over a blocking socket."""
    buffer_views = deque(memoryview(buffer).cast("B") for buffer in buffers)
    while buffer_views:
        _drop_bytes(buffer_views, sock.sendmsg(itertools.islice(buffer_views, _MAX_BUFFERS)))


def send_message(sock: socket.socket, frames: list[Any]) -> tuple[deque[memoryview], int]:
    """Sends as much of a message as a non-blocking socket takes at once.

    Returns:
        The buffers that remain to be sent, and the number of bytes sent.
    """
    buffers = encode(frames)
    if len(buffers) == 1:  # most messages
        try:
            num_sent = sock.send(buffers[0])
        except BlockingIOError:
            num_sent = 0
        return deque() if num_sent == len(buffers[0]) else deque([memoryview(buffers[0])[num_sent:]]), num_sent
    buffer_views = deque(memoryview(buffer).cast("B") for buffer in buffers)
    return buffer_views, send_some(sock, buffer_views)


def send_some(sock: socket.socket, buffer_views: deque[memoryview]) -> int:
    """Sends from the front of `buffer_views` over a non-blocking socket until nothing remains or the socket takes no more.

    Removes the sent bytes from `buffer_views`; returns their number.
    """
    num_sent_total = 0
    while buffer_views:
        try:
            num_sent = sock.sendmsg(itertools.islice(buffer_views, _MAX_BUFFERS))
        except BlockingIOError:
            break
        num_sent_total += num_sent
        _drop_bytes(buffer_views, num_sent)
    return num_sent_total


def _drop_bytes(buffer_views: deque[memoryview], num_bytes: int) -> None:
    while buffer_views and num_bytes >= len(buffer_views[0]):
        num_bytes -= len(buffer_views.popleft())
    if num_bytes:
        buffer_views[0] = buffer_views[0][num_bytes:]


def _read_peer_uid(sock: socket.socket) -> int:
    return int(_CRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CRED.size))[1])


def _open_socket(path: str, curve_keys: CurveKeys, timeout_s: float) -> socket.socket:
    """Connects to a listener of this user and sends the token; returns the non-blocking socket.

    Raises:
        OSError: No process listens, or the listener belongs to another user; `BlockingIOError` if its queue stayed full.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                sock.connect(path)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_PAUSE_S)
        if (uid := _read_peer_uid(sock)) != os.getuid():
            raise PermissionError(f"{path} belongs to user {uid}")
        (hello,) = encode([b"hello", token_of(curve_keys)])
        sock.send(hello)  # the first bytes of a new connection always fit
    except OSError:
        sock.close()
        raise
    return sock


def connect(path: str, keys: CurveKeys, timeout: float = CONNECT_S) -> UnixConnection:
    """Connects to a listener; returns a connection that never blocks.

    Raises:
        OSError: No process listens, or the listener belongs to another user; `BlockingIOError` if its queue stayed full.
    """
    connection = UnixConnection(_open_socket(path, keys, timeout), token_of(keys))
    connection.accepts_messages = True  # only the side that connects sends a token
    return connection


class Client:
    """Connection to a service for the requests of one thread; all waits are bounded.

    Attributes:
        in_step: Whether the connection is usable: the last message was sent completely or not at all.
    """

    def __init__(self, path: str, keys: CurveKeys) -> None:
        self._sock = _open_socket(path, keys, CONNECT_S)
        self._decoder, self._messages = Decoder(), deque[list[bytes]]()
        self._readable_poll, self._writable_poll = select.poll(), select.poll()
        self._readable_poll.register(self._sock, select.POLLIN)
        self._writable_poll.register(self._sock, select.POLLOUT)
        self.in_step = True

    def send(self, frames: list[Any], check: Callable[[], None]) -> None:
        """Sends a message.

        Args:
            frames: The message.
            check: Called before each wait for the other process to read; raises an exception to give up.
        """
        self.in_step = False
        unsent_views, num_sent = send_message(self._sock, frames)
        while unsent_views:
            self.in_step = not num_sent
            check()
            self._writable_poll.poll(_CHECK_MS)
            self.in_step = False
            num_sent += send_some(self._sock, unsent_views)
        self.in_step = True

    def receive(self, timeout: float) -> list[bytes] | None:
        """Returns the next message; None if no complete message has arrived yet. Waits at most `timeout` seconds for data.

        Raises:
            ConnectionError: The other process has closed the connection.
        """
        if not self._messages:
            if not self._readable_poll.poll(timeout * 1000):
                return None
            received_bytes = self._sock.recv(_CHUNK)
            if not received_bytes:
                raise ConnectionError("the other process is gone")
            self._messages.extend(self._decoder.feed(received_bytes))
        return self._messages.popleft() if self._messages else None

    def close(self) -> None:
        self._sock.close()


class Listener:
    """Listening UNIX socket, which accepts connections as `UnixConnection` objects."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.sock.bind(path)
        os.chmod(path, 0o600)
        self.sock.listen(1024)

    def accept(self, token: bytes) -> UnixConnection | None:
        """Accepts the next waiting connection; returns None if no connection waits or if it is from another user."""
        try:
            sock, _ = self.sock.accept()
        except (BlockingIOError, ConnectionError):
            return None
        if _read_peer_uid(sock) != os.getuid():
            sock.close()
            return None
        sock.setblocking(False)
        return UnixConnection(sock, token)


class UnixConnection:
    """Non-blocking connection with a queue of data that the socket could not take yet.

    A service uses this class for the connections that it accepts; remote calls (`rpc`) use it at both ends.

    Attributes:
        accepts_messages: Whether messages are accepted: the peer has sent the token, or this side has connected.
        closed: Whether the connection has ended.
        name: Unique name of the connection in this process.
    """

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        self.sock, self._token = sock, token
        self._decoder = Decoder()
        self._unsent: deque[memoryview] = deque()
        self.accepts_messages = self.closed = False
        self.name = f"fd{sock.fileno()}-{id(self):x}"

    def receive(self) -> list[list[bytes]]:
        """Returns the complete messages that have arrived.

        Sets `closed` if the connection has ended or the peer does not know the secret.
        """
        try:
            received_bytes = self.sock.recv(_CHUNK)
            messages = self._decoder.feed(received_bytes)
        except BlockingIOError:
            return []
        except OSError:
            received_bytes, messages = b"", []
        self.closed = self.closed or not received_bytes
        if not self.accepts_messages and messages:
            hello = messages.pop(0)
            if len(hello) != 2 or hello[0] != b"hello" or not hmac.compare_digest(hello[1], self._token):
                self.closed = True
                return []
            self.accepts_messages = True
        return messages

    def send(self, frames: list[Any]) -> bool:
        """Sends or queues a message; returns whether data remains for `flush`.

        The caller may change the memory of the frames afterwards.
        """
        if self._unsent:
            self._unsent.extend(memoryview(buffer).cast("B") for buffer in copy_shared(encode(frames)))
            return True
        try:
            unsent_views, _ = send_message(self.sock, frames)
        except OSError:
            self.closed = True
            return False
        if unsent_views:
            self._unsent.extend(map(memoryview, copy_shared(unsent_views)))
        return bool(unsent_views)

    def close(self) -> None:
        """Closes the socket and drops queued data."""
        self.closed = True
        self.sock.close()

    def flush(self) -> bool:
        """Sends as much of the queue as the socket takes; returns whether data remains."""
        try:
            send_some(self.sock, self._unsent)
        except OSError:
            self.closed = True
            self._unsent.clear()
        return bool(self._unsent)
