"""The service thread: one in every process of a session. It is the home of channels and inboxes and serves payloads.

It never runs user code and never unpickles a payload, so it answers in microseconds whatever the main thread computes.
Other threads of the same process use the same state directly, under one lock, without a socket.
"""

from __future__ import annotations

import collections
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from rlhpc.runtime.comm.payload import SegmentGone, read_segment, unlink
from rlhpc.runtime.comm.queues import ChannelState, Item
from rlhpc.runtime.comm.sockets import Peers, ZapDoor, bind, make_socket
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded
from rlhpc.runtime.registry import Keys
from rlhpc.runtime.scratch import Scratch, host_id

INBOX = "\0inbox"
DEFAULT_MAX_BYTES = 2 << 30


class _RemoteAnswer:
    """Answers a request that came over the socket."""

    __slots__ = ("identity", "number", "service")

    def __init__(self, service: Service, identity: bytes, number: bytes) -> None:
        self.service, self.identity, self.number = service, identity, number

    def __call__(self, items: list[Item] | str) -> bool:
        if isinstance(items, str):
            self.service.reply(self.identity, [self.number, b"error", items.encode()])
            return True
        head = pickle.dumps([(item.number, len(item.frames)) for item in items])
        frames = [frame for item in items for frame in item.frames]
        self.service.reply(self.identity, [self.number, b"ok", head, *frames])
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
        self._outbox: collections.deque[tuple[bytes, list[Any]]] = collections.deque()
        self._router = make_socket(self.context, zmq.ROUTER, keys, server=True)
        self._zap = ZapDoor(self.context, keys)
        self.endpoint = bind(self._router, scratch, "d", tcp_address)
        self.origin = (host_id(), self.endpoint["tcp"] or self.endpoint["ipc"])
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._on_tick, self._on_note = on_tick, on_note
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"rlhpc-service-{name}", daemon=True)
        self._thread.start()

    # -- called by any thread -------------------------------------------------------------------------------------

    def reply(self, identity: bytes, frames: list[Any]) -> None:
        """Queues a reply; the service thread, which alone owns the socket, sends it."""
        self._outbox.append((identity, frames))
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
        poller = zmq.Poller()
        for source in (self._router, self._zap.socket, self._wake):
            poller.register(source, zmq.POLLIN)
        next_tick = time.monotonic()
        while not self._stopping:
            ready = dict(poller.poll(1000))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._zap.socket in ready:
                self._zap.answer()
            if self._router in ready:
                for _ in range(64):
                    try:
                        message = self._router.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    self._handle(message)
            while self._outbox:
                identity, frames = self._outbox.popleft()
                self._router.send_multipart([identity, *frames])
            if self._on_tick and time.monotonic() >= next_tick:
                next_tick = time.monotonic() + 1.0
                self._on_tick(self)
        self._router.close()
        self._zap.socket.close()
        self.peers.close()

    def _handle(self, message: list[bytes]) -> None:
        identity, number, op, *frames = message
        answer = _RemoteAnswer(self, identity, number)
        try:
            getattr(self, f"_op_{op.decode().lower()}")(answer, frames)
        except (ChannelError, SegmentGone, PermissionError, AttributeError, ValueError) as error:
            if number:
                self.reply(identity, [number, b"error", f"{type(error).__name__}: {error}".encode()])

    def _op_put(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        name, key, nbytes, weight, segment, wait = pickle.loads(frames[0])
        with self.lock:
            admitted = self.channel(name).put(key, frames[1:], nbytes, weight, segment, answer)
            if not wait and admitted:
                refused = self.channel(name).cancel(lambda a: a is answer)
                if refused:
                    answer("full")

    def _op_get(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        name, key, who, target, wait = pickle.loads(frames[0])
        with self.lock:
            state = self.channel(name)
            if not wait and not state.queue(key).items:
                answer("empty")
            else:
                state.get(key, who, target, answer)

    def _op_ack(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        name, numbers = pickle.loads(frames[0])
        with self.lock:
            self.channel(name).acknowledge(numbers)

    def _op_stat(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        name, key = pickle.loads(frames[0])
        with self.lock:
            state = self.channel(name)
            result = (len(state.queue(key).items), state.full(key))
        self.reply(answer.identity, [answer.number, b"ok", pickle.dumps(result)])

    def _op_open(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        self.open_channel(*pickle.loads(frames[0]))
        answer([])

    def _op_cancel(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        def matches(other: Any) -> bool:
            return isinstance(other, _RemoteAnswer) and (other.identity, other.number) == (answer.identity, frames[0])

        with self.lock:
            for state in self.channels.values():
                state.cancel(matches)

    def _op_fetch(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        data = read_segment((self.scratch.shm, self.scratch.spill), frames[0].decode())
        self.reply(answer.identity, [answer.number, b"ok", data])

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
