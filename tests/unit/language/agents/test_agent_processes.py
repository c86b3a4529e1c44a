"""Each ticket has an outcome, and the outcome says what happened."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc.language.agents import agent_processes as module
from rlhpc.language.agents.agent_processes import RUNNER, AgentProcesses, Program

AGENT = """
import time
def solve(task, model):
    if task.question == "wait":
        time.sleep(100)
    if task.question == "large":
        return {"reward": 1.0, "response": "x" * 1_100_000}
    return 1.0
"""


def ticket(number: int, question: str = "", timeout_s: float = 60.0) -> dict[str, Any]:
    keys = dict.fromkeys(("model", "far", "api_key", "session_id", "process_key", "host"), "k")
    task = {"messages": [], "question": question, "answer": "", "meta": {}, "seed": 1, "id": number, "kwargs": {}}
    return {
        "id": number,
        "timeout_s": timeout_s,
        "base_url": "http://127.0.0.1:1/v1",
        "socket": "",
        "looks": False,
        **keys,
        "task": task,
    }


class Outcomes:
    def __init__(self) -> None:
        self.came: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self.next: list[dict[str, Any]] = []
        self.agent_processes: AgentProcesses | None = None

    def take(self, number: int, outcome: dict[str, Any]) -> None:
        self.came.put((number, outcome))
        if self.next and self.agent_processes is not None:
            self.agent_processes.run(self.next.pop(0))

    def get(self) -> tuple[int, dict[str, Any]]:
        return self.came.get(timeout=60)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AgentProcesses, Outcomes]]:
    tmp_path.joinpath("agent_of_tests.py").write_text(AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    outcomes = Outcomes()
    outcomes.agent_processes = AgentProcesses(Program("python", "agent_of_tests:solve", (), None, 2), outcomes.take)
    yield outcomes.agent_processes, outcomes
    outcomes.agent_processes.close()


def test_tickets_given_while_the_runner_starts_again_are_answered(running: Any) -> None:
    harness, outcomes = running
    outcomes.next = [ticket(2)]  # given by the callback of the lost one
    harness.run(ticket(1, "wait"))
    time.sleep(0.3)
    harness._process.kill()
    number, outcome = outcomes.get()
    assert number == 1 and "ended with status" in outcome["error"]
    late = [ticket(number) for number in (3, 4, 5)]
    for one in late:
        threading.Timer(0.05 * one["id"], harness.run, [one]).start()
    answered = dict(outcomes.get() for _ in range(4))
    assert answered == {number: {"reward": 1.0} for number in (2, 3, 4, 5)}


def test_lines_read_together_are_all_kept(tmp_path: Path) -> None:
    tmp_path.joinpath("agent_of_tests.py").write_text(AGENT)
    spec = Program("python", "agent_of_tests:solve", (), None, 2).spec() | {"paths": [str(tmp_path)]}
    lines = [json.dumps(line).encode() + b"\n" for line in (spec, ticket(7), ticket(8))]
    process = subprocess.Popen([sys.executable, str(RUNNER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    os.write(process.stdin.fileno(), b"".join(lines))
    killer = threading.Timer(60, process.kill)
    killer.start()
    replies = [json.loads(process.stdout.readline()) for _ in range(3)]
    killer.cancel()
    process.stdin.close()
    process.wait(30)
    process.stdout.close()
    assert replies[0] == {"ready": True} and sorted(reply["id"] for reply in replies[1:]) == [7, 8]


def test_a_ticket_without_an_outcome_is_given_up_after_its_time(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLACK_S", 0.2)
    harness, outcomes = running
    os.kill(harness._process.pid, signal.SIGSTOP)
    try:
        for number in (1, 2):  # all places
            harness.run(ticket(number, timeout_s=0.2))
        lost = dict(outcomes.get() for _ in range(2))
    finally:
        os.kill(harness._process.pid, signal.SIGCONT)
    assert all("no outcome of it came" in lost[number]["error"] for number in (1, 2))
    harness.run(ticket(3))
    assert outcomes.get() == (3, {"reward": 1.0})


def test_an_outcome_says_what_went_wrong(running: Any) -> None:
    harness, outcomes = running
    harness.run(ticket(1, "large"))
    assert outcomes.get() == (1, {"error": "its outcome is larger than 1 MiB: return a shorter response"})
    harness.run({name: value for name, value in ticket(2).items() if name != "session_id"})
    assert outcomes.get() == (2, {"error": "the process that watches over the episode failed: KeyError: 'session_id'"})
