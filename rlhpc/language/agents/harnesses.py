"""Harnesses of episodes, in processes of their own: so many at a time, each to its end or its time limit (`runner.py`)."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.language.agents.shells import broken
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.host import node_name
from rlhpc.runtime.import_paths import import_paths

log = logging.getLogger(__name__)
RUNNER = Path(__file__).with_name("runner.py")
#: Seconds that an agent's packages have to be imported.
_IMPORT_S = 300.0
_END_S = 6.0
#: How often what runs harnesses is started again, without an episode having ended between.
_RESTARTS = 3
Ticket = dict[str, Any]
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """What is run for an episode.

    Attributes:
        kind: `agent.kind`.
        target: `module:function`.
        command: argv.
        python: The interpreter; None is this one.
        processes: Episodes at a time.
        options: Of other kinds than these two.
        environment: Further variables.
        sandbox: `agent.sandbox`.
    """

    kind: str
    target: str | None
    command: tuple[str, ...]
    python: str | None
    processes: int
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    sandbox: str | None = None

    def spec(self) -> dict[str, Any]:
        """What the runner is told first."""
        paths = import_paths(foreign=self.python is not None)
        return {
            "kind": self.kind, "target": self.target, "command": list(self.command), "paths": paths,
            "options": self.options, "sandbox": self.sandbox,
        }  # fmt: skip


class Harnesses:
    """Runs a program for each ticket.

    Args:
        program: Which.
        done: Is called with the ticket's id and the outcome, in a thread of this object's.

    Raises:
        ConfigError: The program cannot be started.
    """

    def __init__(self, program: Program, done: Callable[[int, Outcome], None]) -> None:
        self._program, self._done = program, done
        self._lock = threading.Lock()
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._running: dict[int, Ticket] = {}
        self._closed, self._failures, self._gone = False, 0, ""
        if program.sandbox is not None and (why := broken(program.sandbox)):
            raise ConfigError(f"agent.sandbox is {program.sandbox}, which does not work on {node_name()}: {why}")
        self._process = self._start()

    def run(self, ticket: Ticket) -> None:
        """Runs the program for a ticket, when there is room for one more."""
        with self._lock:
            if not self._gone:
                self._waiting.append(ticket)
                self._fill()
                return
        self._done(ticket["id"], {"error": self._gone})

    def kill(self, number: int) -> None:
        """Ends the program of one ticket, or forgets it; it has no outcome."""
        with self._lock:
            self._waiting = collections.deque(ticket for ticket in self._waiting if ticket["id"] != number)
            if self._running.pop(number, None) is not None:
                self._tell({"kill": number})
                self._fill()

    def abort(self) -> None:
        """Ends all that run, and forgets those that wait; none of them has an outcome."""
        with self._lock:
            self._waiting.clear()
            for number in self._running:
                self._tell({"kill": number})
            self._running.clear()

    def close(self) -> None:
        """Ends everything."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._running.clear()
            self._tell(None)  # the runner ends its episodes, then itself
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_S)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _start(self) -> subprocess.Popen[bytes]:
        python = self._program.python or sys.executable
        try:
            process = subprocess.Popen(
                [python, "-P" if self._program.python is None else "-u", str(RUNNER)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, env={**os.environ, **self._program.environment},
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"agent.python is {python!r}, which cannot be started: {error.strerror}") from None
        self._process, self._told = process, queue.SimpleQueue[dict[str, Any] | None]()
        threading.Thread(target=_write, args=(process, self._told), name="rlhpc-tickets", daemon=True).start()
        self._tell(self._program.spec())
        late = threading.Timer(_IMPORT_S, process.kill)
        late.start()
        assert process.stdout is not None
        first = process.stdout.readline()
        late.cancel()
        said = json.loads(first) if first else {"failed": f"its interpreter ended within {_IMPORT_S:g} s"}
        if "failed" in said:
            process.kill()
            process.wait()
            what = f"target is {self._program.target!r}" if self._program.target else f"kind is {self._program.kind}"
            raise ConfigError(f"agent.{what}, which cannot be imported by {python} (agent.python): {said['failed']}")
        threading.Thread(target=self._listen, args=(process,), name="rlhpc-harnesses", daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said = json.loads(line)
            with self._lock:
                ticket = self._running.pop(said["id"], None)
                self._failures = 0
                self._fill()
            if ticket is not None:
                self._done(said["id"], said["outcome"])
        self._lost(process)

    def _lost(self, process: subprocess.Popen[bytes]) -> None:
        """What runs the harnesses has ended: its episodes have failed, and another takes its place."""
        status = process.wait()
        with self._lock:
            if self._closed:
                return
            lost = list(self._running)
            self._running.clear()
            self._failures += 1
        log.warning("what runs the agents ended with status %d; %d episodes were under way", status, len(lost))
        for number in lost:
            self._done(number, {"error": f"what ran it ended with status {status}"})
        if self._failures <= _RESTARTS:
            try:
                self._start()
            except ConfigError as error:  # it could be imported before
                self._give_up(str(error))
                return
            with self._lock:
                self._fill()
            return
        self._give_up(f"what runs the agents has ended {self._failures} times")

    def _give_up(self, why: str) -> None:
        with self._lock:
            self._gone = why
            waiting, self._waiting = list(self._waiting), collections.deque()
        for ticket in waiting:
            self._done(ticket["id"], {"error": why})

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._program.processes:
            ticket = self._waiting.popleft()
            self._running[ticket["id"]] = ticket
            self._tell(ticket)

    def _tell(self, message: dict[str, Any] | None) -> None:
        self._told.put(message)


def _write(process: subprocess.Popen[bytes], told: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    """Writes what the runner is told. In a thread of its own: whoever tells never waits for one that has much to say."""
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin as stream:  # it has ended: `_listen` sees to it
        while (message := told.get()) is not None:
            stream.write(json.dumps(message).encode() + b"\n")
            stream.flush()
