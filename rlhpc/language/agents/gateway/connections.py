"""Connection limits of the gateway, so that connections without a valid key cannot exhaust the run's file descriptors."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable

from rlhpc.runtime.os_resources import is_short_of_descriptors
from rlhpc.runtime.tcp_listener import ConnectionTable

#: Time limit of a connection's first request with a valid key, in seconds.
KEY_TIMEOUT_S = 10.0
#: Maximum number of open connections from other hosts without a key. On this host only this user can connect
#: (`runtime.tcp_listener`).
_MAX_REMOTE = 256
#: Number of connections of an episode that are not closed when file descriptors run short.
_MIN_PER_EPISODE = 16


class Connections:
    """Factory of a server's connections, and their limits. Runs on the server's event loop.

    Args:
        handler: Function that creates the protocol that reads requests.
    """

    def __init__(self, handler: Callable[[], asyncio.BaseProtocol]) -> None:
        self._handler = handler
        self._timers: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        #: Connections without a key, from other hosts and from this host; and connections with a key, by episode.
        self._remote_connections = ConnectionTable[asyncio.BaseTransport](_MAX_REMOTE)
        self._local_connections, self._authenticated_connections = (
            ConnectionTable[asyncio.BaseTransport](),
            ConnectionTable[asyncio.BaseTransport](),
        )

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self, self._handler)

    def authenticate(self, transport: asyncio.BaseTransport, owner: str) -> None:
        """Marks a connection as authenticated with a valid key of `owner`."""
        if transport in self._timers:
            self.remove(transport)
            self._authenticated_connections.add(transport, owner)

    def register(self, transport: asyncio.BaseTransport, timer: asyncio.TimerHandle) -> bool:
        """Registers a new connection; returns False if the limits do not allow it."""
        if is_short_of_descriptors() and not self._free_descriptors():
            return False
        self._timers[transport] = timer
        host = _find_remote_host(transport)
        evicted_transport = (self._remote_connections if host else self._local_connections).add(transport, host)
        if evicted_transport is not None:
            self._close_transport(evicted_transport)
        return True

    def _free_descriptors(self) -> bool:
        """Frees file descriptors: closes a connection without a key, or of an episode with many connections. Returns False if
        no such connection is open.
        """
        while self._remote_connections:
            self._close_transport(self._remote_connections.pop())
        # Episodes come first, because new local connections need time to send a key.
        if self._authenticated_connections.max_per_owner() > _MIN_PER_EPISODE:
            self._close_transport(self._authenticated_connections.pop())
        elif self._local_connections:
            self._close_transport(self._local_connections.pop())
        else:
            return False
        return True

    def remove(self, transport: asyncio.BaseTransport) -> None:
        """Removes a connection that has ended."""
        if timer := self._timers.pop(transport, None):
            timer.cancel()
        for table in (self._remote_connections, self._local_connections, self._authenticated_connections):
            table.remove(transport)

    def _close_transport(self, transport: asyncio.BaseTransport) -> None:
        self.remove(transport)
        _abort(transport)


class _Connection(asyncio.Protocol):
    """Connection that is passed to the handler if the limits allow it."""

    def __init__(self, connections: Connections, handler: Callable[[], asyncio.BaseProtocol]) -> None:
        self._connections, self._make_handler = connections, handler
        self._handler = asyncio.Protocol()  # ignores all data, until the connection is allowed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        timer = asyncio.get_running_loop().call_later(KEY_TIMEOUT_S, _abort, transport)
        if not self._connections.register(transport, timer):
            timer.cancel()
            _abort(transport)
            return
        handler = self._make_handler()
        assert isinstance(handler, asyncio.Protocol)
        self._handler = handler
        handler.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self._transport)
        self._handler.connection_lost(exc)

    def data_received(self, received_bytes: bytes) -> None:
        self._handler.data_received(received_bytes)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()


def _find_remote_host(transport: asyncio.BaseTransport) -> str:
    """Returns the address of a client on another host; "" for a client on this host."""
    peer_address, local_address = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
    is_remote = (
        isinstance(peer_address, tuple)
        and peer_address[0] != local_address[0]
        and not ipaddress.ip_address(peer_address[0]).is_loopback
    )
    return str(peer_address[0]) if is_remote else ""


def _abort(transport: asyncio.BaseTransport) -> None:
    assert isinstance(transport, asyncio.Transport)
    transport.abort()
