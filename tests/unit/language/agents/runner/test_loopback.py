"""First program in a sandbox: network, limits, mounts and capabilities that a command starts with, and the model's port.

Each test runs the program as `shell.py` does, in the namespaces of `unshare`. Attacks on it are in test_shell.py.
"""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc.language.agents.runner import loopback

NAMESPACES = ("unshare", "-rnm", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
#: Prints what the command finds, as JSON.
COMMAND = """
import json, os, resource, socket, sys

def attempt(action):
    try:
        action()
    except OSError as error:
        return error.strerror
    return "done"

def ask(port, text):
    with socket.create_connection(("127.0.0.1", port), 10) as model:
        model.sendall(text)
        model.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: model.recv(100), b"")).decode()

settings = json.loads(sys.argv[1])
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
listener = socket.create_server(("127.0.0.1", 0))
fixed = settings.get("fixed")
print(json.dumps({
    "nice": os.nice(0),
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "data": resource.getrlimit(resource.RLIMIT_DATA),
    "file": resource.getrlimit(resource.RLIMIT_FSIZE),
    "capabilities": [status[name].strip().strip("0") for name in ("CapPrm", "CapEff", "CapBnd")],
    "privileges": status["NoNewPrivs"].strip(),
    "loopback": attempt(lambda: socket.create_connection(listener.getsockname(), 10)),
    "outside": attempt(lambda: socket.create_connection(("192.0.2.1", 80), 10)),
    "replies": [ask(settings["port"], letter.encode() * size) for letter, size in settings.get("ask", ())],
    "write": fixed and attempt(lambda: open(fixed + "/planted", "w")),
    "rename": fixed and attempt(lambda: os.rename(fixed, fixed + "-other")),
    "rename above": fixed and attempt(lambda: os.rename(os.path.dirname(fixed), os.path.dirname(fixed) + "-other")),
    "read": fixed and open(fixed + "/file").read(),
}))
"""


def run(settings: dict[str, Any], *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in the sandbox; without one, the program `COMMAND`."""
    spec = {"socket": "", "fixed": "", **settings}
    command = command or (sys.executable, "-I", "-c", COMMAND, json.dumps({**spec, "port": loopback.PORT}))
    program = [*NAMESPACES, sys.executable, "-I", "-B", loopback.__file__, json.dumps(spec), *command]
    return subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)


def facts(**settings: Any) -> dict[str, Any]:
    """Returns what the command in the sandbox finds."""
    done = run(settings)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Iterator[str]:
    """A UNIX socket that answers each connection, once it has read all, with the text in upper case."""
    path = str(tmp_path / "model")
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(8)

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as request:
                connection.sendall(request.read().upper())

    threading.Thread(target=serve, daemon=True).start()
    yield path
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def test_the_command_has_the_loopback_address_and_no_other_network_and_no_capability() -> None:
    found = facts()
    assert found["loopback"] == "done" and found["outside"] == "Network is unreachable"
    assert found["capabilities"] == ["", "", ""] and found["privileges"] == "1"
    assert found["nice"] >= 10, "the rank that generates its replies comes first"


def test_limits_are_those_of_the_settings() -> None:
    found = facts(memory_mb=512, disk_mb=64)
    assert found["core"] == [0, 0]
    assert found["data"] == [4 * 512 << 20] * 2 and found["file"] == [64 << 20] * 2


def test_without_settings_only_core_files_are_limited() -> None:
    found = facts()
    assert found["core"] == [0, 0]
    assert found["data"] == [*resource.getrlimit(resource.RLIMIT_DATA)]
    assert found["file"] == [*resource.getrlimit(resource.RLIMIT_FSIZE)]


def test_a_port_of_the_sandbox_is_the_models_socket(model: str) -> None:
    """Also when the client has finished its request before the reply begins."""
    assert facts(socket=model, ask=[("a", 5), ("b", 300_000), ("c", 0)])["replies"] == ["AAAAA", "B" * 300_000, ""]


def test_a_model_that_has_gone_closes_the_connection_and_the_port_stays(tmp_path: Path) -> None:
    command = """
import socket, sys
for _ in range(2):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10) as model:
        print(model.recv(1))
"""
    done = run({"socket": str(tmp_path / "gone")}, sys.executable, "-I", "-c", command, str(loopback.PORT))
    assert done.stdout.split() == ["b''", "b''"], done.stderr


def test_a_fixed_folder_is_neither_written_nor_moved_and_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "fixed"
    folder.mkdir(parents=True)
    (folder / "file").write_text("content")
    found = facts(fixed=str(folder))
    assert found["read"] == "content"
    assert found["write"] == "Read-only file system"
    assert found["rename"] == found["rename above"] == "Device or resource busy"
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_command_that_is_not_there_is_named_after_all_is_prepared(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "fixed"
    folder.mkdir()
    done = run({"socket": model, "fixed": str(folder), "memory_mb": 4096, "disk_mb": 64}, "no-such-command", "x")
    assert (done.returncode, done.stderr.strip()) == (1, "no-such-command: No such file or directory")


def test_the_exit_code_is_the_commands() -> None:
    assert run({}, "sh", "-c", "exit 7").returncode == 7
