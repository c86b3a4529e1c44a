"""Hooks for alerts in tests: a command that keeps what it is told, and a server that answers posts as a test wants."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_KEEP = """
import os, sys
line = sys.stdin.buffer.read()
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.write(fd, line)
"""


class KeptAlerts:
    """A command that appends each alert to a file, and the alerts in it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._program = folder / "alerts.jsonl", folder / "keep.py"
        self._program.write_text(_KEEP)

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-I", "-S", str(self._program), str(self.path)]

    @property
    def override(self) -> str:
        return f"runner.alerts.command={json.dumps(self.command)}"

    def read(self) -> list[dict[str, Any]]:
        """Returns the alerts in the order of their arrival."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def rules(self) -> list[str]:
        return [alert["rule"] for alert in self.read()]


class Posts:
    """What a server was sent.

    Attributes:
        url: Address of the server, with a secret path.
        bodies: Contents of the posts.
        released: Set at the end, for a server that hangs.
    """

    def __init__(self) -> None:
        self.url, self.bodies = "", list[dict[str, Any]]()
        self.released = threading.Event()


@contextmanager
def serving(status: int = 200, *, hangs: bool = False) -> Iterator[Posts]:
    """Serves on a port of this host until the block ends.

    Args:
        status: Status of each answer.
        hangs: Whether the server reads posts and never answers.
    """
    posts = Posts()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posts.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if hangs:
                posts.released.wait(60)
                return
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()
            self.wfile.write(b"what the server says")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    posts.url = f"http://127.0.0.1:{server.server_port}/services/T0/very-secret"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield posts
    finally:
        posts.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
