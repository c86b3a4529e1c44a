"""Attacks by HTTP on the endpoint that agents have: by episodes, with a key, and by other users of the node, without one."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gzip
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.attack.tries import CannotRunError, attack

ROOT = Path(__file__).resolve().parents[2]
USER = {"role": "user", "content": "u"}
CHAT = "/v1/chat/completions"


@functools.cache
def served() -> Any:
    """An endpoint whose engine answers at once."""
    from tests.integration import language

    sys.path.insert(0, str(Path(language.__path__[0])))
    from gateway_things import Scripted, Served

    made = Served(Scripted(lambda prompt: "An answer.", context=2000))
    atexit.register(made.close)
    return made


def raw(data: bytes, timeout_s: float = 20.0, limit: int = 1 << 20) -> bytes:
    """Sends bytes, and returns what comes back until the connection is closed or nothing comes for a while."""
    host, _, port = served().gateway.url.removeprefix("http://").partition(":")
    said = b""
    with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
        with contextlib.suppress(OSError):
            for at in range(0, len(data), 1 << 16):
                connection.sendall(data[at : at + (1 << 16)])
        with contextlib.suppress(OSError):
            connection.settimeout(5.0)
            while len(said) < limit and (part := connection.recv(1 << 16)):
                said += part
    return said


def request(key: str, body: bytes, path: str = CHAT, more: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n{more}\r\n"
    ).encode() + body


def post(body: Any, path: str = CHAT, timeout_s: float = 60.0) -> tuple[int, bytes]:
    """A request of an episode of its own."""
    key = served().open().key
    connection = http.client.HTTPConnection(served().gateway.url.removeprefix("http://"), timeout=timeout_s)
    try:
        connection.request(
            "POST", path, body if isinstance(body, bytes) else json.dumps(body), {"Authorization": f"Bearer {key}"}
        )
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def others_are_served(within_s: float = 10.0) -> str:
    began = time.monotonic()
    status, reply = post({"messages": [USER]})
    took = time.monotonic() - began
    return "" if status == 200 and took < within_s else f"another one got {status} after {took:.0f} s: {reply[:100]!r}"


# -- one request against the engine -----------------------------------------------------------------------------------


@functools.cache
def engine() -> Any:
    """A real engine with a tiny model."""
    from tests.integration import language

    sys.path.insert(0, str(Path(language.__path__[0])))
    import test_policies
    from gateway_things import chat_model

    from rlhpc.language.engines.registry import make_rollout

    folder = Path(tempfile.mkdtemp(prefix="rlhpc-t-"))
    chat_model(folder)
    return make_rollout(test_policies.make_config(folder), model_path=str(folder), device="cpu", seed=0)


@functools.cache
def served_by_an_engine() -> Any:
    served()
    from gateway_things import Served

    made = Served(engine())
    atexit.register(made.close)
    return made


def ask_the_engine(path: str, body: Any) -> str:
    there = served_by_an_engine()
    session = there.open(most=8)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(there.gateway.url.removeprefix("http://"), timeout=40)
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("POST", path, data, {"Authorization": f"Bearer {session.key}"})
        status = connection.getresponse().status
        if status >= 500:
            return f"status {status}"
    connection.close()
    if not there._thread.is_alive():
        served_by_an_engine.cache_clear()
        return "the engine's loop ended"
    status, reply = there.post(there.open(most=8).key, CHAT, {"messages": [USER]})
    return "" if status == 200 else f"a later request got {status}: {str(reply)[:200]}"


_GENERATE = "/inference/v1/generate"


def _generate(**sampling: Any) -> tuple[str, Any]:
    return _GENERATE, {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, **sampling}}


ENGINE: dict[str, tuple[str, Any]] = {
    "half a pair as a stop": (CHAT, {"messages": [USER], "stop": "\udfff"}),
    "halves in the wrong order": (CHAT, {"messages": [USER], "stop": ["ok", "\udc00\ud800"]}),
    "a half within a stop sequence": ("/v1/messages", {"messages": [USER], "max_tokens": 8, "stop_sequences": ["a\ud83dz"]}),
    "a half in a stop of tokens": _generate(stop=["\ud800"]),
    "a half as bytes that are none": (CHAT, b'{"messages": [{"role": "user", "content": "u"}], "stop": ["\xed\xa0\x80"]}'),
    "an empty stop": (CHAT, {"messages": [USER], "stop": [""]}),
    "a stop id beyond the vocabulary": _generate(stop_token_ids=[1 << 40]),
    "a stop id that is negative": _generate(stop_token_ids=[-1]),
    "a stop id that is true": _generate(stop_token_ids=[True]),
    "sampling values of no sense": _generate(temperature=1e308, top_p=0.0, top_k=-7),
    "temperature of nothing": _generate(temperature=5e-324),
    "a huge seed": _generate(seed=1 << 70),
    "a bias of tokens that are none": (CHAT, {"messages": [USER], "logit_bias": {"99999999": 100, "\ud800": 1, "-1": 5}}),
    "tokens that are none": (_GENERATE, {"token_ids": [1 << 33, -5], "sampling_params": {"max_tokens": 8}}),
    "tokens that are numbers": (_GENERATE, {"token_ids": [1.5, True], "sampling_params": {"max_tokens": 8}}),
    "halves in the prompt": (CHAT, {"messages": [{"role": "user", "content": "\ud800 \udc00"}]}),
    "halves in a tool's name": (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "\ud800"}}]}),
}  # fmt: skip
for _name, (_path, _body) in ENGINE.items():
    attack("one request", _name)(functools.partial(ask_the_engine, _path, _body))

# -- big bodies -------------------------------------------------------------------------------------------------------


def send_beside(make: Callable[[], tuple[str, Any]]) -> str:
    """One episode sends a body, three times; another must be served meanwhile."""
    path, body = make()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    if how := others_are_served():
        return how
    said: list[int] = []

    def flood() -> None:
        for _ in range(3):
            with contextlib.suppress(OSError, http.client.HTTPException):
                said.append(post(data, path, 100.0)[0])

    sender = threading.Thread(target=flood, daemon=True)
    sender.start()
    time.sleep(0.3)
    how = ""
    while sender.is_alive() and not how:
        how = others_are_served()
        time.sleep(0.1)
    sender.join(60)
    return how or (f"statuses {said}" if len(said) < 3 or any(status >= 500 for status in said) else "")


BODIES: dict[str, Callable[[], tuple[str, Any]]] = {
    "a text without blanks": lambda: (CHAT, {"messages": [{"role": "user", "content": "a" * 4_000_000}]}),
    "special tokens": lambda: (CHAT, {"messages": [{"role": "user", "content": "<|im_start|>" * 300_000}]}),
    "parts of one message": lambda: (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 150_000}]}),
    "messages of nothing": lambda: (CHAT, {"messages": [{"role": "user", "content": ""}] * 200_000}),
    "tools": lambda: (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(60_000)]}),
    "a tool's long description": lambda: (CHAT, {"messages": [USER], "tools": [
        {"type": "function", "function": {"name": "f", "description": "d " * 2_000_000}}]}),
    "calls of tools": lambda: (CHAT, {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [
        {"id": str(n), "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(60_000)]}]}),
    "arguments that are deep": lambda: (CHAT, {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":' * 90_000 + "1" + "}" * 90_000}}]}, USER]}),
    "tokens": lambda: (_GENERATE, {"token_ids": [5] * 3_000_000, "sampling_params": {"max_tokens": 8}}),
    "system texts": lambda: ("/v1/messages", {"messages": [USER], "max_tokens": 8, "system": [{"type": "text", "text": "s " * 9}] * 90_000}),
    "a long word in many alphabets": lambda: (CHAT, {"messages": [{"role": "user", "content": "".join(map(chr, range(0x4E00, 0x9000))) * 40}]}),
    "a packed body": lambda: (CHAT, gzip.compress(b" " * (30 << 20))),
}  # fmt: skip
for _name, _make in BODIES.items():
    attack("big bodies", _name)(functools.partial(send_beside, _make))

# -- odd requests -----------------------------------------------------------------------------------------------------

ODD: dict[str, Callable[[str], bytes]] = {
    "a key of other letters": lambda key: request("schl\xfcssel", b"{}").replace("schl\xfcssel".encode(), b"\xff\xfe\xfc"),
    "a key of 60 kB": lambda key: request("k" * 60_000, b"{}"),
    "two keys": lambda key: request(key, b"{}", more="Authorization: Bearer x\r\nx-api-key: \xe9\r\n"),
    "a length that is none": lambda key: request(key, b"{}").replace(b"Content-Length: 2", b"Content-Length: -2"),
    "two lengths": lambda key: request(key, b"{}", more="Content-Length: 9\r\n"),
    "a chunk without a size": lambda key: request(key, b"zz\r\n{}\r\n0\r\n\r\n", more="Transfer-Encoding: chunked\r\n").replace(b"Content-Length", b"X"),
    "a packed body that is broken": lambda key: request(key, gzip.compress(b"{}")[:-9], more="Content-Encoding: gzip\r\n"),
    "a packed body of another kind": lambda key: request(key, zlib.compress(b"{}"), more="Content-Encoding: br\r\n"),
    "a body of 30 MB in 30 kB": lambda key: request(key, gzip.compress(b" " * (30 << 20) + b"{}"), more="Content-Encoding: gzip\r\n"),
    "a path with zeros": lambda key: request(key, b"{}", path="/v1/%00%ff/../chat/completions"),
    "a method of no name": lambda key: request(key, b"{}").replace(b"POST", b"\x01POST"),
    "a wish to be asked first": lambda key: request(key, b"{}", more="Expect: 999-nothing\r\n"),
    "another protocol": lambda key: request(key, b"{}", more="Upgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Key: x\r\n"),
    "TLS": lambda key: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "a charset of no name": lambda key: request(key, b"{}").replace(b"application/json", b"application/json; charset=\xff"),
    "UTF-16": lambda key: request(key, json.dumps({"messages": [USER]}).encode("utf-16")),
    "a mark before the text": lambda key: request(key, b"\xef\xbb\xbf" + json.dumps({"messages": [USER]}).encode()),
    "names twice": lambda key: request(key, b'{"messages": 5, "messages": [{"role": "user", "role": {}, "content": "u"}]}'),
    "a number of 100 000 digits": lambda key: request(key, b'{"messages": [], "n": ' + b"9" * 100_000 + b"}"),
    "a session's header of other letters": lambda key: request(key, b"{}", more="x-session-id: \x7f\x80\r\nx-request-id: %0d%0a\r\n"),
}  # fmt: skip


def send_odd(make: Callable[[str], bytes]) -> str:
    import logging

    faults: list[str] = []

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info or record.levelno >= logging.ERROR:
                faults.append(record.getMessage()[:200])

    handler = Seen()
    logging.getLogger().addHandler(handler)
    try:
        said = raw(make(served().open().key))
        time.sleep(0.2)
    finally:
        logging.getLogger().removeHandler(handler)
    if b" 500 " in said.split(b"\r\n", 1)[0]:
        return said[:200].decode(errors="replace")
    return f"logged: {faults[0]}" if faults else others_are_served()


for _name, _make_raw in ODD.items():
    attack("odd requests", _name)(functools.partial(send_odd, _make_raw))

# -- another user without a key ---------------------------------------------------------------------------------------

#: What uid 65534 does; arguments are host, port, and what.
_STRANGER = """
import os, resource, socket, sys, time
os.setgroups([]); os.setgid(65534); os.setuid(65534)
host, port, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
held = []
def begin(data):
    s = socket.socket(); s.settimeout(1)
    try:
        s.connect((host, port)); s.sendall(data); held.append(s)
    except OSError:
        pass
head = "POST %s HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer no\\r\\nContent-Length: 30000000\\r\\n\\r\\n"
end = time.time() + 12
print("begun", flush=True)
while time.time() < end:
    if what == "feedback bodies" and len(held) < 200:
        begin((head % "/v1/feedback").encode() + b"x" * 400_000)
    elif what == "chat bodies" and len(held) < 200:
        begin((head % "/v1/chat/completions").encode() + b"x" * 400_000)
    elif what == "headers without end" and len(held) < 200:
        begin(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n" + b"".join(b"x-%d: %s\\r\\n" % (n, b"y" * 4000) for n in range(60)))
    elif what == "chunks without end" and len(held) < 200:
        begin(b"POST /v1/feedback HTTP/1.1\\r\\nHost: x\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n" + b"fff\\r\\n" + b"x" * 4095 + b"\\r\\n")
    elif what == "many in a line" and len(held) < 60:
        begin(b"GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n" * 5000)
    elif what == "connections" and len(held) < 900:
        begin(b"G")
    elif what == "one letter a second" and len(held) < 600:
        begin(b"G")
    elif what == "comes and goes":
        begin(b""); held.pop().close() if held else None
    elif what == "comes and goes, and resets":
        begin(b"")
        if held:
            held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\\1\\0\\0\\0\\0\\0\\0\\0"); held.pop().close()
    elif what in ("comes and goes, and waits for nothing", "fills the queue"):
        s = socket.socket(); s.setblocking(False)
        try: s.connect((host, port))
        except OSError: pass
        held.append(s)
        while len(held) > (0 if "waits" in what else 900): held.pop(0).close()
    elif what == "comes with a request, and goes":
        begin(b"GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer no\\r\\n\\r\\n"); held.pop().close() if held else None
    for s in held[:] if what == "one letter a second" else ():
        try: s.send(b"x")
        except OSError: pass
    if "comes" not in what and what != "fills the queue":
        time.sleep(0.002 if len(held) < 200 else 0.2)
"""
STRANGERS = ("feedback bodies", "chat bodies", "headers without end", "chunks without end", "many in a line", "connections",
             "one letter a second", "comes and goes", "comes and goes, and resets",
             "comes and goes, and waits for nothing", "fills the queue", "comes with a request, and goes")  # fmt: skip


def come_as_a_stranger(what: str, count: int = 1) -> str:
    import os

    if os.getuid():
        raise CannotRunError("needs root, to be two users")
    process = _own_process()
    host, _, port = served().gateway.url.removeprefix("http://").partition(":")
    before = process.memory_info().rss
    worst, descriptors, how = 0, 0, ""
    words = [sys.executable, "-S", "-c", _STRANGER, host, port, what]
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE)) for _ in range(count)]
        stack.callback(lambda: [one.kill() for one in strangers])
        for one in strangers:
            assert one.stdout is not None
            one.stdout.readline()
        while strangers[0].poll() is None and not how:
            time.sleep(0.5)
            worst, descriptors = max(worst, process.memory_info().rss - before), max(descriptors, process.num_fds())
            how = others_are_served()
    if worst > 150 << 20:
        return f"{worst >> 20} MB more"
    return how or (f"{descriptors} descriptors" if descriptors > 700 else "")


def _own_process() -> Any:
    import psutil

    return psutil.Process()


for _what in STRANGERS:
    attack("another user without a key", _what)(functools.partial(come_as_a_stranger, _what))
attack("another user without a key", "four who come and go")(functools.partial(come_as_a_stranger, "comes and goes", 4))

# -- many connections of this user's ----------------------------------------------------------------------------------

#: Arguments are host, port, a key or nothing, and whether each connection asks for a stream that nobody reads.
_HOLDER = """
import socket, sys, time
host, port, key, what = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
body = '{"messages": [{"role": "user", "content": "u"}], "stream": true}'
heads = {
    "asks once": f"GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {key}\\r\\n\\r\\n",
    "reads no stream": f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {key}\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n{body}",
    "says nothing": "",
}
held, end = [], time.time() + 12
while time.time() < end:
    s = socket.socket(); s.settimeout(2)
    try:
        s.connect((host, port)); s.sendall(heads[what].encode()); held.append(s)
        if what == "asks once": s.recv(4096)
    except OSError:
        pass
    if len(held) == 300: print("begun", flush=True)
    if len(held) > 850: held.pop(0).close()
"""


def hold_connections(what: str) -> str:
    """An episode's process opens as many connections as it may; other episodes are served."""
    host, _, port = served().gateway.url.removeprefix("http://").partition(":")
    words = [sys.executable, "-S", "-c", _HOLDER, host, port, served().open(most=2000).key, what]
    how = ""
    with subprocess.Popen(words, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            while holder.poll() is None and not how:
                how = others_are_served()
        except (OSError, http.client.HTTPException) as error:
            how = f"another one got {error!r}"
        holder.kill()
    return how


for _what, _documented in {
    "asks once": "",
    "reads no stream": "within agent.max_turns an episode may ask for everything at once",
    "says nothing": "programs of the run's own user can delay others without a key",
}.items():
    attack("many connections of an episode", _what, _documented)(functools.partial(hold_connections, _what))
