"""What goes in and out of a process: its listening sockets, the connections of others, and answers that wait to be sent.

It belongs to the thread that leads the service's event loop; only `post` and `wake` are for others.
"""

from __future__ import annotations

import collections
import os
import select
import weakref
from collections.abc import Callable
from typing import Any

import zmq

from rlhpc.runtime.comm.bulk import BulkServer
from rlhpc.runtime.comm.sockets import Door, ZapDoor, divided, readable, shut_where_crowded, whole
from rlhpc.runtime.comm.unix import Connection, Listener

#: Who has sent something: a connection on this host, or the ZeroMQ identity of one from another.
Peer = Connection | bytes


class Traffic:
    """The sockets of a service.

    Args:
        listener: For processes of this host.
        token: What they prove to know.
        zap: Lets in ZeroMQ's connections.
        router: For processes of other hosts, if there are any.
        bulk: For large data of other hosts.
        handle: Given each message, with who sent it.
        gone: Given the name of a connection that has closed.
    """

    def __init__(
        self,
        listener: Listener,
        token: bytes,
        zap: ZapDoor,
        router: zmq.Socket[Any] | None,
        bulk: BulkServer | None,
        *,
        handle: Callable[[Peer, list[bytes]], None],
        gone: Callable[[str], None],
    ) -> None:
        self._listener, self._token, self._zap, self._router, self._bulk = listener, token, zap, router, bulk
        self._handle, self._gone = handle, gone
        self._outbox: collections.deque[tuple[Peer, list[Any]]] = collections.deque()
        self._connections: dict[int, Connection] = {}
        self._doors: dict[int, Door] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # not by `close`: another thread may be about to write to it, and its number may be a file's by then
        weakref.finalize(self, os.close, self._wake)
        self._epoll = select.epoll()
        for fd in (listener.sock.fileno(), self._wake, int(zap.socket.FD)):
            self._epoll.register(fd, select.EPOLLIN)
        if router:
            self._epoll.register(int(router.FD), select.EPOLLIN)
        if bulk:
            self._epoll.register(bulk.sock.fileno(), select.EPOLLIN)

    def mind(self, door: Door) -> None:
        """Looks at a port at once when somebody connects to it."""
        self._doors[door.listener.fileno()] = door
        self._epoll.register(door.listener.fileno(), select.EPOLLIN | select.EPOLLET)

    def look_at_doors(self) -> None:
        """Shuts the ports where the process has too few descriptors left, and opens them again."""
        shut_where_crowded(self._doors.values())

    def post(self, peer: Peer, frames: list[Any]) -> None:
        """Queues what is to be sent at the end of a turn."""
        self._outbox.append((peer, frames))

    def wake(self) -> None:
        """Ends a turn that waits."""
        os.eventfd_write(self._wake, 1)

    def turn(self, timeout: float) -> bool:
        """Takes in what has come, and sends what is to be sent; waits at most so long. False when nothing happened."""
        events = self._epoll.poll(timeout)
        for fd, event in events:
            if fd in self._connections:
                self._serve(fd, event)
            elif fd == self._wake:
                os.eventfd_read(self._wake)
            elif fd == self._listener.sock.fileno():
                while (accepted := self._listener.accept(self._token)) is not None:
                    self._connections[accepted.sock.fileno()] = accepted
                    self._epoll.register(accepted.sock.fileno(), select.EPOLLIN)
            elif self._bulk and fd == self._bulk.sock.fileno():
                self._bulk.accept()
            elif fd in self._doors:
                self.look_at_doors()
            # ZeroMQ's descriptor only says that its state changed: read until there is nothing more.
            elif self._router and fd == self._router.FD:
                pass
            else:
                while readable(self._zap.socket):
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
            self._gone(connection.name)

    def _exchange(self) -> None:
        """Takes what other hosts have sent, and sends all that is queued."""
        router = self._router
        while True:
            while router and readable(router):
                identity, *rest = router.recv_multipart()
                self._handle(identity, whole(rest))
            # Sending also notices what has arrived, and the descriptor then no longer signals it: check again.
            if not self._outbox:
                return
            while self._outbox:
                peer, frames = self._outbox.popleft()
                if isinstance(peer, bytes):
                    assert router is not None
                    router.send_multipart([peer, *divided(frames)])
                elif not peer.closed and peer.send(frames):
                    self._epoll.modify(peer.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def close(self) -> None:
        """Closes all sockets."""
        for connection in self._connections.values():
            connection.sock.close()
        self._listener.sock.close()
        self._epoll.close()
        for door in self._doors.values():
            door.listener.close()
        if self._router:
            self._router.close()
        if self._bulk:
            self._bulk.close()
        self._zap.socket.close()
