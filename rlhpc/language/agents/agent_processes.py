"""Agent processes: a runner (`runner/main.py`) that executes an agent's program for each episode, with limits of time and of
concurrent episodes.
"""

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
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.language.agents.runner.shell import find_fault
from rlhpc.language.agents.runner.task import check_outcome
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.host import node_name
from rlhpc.runtime.imports import import_paths
from rlhpc.runtime.scratch import session_folder

log = logging.getLogger(__name__)
RUNNER = Path(__file__).with_name("runner") / "main.py"
#: Time limit of the import of an agent's packages, in seconds.
_IMPORT_S = 300.0
#: Time limit of the runner's exit, in seconds.
_CLOSE_S = 6.0
#: Maximum number of consecutive restarts of the runner in which no episode ends.
_MAX_RESTARTS = 3
#: Seconds beyond an episode's time limit after which it fails without an outcome; and seconds between two checks.
_SLACK_S, _CHECK_S = 60.0, 1.0
#: Maximum number of bytes of a line from the runner: the limit of an outcome with all characters escaped.
_MAX_LINE_BYTES = 8 << 20
Ticket = dict[str, Any]
AgentReply = dict[str, Any]


def _find_episodes_parent() -> str | None:
    """Returns the parent of the episodes' folders (`shell.make_temporary_folder`); None for the system's default."""
    folder = session_folder()
    return str(folder) if folder else None


@dataclass(frozen=True)
class Program:
    """Agent program that runs an episode.

    Attributes:
        kind: `agent.kind`.
        target: `module:function`.
        command: Command line (argv).
        python: Python interpreter; None for this process's interpreter.
        processes: Maximum number of concurrent episodes.
        options: Options of kinds without target and command.
        environment: Additional environment variables.
        sandbox: `agent.sandbox`.
        read: Additional files and folders that are visible in bubblewrap.
        hidden: Files and folders that are not visible in bubblewrap unless `read` names them.
        limits: Resource limits of an episode in a sandbox, by key of section `agent`.
    """

    kind: str
    target: str | None
    command: tuple[str, ...]
    python: str | None
    processes: int
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    sandbox: str | None = None
    read: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)

    def spec(self) -> dict[str, Any]:
        """Returns the first message to the runner."""
        paths = import_paths(foreign=self.python is not None)
        return {
            "kind": self.kind,
            "target": self.target,
            "command": list(self.command),
            "paths": paths,
            "options": self.options,
            "sandbox": self.confinement(),
            "temporary": _find_episodes_parent(),
        }

    def confinement(self) -> dict[str, Any] | None:
        """Returns the argument `confinement` of `shell.sandbox_command`; None if there is no sandbox."""
        if self.sandbox is None:
            return None
        return {"kind": self.sandbox, "read": list(self.read), "hidden": list(self.hidden), **self.limits}


def require_sandbox(program: Program) -> None:
    """Checks that the program's sandbox works on this machine.

    Raises:
        ConfigError: The sandbox does not work, or a readable path does not exist.
    """
    for path in program.read:
        if not Path(path).expanduser().exists():
            raise ConfigError(f"agent.sandbox_read names {path!r}, which is not there on {node_name()}: correct it")
    if (confinement := program.confinement()) is not None and (
        reason := find_fault(confinement, _find_episodes_parent())
    ):
        raise ConfigError(f"agent.sandbox is {program.sandbox}, which does not work on {node_name()}: {reason}")


class AgentProcesses:
    """Runner of an agent program, with one process per ticket.

    Args:
        program: Program of the episodes.
        on_outcome: Callback with the ticket's id and the outcome, called in a thread of this object.

    Raises:
        ConfigError: The program cannot be started.
    """

    def __init__(self, program: Program, on_outcome: Callable[[int, AgentReply], None]) -> None:
        self._program, self._on_outcome = program, on_outcome
        self._lock = threading.Lock()
        self._queued_tickets: collections.deque[Ticket] = collections.deque()
        self._deadlines: dict[int, float] = {}  # deadline of each episode's outcome, by ticket
        self._closed, self._num_failures, self._failure_reason = False, 0, ""
        self._is_starting, self._close_event = False, threading.Event()  # while the runner starts, tickets are queued
        require_sandbox(program)
        self._process = self._start_process()
        threading.Thread(target=self._fail_overdue_episodes, name="rlhpc-overdue", daemon=True).start()

    def run(self, ticket: Ticket) -> None:
        """Queues a ticket; its program starts as soon as the limit of concurrent processes allows it."""
        with self._lock:
            if not self._failure_reason:
                self._queued_tickets.append(ticket)
                self._start_queued()
                return
        self._on_outcome(ticket["id"], {"error": self._failure_reason})

    def kill(self, number: int) -> None:
        """Ends the program of a ticket, or removes the queued ticket, without reporting an outcome."""
        with self._lock:
            self._queued_tickets = collections.deque(
                ticket for ticket in self._queued_tickets if ticket["id"] != number
            )
            if self._deadlines.pop(number, None) is not None:
                self._outbox.put({"kill": number})
                self._start_queued()

    def abort(self) -> None:
        """Ends all running programs and removes queued tickets, without reporting outcomes."""
        with self._lock:
            self._queued_tickets.clear()
            for episode_number in self._deadlines:
                self._outbox.put({"kill": episode_number})
            self._deadlines.clear()

    def close(self) -> None:
        """Ends the runner and all programs."""
        self._close_event.set()
        with self._lock:
            self._closed = True
            self._queued_tickets.clear()
            self._deadlines.clear()
            self._outbox.put(None)  # the runner ends its episodes, then itself
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_CLOSE_S)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _start_process(self) -> subprocess.Popen[bytes]:
        python = self._program.python or sys.executable
        try:
            process = subprocess.Popen(
                [python, "-P" if self._program.python is None else "-u", str(RUNNER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **self._program.environment},
            )
        except OSError as error:
            raise ConfigError(f"agent.python is {python!r}, which cannot be started: {error.strerror}") from None
        self._process, self._outbox = process, queue.SimpleQueue[dict[str, Any] | None]()
        threading.Thread(
            target=_write_messages, args=(process, self._outbox), name="rlhpc-tickets", daemon=True
        ).start()
        self._outbox.put(self._program.spec())
        import_timer = threading.Timer(_IMPORT_S, process.kill)
        import_timer.start()
        assert process.stdout is not None
        startup_line = process.stdout.readline()
        import_timer.cancel()
        reply = (
            json.loads(startup_line) if startup_line else {"failed": f"its interpreter ended within {_IMPORT_S:g} s"}
        )
        if "failed" in reply:
            process.kill()
            process.wait()
            program_setting = (
                f"target is {self._program.target!r}" if self._program.target else f"kind is {self._program.kind}"
            )
            raise ConfigError(
                f"agent.{program_setting}, which cannot be imported by {python} (agent.python): {reply['failed']}"
            )
        threading.Thread(target=self._read_outcomes, args=(process,), name="rlhpc-harnesses", daemon=True).start()
        return process

    def _read_outcomes(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        while line := process.stdout.readline(_MAX_LINE_BYTES):
            reply = _read_reply(line)
            if reply is None:
                log.warning("what runs the agents said what is no outcome, %d bytes of it: it is left out", len(line))
                continue
            episode_number, raw_outcome = reply
            with self._lock:
                is_running = self._deadlines.pop(episode_number, None) is not None
                self._num_failures = 0
                self._start_queued()
            if is_running:
                self._on_outcome(episode_number, raw_outcome)
        self._on_exit(process)

    def _on_exit(self, process: subprocess.Popen[bytes]) -> None:
        """Fails the episodes of a runner that has exited, and starts another runner."""
        status = process.wait()
        with self._lock:
            if self._closed:
                return
            episode_numbers = list(self._deadlines)
            self._deadlines.clear()
            self._num_failures += 1
            self._is_starting = True
        log.warning(
            "what runs the agents ended with status %d; %d episodes were under way", status, len(episode_numbers)
        )
        for episode_number in episode_numbers:
            self._on_outcome(episode_number, {"error": f"what ran it ended with status {status}"})
        if self._num_failures <= _MAX_RESTARTS:
            try:
                self._start_process()
            except ConfigError as error:  # the environment has changed since the first start
                self._fail_queued_episodes(str(error))
                return
            with self._lock:
                self._is_starting = False
                if self._closed:
                    self._outbox.put(None)
                self._start_queued()
            return
        self._fail_queued_episodes(f"what runs the agents has ended {self._num_failures} times")

    def _fail_queued_episodes(self, reason: str) -> None:
        with self._lock:
            self._failure_reason = reason
            waiting_tickets, self._queued_tickets = list(self._queued_tickets), collections.deque()
        for ticket in waiting_tickets:
            self._on_outcome(ticket["id"], {"error": reason})

    def _start_queued(self) -> None:
        while self._queued_tickets and not self._is_starting and len(self._deadlines) < self._program.processes:
            ticket = self._queued_tickets.popleft()
            self._deadlines[ticket["id"]] = time.monotonic() + ticket["timeout_s"] + _SLACK_S
            self._outbox.put(ticket)

    def _fail_overdue_episodes(self) -> None:
        """Fails each episode without an outcome `_SLACK_S` seconds after its time limit."""
        while not self._close_event.wait(_CHECK_S):
            with self._lock:
                overdue_numbers = [
                    episode_number
                    for episode_number, deadline in self._deadlines.items()
                    if time.monotonic() > deadline
                ]
                for episode_number in overdue_numbers:
                    del self._deadlines[episode_number]
                    self._outbox.put({"kill": episode_number})
                self._start_queued()
            for episode_number in overdue_numbers:
                self._on_outcome(
                    episode_number, {"error": f"no outcome of it came within {_SLACK_S:g} s after its time limit"}
                )


def _read_reply(line: bytes) -> tuple[int, AgentReply] | None:
    """Parses a line of the runner; returns the episode's number and outcome, or None if the line is not an outcome."""
    try:
        reply = json.loads(line)
        episode_number = reply["id"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if not isinstance(episode_number, int):
        return None
    try:
        return episode_number, check_outcome(reply.get("outcome"))
    except ValueError as error:
        return episode_number, {"error": str(error)}


def _write_messages(process: subprocess.Popen[bytes], outbox: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    """Writes messages to the runner in a separate thread, so that senders never wait for the pipe."""
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin as stream:  # if the runner has exited, `_read_outcomes` handles it
        while (message := outbox.get()) is not None:
            stream.write(json.dumps(message).encode() + b"\n")
            stream.flush()
