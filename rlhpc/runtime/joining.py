"""Client side of joining: a process in any allocation that reaches the driver adds a rank to a running run.

The process reads the run's registry, requests a place in a group from the driver, starts the rank, and ends the rank when the
driver has ended. If another driver continues the run, for example after a requeue, the process joins again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import zmq

from rlhpc.runtime.comm.queues import TooEarly
from rlhpc.runtime.comm.zmq_sockets import Peers, choose
from rlhpc.runtime.errors import ChannelError, ConfigError, RlhpcError
from rlhpc.runtime.files import read_file
from rlhpc.runtime.host import host_id, node_name
from rlhpc.runtime.imports import fingerprint, run_module
from rlhpc.runtime.launchers import rank_environment
from rlhpc.runtime.ownership import owner
from rlhpc.runtime.registry import CURRENT, DEPARTED, MEMBERS, CurveKeys, GenerationFolder
from rlhpc.runtime.text import short_repr
from rlhpc.runtime.worker_spec import LEAVE, WorkerSpec, for_input

log = logging.getLogger(__name__)

#: Seconds to wait for a killed process to end.
_KILL_TIMEOUT_S = 10.0

#: Fields of a driver's record with its endpoints.
_ENDPOINTS = ("host", "ipc", "tcp", "bulk")
#: Seconds between two checks whether the driver is alive, and seconds that the driver may take to answer.
_CHECK_S, _ANSWER_S = 2.0, 30.0
#: Seconds between two checks for another driver, between two calls of a silent driver, and between two requests for a place.
_DRIVER_POLL_S, _CALL_S, _JOIN_RETRY_S = 0.5, 5.0, 1.0
#: Seconds that a leaving rank may take to requeue its items. Slurm kills a job 30 s after its first signal by default.
_REQUEUE_S = 15.0


class JoinRefused(ConfigError):
    """Error: the driver refuses a rank that asks to join; the message has the reason."""


class NotYet(JoinRefused):
    """Error: the driver does not accept ranks now, but may accept them later."""


class DriverConnection:
    """Connection of a joining process to a run's driver.

    Args:
        registry_root: The run's registry folder.

    Raises:
        ConfigError: The run has no driver yet, or belongs to another user.
    """

    def __init__(self, registry_root: Path) -> None:
        try:
            self.registry = GenerationFolder(registry_root / read_file(registry_root / CURRENT).decode())
            self.keys: CurveKeys = self.registry.load_keys()
            driver = self.registry.get(MEMBERS, "driver")
            if driver is not None:
                driver = {"node": driver["node"], "data": {name: str(driver["data"][name]) for name in _ENDPOINTS}}
        except PermissionError as error:
            raise ConfigError(
                f"{error.filename}: {error.strerror}: only the user whose run it is can join it"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{registry_root.parent}: no driver of this run is at work ({error.strerror}); `rlhpc status` says where it is"
            ) from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{registry_root}: its files are not those of a run: {error!r}") from None
        if driver is None:
            raise ConfigError(f"{self.registry.root}: its driver has not said where it is")
        self._driver = driver
        self._context: zmq.Context[Any] = zmq.Context()
        self._peers = Peers(self._context, self.keys, lambda: None)
        #: Whether the driver continues without this rank; whether the driver did not answer the last check.
        self.has_departed = self.was_silent = False

    @property
    def is_current(self) -> bool:
        """True if this driver still owns the run's registry and has not ended the run."""
        try:
            return read_file(self.registry.root.parent / CURRENT).decode() == self.registry.generation and (
                self.registry.load_keys() == self.keys
            )
        except (OSError, RlhpcError):
            return False

    @property
    def is_reachable(self) -> bool:
        """True if the driver accepts connections from this host."""
        try:
            self._endpoint()
        except JoinRefused:
            return False
        return True

    def _endpoint(self) -> str:
        try:
            endpoint = choose(self._driver["data"])
        except ChannelError as error:
            raise JoinRefused(
                f"the driver is on {self._driver['node']} and listens to processes of that host only, and this is another"
            ) from error
        if self._driver["data"]["host"] == host_id():
            self._refuse_foreign_driver(endpoint)
        return endpoint

    @staticmethod
    def _refuse_foreign_driver(endpoint: str) -> None:
        """Refuses the endpoint of another user's driver on this host, because a registry may contain foreign files."""
        scheme, _, path = endpoint.partition("://")
        if scheme != "ipc":
            raise JoinRefused(
                f"the driver on this host is said to be at {short_repr(endpoint)}, which is no UNIX socket"
            )
        try:
            status = os.lstat(path)
        except (OSError, ValueError):
            return  # no driver listens there
        if status.st_uid != os.geteuid():
            raise JoinRefused(
                f"{short_repr(path)} is {owner(status)}'s: a driver of another user gives no place in a run"
            )

    def ask(self, request: Mapping[str, Any]) -> WorkerSpec:
        """Asks the driver to admit a rank to a group; returns the rank's specification.

        The answer is JSON, so that this process executes no code from the run; only the rank's process executes code.

        Raises:
            JoinRefused: The driver refuses the request, or cannot be reached; `NotYet` if a later request may succeed.
        """
        try:
            (spec_json,) = self._peers.request(
                self._endpoint(), b"JOIN", [pickle.dumps(dict(request))], _ANSWER_S, "the driver"
            )
        except ChannelError as error:
            raise (NotYet if isinstance(error, TooEarly) else JoinRefused)(str(error)) from error
        try:
            return WorkerSpec.from_json(spec_json)
        except ValueError as error:
            raise JoinRefused(f"what the driver answered is no place in a run: {error}") from None

    def lives(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Returns whether the driver answers within 30 s.

        Args:
            should_stop: Returns True to end the wait early; the driver then counts as alive.
        """
        try:
            pending_request = self._peers.begin(self._endpoint(), b"DOING", [], "the driver", _ANSWER_S)
            self._peers.reply_to(pending_request, _ANSWER_S, should_stop)
        except RlhpcError:
            return should_stop()
        return True

    def ask_leave_reason(self, worker_spec: WorkerSpec, should_stop: Callable[[], bool] = lambda: False) -> str | None:
        """Asks the driver why it continues without this rank; returns "" while the rank takes part.

        Returns None if the driver does not answer within 30 s. Takes no file operation.

        Args:
            worker_spec: Specification of the rank.
            should_stop: Returns True to end the wait early; the rank then counts as taking part.
        """
        request = pickle.dumps({"name": worker_spec.name, "incarnation": worker_spec.incarnation})
        try:
            pending_request = self._peers.begin(self._endpoint(), b"JOIN", [request], "the driver", _ANSWER_S)
            (answer,) = self._peers.reply_to(pending_request, _ANSWER_S, should_stop)
            return str(json.loads(answer))
        except (RlhpcError, ValueError):
            return "" if should_stop() else None

    def tell(self, note: dict[str, Any]) -> None:
        """Sends the driver a note; does nothing if the driver has ended."""
        try:
            self._peers.request(self._endpoint(), b"NOTE", [pickle.dumps(note)], _ANSWER_S, "the driver")
        except RlhpcError as error:
            log.warning("the driver was not told: %s", error)

    def find_leave_reason(self, spec: WorkerSpec) -> str:
        """Returns the reason in the registry why the driver continued without this rank; "" if there is no such record."""
        with contextlib.suppress(OSError, RlhpcError, ValueError):
            departure = self.registry.get(DEPARTED, spec.name) or {}
            if departure.get("incarnation") == spec.incarnation:
                return str(departure["why"])
        return ""

    def close(self) -> None:
        """Closes the connection."""
        self._peers.close()
        self._context.destroy(linger=0)


class LeaveEvent(threading.Event):
    """Event that is set when a process has to leave.

    Attributes:
        reason: The reason.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""

    def set_reason(self, reason: str) -> None:
        """Sets the event with a reason; keeps the reason of an earlier call."""
        self.reason = self.reason or reason
        self.set()


class RunFiles(Protocol):
    """Interface to a run's files for the ranks of this host that wait for a driver."""

    def generation(self) -> str:
        """Returns the run's current generation; "" before the first."""

    def is_over(self) -> bool:
        """Returns whether the run has ended, so that no driver will continue it."""

    def release(self) -> None:
        """Ends the reading by this process, so that another process takes over."""


class JoinedRank:
    """Child process that runs a joined rank."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        # The child itself requests to die with its parent. A function between fork and exec would run Python in a copy of
        # this process, and other threads may have held locks at the fork.
        self.process = subprocess.Popen(
            run_module("rlhpc.runtime.worker_process", "joined", str(os.getpid())),
            stdin=subprocess.PIPE, env=rank_environment(os.environ, spec.threads), start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(for_input([spec]))
            self.process.stdin.flush()

    @property
    def status(self) -> int | None:
        """Wait status of the process; None while it runs."""
        exit_status = self.process.poll()
        return None if exit_status is None else (-exit_status if exit_status < 0 else exit_status << 8)

    def end(self, grace_s: float, requeue_s: float = 0.0) -> int:
        """Ends the rank, waits for it, and returns its wait status.

        Args:
            grace_s: Seconds that the rank may take to end before it is killed.
            requeue_s: Seconds that the rank may take before that to requeue its items; 0 sends it no notice to leave.
        """
        assert self.process.stdin is not None
        if requeue_s:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self.process.stdin.write(LEAVE)
                self.process.stdin.flush()
                self.process.wait(requeue_s)
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # the rank ends when its input ends
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the process hangs in the kernel
                self.process.wait(_KILL_TIMEOUT_S)
        return self.status or 0


def join_request(group: str, num_threads: int, num_accelerators: int) -> dict[str, Any]:
    """Returns this process's request to become a rank of a group."""
    return {
        "group": group, "host": host_id(), "node": node_name(), "threads": num_threads, "accelerators": num_accelerators,
        "code": fingerprint(), "job": os.environ.get("SLURM_JOB_ID", ""),
    }  # fmt: skip


def stay(
    registry_root: Path,
    request: Mapping[str, Any],
    leave_event: LeaveEvent,
    report: Callable[[str], None],
    run_files: RunFiles,
    *,
    patience_s: float,
    grace_s: float = 5.0,
    await_driver: bool = False,
) -> int:
    """Takes part in a run until the run has ended or `leave_event` is set, under each driver that continues the run.

    Args:
        registry_root: The run's registry folder.
        request: See `join_request`.
        leave_event: Set when this process has to leave, for example before its walltime ends; `why` has the reason.
        report: Called with messages about the progress.
        run_files: Looks at the run's files while no driver answers.
        patience_s: Seconds to wait for another driver after a driver has ended.
        grace_s: Seconds that a rank may take to end.
        await_driver: Wait `patience_s` seconds for the first driver, too.

    Returns:
        Number of drivers under which the rank took part.

    Raises:
        ConfigError: At the first attempt the run has no driver, or the driver refuses the rank.
        RlhpcError: The rank has ended by itself while the run continues.
    """
    num_joined, generation, was_silent = 0, "", False
    while True:
        may_wait = await_driver or num_joined > 0
        patience_left_s = patience_s if may_wait else 0.0
        try:
            connection = _await_driver(registry_root, generation, run_files, leave_event, patience_left_s, was_silent)
        finally:
            run_files.release()
        if connection is None:
            return num_joined
        generation, was_silent = connection.registry.generation, True
        try:
            try:
                status = _run_rank(
                    connection, _await_place(connection, request, leave_event, patience_s), leave_event, report, grace_s
                )
            except RlhpcError:
                if not may_wait or connection.lives():
                    raise
                continue  # this driver has ended, too
            num_joined, was_silent = num_joined + 1, connection.was_silent
            if connection.has_departed:
                return num_joined
            if status and not leave_event.is_set() and connection.is_current and connection.lives():
                raise RlhpcError("the rank has ended by itself, while the run goes on: its log says why")
        finally:
            connection.close()
        if leave_event.is_set():
            return num_joined


def _await_driver(
    registry_root: Path,
    previous_generation: str,
    run_files: RunFiles,
    leave_event: LeaveEvent,
    patience_s: float,
    was_silent: bool,
) -> DriverConnection | None:
    """Waits for a driver of the run and connects to it.

    Args:
        registry_root: The run's registry folder.
        previous_generation: Generation of the previous driver; "" for the first driver.
        run_files: Looks at the run's files.
        leave_event: Ends the wait.
        patience_s: Seconds to wait.
        was_silent: Also accept the previous driver if it answers again.

    Returns:
        The connection; None if no driver was available in time.
    """

    def is_over() -> bool:
        return leave_event.is_set() or run_files.is_over()

    if not previous_generation and not patience_s:
        return DriverConnection(registry_root)
    deadline = time.monotonic() + patience_s
    previous_incarnation, next_call = None, 0.0
    try:
        while True:
            with contextlib.suppress(ConfigError, OSError):
                if run_files.generation() not in ("", previous_generation):
                    return DriverConnection(registry_root)
                if was_silent and previous_incarnation is None:
                    previous_incarnation = DriverConnection(registry_root)
                if previous_incarnation is not None and time.monotonic() >= next_call:
                    next_call = time.monotonic() + _CALL_S
                    if previous_incarnation.lives(is_over) and not is_over():
                        connection, previous_incarnation = previous_incarnation, None
                        return connection
            if is_over() or time.monotonic() >= deadline:
                return None
            time.sleep(_DRIVER_POLL_S)
    finally:
        if previous_incarnation is not None:
            previous_incarnation.close()


def _await_place(
    connection: DriverConnection, request: Mapping[str, Any], leave_event: LeaveEvent, patience_s: float
) -> WorkerSpec | None:
    """Waits until the driver assigns a rank; returns the rank's specification. Returns None if this process must leave.

    Raises:
        JoinRefused: The driver refuses the rank, or does not accept it within `patience_s` seconds.
        RlhpcError: The driver has ended.
    """
    deadline, has_waited = time.monotonic() + patience_s, False
    while True:
        try:
            return connection.ask(request)
        except NotYet:
            has_waited = True
            if time.monotonic() > deadline:
                raise
        except JoinRefused as error:
            if has_waited and not connection.lives():
                raise RlhpcError("the run's driver has ended before a rank could join") from error
            raise
        if leave_event.wait(_JOIN_RETRY_S):
            return None


def _describe_departure(connection: DriverConnection, reason: str) -> str:
    """Returns a message if the driver continues without the rank, else ""; sets `has_departed` of the connection."""
    connection.has_departed = bool(reason)
    return f"the run goes on without it: {reason}" if reason else ""


def _run_rank(
    connection: DriverConnection,
    worker_spec: WorkerSpec | None,
    leave_event: LeaveEvent,
    report: Callable[[str], None],
    grace_s: float,
) -> int:
    """Runs a rank under one driver until the driver or the rank has ended or this process has to leave.

    Returns:
        Wait status of the rank; 0 if `worker_spec` is None.
    """
    if worker_spec is None:
        return 0
    rank = JoinedRank(worker_spec)
    report(
        f"{worker_spec.name} joins {connection.registry.root.parent.parent.name} (pid {rank.process.pid}, log "
        f"{worker_spec.log_err})"
    )
    last_check = time.monotonic()
    leave_reason = ""
    while rank.status is None and not leave_reason:
        if leave_event.wait(0.1):
            leave_reason = leave_event.reason or "it was told to leave"
        elif time.monotonic() - last_check > _CHECK_S:
            reason = connection.ask_leave_reason(worker_spec, leave_event.is_set)
            connection.was_silent = reason is None
            leave_reason = (
                "the run has ended, or its driver is gone"
                if reason is None
                else _describe_departure(connection, reason)
            )
            last_check = time.monotonic()
    leave_reason = leave_reason or _describe_departure(connection, connection.find_leave_reason(worker_spec))
    notice_reason = (leave_reason or leave_event.reason) if leave_event.is_set() else ""
    status = rank.end(grace_s, _REQUEUE_S if notice_reason else 0.0) if rank.status is None else rank.status
    connection.tell(
        {
            "note": "exit",
            "name": worker_spec.name,
            "incarnation": worker_spec.incarnation,
            "status": status,
            "why": notice_reason,
        }
    )
    report(f"{worker_spec.name} ended: {leave_reason or f'wait status {status}'}")
    return status
