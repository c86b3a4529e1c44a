"""Servers of tools as they are found: junk before the protocol, keys in URLs, streams, and tools that never answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlhpc.language.agents.runner import mcp_client as tool_servers
from rlhpc.language.agents.runner.mcp_client import ToolFailed, ToolServer
from tests.unit.language.agents.runner.tool_programs import command


def test_what_a_server_prints_besides_is_skipped_and_a_tool_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with ToolServer(command("f", "sleep")) as server:
        assert [tool["function"]["name"] for tool in server.tools()] == ["f", "sleep"]
        assert server.call("f", {"a": 1}) == "{'a': 1}"
        assert server.call("flood", {"a": 2}) == "{'a': 2}", "64 MiB in a line are no message"
        monkeypatch.setattr(tool_servers, "_TOOL_S", 0.3)
        with pytest.raises(ToolFailed, match=r"tools/call: no answer within 0\.3 s"):
            server.call("sleep", {})
        monkeypatch.undo()
        assert server.call("f", {"a": 3}) == "{'a': 3}", "the next call is answered"


class Handler(BaseHTTPRequestHandler):
    seen: list[tuple[str, str, str | None, str | None]]

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._note()
        tools = {"tools": [{"name": "f"}]}
        result = {"initialize": {"protocolVersion": "2025-03-26"}, "tools/list": tools}.get(
            asked["method"], {"content": []}
        )
        body = json.dumps({"jsonrpc": "2.0", "id": asked.get("id"), "result": result})
        stream = asked["method"] == "tools/list"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
        self.send_header("Mcp-Session-Id", "s")
        self.end_headers()
        # no empty line behind the last event; before it, one that is no message
        self.wfile.write(f"data: 42\n\n: comment\n\ndata: {body}\n".encode() if stream else body.encode())

    def do_DELETE(self) -> None:
        self._note()
        self.send_response(200)
        self.end_headers()

    def _note(self) -> None:
        headers = self.headers
        self.seen.append((self.command, self.path, headers["MCP-Protocol-Version"], headers["Mcp-Session-Id"]))

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[tuple[str, list[Any]]]:
    seen: list[Any] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Noted", (Handler,), {"seen": seen}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()


def test_a_url_keeps_its_query_and_each_request_names_the_protocol(address: tuple[str, list[Any]]) -> None:
    url, seen = address
    with ToolServer(url=f"{url}/mcp?api_key=abc") as server:
        assert [tool["function"]["name"] for tool in server.tools()] == ["f"]
    assert {path for _, path, *_ in seen} == {"/mcp?api_key=abc"}
    assert seen[0] == ("POST", "/mcp?api_key=abc", None, None)
    assert {tuple(rest) for _, _, *rest in seen[1:]} == {("2025-03-26", "s")} and seen[-1][0] == "DELETE"


def test_a_session_is_ended_over_https_where_it_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Connection:
        def __init__(self, host: str, port: int | None, timeout: float) -> None:
            asked.append((host, port))

        def request(self, method: str, path: str, headers: Any) -> None:
            asked.append((method, path))
            raise OSError

        def close(self) -> None:
            pass

    monkeypatch.setattr(tool_servers.http.client, "HTTPSConnection", Connection)
    web = tool_servers._HttpTransport("https://tools.test/mcp?k=1")
    web._headers["Mcp-Session-Id"] = "s"
    web.close()
    assert asked == [("tools.test", None), ("DELETE", "/mcp?k=1")]
