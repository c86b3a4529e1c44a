"""Sockets of a service, and its event loop."""

from __future__ import annotations

import collections
import os
import select
import weakref
from collections.abc import Callable
from typing import Any

import zmq

from rlhpc.runtime.comm.bulk_transfer import BulkServer
from rlhpc.runtime.comm.unix_sockets import Listener, UnixConnection
from rlhpc.runtime.comm.zmq_sockets import (
    TcpPort,
    ZapAuthenticator,
    divide_frames,
    is_readable,
    join_pieces,
    shut_crowded_ports,
)

#: Sender of a message: a connection on this host, or the ZeroMQ identity of a process of another host.
Peer = UnixConnection | bytes


class ServiceSockets:
    """Sockets of a service, and its event loop.

    Args:
        listener: Listening socket for processes of this host.
        token: Token that connecting processes of this host must send.
        zap: Authenticator of ZeroMQ's connections.
        router: Socket for processes of other hosts; None if the run has one host.
        bulk: Server of large data for other hosts; None if the run has one host.
        handle: Called with each message and its sender.
        on_close: Called with the name of a connection that has closed.
    """

    def __init__(
        self,
        listener: Listener,
        token: bytes,
        zap: ZapAuthenticator,
        router: zmq.Socket[Any] | None,
        bulk: BulkServer | None,
        *,
        handle: Callable[[Peer, list[bytes]], None],
        on_close: Callable[[str], None],
    ) -> None:
        self._listener, self._token, self._zap, self._router, self._bulk = listener, token, zap, router, bulk
        self._handle = handle
        self._on_close = on_close
        self._outbox: collections.deque[tuple[Peer, list[Any]]] = collections.deque()
        self._connections: dict[int, UnixConnection] = {}
        self._ports: dict[int, TcpPort] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # `close` does not close the eventfd: another thread may still write to it, and the number may belong to another file
        weakref.finalize(self, os.close, self._wake_fd)
        self._epoll = select.epoll()
        for fd in (listener.sock.fileno(), self._wake_fd, int(zap.socket.FD)):
            self._epoll.register(fd, select.EPOLLIN)
        if router:
            self._epoll.register(int(router.FD), select.EPOLLIN)
        if bulk:
            self._epoll.register(bulk.sock.fileno(), select.EPOLLIN)

    def watch_port(self, port: TcpPort) -> None:
        """Adds a port; each connection to the port triggers a check whether the process is short of file descriptors."""
        self._ports[port.listener.fileno()] = port
        self._epoll.register(port.listener.fileno(), select.EPOLLIN | select.EPOLLET)

    def check_ports(self) -> None:
        """Shuts the ports if the process is short of file descriptors; otherwise opens them."""
        shut_crowded_ports(self._ports.values())

    def queue(self, peer: Peer, frames: list[Any]) -> None:
        """Queues a message to be sent at the end of an iteration."""
        self._outbox.append((peer, frames))

    def wake(self) -> None:
        """Wakes the thread that waits in `run_once`."""
        os.eventfd_write(self._wake_fd, 1)

    def run_once(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` seconds for an event, handles the arrived messages, and sends the queued messages.

        Returns False if no event occurred.
        """
        events = self._epoll.poll(timeout_s)
        for fd, event in events:
            if fd in self._connections:
                self._serve(fd, event)
            elif fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif fd == self._listener.sock.fileno():
                while (accepted_connection := self._listener.accept(self._token)) is not None:
                    self._connections[accepted_connection.sock.fileno()] = accepted_connection
                    self._epoll.register(accepted_connection.sock.fileno(), select.EPOLLIN)
            elif self._bulk and fd == self._bulk.sock.fileno():
                self._bulk.accept()
            elif fd in self._ports:
                self.check_ports()
            # ZeroMQ's descriptor only signals that its state has changed: read until there are no more messages.
            elif self._router and fd == self._router.FD:
                pass
            else:
                while is_readable(self._zap.socket):
                    self._zap.answer()
        self._exchange()
        return bool(events)

    def _serve(self, fd: int, event: int) -> None:
        connection = self._connections[fd]
        if event & select.EPOLLOUT and not connection.flush():
            self._epoll.modify(fd, select.EPOLLIN)
        if event & ~select.EPOLLOUT:
            for message in connection.receive():
                self._handle(connection, message)
        if connection.closed:
            self._epoll.unregister(fd)
            del self._connections[fd]
            connection.sock.close()
            self._on_close(connection.name)

    def _exchange(self) -> None:
        """Handles the arrived messages of other hosts, and sends all queued messages."""
        router = self._router
        while True:
            while router and is_readable(router):
                identity, *message = router.recv_multipart()
                self._handle(identity, join_pieces(message))
            # Sending also reads new messages from the network; the descriptor does not signal these, so check again.
            if not self._outbox:
                return
            while self._outbox:
                peer, frames = self._outbox.popleft()
                if isinstance(peer, bytes):
                    assert router is not None
                    router.send_multipart([peer, *divide_frames(frames)])
                elif not peer.closed and peer.send(frames):
                    self._epoll.modify(peer.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def close(self) -> None:
        """Closes all sockets."""
        for connection in self._connections.values():
            connection.sock.close()
        self._listener.sock.close()
        self._epoll.close()
        for port in self._ports.values():
            port.listener.close()
        if self._router:
            self._router.close()
        if self._bulk:
            self._bulk.close()
        self._zap.socket.close()
