"""Transport of calls to a rank and back: over UNIX sockets within a host, over ZeroMQ between hosts.

A waiting thread reads its sockets itself; no thread stands between a call and the rank's main thread. Data that a socket
does not take at once is sent by a short-lived thread, so that neither side waits for the other to read.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
from typing import Any

import zmq

from rlhpc.runtime.comm import unix_sockets
from rlhpc.runtime.comm.service import Service
from rlhpc.runtime.comm.zmq_sockets import TcpPort, choose, divided, join_pieces, make_socket
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.host import host_id, process_id

_numbers = itertools.count()
#: Seconds between checks for an open connection while unsent data waits for a socket.
_LOOK_MS = 1000


class _Line:
    """A connection whose messages are sent in order and never block the sender."""

    def __init__(self, connection: unix_sockets.UnixConnection) -> None:
        self.connection = connection
        self._lock = threading.Lock()
        self._flushing = False

    def send(self, frames: list[Any]) -> None:
        with self._lock:
            if self.connection.send(frames) and not self._flushing:
                self._flushing = True
                threading.Thread(target=self._flush, name="rlhpc-flush", daemon=True).start()

    def _flush(self) -> None:
        poller = select.poll()
        poller.register(self.connection.sock, select.POLLOUT)
        while True:
            poller.poll(_LOOK_MS)  # the close of a socket in the meantime does not end it
            with self._lock:
                if self.connection.closed or not self.connection.flush():
                    self._flushing = False
                    return

    def close(self) -> None:
        with self._lock:
            self.connection.closed = True
            self.connection.sock.close()


def _received(socket: zmq.Socket[Any]) -> list[list[bytes]]:
    """Returns all messages that a ROUTER socket holds, each after the name of its sender."""
    messages: list[list[bytes]] = []
    while True:
        try:
            sender, *message = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return messages
        messages.append([sender, *join_pieces(message)])


class CallDoor:
    """Endpoint at which a rank receives its calls.

    Attributes:
        record: The endpoints to publish: host, ipc, tcp.
    """

    def __init__(self, service: Service, tcp_address: str | None) -> None:
        path = service.scratch.sockets / f"r-{process_id()}-{next(_numbers)}"
        self._listener, self._token = unix_sockets.Listener(str(path)), unix_sockets.token_of(service.keys)
        self.record = {"host": host_id(), "ipc": f"ipc://{path}", "tcp": ""}
        self._epoll = select.epoll()
        self._epoll.register(self._listener.sock.fileno(), select.EPOLLIN)
        self._lines: dict[int, _Line] = {}
        self._calls: list[tuple[_Line | bytes, list[bytes]]] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._router: zmq.Socket[Any] | None = None
        if tcp_address:
            self._router = make_socket(service.context, zmq.ROUTER, service.keys, server=True)
            door = TcpPort(self._router, tcp_address)
            self.record["tcp"] = door.endpoint
            service.mind(door)
            self._epoll.register(int(self._router.FD), select.EPOLLIN)

    def interrupt(self) -> None:
        """Ends a `next` that waits; called on another thread, or in a signal handler."""
        os.eventfd_write(self._wake, 1)

    def next(self) -> tuple[_Line | bytes, list[bytes]] | None:
        """Waits for a call; returns the caller and its message, or None if it was interrupted."""
        while not self._calls:
            if self._router is not None:
                # ZeroMQ's descriptor only signals changes: read the messages that have arrived before waiting.
                self._calls += [(caller, message) for caller, *message in _received(self._router)]
                if self._calls:
                    break
            for fd, _ in self._epoll.poll():
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                    return None
                if fd == self._listener.sock.fileno():
                    self._accept()
                elif fd in self._lines:
                    self._read(fd)
        return self._calls.pop(0)

    def _accept(self) -> None:
        while (connection := self._listener.accept(self._token)) is not None:
            self._lines[connection.sock.fileno()] = _Line(connection)
            self._epoll.register(connection.sock.fileno(), select.EPOLLIN)

    def _read(self, fd: int) -> None:
        line = self._lines[fd]
        self._calls += [(line, message) for message in line.connection.receive()]
        if line.connection.closed:
            self._epoll.unregister(fd)
            del self._lines[fd]
            line.close()

    def answer(self, caller: _Line | bytes, frames: list[Any]) -> None:
        """Sends the answer to a call; does nothing if the caller is gone."""
        if isinstance(caller, _Line):
            if not caller.connection.closed:
                caller.send(frames)
        else:
            assert self._router is not None
            self._router.send_multipart([caller, *divided(frames)])


class CallLines:
    """The caller's connections to the ranks that it has called; used by one thread at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._lines: dict[str, _Line] = {}
        self._by_fd: dict[int, str] = {}
        self._router: zmq.Socket[Any] | None = None
        self._routes: dict[str, bytes] = {}

    def interrupt(self) -> None:
        """Ends a `receive` that is running in another thread."""
        os.eventfd_write(self._wake, 1)

    def send(self, record: dict[str, str], frames: list[Any]) -> bool:
        """Sends to the rank whose `CallDoor` published `record`; returns False if it is known to have ended, which others
        report.
        """
        endpoint = choose(record)
        if endpoint.startswith("ipc://"):
            line = self._lines.get(endpoint) or self._connect(endpoint)
            if line is None:
                return False
            line.send(frames)
        else:
            self._send_far(endpoint, frames)
        return True

    def _connect(self, endpoint: str) -> _Line | None:
        try:
            connection = unix_sockets.connect(endpoint[6:], self._service.keys)
        except (ConnectionError, FileNotFoundError):
            return None
        except OSError as error:
            raise RlhpcError(f"cannot open a connection to a rank: {error.strerror}") from error
        line = self._lines[endpoint] = _Line(connection)
        self._by_fd[connection.sock.fileno()] = endpoint
        self._epoll.register(connection.sock.fileno(), select.EPOLLIN)
        return line

    def _send_far(self, endpoint: str, frames: list[Any]) -> None:
        if self._router is None:
            self._router = make_socket(self._service.context, zmq.ROUTER, self._service.keys, server=False)
            self._router.router_mandatory = True
            self._epoll.register(int(self._router.FD), select.EPOLLIN)
        route = self._routes.get(endpoint)
        if route is None:
            route = self._routes[endpoint] = f"w{len(self._routes)}".encode()
            self._router.setsockopt(zmq.CONNECT_ROUTING_ID, route)
            self._router.connect(endpoint)
        self._router.send_multipart([route, *divided(frames)])

    def receive(self, timeout_ms: int) -> list[list[bytes]]:
        """Returns answers that have arrived, or that arrive within `timeout_ms`."""
        messages = self._from_far()
        for fd, _ in self._epoll.poll(0 if messages else timeout_ms / 1000):
            if fd == self._wake:
                os.eventfd_read(self._wake)
            elif fd in self._by_fd:
                line = self._lines[self._by_fd[fd]]
                messages += line.connection.receive()
                if line.connection.closed:
                    self._epoll.unregister(fd)
                    del self._lines[self._by_fd.pop(fd)]
                    line.close()
        return messages + self._from_far()

    def _from_far(self) -> list[list[bytes]]:
        return [message for _, *message in _received(self._router)] if self._router is not None else []

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._epoll.close()
        os.close(self._wake)
        if self._router is not None:
            self._router.close()
