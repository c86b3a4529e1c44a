"""TCP ports of a run: connections of this user on this host, and of other hosts, are handed over; another user's are reset."""

from __future__ import annotations

import ast
import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlhpc.runtime import tcp_listener
from rlhpc.runtime.os_resources import readable_descriptors
from rlhpc.runtime.tcp_listener import TcpListener
from tests.eventually import wait_until
from tests.users import BOB, needs_root

PACKAGE = Path(tcp_listener.__file__).parents[1]
#: Where else a TCP port is opened, and why another user of the node delays nobody there.
OTHER_PORTS = {
    "runtime/comm/zmq_sockets.py": "ZeroMQ accepts by itself, on a thread that needs no interpreter",
    "jobs/doctor/node_probe.py": "its text runs on a node's own Python, without this package, for seconds",
    "language/agents/runner/loopback.py": "in a network of its own, where one episode is alone",
    "runtime/node_locks.py": "looks for a free port, and listens on none",
    "language/agents/services.py": "looks for a free port, and listens on none",
    "language/sandbox/python.py": "what a program must not reach, for the time of one trial; nobody is served",
}


@pytest.fixture(params=["netlink", "/proc"])
def listen(request: pytest.FixtureRequest) -> Iterator[Callable[[str], TcpListener]]:
    """Makes listeners, which ask the kernel in one way or the other."""
    made: list[TcpListener] = []

    def make(address: str = "127.0.0.1") -> TcpListener:
        made.append(TcpListener(address))
        assert made[-1]._owners._netlink is not None, "this kernel answers"
        if request.param == "/proc":
            made[-1]._owners.close()
        return made[-1]

    yield make
    for one in made:
        one.close()


def connect(listener: TcpListener) -> socket.socket:
    return socket.create_connection(listener.address, timeout=30)


def arrived(listener: TcpListener) -> list[socket.socket]:
    """What is handed over of all who are in the queue."""
    handed = list[socket.socket]()
    while readable_descriptors([listener.sock.fileno()], 0.2):
        handed += listener.accept()
    return handed


def is_reset(client: socket.socket) -> bool:
    client.settimeout(30)
    with contextlib.suppress(TimeoutError):
        try:
            return client.recv(1) == b""
        except ConnectionError:
            return True
    return False


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.3", "::1"])
def test_a_connection_of_this_user_is_handed_over(listen: Callable[[str], TcpListener], address: str) -> None:
    if ":" in address and not os.path.exists("/proc/net/if_inet6"):
        return  # a host without IPv6
    listener = listen(address)
    with connect(listener) as client:
        (served,) = arrived(listener)
        with served:
            assert served.gettimeout() == 0.0
            served.send(b"good")
            assert client.recv(4) == b"good"


def test_one_that_has_said_all_still_gets_its_answer(listen: Callable[[], TcpListener]) -> None:
    listener = listen()
    with connect(listener) as client:
        client.sendall(b"question")
        client.shutdown(socket.SHUT_WR)
        (served,) = arrived(listener)
        with served:
            served.send(b"good")
            assert client.recv(4) == b"good"


def test_one_that_has_hung_up_is_not_handed_over(listen: Callable[[], TcpListener]) -> None:
    """Of a socket that no process holds the kernel forgets whose it was."""
    listener = listen()
    for _ in range(5):
        connect(listener).close()
    with connect(listener):
        assert [one.close() for one in arrived(listener)] == [None]


def test_more_than_a_batch(listen: Callable[[], TcpListener], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_listener, "_MAX_ACCEPTED", 4)
    listener = listen()
    clients = [connect(listener) for _ in range(10)]
    handed = arrived(listener)
    assert {one.getpeername() for one in handed} == {one.getsockname() for one in clients}
    for one in (*clients, *handed):
        one.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_connection_of_another_user_is_reset(
    listen: Callable[[str], TcpListener], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ":" in address and not os.path.exists("/proc/net/if_inet6"):
        return  # a host without IPv6
    listener = listen(address)
    with connect(listener) as client:
        me = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: me + 1)
        monkeypatch.setattr(tcp_listener, "_ROOT", me + 1)
        assert arrived(listener) == [] and is_reset(client)


FLOOD = """
import os, socket, sys, time
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
held = []
print("begun", flush=True)
while True:
    s = socket.socket()
    s.setblocking(False)
    try:
        s.connect(({host!r}, {port}))
    except BlockingIOError:
        pass
    held.append(s)
    if len(held) > 200 or sys.argv[1] == "comes and goes":
        held.pop(0).close()
"""


@needs_root
@pytest.mark.parametrize("way", ["comes and goes", "stays"])
def test_another_user_who_connects_as_fast_as_he_can_keeps_nobody_out(way: str) -> None:
    listener, handed = TcpListener("127.0.0.1"), list[socket.socket]()
    acceptor = listener.serve(handed.append, "test-accept")
    host, port = listener.address
    flood = subprocess.Popen(
        [sys.executable, "-S", "-c", FLOOD.format(uid=BOB, host=host, port=port), way], stdout=subprocess.PIPE
    )
    try:
        assert flood.stdout is not None and flood.stdout.readline()
        clients = []
        for _ in range(20):
            clients.append(connect(listener))
            own = clients[-1].getsockname()
            wait_until(lambda own=own: any(one.getpeername() == own for one in handed), 60)
        assert len(handed) == len(clients), "the other user's were handed over"
    finally:
        flood.kill()
        flood.wait()
        acceptor.close()
    for one in (*clients, *handed):
        one.close()


def test_a_process_without_descriptors_leaves_nobody_in_the_queue() -> None:
    """Whoever comes then is sent away, and the next one is served once there are some."""
    program = textwrap.dedent("""
        import resource, select, socket, sys
        from rlhpc.runtime.tcp_listener import TcpListener
        listener = TcpListener("127.0.0.1")
        clients = [socket.socket() for _ in range(4)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (clients[-1].fileno() + 1, hard))
        for one in clients[:3]:
            one.connect(listener.address)
        assert listener.accept() == [] and listener.accept() == []
        poll = select.poll(); poll.register(listener.sock, select.POLLIN)
        assert poll.poll(0) == [], "they are in the queue"
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        clients[3].connect(listener.address)
        (served,) = listener.accept()
        print(served.getpeername() == clients[3].getsockname())
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


def test_of_other_hosts_nothing_is_known_but_the_address(
    listen: Callable[[], TcpListener], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = listen()
    for host in ("127.0.0.9", "::1", "::ffff:127.1.2.3"):
        assert listener._is_local(tcp_listener._address(host).packed)
    for found in psutil.net_if_addrs().values():
        for one in found:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                host = one.address.partition("%")[0]
                assert listener._is_local(socket.inet_pton(one.family, host)), host
    for host in ("192.0.2.7", "2001:db8::7", "::ffff:192.0.2.7"):
        assert not listener._is_local(tcp_listener._address(host).packed)
    monkeypatch.setattr(listener._owners, "uids", lambda connections: [None for _ in connections])
    monkeypatch.setattr(listener, "_is_local", lambda host: False)
    with connect(listener):
        assert [one.close() for one in arrived(listener)] == [None]


def test_a_connection_that_cannot_be_taken_costs_no_other_one() -> None:
    listener, handed = TcpListener("127.0.0.1"), list[socket.socket]()

    def take(sock: socket.socket) -> None:
        if not handed:
            handed.append(sock)
            raise RuntimeError("can't start new thread")
        handed.append(sock)

    acceptor = listener.serve(take, "test-accept")
    with connect(listener) as first, connect(listener):
        wait_until(lambda: len(handed) == 2, 60)
        assert is_reset(first)
    acceptor.close()
    handed[1].close()


def test_an_acceptor_ends_with_its_listener() -> None:
    listener, handed = TcpListener("127.0.0.1"), list[socket.socket]()
    acceptor = listener.serve(handed.append, "test-accept")
    with connect(listener):
        wait_until(lambda: bool(handed), 60)
    acceptor.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "test-accept"]
    with pytest.raises(ConnectionRefusedError):
        connect(listener)
    handed[0].close()


def test_no_other_module_opens_a_port() -> None:
    opens = {"create_server", "start_server", "HTTPServer", "ThreadingHTTPServer", "TCPServer", "ThreadingTCPServer",
             "TCPSite", "SockSite", "run_app"}  # fmt: skip
    opening: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            address = node.args[0] if node.args else None
            binds = name == "bind" and isinstance(address, ast.Tuple)
            if name in opens or binds:
                opening.setdefault(str(path.relative_to(PACKAGE)), set()).add(name)
    opening.pop("runtime/tcp_listener.py")
    assert set(opening) == set(OTHER_PORTS), opening
