"""Remote procedure calls on ranks: transport of calls and results, server, client, and handles of results.

Calls use UNIX sockets within a host and ZeroMQ between hosts. The thread that waits for a result reads the sockets itself. A
short-lived thread sends data that a socket does not take at once, so that neither side waits for the other side to read. The
driver and any worker that attaches to another group use the same client.

A rank imports this module after its fork, because ZeroMQ's threads must not start in the fork server.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import math
import os
import pickle
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import zmq

from rlhpc.runtime.comm import p2p, unix_sockets
from rlhpc.runtime.comm.service import Service
from rlhpc.runtime.comm.zmq_sockets import TcpPort, choose, divide_frames, join_pieces, make_socket
from rlhpc.runtime.energy import SEPARATOR, EnergyMeter, EnergyReport, split_report
from rlhpc.runtime.errors import (
    CallAborted,
    DeadlineExceeded,
    RlhpcError,
    WorkerFailed,
)
from rlhpc.runtime.former_names import former_keywords
from rlhpc.runtime.host import host_id, process_id, process_key
from rlhpc.runtime.remote_errors import describe_error, worker_failed
from rlhpc.runtime.start_phases import WAITING, enter_phase
from rlhpc.runtime.trace_recorder import record as record_span
from rlhpc.runtime.trace_recorder import recorder, span
from rlhpc.runtime.worker_spec import EXIT, IDLE, RESUME

if TYPE_CHECKING:
    from rlhpc.runtime.comm.context import Context
    from rlhpc.runtime.comm.payload import Packed


_numbers = itertools.count()
#: Milliseconds between two checks whether a connection is still open, while data waits to be sent.
_CHECK_MS = 1000


class _CallConnection:
    """Connection that sends messages in order and does not block the sender."""

    def __init__(self, connection: unix_sockets.UnixConnection) -> None:
        self.connection = connection
        self._lock = threading.Lock()
        self._is_flushing = False

    def send(self, frames: list[Any]) -> None:
        with self._lock:
            if self.connection.send(frames) and not self._is_flushing:
                self._is_flushing = True
                threading.Thread(target=self._flush, name="rlhpc-flush", daemon=True).start()

    def _flush(self) -> None:
        poller = select.poll()
        poller.register(self.connection.sock, select.POLLOUT)
        while True:
            poller.poll(_CHECK_MS)  # closing the socket during the poll does not end the poll
            with self._lock:
                if self.connection.closed or not self.connection.flush():
                    self._is_flushing = False
                    return

    def close(self) -> None:
        with self._lock:
            self.connection.close()


class _CallSockets:
    """Sockets of one side of remote calls: UNIX connections within this host, and a ROUTER socket for other hosts."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._connections: dict[int, _CallConnection] = {}
        self._router: zmq.Socket[Any] | None = None

    def interrupt(self) -> None:
        """Wakes a thread that waits for messages. Other threads and signal handlers may call this."""
        os.eventfd_write(self._wake_fd, 1)

    def _open_router(self, server: bool) -> zmq.Socket[Any]:
        self._router = make_socket(self._service.context, zmq.ROUTER, self._service.keys, server=server)
        self._epoll.register(int(self._router.FD), select.EPOLLIN)
        return self._router

    def _add(self, connection: unix_sockets.UnixConnection) -> _CallConnection:
        fd = connection.sock.fileno()
        self._connections[fd] = _CallConnection(connection)
        self._epoll.register(fd, select.EPOLLIN)
        return self._connections[fd]

    def _receive(self, fd: int) -> list[list[bytes]]:
        """Returns the messages that have arrived on a connection; removes the connection if the other side has closed it."""
        caller_connection = self._connections[fd]
        messages = caller_connection.connection.receive()
        if caller_connection.connection.closed:
            self._epoll.unregister(fd)
            del self._connections[fd]
            caller_connection.close()
        return messages

    def _receive_remote(self) -> list[list[bytes]]:
        """Returns the messages that have arrived from other hosts, each preceded by the sender's routing id."""
        messages: list[list[bytes]] = []
        while self._router is not None:
            try:
                sender, *message = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            messages.append([sender, *join_pieces(message)])
        return messages


class CallReceiver(_CallSockets):
    """Receiver of a rank's calls.

    Attributes:
        record: Endpoints to publish: host, ipc, tcp.
    """

    def __init__(self, service: Service, tcp_address: str | None) -> None:
        super().__init__(service)
        path = service.scratch.sockets / f"r-{process_id()}-{next(_numbers)}"
        self._listener, self._token = unix_sockets.Listener(str(path)), unix_sockets.token_of(service.keys)
        self.record = {"host": host_id(), "ipc": f"ipc://{path}", "tcp": ""}
        self._epoll.register(self._listener.sock.fileno(), select.EPOLLIN)
        self._calls: list[tuple[_CallConnection | bytes, list[bytes]]] = []
        if tcp_address:
            port = TcpPort(self._open_router(server=True), tcp_address)
            self.record["tcp"] = port.endpoint
            service.watch_port(port)

    def next(self) -> tuple[_CallConnection | bytes, list[bytes]] | None:
        """Waits for a call; returns the caller and the message, or None if the wait was interrupted."""
        while not self._calls:
            # ZeroMQ's descriptor only signals changes, so read the messages that have already arrived before waiting.
            self._calls += [(caller_connection, message) for caller_connection, *message in self._receive_remote()]
            for fd, _ in () if self._calls else self._epoll.poll():
                if fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                    return None
                if fd == self._listener.sock.fileno():
                    while (accepted_connection := self._listener.accept(self._token)) is not None:
                        self._add(accepted_connection)
                elif (connection := self._connections.get(fd)) is not None:
                    self._calls += [(connection, message) for message in self._receive(fd)]
        return self._calls.pop(0)

    def answer(self, caller: _CallConnection | bytes, frames: list[Any]) -> None:
        """Sends the answer to a call; does nothing if the caller has closed its connection."""
        if isinstance(caller, _CallConnection):
            if not caller.connection.closed:
                caller.send(frames)
        else:
            assert self._router is not None
            self._router.send_multipart([caller, *divide_frames(frames)])


class CallSender(_CallSockets):
    """Connections of a caller to ranks; only one thread at a time may use them."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._by_endpoint: dict[str, _CallConnection] = {}
        self._routes: dict[str, bytes] = {}

    def send(self, record: dict[str, str], frames: list[Any]) -> bool:
        """Sends a call to a rank; returns False if the rank is known to have ended.

        Args:
            record: `CallReceiver.record` of the rank.
            frames: The call.

        Raises:
            RlhpcError: The connection cannot be opened for another reason.
        """
        endpoint = choose(record)
        if not endpoint.startswith("ipc://"):
            self._send_remote(endpoint, frames)
            return True
        receiver = self._by_endpoint.get(endpoint)
        if receiver is None or receiver.connection.closed:
            try:
                receiver = self._add(unix_sockets.connect(endpoint[6:], self._service.keys))
            except (ConnectionError, FileNotFoundError):
                return False
            except OSError as error:
                raise RlhpcError(f"cannot open a connection to a rank: {error.strerror}") from error
            self._by_endpoint[endpoint] = receiver
        receiver.send(frames)
        return True

    def _send_remote(self, endpoint: str, frames: list[Any]) -> None:
        router = self._router
        if router is None:
            router = self._open_router(server=False)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        reply_route = self._routes.get(endpoint)
        if reply_route is None:
            reply_route = self._routes[endpoint] = f"w{len(self._routes)}".encode()
            router.setsockopt(zmq.CONNECT_ROUTING_ID, reply_route)
            router.connect(endpoint)
        router.send_multipart([reply_route, *divide_frames(frames)])

    def receive(self, timeout_ms: int) -> list[list[bytes]]:
        """Returns the answers that have arrived; waits up to `timeout_ms` milliseconds if no answer has arrived yet."""
        messages = [message for _, *message in self._receive_remote()]
        for fd, _ in self._epoll.poll(0 if messages else timeout_ms / 1000):
            if fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif fd in self._connections:
                messages += self._receive(fd)
        return messages + [message for _, *message in self._receive_remote()]

    def close(self) -> None:
        for receiver in self._connections.values():
            receiver.close()
        self._epoll.close()
        os.close(self._wake_fd)
        if self._router is not None:
            self._router.close()


def _encode_durations(duration_s: float, sections: dict[str, float]) -> bytes:
    """Encodes the duration of a call and of its timed sections, which it removes for the next call."""
    encoded_durations = b"%.9f" % duration_s
    if not sections:
        return encoded_durations
    # other threads of the rank may time sections at the same time
    return encoded_durations + b" " + json.dumps({name: sections.pop(name) for name in list(sections)}).encode()


def _decode_durations(method: str, encoded_durations: bytes) -> dict[str, float]:
    """Returns the seconds of a call of `method` and of its timed sections, by name."""
    duration_text, _, sections = encoded_durations.partition(b" ")
    return {method: float(duration_text), **(json.loads(sections) if sections else {})}


class CallServer:
    """Server of a rank: executes its calls one after another, on the main thread.

    Args:
        context: Context of this process.
        receiver: Receiver of the calls.
        instance: The user's object, which has the called methods.
        meter: Energy counters to read before and after each call.
    """

    def __init__(
        self, context: Context, receiver: CallReceiver, instance: Any, meter: EnergyMeter | None = None
    ) -> None:
        self._meter = meter if meter is not None and meter.counters else None
        self._context, self._service, self._receiver, self._instance = context, context.service, receiver, instance
        #: Runs the instance's `async` methods; its event loop exists from the first call of one.
        self._event_loop = asyncio.Runner()
        #: Durations of timed sections, which a `Worker` has.
        self._sections: dict[str, float] = getattr(instance, "call_durations", {})

    def run(self) -> int:
        """Executes calls until the rank has to end; returns its exit status."""
        graceful_leave = self._context.graceful_leave
        while True:
            if graceful_leave.has_notice:
                graceful_leave.run_action()
            if graceful_leave.is_over:
                return 1  # the run continues, so the status differs from that of an end which the driver requested
            call = self._receiver.next()
            if call is None:  # the rank has just received a notice to leave
                continue
            caller_connection, (call_id, method, *frames) = call
            name, epoch, *call_marks = method.decode().split(" ")
            self._service.members_changed(int(epoch))
            if name == RESUME:
                self._resume(frames)
            if name in (EXIT, IDLE, RESUME):
                self._receiver.answer(caller_connection, [call_id, b"ok", b"0", *self._service.pack(None).frames()])
                if name == EXIT:
                    return 0
                continue
            if call_marks:
                enter_phase(name)
            if self._meter is not None:
                self._meter.begin_call()
            status, duration_s, payload = self._execute(name, frames)
            if call_marks:
                enter_phase(WAITING)
            durations = _encode_durations(duration_s, self._sections)
            if self._meter is not None:
                durations = self._meter.end_call() + durations
            self._receiver.answer(caller_connection, [call_id, status, durations, *payload.frames()])

    def _resume(self, frames: list[bytes]) -> None:
        """Drops unread messages from the time before a recovery, and accepts calls again after the recovery."""
        (recovery,), _ = self._service.unpack(frames)
        p2p.clear_inbox(self._service)
        self._service.resume(recovery)

    def _execute(self, name: str, frames: list[bytes]) -> tuple[bytes, float, Packed]:
        """Executes a call; returns its status, its duration in seconds, and its result or the report of its error."""
        start_time, started_ns, was_traced = time.perf_counter(), time.monotonic_ns(), recorder.is_on
        try:
            self._service.check()
            args, kwargs = self._service.unpack(frames)
            result = getattr(self._instance, name)(*args, **kwargs)
            if asyncio.iscoroutine(result):
                result = self._event_loop.run(result)
            args = kwargs = None
            with span("confirmation of messages", "wait"):
                self._service.peers.confirm(self._context.wait_deadline)
            status, payload = b"ok", self._service.pack(result, about=name)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            self._service.peers.forget_unconfirmed()
            if not isinstance(error, CallAborted):
                traceback.print_exc()
            status, payload = b"error", self._service.pack(describe_error(error), about=name)
        if was_traced or recorder.is_on:  # also a long call during which the recording began or ended
            record_span(name, "call", started_ns, time.monotonic_ns())
        return status, time.perf_counter() - start_time, payload


#: Seconds that all ranks together may take to report their stacks.
PATIENCE_S = 1.0
_HERE = Path(__file__).resolve()
#: Paths of code that waits for other ranks; a rank with such code among its innermost frames is waiting.
_WAITING_PATHS = (f"{_HERE.parent}/comm/", str(_HERE), "/torch/distributed/")
#: Functions of this module that execute calls and do not wait for other ranks.
_EXECUTING = (CallServer.run.__name__, CallServer._execute.__name__)
#: Innermost frames of an event loop whose tasks all wait.
_IDLE_EVENT_LOOP = [("base_events.py", "_run_once"), ("selectors.py", "select")]
_MAX_FRAMES = 12
#: Maximum number of ranks whose phase is in a message.
_MAX_PHASES = 8

Frame = tuple[str, int, str]


def main_stack() -> list[Frame]:
    """Returns file, line and function of the main thread's innermost frames; the innermost frame is last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[Frame] = []
    while frame is not None and len(frames) < _MAX_FRAMES:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames[::-1]


def _is_waiting(stack: Sequence[Frame]) -> bool:
    """Returns whether a rank with this stack waits for other ranks; all tasks of an idle event loop wait."""
    if [(Path(file).name, function) for file, _, function in stack[-2:]] == _IDLE_EVENT_LOOP:
        return True
    return any(
        any(path in file for path in _WAITING_PATHS) and not (file == str(_HERE) and function in _EXECUTING)
        for file, _, function in stack
    )


def busy(service: Service, calls: Sequence[tuple[dict[str, Any], str]], elapsed_s: float) -> list[str]:
    """Requests the stacks of ranks; returns a sentence for each rank that is busy, with its position in the code.

    A rank is busy if it does not wait for other ranks.

    Args:
        service: Service of this process.
        calls: Records of ranks, each with the method that the rank executes.
        elapsed_s: Duration of the wait so far.
    """
    requests, deadline = [], time.monotonic() + PATIENCE_S
    for record, method in {record["rpc"]["ipc"]: (record, method) for record, method in calls}.values():
        try:
            wait_purpose = f"{record['group']}-{record['rank']} to say where it is"
            timeout_s = max(0.01, deadline - time.monotonic())
            requests.append(
                (record, method, service.peers.begin(choose(record["data"]), b"DOING", [], wait_purpose, timeout_s))
            )
        except (RlhpcError, OSError):
            continue  # the rank has ended, which is reported elsewhere
    sentences = []
    for record, method, pending_request in requests:
        rank_text = f"{record['group']}[{record['rank']}] on node {record['node']}"
        try:
            stack = pickle.loads(service.peers.reply_to(pending_request, max(0.01, deadline - time.monotonic()))[0])
        except (RlhpcError, OSError):
            position_text = "it does not even say where it is"
        else:
            if not stack or _is_waiting(stack):
                continue
            file, line, function = stack[-1]
            position_text = f"it is in {function} ({file}:{line})"
        sentences.append(
            f"{rank_text} has not come back from {method}() in {elapsed_s:.1f} s: {position_text}; log {record['log_err']}"
        )
    return sentences


_POLL_MS = 200
#: End of a call's name if the call is part of the run's start.
_START_MARK = " start"


class Handle:
    """Handle of a call on the ranks of a group."""

    def __init__(self, client: RpcClient, group: str, method: str, ranks: Sequence[int]) -> None:
        self._client, self.group, self.method, self.ranks = client, group, method, list(ranks)
        self._results: dict[int, Any] = {}
        self._durations: dict[int, dict[str, float]] = {}
        self._failure: BaseException | None = None

    def done(self) -> bool:
        """Returns whether all ranks have answered or one has failed."""
        if not self._is_complete():
            self._client.pump(0)
        return self._is_complete()

    def _is_complete(self) -> bool:
        return self._failure is not None or len(self._results) == len(self.ranks)

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Blocks until all ranks have answered; returns their results in rank order.

        Raises:
            WorkerFailed: A rank of any group of this driver raised an exception or died; the first such failure.
            DeadlineExceeded: Not all ranks answered within `timeout` seconds (default: the session's wait deadline). The
                message names the missing ranks, and first the ranks that are busy and not waiting for other ranks.
        """
        timeout_s = self._client.context.wait_deadline if timeout is None else timeout
        deadline = time.monotonic() + timeout_s
        with span(f"{self.group}.{self.method}", "wait"):
            while not self._is_complete():
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise self._client.overdue_error(self, timeout_s)
                self._client.pump(min(_POLL_MS, max(1, int(remaining_s * 1000))))
        if self._failure is not None:
            raise self._failure
        return [self._results[rank] for rank in self.ranks]

    async def async_wait(self, timeout: float | None = None) -> list[Any]:
        """Waits like `wait`, for coroutines: other tasks of the event loop run during the wait."""
        return await asyncio.to_thread(self.wait, timeout)

    @overload
    def consume_durations(
        self, reduction_type: str = "max", return_per_rank: Literal[False] = False
    ) -> dict[str, float]: ...

    @overload
    def consume_durations(
        self, reduction_type: str = "max", *, return_per_rank: Literal[True]
    ) -> tuple[dict[str, float], list[dict[str, float]]]: ...

    @former_keywords(reduction="reduction_type")
    def consume_durations(
        self, reduction_type: str = "max", return_per_rank: bool = False
    ) -> dict[str, float] | tuple[dict[str, float], list[dict[str, float]]]:
        """Waits for the call, then returns its duration on the ranks and those of its timed sections, and clears them.

        Args:
            reduction_type: "max", "min" or "mean" over the ranks.
            return_per_rank: Also return the durations of each rank, in rank order.

        Returns:
            The seconds by name, of the method and of the sections (`Worker.worker_timer`, `Worker.timer`) that the call went
            through; empty if the durations were consumed before.
        """
        self.wait()
        by_rank, self._durations = [self._durations[rank] for rank in sorted(self._durations)], {}
        duration_names = dict.fromkeys(name for durations in by_rank for name in durations)
        reduced_durations = {
            name: _reduce(reduction_type, [d[name] for d in by_rank if name in d]) for name in duration_names
        }
        return (reduced_durations, by_rank) if return_per_rank else reduced_durations

    def consume_duration(self, reduction_type: str = "max") -> float:
        """Waits for the call, then returns its duration on the ranks and clears it; `consume_durations` has the sections.

        Raises:
            ValueError: The duration was consumed before.
        """
        self.wait()
        durations_s = [durations.pop(self.method) for durations in self._durations.values() if self.method in durations]
        if not durations_s:
            raise ValueError(f"the duration of {self.group}.{self.method}() was consumed before")
        return _reduce(reduction_type, durations_s)

    def _remove_rank(self, rank: int) -> None:
        """Removes a rank that will not answer, because it has left its group."""
        self.ranks.remove(rank)

    def _record_answer(self, rank: int, durations: bytes, result: Any, failure: BaseException | None) -> None:
        self._durations[rank] = _decode_durations(self.method, durations)
        if failure is not None and self._failure is None:
            self._failure = failure
        else:
            self._results[rank] = result


def _reduce(reduction_type: str, durations_s: Sequence[float]) -> float:
    """Reduces durations of several ranks."""
    reductions: dict[str, Callable[[Sequence[float]], float]] = {
        "max": max,
        "min": min,
        "mean": lambda durations: math.fsum(durations) / len(durations),
    }
    if reduction_type not in reductions:
        raise ValueError(f"reduction_type of durations is {reduction_type!r}; allowed: {', '.join(reductions)}")
    return reductions[reduction_type](durations_s)


class RpcClient:
    """Client of remote calls on ranks.

    Args:
        context: This process's context.
        on_failure: Called with each exception that a rank reports; stops the run, or registers that the rank has left
            (`leave`).
        check: Raises an exception if the run has failed for another reason.
        is_starting: Returns whether ranks report their calls as phases of the start (`start_phases`).
        describe_phase: Returns the phase of a rank's start as text, given the rank's record; "" if there is no phase.
        on_energy: Called with a rank's record, the method of a call, and the energy counters before and after the call.
    """

    def __init__(
        self,
        context: Context,
        on_failure: Callable[[WorkerFailed], None],
        check: Callable[[], None],
        is_starting: Callable[[], bool] = lambda: False,
        describe_phase: Callable[[dict[str, Any]], str] = lambda record: "",
        on_energy: Callable[[dict[str, Any], str, EnergyReport], None] = lambda record, method, report: None,
    ) -> None:
        self.context, self._on_failure, self._check = context, on_failure, check
        self._is_starting, self._describe_phase, self._on_energy = is_starting, describe_phase, on_energy
        self._sender = CallSender(context.service)
        self._lock = threading.Lock()
        self._call_numbers = itertools.count(1)
        self._pending_calls: dict[bytes, tuple[Handle, int, dict[str, Any]]] = {}
        self._departed_ranks = set[tuple[str, int, str]]()
        #: Ranks that have left since the last `pump`, whose calls are still pending.
        self._leavers = collections.deque[tuple[str, int, str]]()

    def busy_ranks(self) -> set[tuple[str, int]]:
        """Returns group and rank of all ranks that have not answered a call yet."""
        with self._lock:
            return {(record["group"], rank) for _, rank, record in self._pending_calls.values()}

    def interrupt(self) -> None:
        """Wakes a thread in `pump`, because the run has failed or another thread has to send."""
        self._sender.interrupt()

    def leave(self, record: dict[str, Any]) -> None:
        """Registers that a rank has left its group; pending calls no longer wait for the rank's answers."""
        self._departed_ranks.add(_identify(record))
        self._leavers.append(_identify(record))
        self.interrupt()

    def has_left(self, record: dict[str, Any]) -> bool:
        """Returns whether this rank has left its group."""
        return bool(self._departed_ranks) and _identify(record) in self._departed_ranks

    def call(
        self, records: Sequence[dict[str, Any]], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Handle:
        """Sends a call of `method` to the ranks of `records`; returns a handle at once."""
        service = self.context.service
        call_handle = Handle(self, records[0]["group"], method, [record["rank"] for record in records])
        # The epoch notifies a rank of membership changes before the call, because the call may depend on them.
        name = f"{method} {service.epoch}{_START_MARK if self._is_starting() else ''}".encode()
        holders = [process_key(record["data"]) for record in records]
        payload = service.pack((args, kwargs), len(records), holders=holders, about=method)
        self.interrupt()
        with self._lock:
            for index, record in enumerate(records):
                call_id = next(self._call_numbers).to_bytes(8, "big")
                self._pending_calls[call_id] = (call_handle, record["rank"], record)
                if self.has_left(record):  # the rank has left since the caller checked
                    self._leavers.append(_identify(record))
                if not self._sender.send(record["rpc"], [call_id, name, *payload.frames(index)]):
                    payload.discard(index, index + 1)
        return call_handle

    def overdue_error(self, call_handle: Handle, timeout_s: float) -> DeadlineExceeded:
        """Returns the error for a call that took too long.

        The message first names the ranks that are busy, possibly with other calls.
        """
        missing_ranks = [rank for rank in call_handle.ranks if rank not in call_handle._results]
        with self._lock:
            calls = [(record, pending_request.method) for pending_request, _, record in self._pending_calls.values()]
            records = [
                record for pending_request, _, record in self._pending_calls.values() if pending_request is call_handle
            ]
        busy_ranks = busy(self.context.service, calls, timeout_s)
        wait_text = f"waited {timeout_s:.1f} s for {call_handle.group}.{call_handle.method}() on ranks {missing_ranks}"
        phases = [
            f"{record['group']}[{record['rank']}] is {phase}"
            for record in records
            if (phase := self._describe_phase(record))
        ]
        omission = [f"and {len(phases) - _MAX_PHASES} more ranks"] if len(phases) > _MAX_PHASES else []
        return DeadlineExceeded("\n  ".join([*busy_ranks, wait_text, *phases[:_MAX_PHASES], *omission]))

    def pump(self, timeout_ms: int) -> None:
        """Waits up to `timeout_ms` for answers and passes them to their handles.

        Raises:
            WorkerFailed: The run has failed.
        """
        with self._lock:
            messages = self._sender.receive(timeout_ms)
        for call_id, status, durations, *frames in messages:
            pending_call = self._pending_calls.pop(call_id, None)
            if pending_call is None:
                continue  # the group has ended since the call was sent
            call_handle, rank, record = pending_call
            if SEPARATOR in durations:
                energy, durations = split_report(durations)
                if energy is not None:
                    self._on_energy(record, call_handle.method, energy)
            result = self.context.service.unpack(frames)
            if status == b"error":
                error = worker_failed(result, f"{record['group']}[{rank}].{call_handle.method}()", record)
                self._on_failure(error)
                if self.has_left(record):
                    call_handle._remove_rank(rank)
                else:
                    call_handle._record_answer(rank, durations, None, error)
            else:
                call_handle._record_answer(rank, durations, result, None)
        if self._leavers:
            self._drop_calls_of_leavers()
        self._check()

    def _drop_calls_of_leavers(self) -> None:
        """Removes ranks that have left from their pending calls. Their earlier answers must have been received already."""
        leavers = set[tuple[str, int, str]]()
        while self._leavers:
            leavers.add(self._leavers.popleft())
        with self._lock:
            dropped_calls = {n: call for n, call in self._pending_calls.items() if _identify(call[2]) in leavers}
            for call_id in dropped_calls:
                del self._pending_calls[call_id]
        for call_handle, rank, _ in dropped_calls.values():
            call_handle._remove_rank(rank)

    def forget(self, group: str) -> None:
        """Drops the pending calls of a group that has ended."""
        with self._lock:
            self._pending_calls = {n: p for n, p in self._pending_calls.items() if p[0].group != group}

    def close(self) -> None:
        with self._lock:
            self._sender.close()


def _identify(record: dict[str, Any]) -> tuple[str, int, str]:
    return record["group"], record["rank"], record["incarnation"]
