"""Wait server: one query for all jobs, and what the shells of waiting commands are sent."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs import wait_server
from rlhpc.jobs.probes import JobReport, JobState
from rlhpc.jobs.wait_client import WELCOME
from rlhpc.jobs.wait_server import ReportCache, Watcher
from rlhpc.runtime.errors import UserError


class Asked:
    """A probe under which every job runs; it records its questions and who has left."""

    def __init__(self) -> None:
        self.questions, self.gone = list[list[str]](), list[str]()
        self.free = threading.Event()
        self.free.set()

    def query(self, job_ids: Iterable[str]) -> dict[str, JobReport]:
        ids = list(job_ids)
        self.questions.append(ids)
        assert self.free.wait(60)
        return {job: JobReport(JobState.RUNNING, "", "squeue", True) for job in ids}

    def leave(self, job_ids: Iterable[str]) -> None:
        self.gone += job_ids


def states(answers: ReportCache, *ids: str) -> list[str]:
    """Returns the states of jobs."""
    return [report.state.value for report in answers.query(ids).values()]


def test_all_jobs_are_in_one_query() -> None:
    probe: Any = Asked()
    answers = ReportCache(probe, interval_s=1000)
    answers.enter("1")
    answers.enter("2")
    assert states(answers, "1") == states(answers, "2") == ["RUNNING"]
    assert probe.questions == [["1", "2"]]
    answers.enter("3")  # is asked about at once
    assert states(answers, "3") == ["RUNNING"] and probe.questions[-1] == ["1", "2", "3"]
    assert states(answers, "4") == ["UNKNOWN"]


def test_while_one_thread_asks_the_others_take_the_last_answers() -> None:
    probe: Any = Asked()
    answers = ReportCache(probe, interval_s=0)
    answers.enter("1")
    states(answers, "1")
    probe.free.clear()
    asking = threading.Thread(target=states, args=(answers, "1"))
    asking.start()
    while len(probe.questions) < 2:
        time.sleep(0.01)
    assert states(answers, "1") == ["RUNNING"] and len(probe.questions) == 2
    probe.free.set()
    asking.join(60)


def test_a_job_is_followed_until_the_last_that_waits_has_left() -> None:
    probe: Any = Asked()
    answers = ReportCache(probe, interval_s=0)
    answers.enter("1")
    answers.enter("1")
    answers.leave(["1"])
    assert states(answers, "1") == ["RUNNING"] and probe.gone == []
    answers.leave(["1"])
    assert probe.gone == ["1"] and states(answers, "1") == ["UNKNOWN"] and probe.questions[-1] == []


class Waiter:
    """A waiter that is done after three looks, or fails with an error."""

    poll_s = 0.001

    def __init__(self, out: Any, error: Exception | None = None, endless: bool = False) -> None:
        self.out, self.error, self.endless, self.looks, self.left = out, error, endless, 0, False

    def poll(self) -> str | None:
        self.looks += 1
        if self.looks == 1:
            self.out("one line\nand\0 another")
        if self.error and self.looks == 2:
            raise self.error
        return "done" if self.looks > 3 and not self.endless else None

    def answer(self, done: str) -> dict[str, str]:
        return {"state": done}

    def leave(self) -> None:
        self.left = True


class Serving:
    """A server in a thread, and its waiters."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, **waiter: Any) -> None:
        self.waiters: list[Waiter] = []

        class Wait:
            def __init__(wait, answers: bool) -> None:  # noqa: N805
                wait.answers = answers

            def waiter(wait, out: Any, find_probe: Any, environment: Any) -> Waiter:  # noqa: N805
                self.waiters.append(Waiter(out, **waiter))
                return self.waiters[-1]

        monkeypatch.setattr(wait_server, "Wait", Wait)
        monkeypatch.setattr(wait_server, "answer_line", lambda answer: f"it is {answer['state']}")
        monkeypatch.setattr(wait_server, "_LINGER_S", 0.2)
        self.path = f"/proc/self/cwd/{path.name}"
        monkeypatch.chdir(path.parent)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen()
        self.thread = threading.Thread(target=Watcher(listener).serve, daemon=True)
        self.thread.start()

    def ask(self, request: Any) -> socket.socket:
        """Sends a request."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(60)
        connection.connect(self.path)
        connection.sendall(request if isinstance(request, bytes) else json.dumps(request).encode() + b"\n")
        return connection

    def answer(self, request: Any) -> list[str]:
        """Returns all lines that a request is answered with."""
        with self.ask(request) as connection:
            data = b""
            while part := connection.recv(4096):
                data += part
        return data.decode().splitlines()

    def end(self) -> None:
        """Waits for the server's end, which comes when nobody waits."""
        self.thread.join(60)
        assert not self.thread.is_alive()


REQUEST = {"answers": True, "values": {"TOKEN": "s3cret"}}
START = [WELCOME.decode().strip(), "D0", "Erlhpc: one line", "Eand another"]


def test_a_shell_hears_lines_the_answer_and_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Serving(tmp_path / "s", monkeypatch)
    assert server.answer(REQUEST) == [*START, "Erlhpc: it is done", 'O{"state": "done"}', "X0"]
    assert server.answer({**REQUEST, "answers": False}) == [*START, "Erlhpc: it is done", "X0"]
    server.end()
    assert all(waiter.left for waiter in server.waiters)


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (UserError("the token s3cret is wrong"), ["X"]),
        (ZeroDivisionError(), ["A"]),  # the shell waits by itself
    ],
    ids=["an error of the run", "a mistake here"],
)
def test_a_shell_hears_of_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, lines: list[str]
) -> None:
    server = Serving(tmp_path / "s", monkeypatch, error=error)
    answer = server.answer(REQUEST)
    assert answer[:4] == START and answer[-1][0] == lines[0]
    if isinstance(error, UserError):
        assert answer[-1] == f"X{error.exit_code}" and "s3cret" not in "".join(answer)
        assert answer[-2].startswith("Erlhpc: error: the token ")
    server.end()


def test_who_leaves_is_no_longer_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Serving(tmp_path / "s", monkeypatch, endless=True)
    connection = server.ask(REQUEST)
    assert connection.recv(4096).startswith(WELCOME)
    connection.close()
    server.end()
    assert server.waiters[0].left


@pytest.mark.parametrize("request_", [b"no json\n", b"[]\n", b'{"values": {}}\n', b""])
def test_what_is_no_request_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: bytes) -> None:
    server = Serving(tmp_path / "s", monkeypatch)
    with server.ask(request_) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(4096) == b""
    server.end()
    assert server.waiters == []
