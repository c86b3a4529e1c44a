"""TCP sockets as the kernel lists them: who listens where a connection to the loopback address arrives."""

from __future__ import annotations

import os
import socket

import pytest

from rlhpc.runtime.tcp_sockets import loopback_listeners, socket_inodes, tcp_sockets


@pytest.mark.parametrize(("family", "host"), [
    (socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "::"), (socket.AF_INET6, "::ffff:127.0.0.1"),
])  # fmt: skip
def test_a_listener_is_found_with_its_owner(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as server:
        try:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0) if family == socket.AF_INET6 else None
            server.bind((host, 0))
        except OSError:
            assert not os.path.exists("/proc/net/if_inet6"), "a host with IPv6 has this address"
            return
        port = server.getsockname()[1]
        assert not loopback_listeners(port), "it is bound, and does not listen yet"
        server.listen()
        (found,) = loopback_listeners(port)
        assert (found.uid, found.address[1]) == (os.getuid(), port)
        inodes = socket_inodes([os.getpid()])
        assert inodes is not None and found.inode in inodes and socket_inodes([]) == set()
        with socket.create_connection(("127.0.0.1", port)) as client:
            own = client.getsockname()[:2]
            assert any(one.address[1] == own[1] and one.peer[1] == port for one in tcp_sockets())


def test_the_most_specific_listener_gets_the_connection() -> None:
    with socket.socket() as narrow, socket.socket() as wide:
        for one in (narrow, wide):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        wide.bind(("", 0))
        narrow.bind(("127.0.0.1", wide.getsockname()[1]))
        wide.listen()
        narrow.listen()
        (found,) = loopback_listeners(wide.getsockname()[1])
        assert found.address[0] == "127.0.0.1"
