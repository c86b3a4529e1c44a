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
import os
import pickle
import select
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from rlhpc.runtime.comm import p2p, unix_sockets
from rlhpc.runtime.comm.service import Service
from rlhpc.runtime.comm.zmq_sockets import TcpPort, choose, divided, join_pieces, make_socket
from rlhpc.runtime.disk_errors import explained
from rlhpc.runtime.errors import (
    CallAborted,
    DeadlineExceeded,
    NonFinite,
    RlhpcError,
    StaleGeneration,
    StrangerConnected,
    UserError,
    WorkerFailed,
)
from rlhpc.runtime.host import host_id, process_id, process_key
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
        self._flushing = False

    def send(self, frames: list[Any]) -> None:
        with self._lock:
            if self.connection.send(frames) and not self._flushing:
                self._flushing = True
                threading.Thread(target=self._flush, name="rlhpc-flush", daemon=True).start()

    def _flush(self) -> None:
        poller = select.poll()
        poller.register(self.connection.sock, select.POLLOUT)
        while True:
            poller.poll(_CHECK_MS)  # closing the socket during the poll does not end the poll
            with self._lock:
                if self.connection.closed or not self.connection.flush():
                    self._flushing = False
                    return

    def close(self) -> None:
        with self._lock:
            self.connection.close()


class _CallSockets:
    """Sockets of one side of remote calls: UNIX connections within this host, and a ROUTER socket for other hosts."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._connections: dict[int, _CallConnection] = {}
        self._router: zmq.Socket[Any] | None = None

    def interrupt(self) -> None:
        """Wakes a thread that waits for messages. Other threads and signal handlers may call this."""
        os.eventfd_write(self._wake, 1)

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
        caller = self._connections[fd]
        messages = caller.connection.receive()
        if caller.connection.closed:
            self._epoll.unregister(fd)
            del self._connections[fd]
            caller.close()
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
            self._calls += [(caller, message) for caller, *message in self._receive_remote()]
            for fd, _ in () if self._calls else self._epoll.poll():
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                    return None
                if fd == self._listener.sock.fileno():
                    while (accepted := self._listener.accept(self._token)) is not None:
                        self._add(accepted)
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
            self._router.send_multipart([caller, *divided(frames)])


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
        route = self._routes.get(endpoint)
        if route is None:
            route = self._routes[endpoint] = f"w{len(self._routes)}".encode()
            router.setsockopt(zmq.CONNECT_ROUTING_ID, route)
            router.connect(endpoint)
        router.send_multipart([route, *divided(frames)])

    def receive(self, timeout_ms: int) -> list[list[bytes]]:
        """Returns the answers that have arrived; waits up to `timeout_ms` milliseconds if no answer has arrived yet."""
        messages = [message for _, *message in self._receive_remote()]
        for fd, _ in self._epoll.poll(0 if messages else timeout_ms / 1000):
            if fd == self._wake:
                os.eventfd_read(self._wake)
            elif fd in self._connections:
                messages += self._receive(fd)
        return messages + [message for _, *message in self._receive_remote()]

    def close(self) -> None:
        for receiver in self._connections.values():
            receiver.close()
        self._epoll.close()
        os.close(self._wake)
        if self._router is not None:
            self._router.close()


def describe_error(error: BaseException) -> dict[str, Any]:
    """Returns a picklable report of an exception: text, traceback, exit code, and the pickled exception if possible."""
    error = explained(error, "this rank")
    try:
        pickled_error = pickle.dumps(error)
        pickle.loads(pickled_error)
    except Exception:
        pickled_error = b""
    return {
        "text": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
        "exit_code": error.exit_code if isinstance(error, RlhpcError) else 1,
        "pickled": pickled_error,
    }


class CallServer:
    """Server of a rank: executes its calls one after another, on the main thread.

    Args:
        context: Context of this process.
        receiver: Receiver of the calls.
        instance: The user's object, which has the called methods.
    """

    def __init__(self, context: Context, receiver: CallReceiver, instance: Any) -> None:
        self._context, self._service, self._receiver, self._instance = context, context.service, receiver, instance

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
            caller, (call_id, method, *frames) = call
            name, _, epoch = method.decode().partition(" ")
            self._service.members_changed(int(epoch or 0))
            if name == RESUME:
                self._resume(frames)
            if name in (EXIT, IDLE, RESUME):
                self._receiver.answer(caller, [call_id, b"ok", b"0", *self._service.pack(None).frames()])
                if name == EXIT:
                    return 0
                continue
            status, seconds, packed = self._execute(name, frames)
            self._receiver.answer(caller, [call_id, status, b"%.9f" % seconds, *packed.frames()])

    def _resume(self, frames: list[bytes]) -> None:
        """Drops unread messages from the time before a recovery, and accepts calls again after the recovery."""
        (recovery,), _ = self._service.unpack(frames)
        p2p.clear_inbox(self._service)
        self._service.resume(recovery)

    def _execute(self, name: str, frames: list[bytes]) -> tuple[bytes, float, Packed]:
        """Executes a call; returns its status, its duration in seconds, and its result or the report of its error."""
        started = time.perf_counter()
        try:
            self._service.check()
            args, kwargs = self._service.unpack(frames)
            result = getattr(self._instance, name)(*args, **kwargs)
            args = kwargs = None
            self._service.peers.confirm(self._context.wait_deadline)
            status, packed = b"ok", self._service.pack(result)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            self._service.peers.forget_unconfirmed()
            if not isinstance(error, CallAborted):
                traceback.print_exc()
            status, packed = b"error", self._service.pack(describe_error(error))
        return status, time.perf_counter() - started, packed


#: Seconds that all ranks together may take to report their stacks.
PATIENCE_S = 1.0
_HERE = Path(__file__).resolve()
#: Paths of code that waits for other ranks; a rank with such code among its innermost frames is waiting.
_WAITING_PATHS = (f"{_HERE.parent}/comm/", str(_HERE), "/torch/distributed/")
#: Functions of this module that execute calls and do not wait for other ranks.
_EXECUTING = (CallServer.run.__name__, CallServer._execute.__name__)
_MAX_FRAMES = 12

Frame = tuple[str, int, str]


def main_stack() -> list[Frame]:
    """Returns file, line and function of the main thread's innermost frames; the innermost frame is last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[Frame] = []
    while frame is not None and len(frames) < _MAX_FRAMES:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames[::-1]


def _is_waiting(file: str, function: str) -> bool:
    """Returns whether a rank with a stack frame of this function waits for other ranks."""
    return any(path in file for path in _WAITING_PATHS) and not (file == str(_HERE) and function in _EXECUTING)


def busy(service: Service, calls: Sequence[tuple[dict[str, Any], str]], seconds: float) -> list[str]:
    """Requests the stacks of ranks; returns a sentence for each rank that is busy, with its position in the code.

    A rank is busy if it does not wait for other ranks.

    Args:
        service: Service of this process.
        calls: Records of ranks, each with the method that the rank executes.
        seconds: Duration of the wait so far.
    """
    requests, deadline = [], time.monotonic() + PATIENCE_S
    for record, method in {record["rpc"]["ipc"]: (record, method) for record, method in calls}.values():
        try:
            purpose = f"{record['group']}-{record['rank']} to say where it is"
            limit = max(0.01, deadline - time.monotonic())
            requests.append((record, method, service.peers.begin(choose(record["data"]), b"DOING", [], purpose, limit)))
        except (RlhpcError, OSError):
            continue  # the rank has ended, which is reported elsewhere
    sentences = []
    for record, method, pending in requests:
        rank = f"{record['group']}[{record['rank']}] on node {record['node']}"
        try:
            stack = pickle.loads(service.peers.reply_to(pending, max(0.01, deadline - time.monotonic()))[0])
        except (RlhpcError, OSError):
            position = "it does not even say where it is"
        else:
            if not stack or any(_is_waiting(file, function) for file, _, function in stack):
                continue
            file, line, function = stack[-1]
            position = f"it is in {function} ({file}:{line})"
        sentences.append(
            f"{rank} has not come back from {method}() in {seconds:.1f} s: {position}; log {record['log_err']}"
        )
    return sentences


_POLL_MS = 200


def worker_failed(error: dict[str, Any], call_text: str, record: dict[str, Any]) -> WorkerFailed:
    """Returns the driver-side exception for an error that a worker reported with `describe_error`."""
    cause = pickle.loads(error["pickled"]) if error["pickled"] else None
    origin = f"raised in {call_text} on node {record['node']} (pid {record['pid']}, log {record['log_err']})"
    message = f"{error['text']}\n  {origin}\n{error['traceback'].rstrip()}"
    if isinstance(cause, (UserError, NonFinite, StaleGeneration, StrangerConnected)):  # a traceback would not help
        message = f"{cause}\n  {origin}"
    failure = WorkerFailed(
        message,
        group=record["group"],
        rank=record["rank"],
        node=record["node"],
        log_path=record["log_err"],
        remote_traceback=error["traceback"],
    )
    failure.exit_code = error["exit_code"]
    failure.__cause__ = cause
    return failure


class Handle:
    """Handle of a call on the ranks of a group."""

    def __init__(self, client: RpcClient, group: str, method: str, ranks: Sequence[int]) -> None:
        self._client, self.group, self.method, self.ranks = client, group, method, list(ranks)
        self._results: dict[int, Any] = {}
        self._seconds: dict[int, float] = {}
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
        limit = self._client.context.wait_deadline if timeout is None else timeout
        deadline = time.monotonic() + limit
        while not self._is_complete():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise self._client.overdue_error(self, limit)
            self._client.pump(min(_POLL_MS, max(1, int(remaining_s * 1000))))
        if self._failure is not None:
            raise self._failure
        return [self._results[rank] for rank in self.ranks]

    async def async_wait(self, timeout: float | None = None) -> list[Any]:
        """Waits like `wait`, for coroutines: other tasks of the event loop run during the wait."""
        return await asyncio.to_thread(self.wait, timeout)

    def consume_durations(self, reduction: str = "max") -> dict[str, float]:
        """Waits for the call, then returns its duration on the ranks and clears it.

        Args:
            reduction: "max", "min" or "mean" over the ranks.

        Returns:
            The seconds by method name; empty if the durations were consumed before.
        """
        self.wait()
        seconds, self._seconds = list(self._seconds.values()), {}
        reduce: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "mean": statistics.fmean}
        if reduction not in reduce:
            raise ValueError(f"consume_durations: reduction is {reduction!r}; allowed: {', '.join(reduce)}")
        return {self.method: reduce[reduction](seconds)} if seconds else {}

    def _remove_rank(self, rank: int) -> None:
        """Removes a rank that will not answer, because it has left its group."""
        self.ranks.remove(rank)

    def _record_answer(self, rank: int, seconds: float, result: Any, failure: BaseException | None) -> None:
        self._seconds[rank] = seconds
        if failure is not None and self._failure is None:
            self._failure = failure
        else:
            self._results[rank] = result


class RpcClient:
    """Client of remote calls on ranks.

    Args:
        context: This process's context.
        on_failure: Called with each exception that a rank reports; stops the run, or registers that the rank has left
            (`leave`).
        check: Raises an exception if the run has failed for another reason.
    """

    def __init__(self, context: Context, on_failure: Callable[[WorkerFailed], None], check: Callable[[], None]) -> None:
        self.context, self._on_failure, self._check = context, on_failure, check
        self._sender = CallSender(context.service)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[bytes, tuple[Handle, int, dict[str, Any]]] = {}
        self._departed = set[tuple[str, int, str]]()
        #: Ranks that have left since the last `pump`, whose calls are still pending.
        self._leavers = collections.deque[tuple[str, int, str]]()

    def interrupt(self) -> None:
        """Wakes a thread in `pump`, because the run has failed or another thread has to send."""
        self._sender.interrupt()

    def leave(self, record: dict[str, Any]) -> None:
        """Registers that a rank has left its group; pending calls no longer wait for the rank's answers."""
        self._departed.add(_identity(record))
        self._leavers.append(_identity(record))
        self.interrupt()

    def has_left(self, record: dict[str, Any]) -> bool:
        """Returns whether this rank has left its group."""
        return bool(self._departed) and _identity(record) in self._departed

    def call(
        self, records: Sequence[dict[str, Any]], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Handle:
        """Sends a call of `method` to the ranks of `records`; returns a handle at once."""
        service = self.context.service
        handle = Handle(self, records[0]["group"], method, [record["rank"] for record in records])
        # The epoch notifies a rank of membership changes before the call, because the call may depend on them.
        name = f"{method} {service.epoch}".encode()
        holders = [process_key(record["data"]) for record in records]
        packed = service.pack((args, kwargs), len(records), holders=holders)
        self.interrupt()
        with self._lock:
            for index, record in enumerate(records):
                call_id = next(self._numbers).to_bytes(8, "big")
                self._pending[call_id] = (handle, record["rank"], record)
                if self.has_left(record):  # the rank has left since the caller checked
                    self._leavers.append(_identity(record))
                if not self._sender.send(record["rpc"], [call_id, name, *packed.frames(index)]):
                    packed.discard(index, index + 1)
        return handle

    def overdue_error(self, handle: Handle, seconds: float) -> DeadlineExceeded:
        """Returns the error for a call that took too long.

        The message first names the ranks that are busy, possibly with other calls.
        """
        missing_ranks = [rank for rank in handle.ranks if rank not in handle._results]
        with self._lock:
            calls = [(record, pending.method) for pending, _, record in self._pending.values()]
        busy_ranks = busy(self.context.service, calls, seconds)
        wait_text = f"waited {seconds:.1f} s for {handle.group}.{handle.method}() on ranks {missing_ranks}"
        return DeadlineExceeded("\n  ".join([*busy_ranks, wait_text]))

    def pump(self, timeout_ms: int) -> None:
        """Waits up to `timeout_ms` for answers and passes them to their handles.

        Raises:
            WorkerFailed: The run has failed.
        """
        with self._lock:
            messages = self._sender.receive(timeout_ms)
        for call_id, status, seconds, *frames in messages:
            pending_call = self._pending.pop(call_id, None)
            if pending_call is None:
                continue  # the group has ended since the call was sent
            handle, rank, record = pending_call
            result = self.context.service.unpack(frames)
            if status == b"error":
                error = worker_failed(result, f"{record['group']}[{rank}].{handle.method}()", record)
                self._on_failure(error)
                if self.has_left(record):
                    handle._remove_rank(rank)
                else:
                    handle._record_answer(rank, float(seconds), None, error)
            else:
                handle._record_answer(rank, float(seconds), result, None)
        if self._leavers:
            self._drop_calls_of_leavers()
        self._check()

    def _drop_calls_of_leavers(self) -> None:
        """Removes ranks that have left from their pending calls. Their earlier answers must have been received already."""
        leavers = set[tuple[str, int, str]]()
        while self._leavers:
            leavers.add(self._leavers.popleft())
        with self._lock:
            dropped_calls = {n: call for n, call in self._pending.items() if _identity(call[2]) in leavers}
            for call_id in dropped_calls:
                del self._pending[call_id]
        for handle, rank, _ in dropped_calls.values():
            handle._remove_rank(rank)

    def forget(self, group: str) -> None:
        """Drops the pending calls of a group that has ended."""
        with self._lock:
            self._pending = {n: p for n, p in self._pending.items() if p[0].group != group}

    def close(self) -> None:
        with self._lock:
            self._sender.close()


def _identity(record: dict[str, Any]) -> tuple[str, int, str]:
    return record["group"], record["rank"], record["incarnation"]
