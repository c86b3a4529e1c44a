"""The service thread: one in every process of a session. It is the home of channels and inboxes and serves payloads.

It never runs user code and never unpickles a payload, so it answers in microseconds whatever the main thread computes.
Other threads of the same process use the same state directly, under one lock, without a socket.
"""

from __future__ import annotations

import collections
import itertools
import os
import pickle
import queue
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from rlhpc.runtime.comm.payload import SegmentGone, read_segment, unlink
from rlhpc.runtime.comm.queues import ChannelState, Item
from rlhpc.runtime.comm.sockets import Peers, ZapDoor, bind, make_socket
from rlhpc.runtime.comm.unix import Connection, Listener, token_of
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded
from rlhpc.runtime.registry import Keys
from rlhpc.runtime.scratch import Scratch, host_id

INBOX = "\0inbox"
DEFAULT_MAX_BYTES = 2 << 30
_numbers = itertools.count()


class _RemoteAnswer:
    """Answers a request that came over a socket."""

    __slots__ = ("number", "peer", "service")

    def __init__(self, service: Service, peer: Connection | bytes, number: bytes) -> None:
        self.service, self.peer, self.number = service, peer, number

    @property
    def who(self) -> str:
        """The connection's name: when it closes, what was not acknowledged over it goes back to the queue."""
        return self.peer.name if isinstance(self.peer, Connection) else self.peer.hex()

    def frames(self, *frames: Any) -> None:
        self.service.reply(self.peer, [self.number, b"ok", *frames])

    def __call__(self, items: list[Item] | str) -> bool:
        if isinstance(self.peer, Connection) and self.peer.closed:
            return False
        if isinstance(items, str):
            self.service.reply(self.peer, [self.number, b"error", items.encode()])
            return True
        head = pickle.dumps([(item.number, len(item.frames)) for item in items])
        self.frames(head, *(frame for item in items for frame in item.frames))
        return True


class _LocalAnswer:
    """Answers a thread of this process."""

    __slots__ = ("abandoned", "box")

    def __init__(self) -> None:
        self.box: queue.SimpleQueue[list[Item] | str] = queue.SimpleQueue()
        self.abandoned = False

    def __call__(self, items: list[Item] | str) -> bool:
        if self.abandoned:
            return False
        self.box.put(items)
        return True


class Service:
    """Data plane of one process.

    Args:
        name: `group-rank` or `driver`, for socket names and messages.
        keys: The generation's key pair.
        scratch: The session's folders on this host.
        tcp_address: Address to listen on for other hosts; None where all processes share this host.
        check: Called while waiting; raises when the run has failed.
        on_tick: Called about once a second on the service thread (heartbeats).
        on_note: Called on the service thread with each note (HELLO, heartbeat) that another process posted.
    """

    def __init__(
        self,
        name: str,
        keys: Keys,
        scratch: Scratch,
        tcp_address: str | None = None,
        check: Callable[[], None] = lambda: None,
        on_tick: Callable[[Service], None] | None = None,
        on_note: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.name, self.keys, self.scratch = name, keys, scratch
        self.context: zmq.Context[Any] = zmq.Context()
        self.lock = threading.Lock()
        self.channels: dict[str, ChannelState] = {INBOX: ChannelState(0, DEFAULT_MAX_BYTES)}
        self.check = check
        self.peers = Peers(self.context, keys, check)
        self.shared_readers: dict[str, int] = {}
        self._outbox: collections.deque[tuple[Connection | bytes, list[Any]]] = collections.deque()
        self._zap = ZapDoor(self.context, keys)
        path = scratch.sockets / f"d-{os.getpid()}-{next(_numbers)}"
        self._listener = Listener(str(path))
        self._token = token_of(keys)
        self.endpoint = {"host": host_id(), "ipc": f"ipc://{path}", "tcp": ""}
        self._router = None
        if tcp_address:
            self._router = make_socket(self.context, zmq.ROUTER, keys, server=True)
            self.endpoint["tcp"] = bind(self._router, scratch, "z", tcp_address)["tcp"]
        self.origin = (host_id(), self.endpoint["tcp"] or self.endpoint["ipc"])
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._on_tick, self._on_note = on_tick, on_note
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"rlhpc-service-{name}", daemon=True)
        self._thread.start()

    # -- called by any thread -------------------------------------------------------------------------------------

    def reply(self, peer: Connection | bytes, frames: list[Any]) -> None:
        """Queues a reply; the service thread, which alone owns the sockets, sends it."""
        self._outbox.append((peer, frames))
        if threading.get_ident() != self._thread.ident:
            os.eventfd_write(self._wake, 1)

    def channel(self, name: str) -> ChannelState:
        try:
            return self.channels[name]
        except KeyError:
            raise ChannelError(f"{self.name} is not the home of a channel named {name!r}") from None

    def open_channel(self, name: str, maxsize: int, max_bytes: int) -> None:
        """Makes this process the home of `name`; one of the same name is closed first."""
        with self.lock:
            old = self.channels.get(name)
            if old:
                old.close(f"channel {name!r} was created anew")
            self.channels[name] = ChannelState(maxsize, max_bytes)

    def wait_local(self, act: Callable[[_LocalAnswer], bool], timeout: float, whom: str) -> list[Item]:
        """Runs `act` under the lock with a new waiter and waits for its answer.

        Raises:
            DeadlineExceeded: After `timeout` seconds.
            queue.Empty: `act` refused (a `nowait` call).
        """
        answer = _LocalAnswer()
        with self.lock:
            if not act(answer):
                raise queue.Empty
        deadline = time.monotonic() + timeout
        while True:
            try:
                items = answer.box.get(timeout=min(0.2, max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                try:
                    self.check()
                    late = time.monotonic() > deadline
                except BaseException:
                    self._abandon(answer)
                    raise
                if late:
                    self._abandon(answer)
                    raise DeadlineExceeded(f"{self.name} waited {timeout:.0f} s for {whom}") from None
                continue
            if isinstance(items, str):
                raise ChannelError(items)
            return items

    def _abandon(self, answer: _LocalAnswer) -> None:
        with self.lock:
            answer.abandoned = True
            for state in self.channels.values():
                for item in state.cancel(lambda a: a is answer):
                    unlink(item.segment) if item.segment else None

    def consumer_died(self, who: str) -> None:
        """Gives back what a dead consumer had not acknowledged."""
        with self.lock:
            for state in self.channels.values():
                state.consumer_died(who)
        os.eventfd_write(self._wake, 1)

    def fetch(self, endpoint: str, path: str) -> bytes:
        """Bytes of a segment that lies on another host."""
        return self.peers.request(endpoint, b"FETCH", [path.encode()], 600.0, f"payload {path}")[0]

    def release(self, endpoint: str, path: str) -> None:
        """Tells a shared segment's owner that this reader has it mapped."""
        self.peers.post(endpoint, b"RELEASE", [path.encode()])

    def stop(self) -> None:
        """Ends the thread and closes the sockets."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=2)
        if threading.current_thread() is not self._thread:
            self.peers.close()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        epoll = select.epoll()
        connections: dict[int, Connection] = {}
        router, zap = self._router, self._zap.socket
        for fd in (self._listener.sock.fileno(), self._wake, zap.getsockopt(zmq.FD)):
            epoll.register(fd, select.EPOLLIN)
        if router:
            epoll.register(router.getsockopt(zmq.FD), select.EPOLLIN)
        next_tick = time.monotonic()
        while not self._stopping:
            for fd, event in epoll.poll(1.0):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif fd == self._listener.sock.fileno():
                    while (connection := self._listener.accept(self._token)) is not None:
                        connections[connection.sock.fileno()] = connection
                        epoll.register(connection.sock.fileno(), select.EPOLLIN)
                elif fd in connections:
                    connection = connections[fd]
                    if event & select.EPOLLOUT and not connection.flush():
                        epoll.modify(fd, select.EPOLLIN)
                    if event & ~select.EPOLLOUT:
                        for message in connection.receive():
                            self._handle(connection, message)
                    if connection.closed:
                        epoll.unregister(fd)
                        del connections[fd]
                        connection.sock.close()
                        self.consumer_died(connection.name)
            # ZeroMQ's descriptor only says that its state changed: look until it has nothing more.
            while zap.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                self._zap.answer()
            while router and router.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                identity, *rest = router.recv_multipart()
                self._handle(identity, rest)
            while self._outbox:
                peer, frames = self._outbox.popleft()
                if isinstance(peer, bytes):
                    assert router is not None
                    router.send_multipart([peer, *frames])
                elif not peer.closed and peer.send(frames):
                    epoll.modify(peer.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
            if self._on_tick and time.monotonic() >= next_tick:
                next_tick = time.monotonic() + 1.0
                self._on_tick(self)
        for connection in connections.values():
            connection.sock.close()
        self._listener.sock.close()
        if router:
            router.close()
        zap.close()
        self.peers.close()

    def _handle(self, peer: Connection | bytes, message: list[bytes]) -> None:
        number, op, *frames = message
        answer = _RemoteAnswer(self, peer, number)
        try:
            _OPERATIONS[op](self, answer, frames)
        except (ChannelError, SegmentGone, PermissionError, KeyError, ValueError) as error:
            if number:
                self.reply(peer, [number, b"error", f"{type(error).__name__}: {error}".encode()])

    def _op_put(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        name, key, nbytes, weight, segment, wait = pickle.loads(frames[0])
        with self.lock:
            admitted = self.channel(name).put(key, frames[1:], nbytes, weight, segment, answer)
            if not wait and admitted:
                refused = self.channel(name).cancel(lambda a: a is answer)
                if refused:
                    answer("full")

    def _op_get(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        name, key, target, wait = pickle.loads(frames[0])
        with self.lock:
            state = self.channel(name)
            if not wait and not state.queue(key).items:
                answer("empty")
            else:
                state.get(key, answer.who, target, answer)

    def _op_ack(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        name, numbers = pickle.loads(frames[0])
        with self.lock:
            self.channel(name).acknowledge(numbers)

    def _op_stat(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        name, key = pickle.loads(frames[0])
        with self.lock:
            state = self.channel(name)
            result = (len(state.queue(key).items), state.full(key))
        answer.frames(pickle.dumps(result))

    def _op_open(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        self.open_channel(*pickle.loads(frames[0]))
        answer([])

    def _op_cancel(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        def matches(other: Any) -> bool:
            return isinstance(other, _RemoteAnswer) and (other.peer, other.number) == (answer.peer, frames[0])

        with self.lock:
            for state in self.channels.values():
                for item in state.cancel(matches):
                    unlink(item.segment) if item.segment else None
                state.consumer_died(answer.who)  # an answer that crossed this: its items go back to the front

    def _op_fetch(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        data = read_segment((self.scratch.shm, self.scratch.spill), frames[0].decode())
        answer.frames(data)

    def _op_release(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        path = frames[0].decode()
        with self.lock:
            left = self.shared_readers.get(path, 1) - 1
            if left > 0:
                self.shared_readers[path] = left
                return
            self.shared_readers.pop(path, None)
        unlink(path)

    def _op_note(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        if self._on_note:
            self._on_note(pickle.loads(frames[0]))


_OPERATIONS: dict[bytes, Callable[[Service, _RemoteAnswer, list[bytes]], None]] = {
    b"PUT": Service._op_put,
    b"GET": Service._op_get,
    b"ACK": Service._op_ack,
    b"STAT": Service._op_stat,
    b"OPEN": Service._op_open,
    b"CANCEL": Service._op_cancel,
    b"FETCH": Service._op_fetch,
    b"RELEASE": Service._op_release,
    b"NOTE": Service._op_note,
}
