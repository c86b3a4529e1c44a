"""Wait client: the description of a wait, the folder where commands meet, and the search for a watcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs import wait_client
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import ProcessId
from rlhpc.jobs.segment import JobRecord, SegmentJournal
from rlhpc.jobs.wait_client import SHELL_COMMAND, SHELL_PROGRAM, SOCKET, WELCOME, Wait
from rlhpc.jobs.waiter import Waiter


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where commands meet, which does not exist yet."""
    folder = tmp_path / "waits"
    monkeypatch.setattr(wait_client, "wait_folder", lambda: folder)
    return folder


def wait_for(root: Path) -> Wait:
    record = JobRecord(0, 1, "token", "local", ["secret"], "name", job_id="12", process=ProcessId.from_pid(os.getpid()))
    files = SegmentJournal(RunPaths(root), 0)
    waiter = Waiter(
        files, record, print, poll_s=0.1, deadline_s=9.0, asked_by=ProcessId.from_pid(os.getpid()), began=3.0
    )
    return Wait.from_waiter(waiter, answers=True)


def test_any_process_can_continue_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = wait_for(tmp_path)
    monkeypatch.setenv("RLHPC_WAIT", json.dumps(vars(wait)))
    continued = Wait.from_environment()
    assert continued == wait and "RLHPC_WAIT" not in os.environ
    waiter = continued.waiter(print)
    assert (waiter.files.paths.root, waiter.files.segment, waiter.record.job_id) == (tmp_path, 0, "12")
    assert (waiter.deadline_s, waiter.poll_s, waiter.began) == (9.0, 0.1, 3.0)
    assert waiter.asked_by == ProcessId.from_pid(os.getpid()) and waiter.record.command == []


class Listener:
    """A watcher that takes one request, and answers with `reply`."""

    def __init__(self, folder: Path, reply: bytes) -> None:
        folder.mkdir(mode=0o700)
        self.requests: list[Any] = []
        self.reply = reply
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(folder / SOCKET))
        self.socket.listen()
        self.thread = threading.Thread(target=self._answer, daemon=True)
        self.thread.start()

    def _answer(self) -> None:
        connection, _ = self.socket.accept()
        with connection, connection.makefile("rb") as file:
            self.requests.append(json.loads(file.readline()))
            connection.sendall(self.reply)


def test_a_watcher_that_runs_gets_the_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    listener = Listener(Path("waits"), WELCOME + b"X0\n")
    wait = wait_for(folder.parent)
    connection = wait_client._connect_or_start(wait)
    assert connection is not None
    with connection:
        assert connection.recv(9) == b"X0\n" and connection.gettimeout() is None
    listener.thread.join(20)
    assert listener.requests == [{**vars(wait), "values": {}}]
    listener.socket.close()


def test_no_watcher_is_asked_in_a_folder_that_is_open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    assert wait_client._connect_or_start(wait_for(folder.parent)) is None
    assert not list(folder.iterdir())


def test_a_watcher_is_started_by_one_process_and_ends_when_nobody_waits(folder: Path) -> None:
    with wait_client._open_wait_folder() as folder_fd:
        assert wait_client._connect(folder_fd, b"{}\n") is None
        assert wait_client._start_server(folder_fd)
        assert not wait_client._start_server(folder_fd)  # another one has the lock
    deadline = time.monotonic() + 60
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("lines", "code", "output", "errors"),
    [
        ("Etrouble\nO{}\nX3\n", 3, "{}\n", "trouble\n"),
        ("Ebegins\nD0\n", 0, "again\n", "begins\n"),  # the watcher is gone
        ("A\n", 0, "again --alone\n", ""),
    ],
)
def test_the_shell_prints_and_ends_or_becomes_the_command_again(
    lines: str, code: int, output: str, errors: str
) -> None:
    shell = subprocess.run(
        ["/bin/sh", "-c", f"exec 3<&0 </dev/null; {SHELL_COMMAND}", "wait", "echo", "again"], input=lines, text=True,
        env={"PATH": os.environ["PATH"], "RLHPC_SHELL": SHELL_PROGRAM}, capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    assert (shell.returncode, shell.stdout, shell.stderr) == (code, output, errors)
