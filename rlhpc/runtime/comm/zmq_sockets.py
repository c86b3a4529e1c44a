"""Requests to the services of other processes, over UNIX sockets within a host and over ZeroMQ between hosts.

All ZeroMQ sockets between hosts use CURVE, and both sides authenticate with the generation's key.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from socket import SOL_SOCKET, create_server
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from rlhpc.runtime.comm import unix_sockets
from rlhpc.runtime.comm.bulk_transfer import BulkClient
from rlhpc.runtime.comm.queues import ChannelRefused, TooEarly
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded
from rlhpc.runtime.host import host_id
from rlhpc.runtime.os_resources import is_short_of_descriptors
from rlhpc.runtime.registry import CurveKeys

_request_ids = itertools.count()
#: Maximum size of a ZeroMQ frame; longer frames are sent in pieces. ZeroMQ reads a frame into memory before it has
#: authenticated the sender, so this bounds the memory that an unauthenticated connection can use.
PIECE = 1 << 20
#: Upper bound on the bytes that CURVE adds to a frame.
_OVERHEAD = 1 << 10
#: Milliseconds that a handshake may take; a process of this run that was too slow tries again.
_HANDSHAKE_MS = 10_000
_DIVIDED = b"rlhpc divided\n"
_LENGTHS = "!%dQ"
#: Exceptions for replies whose status is neither `ok` nor `error`.
_REFUSALS = {b"refused": ChannelRefused, b"too early": TooEarly}
#: Maximum number of connections that ZeroMQ still accepts after its port is shut; each one uses a descriptor.
_BACKLOG = 100
#: Default seconds that the other side may take to read a message.
POST_S = 60.0
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
#: Packet filter that drops everything: the single instruction `return 0`.
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)


def make_socket(context: zmq.Context[Any], socket_type: int, curve_keys: CurveKeys, server: bool) -> zmq.Socket[Any]:
    """Creates a socket that communicates only with processes that have the generation's key."""
    socket = context.socket(socket_type)
    socket.linger = 0
    socket.set_hwm(0)
    socket.maxmsgsize = PIECE + _OVERHEAD
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.curve_publickey, socket.curve_secretkey = curve_keys.public, curve_keys.secret
    if server:
        socket.curve_server = True
        socket.zap_domain = b"rlhpc"
    else:
        socket.curve_serverkey = curve_keys.public
    return socket


def divide_frames(frames: Sequence[Any]) -> Sequence[Any]:
    """Returns the frames to send. If a frame is longer than `PIECE`, these are the lengths of all frames and their pieces."""
    frame_lengths = [len(f) if isinstance(f, bytes) else memoryview(f).nbytes for f in frames]
    if max(frame_lengths, default=0) <= PIECE:
        return frames
    frame_pieces: list[Any] = [_DIVIDED, struct.pack(_LENGTHS % len(frame_lengths), *frame_lengths)]
    for frame, frame_length in zip(frames, frame_lengths, strict=True):
        frame_bytes = memoryview(frame).cast("B")
        frame_pieces += [
            frame_bytes[piece_start : piece_start + PIECE] for piece_start in range(0, frame_length, PIECE)
        ]
    return frame_pieces


def join_pieces(frames: list[bytes]) -> list[bytes]:
    """Joins the frames that `divide_frames` split into pieces."""
    if not frames or frames[0] != _DIVIDED:
        return frames
    piece_iterator, joined_frames = iter(frames[2:]), []
    for frame_length in struct.unpack(_LENGTHS % (len(frames[1]) // 8), frames[1]):
        joined_frames.append(b"".join(itertools.islice(piece_iterator, -(-frame_length // PIECE))))
    return joined_frames


class TcpPort:
    """TCP port on which a ZeroMQ socket listens for processes of other hosts.

    This class does not use `TcpListener`, because ZeroMQ accepts connections itself, on a thread that does not need the GIL.
    ZeroMQ accepts every connection and keeps it for up to the time limit of a handshake. While unauthenticated connections
    use too many descriptors, `shut` makes the kernel drop further connection requests. A process of the run tries again one
    or two seconds later.

    Attributes:
        listener: Listening socket; an edge-triggered epoll reports it as readable when a process connects.
        endpoint: Endpoint to publish. The port is already bound, so no other process can bind the same port.
    """

    def __init__(self, socket: zmq.Socket[Any], address: str) -> None:
        self.listener = create_server((address, 0), backlog=_BACKLOG)
        self.listener.setblocking(False)
        self.endpoint = f"tcp://{address}:{self.listener.getsockname()[1]}"
        socket.setsockopt(zmq.USE_FD, os.dup(self.listener.fileno()))
        socket.bind(self.endpoint)
        self.is_shut = False

    def shut(self, should_shut: bool) -> None:
        """Makes the kernel drop new connection requests to the port, or accept them again."""
        if should_shut and not self.is_shut:
            drop_filter = ctypes.create_string_buffer(_DROP, len(_DROP))
            self.listener.setsockopt(SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(drop_filter)))
        elif self.is_shut and not should_shut:
            self.listener.setsockopt(SOL_SOCKET, _SO_DETACH_FILTER, 0)
        self.is_shut = should_shut


def shut_crowded_ports(ports: Collection[TcpPort]) -> None:
    """Shuts the ports if the process is short of file descriptors; otherwise opens them."""
    is_crowded = bool(ports) and is_short_of_descriptors()
    for port in list(ports):
        port.shut(is_crowded)


def is_readable(socket: zmq.Socket[Any]) -> bool:
    """Returns whether a message has arrived. ZeroMQ's file descriptor only signals that the socket's state has changed."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def choose(record: dict[str, str]) -> str:
    """Returns the endpoint at which this process reaches the process that published `record`.

    Raises:
        ChannelError: The process is on another host and listens on no TCP port.
    """
    if record["host"] == host_id():
        return record["ipc"]
    if not record["tcp"]:
        raise ChannelError(
            f"{record} is on another host ({record['host']}), or has a /tmp or /dev/shm of its own, and listens on no TCP port"
        )
    return record["tcp"]


class ZapAuthenticator:
    """ZAP handler: answers ZeroMQ's authentication requests; only clients with the generation's public key may connect."""

    def __init__(self, context: zmq.Context[Any], keys: CurveKeys) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")
        self._allowed_key = z85.decode(keys.public)
        self.num_refused = 0

    def answer(self) -> None:
        """Answers one request; call it when the socket is readable."""
        version, request_id, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        is_allowed = mechanism == b"CURVE" and credentials[:1] == [self._allowed_key]
        self.num_refused += not is_allowed
        self.socket.send_multipart(
            [version, request_id, b"200" if is_allowed else b"400", b"", b"rlhpc" if is_allowed else b"", b""]
        )


@contextlib.contextmanager
def _convert_termination() -> Iterator[None]:
    """Converts ZeroMQ's error about a terminated context into a `ChannelError`."""
    try:
        yield
    except zmq.ContextTerminated:
        raise ChannelError("this process has left the run: its session ended while it waited") from None


class _ZmqClient:
    """Connection to a service on another host."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, curve_keys: CurveKeys) -> None:
        self.in_step = True
        self._socket = make_socket(context, zmq.DEALER, curve_keys, server=False)
        self._socket.connect(endpoint)

    def send(self, frames: list[Any], check: Callable[[], None]) -> None:
        with _convert_termination():  # copies to an unbounded queue, so it never blocks
            self._socket.send_multipart(divide_frames(frames))

    def receive(self, timeout: float) -> list[bytes] | None:
        with _convert_termination():
            return join_pieces(self._socket.recv_multipart()) if self._socket.poll(int(timeout * 1000)) else None

    def close(self) -> None:
        self._socket.close()


class Pending(NamedTuple):
    """A sent request: its endpoint, number and purpose."""

    endpoint: str
    number: bytes
    purpose: str


class _ThreadConnections(threading.local):
    """Connections of one thread.

    Attributes:
        clients, bulk: Connections for messages, and for large data, by endpoint.
        unconfirmed_endpoints: Endpoints to which the thread has sent a `PUT` since their last reply, with the process keys.
    """

    def __init__(self) -> None:
        self.clients: dict[str, unix_sockets.Client | _ZmqClient] = {}
        self.bulk: dict[str, BulkClient] = {}
        self.unconfirmed_endpoints: dict[str, str] = {}


class Peers:
    """Client of the services of other processes: each thread has one persistent connection per peer."""

    def __init__(self, context: zmq.Context[Any], keys: CurveKeys, check: Callable[[], None]) -> None:
        self._context, self._keys, self._check = context, keys, check
        self._thread = _ThreadConnections()
        #: Keys of processes (`host.process_key`) whose end the driver has reported.
        self.ended_processes = set[str]()

    def _client(self, endpoint: str) -> unix_sockets.Client | _ZmqClient:
        """Returns this thread's connection to an endpoint."""
        clients = self._thread.clients
        if endpoint not in clients:
            try:
                clients[endpoint] = (
                    unix_sockets.Client(endpoint[6:], self._keys)
                    if endpoint.startswith("ipc://")
                    else _ZmqClient(self._context, endpoint, self._keys)
                )
            except OSError as error:
                self._check()
                raise ChannelError(f"cannot reach the process behind {endpoint}: {error}") from None
        return clients[endpoint]

    def _unreachable(self, endpoint: str, wait_purpose: str) -> ChannelError:
        self._thread.clients.pop(endpoint).close()
        self._await_reported_failure()
        return ChannelError(f"the process behind {endpoint} died while this one waited for {wait_purpose}")

    def has_ended(self, record: Mapping[str, Any]) -> bool:
        """Returns whether the process that published `record` has certainly ended.

        This is the case if the process was on this host and no process listens on its socket any more.
        """
        if record["host"] != host_id():
            return False
        try:
            unix_sockets.connect(record["data"]["ipc"].removeprefix("ipc://"), self._keys, timeout=0.0).sock.close()
        except OSError as error:  # with any other error the process may still be alive
            return isinstance(error, (ConnectionRefusedError, FileNotFoundError))
        return False

    def _send(self, endpoint: str, frames: list[Any], timeout: float, purpose: str) -> None:
        """Sends a message to a process that may have stopped reading.

        Raises:
            DeadlineExceeded: The process has not read enough within `timeout` seconds.
            ChannelError: The process has ended.
        """
        deadline = time.monotonic() + timeout
        client = self._client(endpoint)

        def check() -> None:
            self._check()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"waited {timeout:.1f} s for {purpose}: {endpoint} reads nothing")

        try:
            client.send(frames, check)
        except OSError:
            raise self._unreachable(endpoint, purpose) from None
        except DeadlineExceeded:
            self._thread.unconfirmed_endpoints.pop(
                endpoint, None
            )  # the caller learns of the failure from the exception
            raise
        finally:
            if not client.in_step and self._thread.clients.get(endpoint) is client:
                self._thread.clients.pop(endpoint).close()

    def post(
        self,
        endpoint: str,
        op: bytes,
        frames: Sequence[Any],
        timeout: float = POST_S,
        purpose: str | None = None,
        process: str = "",
    ) -> None:
        """Sends a request that has no reply; raises the same errors as `begin`.

        Args:
            endpoint: Endpoint of the receiver.
            op: Operation of the service.
            frames: Arguments of the operation.
            timeout: Seconds that the receiver may take to read the request.
            purpose: Purpose of the request, for error messages; by default the operation.
            process: Key of the receiver's process (`host.process_key`).
        """
        self._send(endpoint, [b"", op, *frames], timeout, purpose or op.decode())
        if op == b"PUT":
            self._thread.unconfirmed_endpoints[endpoint] = process

    def forget_unconfirmed(self) -> None:
        """Clears the list of endpoints from which `confirm` requests a confirmation.

        Called after the call that sent the messages has failed, because their receivers may have ended.
        """
        self._thread.unconfirmed_endpoints.clear()

    def confirm(self, timeout: float) -> None:
        """Waits until the receivers have handled all `PUT` requests that this thread has sent with `post`.

        Raises:
            ChannelError: A process refused an item. The end of a process raises no error here, because the driver reports it.
        """
        while self._thread.unconfirmed_endpoints:
            endpoint, process = self._thread.unconfirmed_endpoints.popitem()
            try:
                pending_request = self.begin(endpoint, b"SYNC", [], f"{endpoint} to confirm what was put", timeout)
                self.reply_to(pending_request, timeout, lambda process=process: process in self.ended_processes)  # type: ignore[misc]
            except ChannelError:
                if endpoint in self._thread.clients:  # else the connection has ended
                    raise

    def request(self, endpoint: str, op: bytes, frames: Sequence[Any], timeout: float, purpose: str) -> list[bytes]:
        """Sends a request and waits for its reply.

        Raises:
            DeadlineExceeded: No reply arrived within `timeout` seconds; the message has the purpose.
            ChannelError: The other side replied with an error, or has ended.
        """
        deadline = time.monotonic() + timeout
        pending_request = self.begin(endpoint, op, frames, purpose, timeout)
        return self.reply_to(pending_request, max(0.0, deadline - time.monotonic()))

    def begin(self, endpoint: str, op: bytes, frames: Sequence[Any], purpose: str, timeout: float = POST_S) -> Pending:
        """Sends a request and returns at once. The same thread must call `reply_to` before its next request to this endpoint.

        Raises:
            DeadlineExceeded: The other side has not read the request within `timeout` seconds.
            ChannelError: The other side has ended.
        """
        request_id = next(_request_ids).to_bytes(8, "big")
        self._send(endpoint, [request_id, op, *frames], timeout, purpose)
        return Pending(endpoint, request_id, purpose)

    def reply_to(
        self, pending_request: Pending, timeout: float, has_ended: Callable[[], bool] = lambda: False
    ) -> list[bytes]:
        """Waits for the reply to a request and returns it; raises the same errors as `request`.

        Args:
            pending_request: The request.
            timeout: Seconds to wait.
            has_ended: Returns whether the other side is known to have ended. If a process on another host ends, its
                connections may stay open.

        Raises:
            DeadlineExceeded: No reply arrived in time.
        """
        endpoint, request_id, wait_purpose = pending_request
        client = self._client(endpoint)
        try:
            deadline = time.monotonic() + timeout
            while True:
                reply = client.receive(max(0.0, min(0.2, deadline - time.monotonic())))
                if reply is None:
                    self._check()
                    if has_ended():
                        raise self._unreachable(endpoint, wait_purpose)
                    if time.monotonic() > deadline:
                        self._cancel(endpoint, request_id)
                        raise DeadlineExceeded(f"waited {timeout:.1f} s for {wait_purpose}")
                elif reply[0] == request_id:
                    break
                # else: a late reply to an abandoned request; CANCEL has returned its items to their queue
        except (ConnectionError, BrokenPipeError):
            raise self._unreachable(endpoint, wait_purpose) from None
        self._thread.unconfirmed_endpoints.pop(endpoint, None)
        if reply[1] == b"ok":
            return reply[2:]
        raise _REFUSALS.get(bytes(reply[1]), ChannelError)(reply[2].decode())

    def _cancel(self, endpoint: str, number: bytes) -> None:
        """Cancels a request without waiting; if that fails, closes the connection, which has the same effect."""
        try:
            self.post(endpoint, b"CANCEL", [number], timeout=0.0)
        except DeadlineExceeded:
            self._thread.clients.pop(endpoint).close()

    def fetch(self, endpoint: str, path: str, start: int, target: memoryview, *, forwarded: bool = False) -> bool:
        """Fills `target` with bytes of another host's segment, or of data that a process forwards.

        Args:
            endpoint: Endpoint of the `BulkServer` that has the data.
            path: Path of the segment, or name of the forwarded data.
            start: Offset of the first byte.
            target: Memory of this process.
            forwarded: Fetch forwarded data rather than a segment.

        Returns:
            False if the process does not have the forwarded data yet.

        Raises:
            Withdrawn: The data is no longer offered.
            ChannelError: The owner has ended, its host is unreachable, or the segment was freed; the message names the owner.
        """
        clients = self._thread.bulk
        while True:
            is_new = endpoint not in clients
            client = self._find_bulk_client(endpoint)
            try:
                return client.fetch(path, start, target, is_forwarded=forwarded)
            except OSError as error:
                if not is_new and not client.is_receiving:
                    continue  # the connection was idle, and a firewall between the hosts may have dropped it
                self._await_reported_failure()
                raise ChannelError(
                    f"{client.peer} at {endpoint.rpartition('@')[2]} died or is out of reach while this process received "
                    f"{len(target)} bytes from it: {error}"
                ) from None
            finally:
                if not client.in_step:
                    clients.pop(endpoint).close()

    def _find_bulk_client(self, endpoint: str) -> BulkClient:
        if endpoint not in self._thread.bulk:
            self._thread.bulk[endpoint] = BulkClient(endpoint, self._keys, self._check)
        return self._thread.bulk[endpoint]

    def release(self, endpoint: str, path: str, reader: int) -> None:
        """Notifies the owner of a segment on another host that this reader no longer needs it. Ignores an ended owner.

        Connects to the owner first if this thread has no connection to it.
        """
        clients = self._thread.bulk
        for _ in range(2 if endpoint in clients else 1):  # a firewall may have dropped an idle connection
            try:
                self._find_bulk_client(endpoint).release(path, reader)
            except (OSError, ChannelError):
                if endpoint in clients:
                    clients.pop(endpoint).close()
            else:
                return

    def _await_reported_failure(self) -> None:
        # The driver learns of a process's end at about the same time, and its error message is better.
        for _ in range(20):
            self._check()
            time.sleep(0.01)

    def close(self) -> None:
        """Closes the calling thread's connections."""
        for client in (*self._thread.clients.values(), *self._thread.bulk.values()):
            client.close()
        self._thread.clients.clear()
        self._thread.bulk.clear()
