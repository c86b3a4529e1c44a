"""Who speaks to the endpoint without a key, and what listens where agents look for a service."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from gateway_things import Scripted, Served, episodes_of

from rlhpc.language.agents.gateway import connections
from rlhpc.language.agents.gateway.sessions import EpisodeLimits, GatewaySession
from rlhpc.language.engines.base import Request, SamplingParams
from rlhpc.runtime import tcp_sockets

CHAT = {"messages": [{"role": "user", "content": "u"}]}


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served(Scripted(lambda prompt: "An answer.", context=2000))
    yield found
    found.close()


def connect(served: Served) -> socket.socket:
    host, _, port = served.gateway.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def is_closed(connection: socket.socket, within_s: float) -> bool:
    connection.settimeout(within_s)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_connection_that_shows_no_key_is_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEY_TIMEOUT_S", 0.5)
    session = served.open()
    kept = http.client.HTTPConnection(served.gateway.url.removeprefix("http://"), timeout=30)
    kept.request("POST", "/v1/chat/completions", json.dumps(CHAT), {"Authorization": f"Bearer {session.key}"})
    assert kept.getresponse().read()
    silent, half, path = connect(served), connect(served), connect(served)
    half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-")
    path.sendall(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
    assert path.recv(5) == b"HTTP/"
    while path.recv(4096):
        pass
    assert is_closed(silent, 30) and is_closed(half, 30)
    kept.request("POST", "/v1/chat/completions", json.dumps(CHAT), {"Authorization": f"Bearer {session.key}"})
    assert kept.getresponse().status == 200, "a client with a key keeps its connection"
    wrong = connect(served)
    wrong.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no\r\nContent-Length: 9999999\r\n\r\n{"
    )
    said = wrong.recv(4096)
    assert b" 401 " in said and b"close" in said.lower(), "of a stranger's body nothing is awaited"
    for one in (silent, half, path, wrong):
        one.close()
    kept.close()


def test_strangers_do_not_use_up_the_descriptors(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEY_TIMEOUT_S", 600.0)
    session, mine = served.open(), connect(served)
    port, before = mine.getsockname()[1], psutil.Process().num_fds()

    def uids(owners: tcp_sockets.PeerOwners, arrived: Sequence[tcp_sockets.TcpConnection]) -> list[int | None]:
        """All clients but one are another user's."""
        return [os.getuid() if one.peer[1] == port else os.getuid() + 1 for one in arrived]

    monkeypatch.setattr(tcp_sockets.PeerOwners, "uids", uids)
    strangers = list[socket.socket]()
    for _ in range(200):
        with contextlib.suppress(ConnectionError):  # before this side has seen that it was connected
            strangers.append(connect(served))
    assert all(is_closed(one, 60) for one in strangers)
    assert (
        psutil.Process().num_fds() <= before + len(strangers) + 1
        and not served.gateway._connections[0]._remote_connections
    )
    mine.sendall(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n\r\n".encode())
    assert b" 200 " in mine.recv(4096), "whoever is of this user stays"
    for one in strangers:
        one.close()
    monkeypatch.undo()
    monkeypatch.setattr(connections, "is_short_of_descriptors", lambda: True)
    late = connect(served)
    assert is_closed(late, 30), "where descriptors are few nobody else is let in"
    mine.sendall(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n\r\n".encode())
    assert b" 200 " in mine.recv(4096)
    mine.close()
    late.close()


@pytest.mark.parametrize("head", [
    b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -2\r\n\r\n",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: \x7f\x00\r\n\r\n", b"GET /" + b"x" * 60_000 + b" HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\r\n\r\n",
    b"POST /v1/feedback HTTP/1.1\r\nHost: x\r\nContent-Encoding: br\r\nContent-Length: 5\r\n\r\nxxxxx",
    b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
], ids=range(8))  # fmt: skip
def test_what_is_no_http_fills_no_log(served: Served, caplog: pytest.LogCaptureFixture, head: bytes) -> None:
    """Anybody on the node may send that, as often as it pleases."""
    with connect(served) as stranger:
        stranger.sendall(head)
        stranger.settimeout(30)
        with contextlib.suppress(ConnectionError):
            assert b" 500 " not in stranger.recv(4096)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def test_a_sandbox_gives_itself_no_rewards(served: Served) -> None:
    """The route is not at the socket by which it speaks; and no episode that says no `later` gets a reward early."""
    session = served.open()
    reply = served.chat(session, CHAT["messages"])
    key, body = served.gateway.feedback.key, {"id": reply["id"], "reward": 1000.0}
    inside = UnixConnection(served.gateway.socket)
    inside.request("GET", "/v1/models", headers={"Authorization": f"Bearer {session.key}"})
    assert inside.getresponse().status == 200
    inside = UnixConnection(served.gateway.socket)
    inside.request("POST", "/v1/feedback", json.dumps(body), {"Authorization": f"Bearer {key}"})
    assert inside.getresponse().status == 404
    status, said = served.post(key, "/v1/feedback", body)
    assert status == 404 and "agent.feedback_timeout_s" in said["error"]["message"]
    assert session.tree.turns[0].reward == 0.0 and session.tree.turns[0].feedback is None


@pytest.mark.parametrize("error", [
    UnicodeEncodeError("utf-8", "\ud800", 0, 1, "x"), ValueError("stop token 9 is out of the vocabulary"), TypeError("x"),
])  # fmt: skip
def test_one_request_that_the_engine_cannot_take_fails_alone(error: Exception) -> None:
    class Choosy(Scripted):
        def add(self, requests: Iterable[Request]) -> None:
            taken = list(requests)
            if any(request.sampling.stop_token_ids for request in taken):
                raise error
            super().add(taken)

    with episodes_of(Choosy(lambda prompt: "An answer."), "outside_agents:own_loop") as generation:
        gateway, replies = generation._gateway, dict[str, tuple[int, Any]]()
        session = GatewaySession(0, SamplingParams(max_new_tokens=50), 0, EpisodeLimits(9, 900))
        gateway.open(session)

        def ask() -> None:
            for name, more in (("bad", {"stop_token_ids": [9]}), ("good", {})):
                connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=60)
                connection.request("POST", "/v1/chat/completions", json.dumps({**CHAT, **more}),
                                   {"Authorization": f"Bearer {session.key}"})  # fmt: skip
                response = connection.getresponse()
                replies[name] = response.status, json.loads(response.read())
                connection.close()

        client = threading.Thread(target=ask)
        client.start()
        until = time.monotonic() + 60
        while client.is_alive():
            assert time.monotonic() < until
            generation.step()
    assert replies["bad"][0] == 400 and "the engine refuses the request" in replies["bad"][1]["error"]["message"]
    assert replies["good"][0] == 200
