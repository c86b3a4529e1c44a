"""The server of the pages: what it answers, whom it answers, and what it leaves."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from rlhpc.live import server
from rlhpc.live.server import RunsApp, default_socket, serve_on_port, serve_on_socket
from rlhpc.runtime.errors import UserError
from tests.unit.live.test_run_index import write_run
from tests.unit.live.test_run_views import sample, write_samples


class UnixConnection(http.client.HTTPConnection):
    """Connection to a UNIX socket, as `ssh -L` makes one."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=20)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self.path))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_run(folder / "one", state="finished", step=3, max_steps=3)
    (folder / "one/metrics.jsonl").write_text(
        "".join(f'{{"step": {s}, "train/loss": {1 / s}}}\n' for s in range(1, 200))
    )
    return folder


@pytest.fixture
def page(runs: Path, tmp_path: Path) -> Iterator[UnixConnection]:
    with serve_on_socket(RunsApp(runs), tmp_path / "page.sock"):
        connection = UnixConnection(tmp_path / "page.sock")
        get(connection, "/api/runs")
        yield connection
        connection.close()


def get(connection: http.client.HTTPConnection, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    return response, response.read()


def value(connection: http.client.HTTPConnection, path: str) -> Any:
    response, body = get(connection, path)
    assert response.status == 200, body
    return json.loads(body)


def test_runs_curves_and_configuration(page: UnixConnection, runs: Path) -> None:
    assert [row["name"] for row in value(page, "/api/runs")["runs"]] == ["one"]
    assert value(page, "/api/metrics?run=one&run=missing")["names"] == ["train/loss"]
    [line] = value(page, "/api/curves?run=one&metric=train/loss&low=3&high=5")
    assert line["x"] == [2, 3, 4, 5, 6]
    assert "task_type" in value(page, "/api/config?run=one")
    assert value(page, "/api/differences?run=one&run=missing") == {"runs": ["one"], "rows": []}
    assert value(page, "/api/logs?run=one") == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/api/log?run=one&label=x", "has no log 'x'"),
        ("/api/config?run=missing", "there is no run 'missing'"),
        ("/api/config?run=..%2F..%2Fetc", "there is no run"),
        ("/api/config", "the parameter run is missing"),
        ("/api/curves?run=one&metric=a&low=nan", "the parameter low is 'nan'; it must be a number"),
        ("/api/curves?run=one&metric=a&smoothing=x%1b", "must be a number"),
        ("/api/nothing", "there is no /api/nothing"),
        ("/../../etc/passwd", "there is no"),
        ("/media?run=one&file=config.yaml", "has no video or picture"),
        ("/report?run=missing", "there is no run"),
    ],
)
def test_a_mistake_is_one_message(page: UnixConnection, path: str, message: str) -> None:
    response, body = get(page, path)
    assert response.status == 404
    assert message in json.loads(body)["error"]
    assert value(page, "/api/runs")["runs"]  # and the connection goes on


def test_nothing_is_written_and_only_reading_is_answered(page: UnixConnection, runs: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*"))
    response, body = get(page, "/report?run=one")
    assert b"<h1>one</h1>" in body
    assert "sandbox" in str(response.headers["Content-Security-Policy"])
    for method in ("POST", "PUT", "DELETE"):
        page.request(method, "/api/runs")
        response = page.getresponse()
        response.read()
        assert response.status == 501
        page.close()
    assert sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*")) == before


def test_a_foreign_page_gets_nothing(page: UnixConnection) -> None:
    """A page whose name points to this machine, or that embeds addresses of it, is refused."""
    for headers in ({"Host": "evil.example"}, {"Host": "localhost.evil.example:8080"},
                    {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"}):  # fmt: skip
        response, body = get(page, "/api/runs", **headers)
        assert (response.status, b"one" in body) == (403, False)
    response, _ = get(page, "/", Host="localhost:8080", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")
    assert response.status == 200
    assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_the_page_may_load_nothing_from_elsewhere(page: UnixConnection) -> None:
    for path in ("/", "/app.js", "/chart.js", "/style.css"):
        response, body = get(page, path)
        policy = str(response.headers["Content-Security-Policy"])
        assert "default-src 'none'" in policy
        assert "http" not in policy
        assert b"https://" not in body
        assert b"innerHTML" not in body


def test_answers_are_compressed_and_not_sent_twice(page: UnixConnection) -> None:
    path = "/api/curves?run=one&metric=train/loss"
    response, body = get(page, path, Accept_Encoding="gzip")
    assert response.headers["Content-Encoding"] == "gzip"
    assert len(json.loads(gzip.decompress(body))[0]["x"]) == 199
    response, body = get(page, path, If_None_Match=str(response.headers["ETag"]))
    assert (response.status, body) == (304, b"")


def test_a_film_is_sent_in_the_ranges_that_a_player_asks_for(page: UnixConnection, runs: Path) -> None:
    content = bytes(range(256)) * 10
    (runs / "one/play").mkdir()
    (runs / "one/play/global_step_3.mp4").write_bytes(content)
    path = f"/media?run=one&file={quote('play/global_step_3.mp4')}"
    assert get(page, path)[1] == content
    for text, part in {"bytes=5-9": content[5:10], "bytes=2550-": content[2550:], "bytes=-4": content[-4:]}.items():
        response, body = get(page, path, Range=text)
        assert (response.status, body) == (206, part)
    assert get(page, path, Range="bytes=9999-")[0].status == 416
    page.request("HEAD", path)
    response = page.getresponse()
    assert (response.read(), response.headers["Content-Length"]) == (b"", str(len(content)))


def test_samples_of_a_run(page: UnixConnection, runs: Path) -> None:
    from rlhpc.jobs.paths import RunPaths

    name = write_samples(RunPaths(runs / "one"), [sample(n) for n in range(30)])
    found = value(page, f"/api/samples?run=one&samples={quote(name)}&verdict=right&count=2&start=1")
    assert ([row["id"] for row in found["rows"]], found["matches"], found["samples"]) == ([2, 4], 15, 30)


def test_a_run_that_disappears_is_a_message(page: UnixConnection, runs: Path) -> None:
    import shutil

    shutil.rmtree(runs / "one")
    for path in ("/api/config?run=one", "/api/log?run=one&label=driver", "/media?run=one&file=play/a.mp4"):
        response, body = get(page, path)
        assert response.status == 404, body
    assert value(page, "/api/metrics?run=one") == {"names": [], "first": []}
    assert value(page, "/api/evaluations?run=one") == []


def listen_at(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def test_the_socket_of_a_server_that_replaces_a_dead_one_at_the_same_time_is_kept(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, servers, is_dead = tmp_path / "page.sock", list[socket.socket](), server._is_dead_socket
    listen_at(path).close()

    def start_another(looked_at: Path) -> bool:
        answer = is_dead(looked_at)
        if not servers:
            path.unlink()
            servers.append(listen_at(path))
        return answer

    monkeypatch.setattr(server, "_is_dead_socket", start_another)
    with pytest.raises(UserError, match="another rlhpc serve answers there"), serve_on_socket(RunsApp(runs), path):
        pass
    with servers[0], socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))


def test_a_server_that_ends_leaves_the_socket_of_another(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.sock"
    with serve_on_socket(RunsApp(runs), path):
        path.unlink()
        other = listen_at(path)
    assert path.exists()
    other.close()


def test_the_socket_is_its_users_and_goes_with_the_server(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.sock"
    with serve_on_socket(RunsApp(runs), path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(UserError, match="another rlhpc serve answers there"), serve_on_socket(RunsApp(runs), path):
            pass
        assert path.exists()
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as dead:  # of a server that was killed
        dead.bind(str(path))
    with serve_on_socket(RunsApp(runs), path):
        connection = UnixConnection(path)
        assert value(connection, "/api/runs")["runs"]
        connection.close()
    path.write_text("a file")
    with pytest.raises(UserError, match="a file that is no socket"), serve_on_socket(RunsApp(runs), path):
        pass
    long_path = tmp_path / ("x" * 120)
    with pytest.raises(UserError, match="at most 107 bytes"), serve_on_socket(RunsApp(runs), long_path):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_reads_neither_socket_nor_port(runs: Path, tmp_path: Path) -> None:
    """Even where the socket's folder is open and the token is known."""
    script = (
        "import os, socket, sys\nos.setgid(65534); os.setuid(65534)\n"
        "is_path = '/' in sys.argv[1]\nfamily = socket.AF_UNIX if is_path else socket.AF_INET\n"
        "address = sys.argv[1] if is_path else ('127.0.0.1', int(sys.argv[1]))\n"
        "sock = socket.socket(family)\ntry:\n    sock.connect(address)\n"
        "    sock.sendall(f'GET /?token={sys.argv[2]} HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n'.encode())\n"
        "    print(len(sock.recv(100)))\nexcept OSError as error:\n    print(type(error).__name__)\n"
    )
    app, path = RunsApp(runs), Path("/tmp") / f"page-{os.getpid()}.sock"
    with serve_on_socket(app, path), serve_on_port(app) as address:
        path.chmod(0o777)
        port, token = address.rpartition(":")[2].partition("/")[0], address.rpartition("=")[2]
        for target in (str(path), port):
            done = subprocess.run(
                [sys.executable, "-c", script, target, token], capture_output=True, text=True, timeout=60
            )
            assert done.stdout.strip() in ("0", "ConnectionResetError", "BrokenPipeError", "PermissionError"), done


def test_a_port_wants_its_token(runs: Path) -> None:
    with serve_on_port(RunsApp(runs)) as address:
        port, token = int(address.rpartition(":")[2].partition("/")[0]), address.rpartition("=")[2]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        for path in ("/", "/api/runs", f"/?token={token[:-1]}"):
            response, body = get(connection, path)
            assert (response.status, b"one" in body) == (403, False)
        response, _ = get(connection, f"/?token={token}")
        assert response.status == 303
        cookie = str(response.headers["Set-Cookie"])
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        connection.request("GET", "/api/runs", headers={"Cookie": cookie.partition(";")[0]})
        response = connection.getresponse()
        assert (response.status, b"one" in response.read()) == (200, True)
        connection.close()
        with pytest.raises(UserError, match="choose another one"), serve_on_port(RunsApp(runs), port):
            pass


def test_more_connections_than_there_is_room_for(page: UnixConnection) -> None:
    idle = [socket.socket(socket.AF_UNIX) for _ in range(200)]
    try:
        for sock in idle:
            sock.connect(str(page.path))
        assert value(page, "/api/runs")["runs"]  # the page's own connection was there before
    finally:
        for sock in idle:
            sock.close()


def test_many_readers_at_once(page: UnixConnection) -> None:
    results = []

    def read() -> None:
        connection = UnixConnection(page.path)
        results.append(len(value(connection, "/api/curves?run=one&metric=train/loss")[0]["x"]))
        connection.close()

    threads = [threading.Thread(target=read) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [199] * 20


def test_the_default_socket_is_in_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, shared = tmp_path / "private", tmp_path / "shared"
    private.mkdir(mode=0o700)
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(private))
    path = default_socket(tmp_path)
    assert path.parent == private
    assert path == default_socket(tmp_path)
    assert path != default_socket(shared)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
    assert default_socket(tmp_path).parent == Path("/tmp") / f"rlhpc-serve-{os.getuid()}"
    assert stat.S_IMODE((Path("/tmp") / f"rlhpc-serve-{os.getuid()}").stat().st_mode) == 0o700
