"""A hub for tests: the part of the Hugging Face hub's HTTP interface that an upload needs, in memory.

`HubServer` runs in a thread. The client is the unmodified one of huggingface_hub, with HF_ENDPOINT.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HubServer:
    """State of the hub: repositories with their visibility and files."""

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.tokens = {"hf_test_writer"}
        self.commits: list[str] = []
        self.address = ""


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _is_allowed(self) -> bool:
            if self.headers.get("Authorization", "").removeprefix("Bearer ") in hub.tokens:
                return True
            self._answer({"error": "Invalid credentials"}, 401, {"X-Error-Message": "Invalid credentials"})
            return False

        def do_GET(self) -> None:
            name = self.path.removeprefix("/api/models/").partition("?")[0].partition("/revision/")[0]
            if not self._is_allowed():
                return
            if name not in hub.private:
                self._answer({"error": "not found"}, 404, {"X-Error-Code": "RepoNotFound"})
                return
            self._answer({"id": name, "private": hub.private[name], "siblings": [], "tags": [], "sha": "0" * 40})

        def do_PUT(self) -> None:
            hub.blobs[self.path.rpartition("/")[2]] = self._body()
            self._answer({})

        def do_POST(self) -> None:
            body = self._body()
            if not self._is_allowed():
                return
            if self.path == "/api/repos/create":
                wanted = json.loads(body)
                name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
                private = wanted.get("private", wanted.get("visibility") == "private")
                hub.private.setdefault(name, bool(private))
                self._answer({"url": f"{hub.address}/{name}"})
            elif self.path == "/api/validate-yaml":
                self._answer({"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                files = json.loads(body)["files"]
                modes = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in files}
                self._answer({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})
            elif self.path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {**wanted, "actions": {"upload": {"href": f"{hub.address}/blob/{wanted['oid']}"}}}
                    for wanted in json.loads(body)["objects"]
                ]
                self._answer({"transfer": "basic", "objects": objects})
            elif "/commit/" in self.path:
                name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
                files = hub.files.setdefault(name, {})
                for line in map(json.loads, body.splitlines()):
                    value = line["value"]
                    if line["key"] == "header":
                        hub.commits.append(value["summary"])
                    elif line["key"] == "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    elif line["key"] == "lfsFile":
                        files[value["path"]] = hub.blobs[value["oid"]]
                commit = "1" * 40
                self._answer({"commitUrl": f"{hub.address}/{name}/commit/{commit}", "commitOid": commit})
            else:
                self._answer({"error": f"unexpected {self.path}"}, 500)

    return Handler


@contextmanager
def serve_hub() -> Iterator[HubServer]:
    """Yields a hub that answers at its `address` until the block ends."""
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
