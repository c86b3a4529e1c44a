"""Servers of tools, in the Model Context Protocol. As `runner.py`, by which it is read: the standard library, any Python from
3.8 on, nothing of rlhpc.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import urllib.parse
from typing import Any, Iterator, Sequence  # noqa: UP035 (Python 3.8)

_VERSION = "2025-06-18"
#: Longest time for a server to answer, in seconds; the episode's own limit is `agent.timeout_s`.
_ANSWER_S = 600.0


class ToolFailed(Exception):
    """A call that the server refuses, or a tool that says of itself that it has failed."""


class _Command:
    """A server that is a child: it reads and writes a line a message."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.say(message)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                said = json.loads(line)
            except ValueError:  # it has printed something
                continue
            if said.get("id") == message["id"] and "method" not in said:
                found: dict[str, Any] = said
                return found
            if "id" in said and "method" in said:  # it wants something of its client
                self.say(_reply(said))
        raise ConnectionError(f"the server {self._process.args!r} has ended with status {self._process.wait()}")

    def say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _reply(asked: dict[str, Any]) -> dict[str, Any]:
    """What a client that can do nothing says to what a server asks of it."""
    found: dict[str, Any] = {"jsonrpc": "2.0", "id": asked["id"]}
    if asked["method"] == "ping":
        return {**found, "result": {}}
    return {**found, "error": {"code": -32601, "message": "this client cannot do that"}}


class _Web:
    """A server behind a URL (streamable HTTP)."""

    def __init__(self, url: str) -> None:
        self._url = urllib.parse.urlsplit(url)
        self._headers: dict[str, str] = {}

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        response, connection = self._post(message)
        try:
            if response.status >= 300:
                raise ConnectionError(f"{self._url.geturl()}: {response.status}: {response.read(300)!r}")
            if response.headers.get("Mcp-Session-Id"):
                self._headers["Mcp-Session-Id"] = response.headers["Mcp-Session-Id"]
            if response.headers.get("Content-Type", "").startswith("text/event-stream"):
                for said in _events(response):
                    if said.get("id") == message["id"] and "method" not in said:
                        return said
                raise ConnectionError(f"{self._url.geturl()} ended its answer before it had given it")
            found: dict[str, Any] = json.loads(response.read())
            return found
        finally:
            connection.close()

    def say(self, message: dict[str, Any]) -> None:
        response, connection = self._post(message)
        response.read()
        connection.close()

    def _post(self, message: dict[str, Any]) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=_ANSWER_S)
        head = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **self._headers}
        connection.request("POST", self._url.path or "/", json.dumps(message).encode(), head)
        return connection.getresponse(), connection

    def close(self) -> None:
        if "Mcp-Session-Id" in self._headers:
            connection = http.client.HTTPConnection(self._url.hostname or "", self._url.port, timeout=5.0)
            try:
                connection.request("DELETE", self._url.path or "/", headers=self._headers)
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    data = b""
    for line in response:
        if line.startswith(b"data:"):
            data += line[5:].strip()
        elif not line.strip() and data:
            yield json.loads(data)
            data = b""


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") != "image":
        return {"type": "text", "text": part.get("text", f"[{part.get('type')}]")}
    url = f"data:{part.get('mimeType', 'image/png')};base64,{part['data']}"
    return {"type": "image_url", "image_url": {"url": url}}


class ToolServer:
    """A server of tools. Use it in a `with`.

    Args:
        command: What starts it as a child, to speak with over its standard streams; or
        url: where it is.
        looks: Whether who asks looks at pictures; otherwise it reads that there is one.
    """

    def __init__(self, command: Sequence[str] = (), url: str | None = None, looks: bool = False) -> None:
        self._looks = looks
        self._wire: Any = _Web(url) if url else _Command(command)
        self._number = 0

    def __enter__(self) -> ToolServer:
        self._ask("initialize", protocolVersion=_VERSION, capabilities={}, clientInfo={"name": "rlhpc", "version": "1"})
        self._wire.say({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return self

    def __exit__(self, *_: Any) -> None:
        self._wire.close()

    def tools(self) -> list[dict[str, Any]]:
        """Its tools, in OpenAI's form."""
        found: list[Any] = []
        cursor = None
        while True:
            page = self._ask("tools/list", **({"cursor": cursor} if cursor else {}))
            for tool in page["tools"]:
                function = {
                    "name": tool["name"], "description": tool.get("description") or "",
                    "parameters": tool.get("inputSchema") or {"type": "object"},
                }  # fmt: skip
                found.append({"type": "function", "function": function})
            cursor = page.get("nextCursor")
            if not cursor:
                return found

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """What a tool says: a text or, with pictures, parts as messages have them.

        Raises:
            ToolFailed: It says that it has failed.
        """
        said = self._ask("tools/call", name=name, arguments=arguments)
        content = said.get("content") or []
        parts = [part.get("text", f"[{part.get('type')}]") for part in content]
        text = "\n".join(parts) or json.dumps(said.get("structuredContent", ""))
        if said.get("isError"):
            raise ToolFailed(text)
        if self._looks and any(part.get("type") == "image" for part in content):
            return [_part(part) for part in content]
        return text

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        said = self._wire.ask({"jsonrpc": "2.0", "id": self._number, "method": method, "params": params})
        if "error" in said:
            raise ToolFailed(str(said["error"].get("message")))
        found: dict[str, Any] = said["result"]
        return found
