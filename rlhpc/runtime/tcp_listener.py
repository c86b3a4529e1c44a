"""TCP listener that resets the connections of other users of this host.

The kernel puts all connections to a port into one queue, and while the queue is full, a client waits for one, three or seven
seconds. Therefore this listener empties the queue as fast as it can and looks up the user at the other end of each connection.
It resets connections of other users of this host before the process does any work for them. For a connection from another host
only the address is known; the code that uses the listener limits the number and duration of unauthenticated connections.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import logging
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from rlhpc.runtime.tcp_sockets import PeerOwners, TcpConnection, libc

log = logging.getLogger(__name__)

#: Requested length of the connection queue; the kernel lowers it to its maximum (`net.core.somaxconn`).
_BACKLOG = 65_535
#: Maximum number of connections that one call of `accept` takes off the queue.
_MAX_ACCEPTED = 256
#: Errors of a single connection, after which the next connection can be accepted.
_CONNECTION_ERRORS = (errno.ECONNABORTED, errno.EPROTO, errno.EINTR)
_ROOT = 0
_RESET = struct.pack("ii", 1, 0)
#: Seconds for which the addresses of this host's interfaces are cached.
_INTERFACES_S = 60.0

T = TypeVar("T", bound=Hashable)


class TcpListener:
    """Listening socket that admits connections of this user or root on this host, and all connections from other hosts.

    Args:
        address: An address of this host, not the wildcard address.
        port: Port; 0 lets the system choose a port.

    Attributes:
        sock: Listening socket; only `accept` takes connections off its queue.
        address: Host and port.
    """

    def __init__(self, address: str, port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.sock = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        self.sock.setblocking(False)
        self.address: tuple[str, int] = self.sock.getsockname()[:2]
        self._local_address = socket.inet_pton(family, self.address[0]), self.address[1]
        self._owners = PeerOwners(family, self._local_address)
        self._spare_fd = os.eventfd(0, os.EFD_CLOEXEC)  # reserves a descriptor for `_reset_next` when no other is free
        self._name = ctypes.create_string_buffer(128)
        self._interfaces, self._interfaces_until = frozenset[ipaddress.IPv4Address | ipaddress.IPv6Address](), 0.0

    def accept(self) -> list[socket.socket]:
        """Accepts queued connections; returns the admitted connections in non-blocking mode and resets the others."""
        arrived_sockets: list[tuple[int, TcpConnection]] = []
        for _ in range(_MAX_ACCEPTED):
            fd = self._accept()
            if fd >= 0:
                arrived_sockets.append(
                    (fd, TcpConnection(self.sock.family, self._local_address, self._parse_peer_address()))
                )
            elif ctypes.get_errno() in (errno.EMFILE, errno.ENFILE):
                self._reset_next()
            elif ctypes.get_errno() not in _CONNECTION_ERRORS:
                break
        uids = self._owners.uids([connection for _, connection in arrived_sockets])
        admitted_sockets = []
        for (fd, connection), uid in zip(arrived_sockets, uids, strict=True):
            if uid in (os.getuid(), _ROOT) or (uid is None and not self._is_local(connection.peer[0])):
                admitted_sockets.append(socket.socket(fileno=fd))
                admitted_sockets[-1].setblocking(False)
            else:
                _reset(fd)
        return admitted_sockets

    def serve(self, handle: Callable[[socket.socket], None], name: str) -> Acceptor:
        """Starts a thread that accepts connections and calls `handle` with each connection."""
        return Acceptor(self, handle, name)

    def close(self) -> None:
        """Stops listening; the kernel resets the connections in the queue."""
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
            self._spare_fd = -1
        self._owners.close()
        self.sock.close()

    def _reset_next(self) -> None:
        """Resets the next connection when no file descriptor is free, so that it does not stay in the queue."""
        with contextlib.suppress(OSError):
            if self._spare_fd >= 0:
                os.close(self._spare_fd)
                self._spare_fd = -1
                if (fd := self._accept()) >= 0:
                    _reset(fd)
            self._spare_fd = os.eventfd(0, os.EFD_CLOEXEC)

    def _accept(self) -> int:
        name_length = ctypes.c_uint32(len(self._name))
        flags = socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        return int(libc.accept4(self.sock.fileno(), self._name, ctypes.byref(name_length), flags))

    def _parse_peer_address(self) -> tuple[bytes, int]:
        sockaddr = self._name.raw
        host = sockaddr[4:8] if self.sock.family == socket.AF_INET else sockaddr[8:24]
        return host, int.from_bytes(sockaddr[2:4])

    def _is_local(self, host: bytes) -> bool:
        """Returns whether an address belongs to this host.

        A connection from such an address without an owner has been closed by the client.
        """
        address = _address(host)
        if address.is_loopback:
            return True
        if time.monotonic() > self._interfaces_until:
            self._interfaces_until = time.monotonic() + _INTERFACES_S
            import psutil  # imported at a rank's first connection from this host's address, not at its start

            with contextlib.suppress(OSError):
                interface_addresses = (interface.address.partition("%")[0] for addresses in psutil.net_if_addrs().values()
                         for interface in addresses if interface.family in (socket.AF_INET, socket.AF_INET6))  # fmt: skip
                self._interfaces = frozenset(map(_address, interface_addresses))
        return address in self._interfaces


class Acceptor:
    """Thread that accepts the connections of a listener. `close` also closes the listener.

    Args:
        listener: The listener.
        handle: Called with each connection, on this thread.
        name: Name of the thread.
    """

    def __init__(self, listener: TcpListener, handle: Callable[[socket.socket], None], name: str) -> None:
        self._listener, self._handle = listener, handle
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._listener.sock, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        while self._wake_fd not in [ready_fd for ready_fd, _ in poll.poll()]:
            for sock in self._listener.accept():
                try:
                    self._handle(sock)
                except (
                    OSError,
                    RuntimeError,
                ) as error:  # no descriptor or thread is free for this connection
                    log.debug("a connection was closed: %s", error)
                    sock.close()

    def close(self) -> None:
        """Ends the thread and closes the listener; safe to call twice."""
        if self._thread.is_alive():
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
            os.close(self._wake_fd)
        self._listener.close()


class ConnectionTable(Generic[T]):
    """Table of connections by owner and age. If several threads use it, the callers must hold a lock.

    Args:
        limit: Maximum number of connections.
    """

    def __init__(self, limit: int = sys.maxsize) -> None:
        self._limit, self._by_owner = limit, dict[str, dict[T, None]]()
        self._owners: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, connection: T, owner: str) -> T | None:
        """Adds a connection. If the table now exceeds its limit, removes a connection and returns it, to be closed."""
        self._owners[connection] = owner
        self._by_owner.setdefault(owner, {})[connection] = None
        return self.pop() if len(self) > self._limit else None

    def remove(self, connection: T) -> None:
        """Removes a connection, if the table contains it."""
        owner = self._owners.pop(connection, None)
        if owner is not None:
            del self._by_owner[owner][connection]
            if not self._by_owner[owner]:
                del self._by_owner[owner]

    def max_per_owner(self) -> int:
        """Returns the largest number of connections of one owner."""
        return max(map(len, self._by_owner.values()), default=0)

    def pop(self) -> T:
        """Removes and returns the oldest connection of the owner with the most connections.

        In this way, no owner can block the others.
        """
        connections = max(self._by_owner.values(), key=len)
        oldest_connection = next(iter(connections))
        self.remove(oldest_connection)
        return oldest_connection


def host_of(sock: socket.socket) -> str:
    """Returns the address of a connection's other end; "" if the connection is closed."""
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return ""


def _reset(socket_fd: int) -> None:
    """Resets a connection, so that the kernel keeps no state for it."""
    libc.setsockopt(socket_fd, socket.SOL_SOCKET, socket.SO_LINGER, _RESET, len(_RESET))
    libc.close(socket_fd)


def _address(host: bytes | str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parses an address; returns the IPv4 address for an IPv6-mapped one."""
    address = ipaddress.ip_address(host)
    return getattr(address, "ipv4_mapped", None) or address
