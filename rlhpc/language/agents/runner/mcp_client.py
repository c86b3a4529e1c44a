"""Client of tool servers that use the Model Context Protocol (MCP).

`main.py` loads this file. Like `main.py`, it needs only the standard library and Python 3.8 or newer, not rlhpc.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import subprocess
import time
import urllib.parse
from typing import Any, Iterator, Sequence  # noqa: UP035 (Python 3.8)

_VERSION = "2025-06-18"
#: Time limits of a server's answer and of a tool call, in seconds. The model gets a message when a tool call times out.
_ANSWER_S, _TOOL_S = 600.0, 120.0
#: Maximum number of bytes of an answer.
_MAX_BYTES = 32 << 20
_TIMEOUTS = (TimeoutError, socket.timeout)  # two classes before Python 3.10


def _is_ready(descriptor: int, event: int, deadline: float) -> bool:
    """Waits until `deadline` for an event on a descriptor; returns whether it occurred. Unlike `select.select`, it supports
    descriptors above 1023.
    """
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))


class ToolFailed(Exception):
    """Failed tool call: the server refused it, or the tool reported an error."""


class _CommandTransport:
    """Connection to a server in a child process; each message is one line."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        self._buffer = bytearray()

    def exchange(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        self.send(message, timeout_s)
        while True:
            reply = _parse_message(self._read_line(deadline))
            if _is_reply_to(reply, message):
                return reply
            if "id" in reply and "method" in reply:  # a request of the server to its client
                self.send(_answer_request(reply))

    def _read_line(self, deadline: float) -> bytes:
        """Reads a line and returns it without its end; truncates a line that is too long.

        Raises:
            TimeoutError: No line arrived in time.
            ConnectionError: The server has ended.
        """
        searched_bytes = 0
        while (line_end := self._buffer.find(b"\n", searched_bytes)) < 0:
            if not _is_ready(self._stdout, select.POLLIN, deadline):
                raise TimeoutError
            chunk = os.read(self._stdout, 1 << 16)
            if not chunk:
                raise ConnectionError(f"the server {self._process.args!r} has ended with status {self._process.wait()}")
            del self._buffer[_MAX_BYTES:]
            searched_bytes = len(self._buffer)
            self._buffer += chunk
        line = bytes(self._buffer[:line_end])
        del self._buffer[: line_end + 1]
        return line

    def send(self, message: dict[str, Any], timeout_s: float = _ANSWER_S) -> None:
        deadline, unwritten_bytes = time.monotonic() + timeout_s, memoryview(json.dumps(message).encode() + b"\n")
        while unwritten_bytes:
            if not _is_ready(self._stdin, select.POLLOUT, deadline):
                raise TimeoutError
            unwritten_bytes = unwritten_bytes[os.write(self._stdin, unwritten_bytes) :]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]

    def set_version(self, version: str) -> None:
        """Ignores the protocol version, because messages over pipes do not contain it."""


def _parse_message(message_bytes: bytes) -> dict[str, Any]:
    """Parses a message; returns an empty dict if the data is not a JSON object."""
    try:
        message = json.loads(message_bytes)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _is_reply_to(reply: dict[str, Any], message: dict[str, Any]) -> bool:
    return reply.get("id") == message["id"] and "method" not in reply


def _answer_request(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the response to a server's request: a result for `ping`, an error for other requests."""
    reply: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
    if request["method"] == "ping":
        return {**reply, "result": {}}
    return {**reply, "error": {"code": -32601, "message": "this client cannot do that"}}


class _HttpTransport:
    """Connection to a server at a URL (streamable HTTP)."""

    def __init__(self, url: str) -> None:
        self._url = urllib.parse.urlsplit(url)
        self._headers: dict[str, str] = {}

    def exchange(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        with contextlib.closing(self._connection(timeout_s)) as connection:
            response = self._post(connection, message)
            if response.status >= 300:
                raise ConnectionError(f"{self._address()}: {response.status}: {response.read(300)!r}")
            if response.headers.get("Mcp-Session-Id"):
                self._headers["Mcp-Session-Id"] = response.headers["Mcp-Session-Id"]
            if response.headers.get("Content-Type", "").startswith("text/event-stream"):
                for reply in _read_events(response, deadline):
                    if _is_reply_to(reply, message):
                        return reply
                raise ConnectionError(f"{self._address()} ended its answer before it had given it")
            return _parse_message(response.read(_MAX_BYTES))

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.closing(self._connection(_ANSWER_S)) as connection:
            self._post(connection, message).read(_MAX_BYTES)

    def close(self) -> None:
        if "Mcp-Session-Id" in self._headers:
            connection, failures = self._connection(5.0), (OSError, http.client.HTTPException)
            with contextlib.closing(connection), contextlib.suppress(*failures):
                connection.request("DELETE", self._build_request_path(), headers=self._headers)
                connection.getresponse().read(_MAX_BYTES)

    def set_version(self, version: str) -> None:
        """Sets the protocol version in the headers of later requests; the server has chosen it."""
        self._headers["MCP-Protocol-Version"] = version

    def _post(self, connection: http.client.HTTPConnection, message: dict[str, Any]) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **self._headers}
        connection.request("POST", self._build_request_path(), json.dumps(message).encode(), headers)
        return connection.getresponse()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        connection_class = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        return connection_class(self._url.hostname or "", self._url.port, timeout=timeout_s)

    def _build_request_path(self) -> str:
        return (self._url.path or "/") + (f"?{self._url.query}" if self._url.query else "")

    def _address(self) -> str:
        return self._url._replace(query="").geturl()  # the query may contain a key


def _read_events(response: http.client.HTTPResponse, deadline: float) -> Iterator[dict[str, Any]]:
    """Yields the messages of an event stream. A last message need not be followed by an empty line.

    Raises:
        TimeoutError: The deadline has passed.
    """
    event_data = b""
    while True:
        line = response.readline(_MAX_BYTES)
        if line.startswith(b"data:"):
            event_data = (event_data + line[5:].strip() + b"\n")[:_MAX_BYTES]
        elif not line.strip() and event_data:
            yield _parse_message(event_data)
            event_data = b""
        if not line:
            return
        if time.monotonic() > deadline:
            raise TimeoutError


def _convert_message_part(content_part: dict[str, Any]) -> dict[str, Any]:
    if content_part.get("type") != "image":
        return {"type": "text", "text": content_part.get("text", f"[{content_part.get('type')}]")}
    url = f"data:{content_part.get('mimeType', 'image/png')};base64,{content_part['data']}"
    return {"type": "image_url", "image_url": {"url": url}}


class ToolServer:
    """Tool server, as a context manager.

    Args:
        command: Command line of a server that runs as a child process and exchanges messages over its standard streams.
        url: URL of a running server, instead of a command.
        reads_images: Whether the model reads images; otherwise a text replaces each image.
    """

    def __init__(self, command: Sequence[str] = (), url: str | None = None, reads_images: bool = False) -> None:
        self._reads_images = reads_images
        self._transport: Any = _HttpTransport(url) if url else _CommandTransport(command)
        self._num_requests = 0

    def __enter__(self) -> ToolServer:
        client_info = {"name": "rlhpc", "version": "1"}
        session = self._send_request("initialize", protocolVersion=_VERSION, capabilities={}, clientInfo=client_info)
        self._transport.set_version(str(session.get("protocolVersion", _VERSION)))
        self._transport.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return self

    def __exit__(self, *_: Any) -> None:
        self._transport.close()

    def tools(self) -> list[dict[str, Any]]:
        """Returns the server's tools, in OpenAI's format."""
        tools: list[Any] = []
        cursor = None
        while True:
            page = self._send_request("tools/list", **({"cursor": cursor} if cursor else {}))
            for tool in page["tools"]:
                function = {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool.get("inputSchema") or {"type": "object"},
                }
                tools.append({"type": "function", "function": function})
            cursor = page.get("nextCursor")
            if not cursor:
                return tools

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Calls a tool; returns a text or, with images, a list of message parts.

        Raises:
            ToolFailed: The tool reported an error or timed out, or the server refused the call.
        """
        tool_result = self._send_request("tools/call", name=name, arguments=arguments)
        result_content = tool_result.get("content") or []
        part_texts = [content_part.get("text", f"[{content_part.get('type')}]") for content_part in result_content]
        output_text = "\n".join(part_texts) or json.dumps(tool_result.get("structuredContent", ""))
        if tool_result.get("isError"):
            raise ToolFailed(output_text)
        if self._reads_images and any(content_part.get("type") == "image" for content_part in result_content):
            return [_convert_message_part(content_part) for content_part in result_content]
        return output_text

    def _send_request(self, method: str, **params: Any) -> dict[str, Any]:
        self._num_requests += 1
        message, timeout_s = {"jsonrpc": "2.0", "id": self._num_requests, "method": method, "params": params}, _ANSWER_S
        if method == "tools/call":
            timeout_s = _TOOL_S
        try:
            reply = self._transport.exchange(message, timeout_s)
        except _TIMEOUTS:
            reason = f"no answer within {timeout_s:g} s"
            raise (ToolFailed if method == "tools/call" else ConnectionError)(f"{method}: {reason}") from None
        if "error" in reply:
            raise ToolFailed(str(reply["error"].get("message")))
        result_fields = reply.get("result")
        if not isinstance(result_fields, dict):
            raise ConnectionError(f"{method}: the server's answer has no result")
        return result_fields
