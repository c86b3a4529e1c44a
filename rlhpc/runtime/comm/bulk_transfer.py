"""Bulk data transfer between hosts, over plain TCP from the memory of one process into the memory of another.

CURVE encrypts about one gigabyte per second and core, and ZeroMQ copies a message three times. Here the kernel reads from the
owner's segment or tensors and writes directly into memory that the receiver has allocated.

Both sides first prove that they know the generation's secret: each answers the other's random challenge with an HMAC. Each
request and each reply header ends with an HMAC, under the connection's key, of its content and a message count. A third party
can therefore not forge, replay or omit a message. The bytes of the segments follow unencrypted. They are buffers of arrays
and tensors, never a pickle; pickles are only sent in encrypted messages.

    server: MAGIC, challenge            client: challenge, proof            server: proof, size of its name, name
    client: size, request, HMAC         server: size, reply, HMAC, the requested bytes

A request for bytes is b"F" with a range and a segment's path, or b"O" with a range and the name of data that the server
forwards. The request b"R" with a reader's number and a path releases the data for this reader and has no reply.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhpc.runtime.comm.unix_sockets import send_all
from rlhpc.runtime.comm.zero_copy import PREFIX, ForwardedData, Lender, Withdrawn
from rlhpc.runtime.errors import ChannelError
from rlhpc.runtime.registry import CurveKeys
from rlhpc.runtime.tcp_listener import ConnectionTable, TcpListener, host_of

PROOF = 32
SIZE = struct.Struct("!H")
#: Seconds without any packet from the other host after which a transfer fails.
LOST_S = 180
#: Seconds between two checks of a waiting receiver whether the run has failed.
CHECK_S = 0.2
#: Maximum bytes per system call, so that the receiver can check the run between calls.
CHUNK = 8 << 20


class BulkConnection:
    """Connection for messages with an HMAC under the connection's key, and for raw bytes."""

    def __init__(self, sock: socket.socket, keys: CurveKeys, send_role: bytes, receive_role: bytes) -> None:
        self.sock = sock
        self._secret = hashlib.sha256(b"rlhpc bulk " + keys.secret).digest()
        self._roles, self._counts = (send_role, receive_role), [0, 0]
        self._key = b""

    def compute_proof(self, role: bytes, transcript: bytes) -> bytes:
        """Returns the HMAC with which a side proves that it knows the generation's secret."""
        return hmac.digest(self._secret, role + transcript, "sha256")

    def derive_key(self, transcript: bytes) -> None:
        """Sets the connection's key, derived from the secret and the challenges of both sides."""
        self._key = self.compute_proof(b"link", transcript)

    def _mac(self, direction: int, body: bytes) -> bytes:
        self._counts[direction] += 1
        return hmac.digest(self._key, self._roles[direction] + b"%d " % self._counts[direction] + body, "sha256")

    def send(self, body: bytes) -> None:
        """Sends a message with its size and its HMAC."""
        self.sock.sendall(SIZE.pack(len(body)) + body + self._mac(0, body))

    def receive(self, check: Callable[[], None]) -> bytes:
        """Receives the next message and returns it without its HMAC.

        Raises:
            ConnectionError: The other side has closed the connection, or the message's HMAC is wrong.
        """
        (num_bytes,) = SIZE.unpack(self.receive_exactly(SIZE.size, check))
        message = self.receive_exactly(num_bytes + PROOF, check)
        if not hmac.compare_digest(message[num_bytes:], self._mac(1, message[:num_bytes])):
            raise ConnectionError("a message is not the other side's")
        return message[:num_bytes]

    def receive_exactly(self, num_bytes: int, check_alive: Callable[[], None]) -> bytes:
        """Receives and returns `num_bytes` bytes; raises as `receive_into` does."""
        received_bytes = bytearray(num_bytes)
        self.receive_into(memoryview(received_bytes), check_alive)
        return bytes(received_bytes)

    def receive_into(self, target: memoryview, check_alive: Callable[[], None]) -> None:
        """Receives until `target` is full.

        Raises:
            ConnectionError: The connection ended too early; the message has the number of bytes received.
        """
        num_received = 0
        while num_received < len(target):
            try:
                num_new_bytes = self.sock.recv_into(target[num_received : num_received + CHUNK], 0, socket.MSG_WAITALL)
            except BlockingIOError:  # nothing arrived within the socket's timeout
                check_alive()
                continue
            except OSError as error:
                raise ConnectionError(f"{error.strerror} after {num_received} of {len(target)} bytes") from None
            if not num_new_bytes:
                raise ConnectionError(f"its end came after {num_received} of {len(target)} bytes")
            num_received += num_new_bytes


def set_options(sock: socket.socket) -> None:
    """Sets the socket's options: no delay, keep-alive, timeouts.

    Leaves the buffer sizes to the kernel, which grows the buffers as needed; it would cap sizes set here.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_S // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, LOST_S // 9)
    set_receive_timeout(sock, CHECK_S)
    # A peer that does not read must not block a sender forever.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", LOST_S, 0))


def set_receive_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Sets the kernel's receive timeout of a socket.

    Python's timeout would make the socket non-blocking, and every receive would need one more system call.
    """
    whole_s = int(timeout_s)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole_s, int((timeout_s - whole_s) * 1e6)))


log = logging.getLogger(__name__)

MAGIC = b"rlhpc bulk 1\n"
_NONCE = 32
_RANGE, _READER = struct.Struct("!QQ"), struct.Struct("!I")
_FETCH, _FETCH_FORWARDED, _RELEASE = b"F", b"O", b"R"
_OK, _ERROR, _NOT_YET, _WITHDRAWN = b"+", b"-", b"~", b"x"
#: Seconds that a request waits for data that is not offered yet, before it gets a negative reply.
_OFFER_S = 0.5
#: Maximum number of concurrent handshakes.
_MAX_UNAUTHENTICATED = 64
_HANDSHAKE_S = 10.0
#: Maximum number of concurrent transfers of a process. Further transfers wait; the network is busy until then anyway.
MAX_TRANSFERS = 8


# -- the owner's side -------------------------------------------------------------------------------------------------


class BulkServer:
    """Server of this process's segments for other hosts, with one thread per connection.

    Args:
        name: Name of this process, for the other side's messages.
        keys: Keys of the generation.
        address: Address to listen on.
        folders: Folders with segments; no other file is served.
        lender: Zero-copy buffers of this process.
        forwarded_data: Data that this process forwards.

    Attributes:
        sent: Number of bytes of data sent. Bytes are counted before they are sent, so that the number includes all bytes
            that receivers have.
        num_refused: Number of connections that failed to authenticate.
    """

    def __init__(
        self,
        name: str,
        keys: CurveKeys,
        address: str,
        folders: tuple[Path, ...],
        lender: Lender,
        forwarded_data: ForwardedData,
    ) -> None:
        self._name, self._keys, self._folders, self._lender, self._forwarded_data = (
            name,
            keys,
            folders,
            lender,
            forwarded_data,
        )
        self.sent = 0
        self._listener = TcpListener(address)
        self.sock = self._listener.sock
        #: Published endpoint: `name@address:port`.
        self.endpoint = f"{name}@{address}:{self._listener.address[1]}"
        self._lock = threading.Lock()
        self._open_sockets: set[socket.socket] = set()
        self._unauthenticated_sockets = ConnectionTable[socket.socket](_MAX_UNAUTHENTICATED)
        self._transfer_slots = threading.BoundedSemaphore(MAX_TRANSFERS)
        self.num_refused = 0

    def accept(self) -> None:
        """Accepts the waiting connections; call it when the socket is readable."""
        for sock in self._listener.accept():
            with self._lock:
                if (evicted_socket := self._unauthenticated_sockets.add(sock, host_of(sock))) is not None:
                    _shut_down_socket(evicted_socket)
                self._open_sockets.add(sock)
            sock.setblocking(True)
            threading.Thread(target=self._serve, args=[sock], name=f"rlhpc-bulk-{self._name}", daemon=True).start()

    def close(self) -> None:
        """Stops listening and ends all connections."""
        self._listener.close()
        with self._lock:
            for sock in self._open_sockets:
                _shut_down_socket(sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            try:
                connection = self._verify_client(sock)
            finally:
                with self._lock:
                    self._unauthenticated_sockets.remove(sock)
            set_receive_timeout(sock, 0)  # 0 means no timeout; an idle connection costs nothing
            while True:
                self._answer(connection, connection.receive(lambda: None))
        except (OSError, struct.error) as error:
            log.debug("%s: a bulk connection ended: %s", self._name, error)
        finally:
            with self._lock:
                self._open_sockets.discard(sock)
            sock.close()

    def _verify_client(self, sock: socket.socket) -> BulkConnection:
        set_options(sock)
        connection, challenge = BulkConnection(sock, self._keys, b"s", b"c"), secrets.token_bytes(_NONCE)
        sock.sendall(MAGIC + challenge)
        deadline = time.monotonic() + _HANDSHAKE_S

        def check_deadline() -> None:
            if time.monotonic() > deadline:
                raise ConnectionError("it did not say who it is")

        client_hello = connection.receive_exactly(_NONCE + PROOF, check_deadline)
        transcript = challenge + client_hello[:_NONCE]
        if not hmac.compare_digest(client_hello[_NONCE:], connection.compute_proof(b"client", transcript)):
            self.num_refused += 1
            raise ConnectionError("it does not know the generation's secret")
        name = self._name.encode()
        sock.sendall(connection.compute_proof(b"server", transcript + name) + SIZE.pack(len(name)) + name)
        connection.derive_key(transcript)
        return connection

    def _answer(self, connection: BulkConnection, request: bytes) -> None:
        operation, arguments = request[:1], request[1:]
        if operation == _RELEASE:
            self._lender.release(os.fsdecode(arguments[_READER.size :]), *_READER.unpack_from(arguments))
            return
        (range_start, num_bytes), path = _RANGE.unpack_from(arguments), os.fsdecode(arguments[_RANGE.size :])
        if operation == _FETCH_FORWARDED:
            self._send_offer(connection, path, range_start, num_bytes)
            return
        lent_buffers = self._lender.find(path)
        if lent_buffers is None:
            self._send_file(connection, path, range_start, num_bytes)
            return
        with lent_buffers.reading() as lent_views:
            if lent_views is not None:
                with self._begin_transfer(connection, num_bytes):
                    send_all(connection.sock, lent_buffers.pieces(lent_views, range_start, num_bytes))
        if lent_views is None:
            self._send_file(connection, str(lent_buffers.segment), range_start, num_bytes)

    def _send_offer(self, connection: BulkConnection, name: str, range_start: int, num_bytes: int) -> None:
        try:
            memory = self._forwarded_data.find(name, _OFFER_S)
        except Withdrawn:
            connection.send(_WITHDRAWN)
            return
        if memory is None:
            connection.send(_NOT_YET)
        elif range_start + num_bytes > len(memory):
            connection.send(_ERROR + f"{name} has no {num_bytes} bytes from {range_start} on".encode())
        else:
            with self._begin_transfer(connection, num_bytes):
                connection.sock.sendall(memory[range_start : range_start + num_bytes])
            self._forwarded_data.finish_read(name)

    @contextlib.contextmanager
    def _begin_transfer(self, connection: BulkConnection, num_bytes: int) -> Iterator[None]:
        """Waits while `MAX_TRANSFERS` other transfers are running, adds `num_bytes` to `sent`, and sends the reply's
        header. The block then sends the reply's data.
        """
        with self._transfer_slots:
            with self._lock:
                self.sent += num_bytes
            connection.send(_OK)
            yield

    def _send_file(self, connection: BulkConnection, path: str, start: int, count: int) -> None:
        if Path(path).parent not in self._folders:
            connection.send(
                _ERROR + (f"{path} is gone" if path.startswith(PREFIX) else f"{path} is not a segment").encode()
            )
            return
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            connection.send(_ERROR + f"{path} is gone".encode())
            return
        try:
            if start + count > os.fstat(fd).st_size:
                connection.send(_ERROR + f"{path} has no {count} bytes from {start} on".encode())
                return
            memory = self._lender.memory(path)
            with self._begin_transfer(connection, count):
                if memory is not None:
                    # takes half the time of sendfile between namespaces, because sendfile passes one small page at a time
                    connection.sock.sendall(memoryview(memory)[start : start + count])
                    return
                range_end = start + count
                while start < range_end:
                    start += os.sendfile(connection.sock.fileno(), fd, start, range_end - start)
        finally:
            os.close(fd)


def _shut_down_socket(sock: socket.socket) -> None:
    """Shuts the socket down, which wakes the thread that waits on it; that thread closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


# -- the receiver's side ----------------------------------------------------------------------------------------------


class BulkClient:
    """Connection of one thread to the `BulkServer` of a process on another host.

    Args:
        endpoint: The server's published endpoint.
        keys: Keys of the generation.
        check: Called while waiting; raises when the run has failed.

    Attributes:
        peer: Name of the other process.
        in_step: Whether the last reply was received completely, so that the next request may be sent.
        is_receiving: Whether the connection is receiving the data of a reply, or failed while it did.

    Raises:
        ChannelError: The process cannot be reached, or failed to authenticate.
    """

    def __init__(self, endpoint: str, keys: CurveKeys, check: Callable[[], None]) -> None:
        self.in_step, self.is_receiving = True, False
        self.peer, _, server_address = endpoint.rpartition("@")
        self._address, self._check = server_address, check
        address, _, port = server_address.rpartition(":")
        try:
            sock = socket.create_connection((address, int(port)), _HANDSHAKE_S)
        except OSError as error:
            check()
            raise ChannelError(
                f"cannot reach {self.peer} at {server_address} for its data: {error.strerror or error}"
            ) from None
        try:
            self._link = self._verify_server(sock, keys)
        except (OSError, struct.error) as error:
            sock.close()
            check()
            raise ChannelError(f"{self.peer} at {server_address} did not prove to be of this run: {error}") from None

    def _verify_server(self, sock: socket.socket, curve_keys: CurveKeys) -> BulkConnection:
        sock.settimeout(None)
        set_options(sock)
        connection, deadline = BulkConnection(sock, curve_keys, b"c", b"s"), time.monotonic() + _HANDSHAKE_S

        def check_deadline() -> None:
            self._check()
            if time.monotonic() > deadline:
                raise ConnectionError("it said nothing")

        server_hello = connection.receive_exactly(len(MAGIC) + _NONCE, check_deadline)
        if not server_hello.startswith(MAGIC):
            raise ConnectionError("it speaks another protocol")
        challenge = secrets.token_bytes(_NONCE)
        transcript = server_hello[len(MAGIC) :] + challenge
        sock.sendall(challenge + connection.compute_proof(b"client", transcript))
        proof, proof_size = (
            connection.receive_exactly(PROOF, check_deadline),
            connection.receive_exactly(SIZE.size, check_deadline),
        )
        name = connection.receive_exactly(SIZE.unpack(proof_size)[0], check_deadline)
        if not hmac.compare_digest(proof, connection.compute_proof(b"server", transcript + name)):
            raise ConnectionError("it does not know the generation's secret")
        if name.decode() != self.peer:
            raise ConnectionError(f"it is {name.decode()}")
        connection.derive_key(transcript)
        return connection

    def fetch(self, path: str, start: int, target: memoryview, *, is_forwarded: bool = False) -> bool:
        """Fills `target` with bytes of a segment, or of data that the process forwards.

        Args:
            path: Path of the segment, or name of the forwarded data.
            start: Offset of the first byte.
            target: Memory of this process.
            is_forwarded: Fetch forwarded data rather than a segment.

        Returns:
            False if the process does not have the forwarded data yet.

        Raises:
            Withdrawn: The data is no longer offered.
            ChannelError: The segment no longer exists, or the path is not a segment.
            ConnectionError: The connection ended; the content of `target` is undefined.
        """
        self.in_step = False
        self._link.send(
            (_FETCH_FORWARDED if is_forwarded else _FETCH) + _RANGE.pack(start, len(target)) + os.fsencode(path)
        )
        reply = self._link.receive(self._check)
        if reply[:1] != _OK:
            self.in_step = True
            if reply[:1] == _NOT_YET:
                return False
            if reply[:1] == _WITHDRAWN:
                raise Withdrawn(path)
            raise ChannelError(f"{self.peer} at {self._address}: {reply[1:].decode()}")
        self.is_receiving = True
        self._link.receive_into(target, self._check)
        self.in_step, self.is_receiving = True, False
        return True

    def release(self, path: str, reader: int) -> None:
        """Notifies the owner that a reader no longer needs a segment."""
        self._link.send(_RELEASE + _READER.pack(reader) + os.fsencode(path))

    def close(self) -> None:
        self._link.sock.close()
