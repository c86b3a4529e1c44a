"""Agents' programs without a sandbox that are against what runs them: each spoils its own episode alone."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhpc.language.agents.agent_processes import RUNNER, AgentProcesses, Program, _read_reply
from tests.unit.language.agents.test_agent_processes import ticket

AGENT = r"""
import os, signal, stat, time
def nursery():
    with open(f"/proc/{os.getppid()}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
def pipes(pid):
    found = []
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            if int(name) > 2 and stat.S_ISFIFO(os.stat(path).st_mode) and os.lstat(path).st_mode & stat.S_IWUSR:
                found.append(path)
    except OSError:
        pass
    return found
def daemon(note):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGHUP])
            with open(note + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(note + ".new", note)
            time.sleep(1000)
        os._exit(0)
    while not os.path.exists(note):
        time.sleep(0.01)
def solve(task, model):
    what, _, more = task.question.partition(" ")
    if what == "daemon":
        daemon(more)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(100)
    if what == "raw":
        for path in pipes("self"):
            with open(path, "wb") as file:
                file.write(more.replace("DEEP", "[" * 100_000).encode() + b"\n")
        os._exit(0)
    if what == "lines":
        for path in pipes(nursery()):
            with open(path, "wb") as file:
                file.write(more.replace("DEEP", "[" * 100_000).encode() + b"\n")
    if what == "reach":
        count = len(pipes(nursery())) + len(pipes(os.getppid()))
        for pid in (nursery(), os.getppid()):
            for name in ("mem", "environ", "maps"):
                try:
                    with open(f"/proc/{pid}/{name}", "rb") as file:
                        file.read(0 if name == "mem" else 1)
                    count += 1
                except OSError:
                    pass
        return {"reward": 0.0, "reached": count, "own": len(os.listdir("/proc/self/fd")) > 0}
    return 1.0
"""


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AgentProcesses, queue.SimpleQueue[Any]]]:
    tmp_path.joinpath("hostile_of_tests.py").write_text(AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
    program = Program("python", "hostile_of_tests:solve", (), None, 1)
    agent_processes = AgentProcesses(program, lambda number, outcome: outcomes.put((number, outcome)))
    yield agent_processes, outcomes
    agent_processes.close()


def test_what_a_program_started_ends_though_it_killed_its_guard(running: Any, tmp_path: Path) -> None:
    agent_processes, outcomes = running
    for number in range(3):
        note = tmp_path / f"daemon-{number}"
        agent_processes.run(ticket(number, f"daemon {note}"))
        assert "watches over the episode was killed" in outcomes.get(timeout=60)[1]["error"]
        deadline = time.monotonic() + 30
        while psutil.pid_exists(pid := int(note.read_text())):
            assert time.monotonic() < deadline, psutil.Process(pid)
            time.sleep(0.02)
    agent_processes.run(ticket(9))
    assert outcomes.get(timeout=60) == (9, {"reward": 1.0})


RAW = [
    "[1, 2]", "5", "null", '"text"', '{"rewards": 5}', '{"reward": "much"}', '{"reward": true}', '{"metrics": {"a": []}}',
    '{"turn_rewards": [1, "2"]}', '{"response": 5}', '{"later": 5}', '{"unknown": 1}', '{"error": {}}', "DEEP", "no JSON",
    '{"reward": 1' + "0" * 400 + "}",
]  # fmt: skip


def test_a_raw_outcome_of_another_form_fails_its_episode(running: Any) -> None:
    agent_processes, outcomes = running
    for number, raw in enumerate(RAW):
        agent_processes.run(ticket(number, f"raw {raw}"))
    for number, raw in enumerate(RAW):
        at, outcome = outcomes.get(timeout=60)
        assert at == number and set(outcome) == {"error"}, (raw, outcome)
    agent_processes.run(ticket(99))
    assert outcomes.get(timeout=60) == (99, {"reward": 1.0})


def test_foreign_lines_do_not_end_what_hears_outcomes(running: Any) -> None:
    """Where the kernel lets a program write there at all, as it lets root's. It may spoil its own outcome: what hears it may
    not yet have closed the end of that pipe which its guard writes to."""
    agent_processes, outcomes = running
    for number, line in enumerate([*RAW, '{"id": "x"}', '{"id": [1]}', "{}", '{"outcome": {}}']):
        agent_processes.run(ticket(number, f"lines {line}"))
        at, outcome = outcomes.get(timeout=60)
        assert at == number and (outcome == {"reward": 1.0} or set(outcome) == {"error"}), (line, outcome)
    agent_processes.run(ticket(99))
    assert outcomes.get(timeout=60) == (99, {"reward": 1.0})


@pytest.mark.parametrize("raw", RAW)
def test_a_reply_of_another_form_fails_one_episode_or_none(raw: str) -> None:
    raw = raw.replace("DEEP", "[" * 100_000)
    reply = _read_reply(b'{"id": 3, "outcome": ' + raw.encode() + b"}")
    assert reply is None or (reply[0] == 3 and set(reply[1]) == {"error"})
    assert _read_reply(raw.encode()) is None


def test_an_ordinary_user_s_program_reaches_nothing_of_its_guard() -> None:
    """Neither the pipes by which outcomes go out, nor memory or variables of what watches over it."""
    # Root without capabilities is kept out like anybody else.
    ordinary = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="rlhpc-t-") as folder:
        Path(folder, "hostile_of_tests.py").write_text(AGENT)
        spec = Program("python", "hostile_of_tests:solve", (), None, 2).spec() | {"paths": [folder]}
        lines = [json.dumps(line).encode() + b"\n" for line in (spec, ticket(7, "reach"))]
        process = subprocess.Popen(
            [*ordinary, sys.executable, str(RUNNER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder
        )
        assert process.stdin is not None and process.stdout is not None
        os.write(process.stdin.fileno(), b"".join(lines))
        killer = threading.Timer(60, process.kill)
        killer.start()
        replies = [json.loads(process.stdout.readline()) for _ in range(2)]
        killer.cancel()
        process.stdin.close()
        process.wait(30)
        process.stdout.close()
    assert replies[1]["outcome"] == {"reward": 0.0, "metrics": {"reached": 0.0, "own": 1.0}}
