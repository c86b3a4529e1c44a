"""TCP sockets of this host and their owners, from `/proc/net/tcp` and `/proc/net/tcp6`, or from netlink (sock_diag(7))."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_LISTEN = 0x0A
_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ERROR = 4, 20, 1, 2
_HEADER, _ID = struct.Struct("=IHHII"), struct.Struct("=2s2s16s16sIQ")
#: Fields of a query (family, protocol, extensions, states), the first fields of a reply (family, state, timer,
#: retransmissions), and the fields after a reply's id.
_QUERY, _REPLY, _OWNER = struct.Struct("=BBBxI"), struct.Struct("=BBBB"), struct.Struct("=12xII")
_REPLY_BYTES = 4096
#: C library whose functions are called without releasing the GIL: a call takes microseconds, but getting the GIL back from a
#: thread that computes takes five milliseconds.
libc = ctypes.PyDLL(None, use_errno=True)
#: Addresses of a listener that get a connection to 127.0.0.1, from the most to the least specific.
_TIERS = (("127.0.0.1",), ("0.0.0.0", "::ffff:127.0.0.1"), ("::",))


@dataclass(frozen=True)
class TcpSocket:
    """TCP socket of this host.

    Attributes:
        address: Local host and port.
        peer: Host and port of the other end.
        is_listening: Whether the socket listens for connections.
        uid: User id of the owner.
        inode: Inode of the socket, as in `/proc/<pid>/fd`.
    """

    address: tuple[str, int]
    peer: tuple[str, int]
    is_listening: bool
    uid: int
    inode: int


def tcp_sockets() -> Iterator[TcpSocket]:
    """Yields the TCP sockets of all users in this network namespace."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # a kernel without IPv6
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                _, local_address, peer, state_text, _, _, _, uid, _, inode = line.split()[:10]
                yield TcpSocket(
                    _parse_table_address(local_address),
                    _parse_table_address(peer),
                    int(state_text, 16) == _LISTEN,
                    int(uid),
                    int(inode),
                )


class TcpConnection(NamedTuple):
    """Ends of a TCP connection that this process has accepted: addresses in 4 or 16 bytes, and ports."""

    family: int
    local_address: tuple[bytes, int]
    peer: tuple[bytes, int]


class PeerOwners:
    """Look-up of the users at the other ends of a listener's connections. For one thread.

    Args:
        family, local_address: Address family and local address of the listener, used to test whether netlink answers.
    """

    def __init__(self, family: int, local_address: tuple[bytes, int]) -> None:
        self._buffer = ctypes.create_string_buffer(_REPLY_BYTES)
        self._netlink: socket.socket | None = None
        with contextlib.suppress(OSError):  # a sandbox may forbid netlink
            self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG)
            self._netlink.connect((0, 0))
            if (
                self._query(TcpConnection(family, (bytes(len(local_address[0])), 0), local_address)) is None
            ):  # a kernel without tcp_diag
                self.close()

    def close(self) -> None:
        """Closes the netlink socket."""
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None

    def uids(self, connections: Sequence[TcpConnection]) -> list[int | None]:
        """Returns the user id at the other end of each connection; None if no process of this host has that end."""
        if self._netlink is not None:
            try:
                sockets = [self._query(connection) for connection in connections]
                # a closed socket has no inode, and a listener at that port is not the other end of the connection
                return [
                    socket_state[1] if socket_state and socket_state[2] and socket_state[0] != _LISTEN else None
                    for socket_state in sockets
                ]
            except OSError:
                self.close()
        if not connections:
            return []
        endpoint_texts = [
            (_format_address_text(*connection.peer), _format_address_text(*connection.local_address))
            for connection in connections
        ]
        owners = _owners({local_name for _, local_name in endpoint_texts})
        return [owners.get(endpoint_pair) for endpoint_pair in endpoint_texts]

    def _query(self, connection: TcpConnection) -> tuple[int, int, int] | None:
        """Returns state, user and inode of the socket at the other end; None if there is no such socket.

        Raises:
            OSError: Netlink does not answer.
        """
        family, local_end, peer = connection
        (host, port), (local_host, local_port) = peer, local_end
        endpoint_id = _ID.pack(port.to_bytes(2), local_port.to_bytes(2), host, local_host, 0, (1 << 64) - 1)
        diag_query = _QUERY.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + endpoint_id
        assert self._netlink is not None
        request = _HEADER.pack(_HEADER.size + len(diag_query), _BY_FAMILY, _REQUEST, 0, 0) + diag_query
        netlink_fd = self._netlink.fileno()
        # the kernel answers during `send`, so `recv` need not wait
        if libc.send(netlink_fd, request, len(request), 0) < 0:
            raise OSError(ctypes.get_errno(), "netlink")
        num_received = libc.recv(netlink_fd, self._buffer, _REPLY_BYTES, socket.MSG_DONTWAIT)
        if num_received < _HEADER.size:
            raise OSError(ctypes.get_errno(), "netlink")
        response = self._buffer.raw[:num_received]
        if _HEADER.unpack_from(response)[1] == _ERROR:
            (error,) = struct.unpack_from("=i", response, _HEADER.size)
            if -error == errno.ENOENT:
                return None
            raise OSError(-error, "netlink")
        _, socket_state, _, _ = _REPLY.unpack_from(response, _HEADER.size)
        uid, inode = _OWNER.unpack_from(response, _HEADER.size + _REPLY.size + _ID.size)
        return socket_state, uid, inode


def loopback_listeners(port: int) -> list[TcpSocket]:
    """Returns the listening sockets that get connections to a port of 127.0.0.1; empty if no socket listens."""
    listeners = [listener for listener in tcp_sockets() if listener.is_listening and listener.address[1] == port]
    listeners_by_tier = ([listener for listener in listeners if listener.address[0] in hosts] for hosts in _TIERS)
    return next((tier for tier in listeners_by_tier if tier), [])


def socket_inodes(pids: Iterable[int]) -> set[int] | None:
    """Returns the inodes of the sockets that the given processes have open; None if a process cannot be inspected."""
    inodes = set[int]()
    for pid in pids:
        try:
            for fd_name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    link_type, _, inode = os.readlink(f"/proc/{pid}/fd/{fd_name}").partition(":[")
                    if link_type == "socket":
                        inodes.add(int(inode.rstrip("]")))
        except FileNotFoundError:  # the process has ended
            continue
        except PermissionError:
            return None
    return inodes


def _parse_table_address(address_text: str) -> tuple[str, int]:
    host, _, port = address_text.partition(":")
    host_words = [int(host[word_start : word_start + 8], 16) for word_start in range(0, len(host), 8)]
    return _host(struct.pack(f"={len(host_words)}I", *host_words)), int(port, 16)


def _host(address_bytes: bytes) -> str:
    address = ipaddress.ip_address(address_bytes)
    mapped_address = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(address) if mapped_address is None else f"::ffff:{mapped_address}"


def _owners(peers: set[bytes]) -> dict[tuple[bytes, bytes], int]:
    """Returns the user ids of sockets with one of these peers, by local name and peer name (see `_format_address_text`)."""
    uids: dict[tuple[bytes, bytes], int] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # a kernel without IPv6
            for line in Path(f"/proc/net/{table}").read_bytes().split(b"\n"):
                if any(peer in line for peer in peers):  # parse only the few matching lines of a long table
                    _, local_address, peer, state_text, _, _, _, uid, _, inode = line.split()[:10]
                    if int(inode) and int(state_text, 16) != _LISTEN:
                        uids[local_address[-13:], peer[-13:]] = int(uid)
    return uids


def _format_address_text(host: bytes, port: int) -> bytes:
    """Returns the end of an address's text in the tables of both families: the last four bytes of the host, and the port."""
    (host_word,) = struct.unpack_from("=I", host, len(host) - 4)
    return b"%08X:%04X" % (host_word, port)
