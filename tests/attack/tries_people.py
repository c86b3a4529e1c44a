"""Attacks by another user of the node (uid 65534) on the services of agents, and on the line to a robot."""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.attack.tries import CannotRunError, attack

#: uid 65534 polls /proc for a process whose arguments have the word and a port, and listens there; says `evil` to everybody.
_THIEF = """
import os, re, socket, sys, threading, time
os.setgroups([]); os.setgid(65534); os.setuid(65534)
word, way = sys.argv[1].encode(), sys.argv[2]
def serve(s):
    while True:
        c, _ = s.accept()
        try:
            c.recv(1000); c.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 4\\r\\nConnection: close\\r\\n\\r\\nevil")
        except OSError:
            pass
        c.close()
def take(port):
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"), (socket.AF_INET, "127.0.0.2")):
        if way not in ("any", address):
            continue
        s = socket.socket(family)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if way == "any":
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            s.bind((address, port)); s.listen(64)
        except OSError:
            continue
        threading.Thread(target=serve, args=(s,), daemon=True).start()
        print("took", address, port, flush=True)
print("looking", flush=True)
done = set()
while True:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline", "rb").read()
        except OSError:
            continue
        if word in words and b"rlhpc-t-thief" not in words:
            for number in re.findall(rb"(?<![0-9])([0-9]{4,5})(?![0-9])", words):
                if 1024 < int(number) < 65536 and number not in done:
                    done.add(number); take(int(number))
"""
_GOOD = """
import http.server, os, socket, sys, time
mark, way, slow = sys.argv[1:4]
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "4"); self.end_headers(); self.wfile.write(b"good")
    def log_message(self, *words): pass
time.sleep(float(slow))
port = int(sys.argv[4]) if len(sys.argv) > 4 else int(os.environ["PORT"])
class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ":" in way else socket.AF_INET
try:
    server = Server((way, port), Answer)
    print("up", flush=True)
except OSError as error:
    print("busy", error, flush=True)
    if way == "stays":
        time.sleep(100)
    sys.exit(1)
server.serve_forever()
"""


def take_over(ready: str, thief: str, address: str, slow: float, by_argument: bool = True) -> str:
    """Another user is at the service's port before the service is; then an agent asks the service."""
    from rlhpc.language.agents.services import Services
    from rlhpc.language.config.agents import ServiceConfig
    from rlhpc.runtime.errors import RlhpcError

    if os.getuid():
        raise CannotRunError("needs root, to be two users")
    mark = f"rlhpc-t-mark-{time.monotonic_ns()}"
    with tempfile.TemporaryDirectory(prefix="rlhpc-t-") as folder:
        program = Path(folder) / "service.py"
        program.write_text(_GOOD)
        words = [sys.executable, str(program), mark, address, str(slow), *(["{port}"] if by_argument else [])]
        stolen = subprocess.Popen(
            [sys.executable, "-S", "-c", _THIEF + "\n# rlhpc-t-thief", mark, thief], stdout=subprocess.PIPE, text=True
        )
        try:
            assert stolen.stdout is not None and stolen.stdout.readline() == "looking\n"
            try:
                services = Services([ServiceConfig("search", words, ready=ready, timeout_s=15.0)], Path(folder))
            except RlhpcError:
                return ""
            try:
                end = time.monotonic() + 4
                while time.monotonic() < end:
                    connection = http.client.HTTPConnection(services.addresses["search"], timeout=5)
                    with contextlib.suppress(OSError, http.client.HTTPException):
                        connection.request("GET", "/")
                        if connection.getresponse().read() == b"evil":
                            return "an agent was answered by the other user"
                    connection.close()
                    if hasattr(services, "check"):
                        services.check()
                    time.sleep(0.1)
            except RlhpcError:
                return ""
            finally:
                services.close()
        finally:
            stolen.kill()
            stolen.wait()
    return ""


for _ready, _thief, _address, _slow, _argument in (
    ("port", "127.0.0.1", "127.0.0.1", 1.0, True), ("/", "127.0.0.1", "127.0.0.1", 1.0, True),
    ("line: up", "127.0.0.1", "0.0.0.0", 1.0, True), ("port", "any", "127.0.0.1", 1.0, True),
    ("port", "0.0.0.0", "127.0.0.1", 1.0, True), ("/", "::", "127.0.0.1", 1.0, True),
    ("port", "127.0.0.1", "::", 1.0, True), ("port", "127.0.0.1", "0.0.0.0", 0.0, True),
    ("port", "127.0.0.1", "127.0.0.2", 0.0, True), ("/", "any", "127.0.0.1", 1.0, False),
    ("line: busy", "127.0.0.1", "127.0.0.1", 1.0, True),
):  # fmt: skip
    attack("services of agents", f"ready {_ready}, thief at {_thief}, service at {_address} after {_slow:g} s"
           + ("" if _argument else ", port by variable"))(
        functools.partial(take_over, _ready, _thief, _address, _slow, _argument)
    )  # fmt: skip

# -- robots -----------------------------------------------------------------------------------------------------------

_VISITOR = """
import encodings.idna, os, random, socket, struct, sys, threading, time
os.setgroups([]); os.setgid(65534); os.setuid(65534)
host, port, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def come(number):
    while True:
        try:
            source = {"many addresses": f"127.0.{random.randrange(1, 255)}.{random.randrange(1, 255)}", "the robot's address": "127.0.0.1"}.get(what, "127.0.0.9")
            with socket.create_connection((host, port), 20, source_address=(source, 0)) as s:
                if what == "long frames": s.sendall(b"\\xff\\xff\\xff\\x7f" + b"x" * 4096)
                elif what == "deep greetings": s.sendall((200000).to_bytes(4, "big") + b"[" * 200000)
                elif what == "drips":
                    for _ in range(100): s.sendall(b"\\0"); time.sleep(0.1)
                elif what == "resets":
                    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)); continue
                while s.recv(4096): pass
        except OSError:
            time.sleep(0.01)
for number in range(80 if what != "resets" else 4):
    threading.Thread(target=come, args=(number,), daemon=True).start()
print("come", flush=True)
time.sleep(60)
"""
VISITORS = ("many addresses", "the robot's address", "long frames", "deep greetings", "drips", "resets")


def keep_the_robot_out(what: str) -> str:
    from rlhpc.embodied.robots.joining import meeting_points
    from tests.eventually import wait_until
    from tests.unit.embodied.robots.remote_robot import Inside, Outside, Rail

    if os.getuid():
        raise CannotRunError("needs root, to be two users")
    with tempfile.TemporaryDirectory(prefix="rlhpc-t-") as folder:
        inside = Inside(Path(folder), wait_s=30.0)
        wait_until(lambda: bool(meeting_points(inside.folder)), 20)
        (place,) = meeting_points(inside.folder)
        threads = threading.active_count()
        visitor = subprocess.Popen(
            [sys.executable, "-S", "-c", _VISITOR, place.address, str(place.port), what], stdout=subprocess.PIPE
        )
        try:
            assert visitor.stdout is not None
            visitor.stdout.readline()
            time.sleep(1.0)
            outside = Outside(inside.key(), Rail(), patience_s=25.0)
            try:
                inside.joined()
            except Exception as error:
                return f"the robot was kept out: {error!r} {outside.error}"
            count = threading.active_count() - threads
        finally:
            visitor.kill()
            visitor.wait()
            with contextlib.suppress(Exception):
                inside.env.close()
    return f"{count} threads" if count > 120 else ""


for _what in VISITORS:
    attack("visitors of a robot's line", _what)(functools.partial(keep_the_robot_out, _what))
