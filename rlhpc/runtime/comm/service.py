"""The service thread: one in every process of a session. It is the home of channels and inboxes and serves payloads.

It never runs user code and never unpickles a payload, so it answers in microseconds whatever the main thread computes.
Other threads of the same process use the same state directly, under one lock, without a socket.

While a thread waits for an item of its own process, it runs the event loop itself, so that a message wakes the thread
that needs it and no other; the service thread parks, and takes the loop back when nobody else runs it.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import pickle
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from rlhpc.runtime.comm.bulk import BulkServer
from rlhpc.runtime.comm.landing import Landing
from rlhpc.runtime.comm.loans import Loans
from rlhpc.runtime.comm.payload import Origin, Packed, unpack
from rlhpc.runtime.comm.queues import ChannelState, Item, Outlook
from rlhpc.runtime.comm.segments import HEADER, Mappings, SegmentGone, SegmentPool, default_idle, discard
from rlhpc.runtime.comm.share import Share, once_for_all
from rlhpc.runtime.comm.sockets import Door, Peers, ZapDoor, divided, make_socket, whole
from rlhpc.runtime.comm.unix import Connection, Listener, token_of
from rlhpc.runtime.descriptors import crowded
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded, RlhpcError
from rlhpc.runtime.host import host_id
from rlhpc.runtime.registry import Keys
from rlhpc.runtime.scratch import Scratch

log = logging.getLogger(__name__)
INBOX = "\0inbox"
DEFAULT_MAX_BYTES = 2 << 30
_PARK_S = 0.002
_LONG_LEAD_S = 0.005
_numbers = itertools.count()


def _readable(socket: zmq.Socket[Any]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class _RemoteAnswer:
    """Answers a request that came over a socket."""

    __slots__ = ("number", "outlook", "peer", "service")

    def __init__(self, service: Service, peer: Connection | bytes, number: bytes) -> None:
        self.service, self.peer, self.number = service, peer, number
        self.outlook: Outlook | None = None

    @property
    def who(self) -> str:
        """The connection's name: when it closes, what was not acknowledged over it goes back to the queue."""
        return self.peer.name if isinstance(self.peer, Connection) else self.peer.hex()

    def frames(self, *frames: Any) -> None:
        self.service.reply(self.peer, [self.number, b"ok", *frames])

    def __call__(self, items: list[Item] | str) -> bool:
        if isinstance(self.peer, Connection) and self.peer.closed:
            return False
        if not self.number:
            return True  # posted: nobody is waiting for an answer
        if isinstance(items, str):
            self.service.reply(self.peer, [self.number, b"error", items.encode()])
            return True
        if self.outlook is not None:
            self.frames(pickle.dumps(tuple(self.outlook)))
            return True
        head = pickle.dumps([(item.number, len(item.frames)) for item in items])
        self.frames(head, *(frame for item in items for frame in item.frames))
        return True


class _LocalAnswer:
    """Answers a thread of this process."""

    __slots__ = ("abandoned", "items", "wakes")

    def __init__(self) -> None:
        self.items: list[Item] | str | None = None
        self.abandoned = False
        #: An item here tells the thread to check again.
        self.wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __call__(self, items: list[Item] | str) -> bool:
        if self.abandoned:
            return False
        self.items = items
        self.wakes.put(None)
        return True


class Service:
    """The data plane of one process.

    Args:
        name: `group-rank` or `driver`, for socket names and messages.
        keys: The generation's key pair.
        scratch: The session's folders on this host.
        tcp_address: Address to listen on for other hosts; None where all processes share this host.
        check: Called while waiting; raises when the run has failed.
        on_tick: Called every `tick_s` on the service thread (heartbeats).
        tick_s: Seconds between ticks. Each wakes the process, which is all that an idle one costs.
        on_note: Called on the service thread with each note (HELLO, heartbeat) that another process posted.
        on_broken: Called on the service thread when an error ends it; from then on nobody answers for this process.
        doing: Says what this process is doing, for those that ask.
    """

    def __init__(
        self,
        name: str,
        keys: Keys,
        scratch: Scratch,
        tcp_address: str | None = None,
        check: Callable[[], None] = lambda: None,
        on_tick: Callable[[Service], None] | None = None,
        tick_s: float = 1.0,
        on_note: Callable[[dict[str, Any]], None] | None = None,
        on_broken: Callable[[Exception], None] | None = None,
        doing: Callable[[], Any] = lambda: None,
    ) -> None:
        self.name, self.keys, self.scratch = name, keys, scratch
        self.context: zmq.Context[Any] = zmq.Context()
        self.lock = threading.Lock()
        self.channels: dict[str, ChannelState] = {INBOX: ChannelState(0, DEFAULT_MAX_BYTES)}
        self._run_failed, self._stopping = check, False
        self.peers = Peers(self.context, keys, self.check)
        self.pool, self.mappings = SegmentPool(scratch), Mappings()
        self.loans, self.landing = Loans(self.pool), Landing(default_idle(scratch))
        self._store: dict[bytes, bytes] = {}
        self._store_waiters: dict[bytes, list[_RemoteAnswer]] = {}
        self._store_grew = threading.Condition(self.lock)
        #: The driver wants the main thread's present call to be given up.
        self.aborted = False
        self._outbox: collections.deque[tuple[Connection | bytes, list[Any]]] = collections.deque()
        self._zap = ZapDoor(self.context, keys)
        path = scratch.sockets / f"d-{os.getpid()}-{next(_numbers)}"
        self._listener = Listener(str(path))
        self._token = token_of(keys)
        self.endpoint = {"host": host_id(), "ipc": f"ipc://{path}", "tcp": ""}
        self._router = self._bulk = None
        if tcp_address:
            self._router = make_socket(self.context, zmq.ROUTER, keys, server=True)
            door = Door(self._router, tcp_address)
            self.endpoint["tcp"] = door.endpoint
            self._bulk = BulkServer(name, keys, tcp_address, (scratch.shm, scratch.spill), self.loans)
        self.origin = Origin(
            host_id(), self.endpoint["tcp"] or self.endpoint["ipc"], self._bulk.endpoint if self._bulk else ""
        )
        self._doing = doing
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._on_tick, self._tick_s, self._on_note, self._on_broken = on_tick, tick_s, on_note, on_broken
        self._loop = threading.Lock()  # held by the thread that leads the event loop
        self._leader: int | None = None
        self._guests = 0
        self._followers: list[_LocalAnswer] = []
        self._unparked = threading.Event()
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._doors: dict[int, Door] = {}
        self._next_tick = time.monotonic()
        for fd in (self._listener.sock.fileno(), self._wake, int(self._zap.socket.FD)):
            self._epoll.register(fd, select.EPOLLIN)
        if self._router:
            self._epoll.register(int(self._router.FD), select.EPOLLIN)
            self.mind(door)
        if self._bulk:
            self._epoll.register(self._bulk.sock.fileno(), select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=f"rlhpc-service-{name}", daemon=True)
        self._thread.start()

    # -- called by any thread -------------------------------------------------------------------------------------

    def mind(self, door: Door) -> None:
        """Keeps a port shut while the process has too few descriptors left for its own files."""
        self._doors[door.listener.fileno()] = door
        self._epoll.register(door.listener.fileno(), select.EPOLLIN | select.EPOLLET)

    @property
    def stopped(self) -> bool:
        """Whether this process has left the run."""
        return self._stopping

    def check(self) -> None:
        """Raises when the run has failed, or when this process is leaving it."""
        if self._stopping:
            raise ChannelError(f"{self.name} has left the run: its session ended while it waited")
        self._run_failed()

    def reply(self, peer: Connection | bytes, frames: list[Any]) -> None:
        """Queues a reply; the thread that leads the loop sends it."""
        self._outbox.append((peer, frames))
        if threading.get_ident() != self._leader:
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
        if answer.items is None:
            try:
                self._await(answer, time.monotonic() + timeout)
            except BaseException:
                self._abandon(answer)
                raise
        if answer.items is None:
            self._abandon(answer)
            if answer.items is None and self._stopping:
                self.check()
            if answer.items is None:  # nor did it come at the last moment
                raise DeadlineExceeded(f"{self.name} waited {timeout:.1f} s for {whom}")
        if isinstance(answer.items, str):
            raise ChannelError(answer.items)
        return answer.items

    def _await(self, answer: _LocalAnswer, deadline: float) -> None:
        """Returns when the answer is there or the deadline has passed; runs the loop meanwhile if no other guest does."""
        with self.lock:
            self._guests += 1
        began = time.monotonic()
        try:
            while answer.items is None and not self._stopping:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                if self._leader == self._thread.ident:
                    os.eventfd_write(self._wake, 1)  # ask the service thread to step aside
                if self._loop.acquire(timeout=min(0.002, left)):
                    try:
                        self._leader = threading.get_ident()
                        while answer.items is None and not self._stopping:
                            left = deadline - time.monotonic()
                            if left <= 0:
                                break
                            if not self._iterate(min(0.2, left)):
                                self.check()
                    finally:
                        self._leader = None
                        self._loop.release()
                        self._call_followers()
                else:
                    self._follow(answer, min(0.2, left))
        finally:
            with self.lock:
                self._guests -= 1
            if time.monotonic() - began > _LONG_LEAD_S:
                self._unparked.set()

    def _follow(self, answer: _LocalAnswer, timeout: float) -> None:
        """Waits while another guest leads, who gets this one's answer, too. Not while it is the service thread, which only has
        to step aside: with nobody to lead, nothing would come."""
        with self.lock:
            self._followers.append(answer)
        try:
            if self._leader not in (None, self._thread.ident):
                try:
                    answer.wakes.get(timeout=timeout)
                except queue.Empty:
                    self.check()
        finally:
            with self.lock:
                self._followers.remove(answer)

    def _call_followers(self) -> None:
        """Wakes those who have followed a guest that has got what it waited for: one of them is to lead."""
        with self.lock:
            for follower in self._followers:
                follower.wakes.put(None)

    def _abandon(self, answer: _LocalAnswer) -> None:
        with self.lock:
            answer.abandoned = True
            for state in self.channels.values():
                for item in state.cancel(lambda a: a is answer):
                    discard(item.segment) if item.segment else None

    def clear_inbox(self) -> None:
        """Drops the messages that were sent to this process and that it has not taken."""
        with self.lock:
            state = self.channels[INBOX]
            self.channels[INBOX] = ChannelState(0, DEFAULT_MAX_BYTES)
        for item in [item for queued in state.queues.values() for item in queued.items]:
            # Unpacking frees this reader's claim on the payload, in case its sender and the other readers are still there.
            with contextlib.suppress(RlhpcError, SegmentGone, OSError):
                self.unpack(item.frames, borrow=True)

    def consumer_died(self, who: str) -> None:
        """Puts items that a dead consumer had not acknowledged back into the queues."""
        with self.lock:
            for state in self.channels.values():
                state.consumer_died(who)
        os.eventfd_write(self._wake, 1)

    def pack(self, obj: Any, readers: int = 1, *, lend: bool = False) -> Packed:
        """Serializes an object for `readers` readers. With `lend`, all are on other hosts, and the caller will `settle`."""
        return Packed(obj, self.pool, self.origin, readers, self.loans if lend and self._bulk else None)

    def unpack(
        self, frames: Sequence[Any], *, borrow: bool = False, later: list[Callable[[], None]] | None = None
    ) -> Any:
        """Rebuilds an object from the frames that transport delivered.

        Args:
            frames: What came.
            borrow: The caller only reads what it gets.
            later: Gets what to call once the item is acknowledged, for data of another host; by default it is called
                now.
        """

        def fetch(origin: Origin, path: str, size: int, reader: int, share: Share | None) -> memoryview:
            return self.fetch(origin, path, size, reader, share, own=borrow, later=later)

        return unpack(frames, self.endpoint["host"], self.mappings, fetch, borrow=borrow)

    def fetch(
        self,
        origin: Origin,
        path: str,
        size: int,
        reader: int,
        share: Share | None,
        *,
        own: bool,
        later: list[Callable[[], None]] | None = None,
    ) -> memoryview:
        """The data of a segment of another host; it is this process's until the last view of it is gone.

        Args:
            origin: Whose it is.
            path: The segment.
            size: Bytes of its data.
            reader: Which of its readers this is.
            share: Its place among the processes of this host that together are this reader.
            own: As `Mappings.lease` has it, for what is shared.
            later: Gets what to call once the reader is done with the data; by default it is called now.
        """

        def receive(memory: memoryview) -> None:
            self.peers.fetch(origin.bulk, path, HEADER, memory[HEADER : HEADER + size])

            def release() -> None:
                self.peers.release(origin.bulk, path, reader)

            release() if later is None else later.append(release)

        if share is None:
            view = self.landing.take(HEADER + size)
            receive(view)
            return view

        def receive_for_all() -> str:
            here = self.pool.reserve(size, share.of)
            try:
                receive(memoryview(here.memory))
            except BaseException:
                for number in range(share.of):
                    discard(here.path, number)
                raise
            return here.path

        found = once_for_all(self.scratch.shm, share, receive_for_all, self.check)
        return self.mappings.lease(found, share.number, own=own)

    def stop(self) -> None:
        """Ends the thread and closes the sockets."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=2)
        if threading.current_thread() is not self._thread:
            self.peers.close()
        self.pool.close()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            log.exception("the service thread of %s has ended", self.name)
            if self._on_broken and not self._stopping:
                self._on_broken(error)

    def _serve(self) -> None:
        park = _PARK_S
        while not self._stopping:
            if self._guests:
                # While one guest runs the loop without a break the naps get longer; it sets the event when it leaves.
                park = _PARK_S if self._unparked.wait(park) else min(2 * park, 0.1)
                self._unparked.clear()
                continue
            park = _PARK_S
            with self._loop:
                self._leader = threading.get_ident()
                while not self._guests and not self._stopping:
                    self._iterate(max(0.0, self._next_tick - time.monotonic()))
                self._leader = None
        with self._loop:
            for connection in self._connections.values():
                connection.sock.close()
            self._listener.sock.close()
            self._epoll.close()
            for door in self._doors.values():
                door.listener.close()
            if self._router:
                self._router.close()
            if self._bulk:
                self._bulk.close()
            self._zap.socket.close()
            self.peers.close()

    def _iterate(self, timeout: float) -> bool:
        """One turn of the event loop, by the thread that runs it; False when nothing happened."""
        epoll, connections, router, zap = self._epoll, self._connections, self._router, self._zap.socket
        events = epoll.poll(timeout)
        for fd, event in events:
            if fd in connections:
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
            elif fd == self._wake:
                os.eventfd_read(self._wake)
            elif fd == self._listener.sock.fileno():
                while (accepted := self._listener.accept(self._token)) is not None:
                    connections[accepted.sock.fileno()] = accepted
                    epoll.register(accepted.sock.fileno(), select.EPOLLIN)
            elif self._bulk and fd == self._bulk.sock.fileno():
                self._bulk.accept()
            elif fd in self._doors:
                self._mind_doors()
            # ZeroMQ's descriptor only says that its state changed: read until there is nothing more.
            elif router and fd == router.FD:
                pass
            else:
                while _readable(zap):
                    self._zap.answer()
        while True:
            while router and _readable(router):
                identity, *rest = router.recv_multipart()
                self._handle(identity, whole(rest))
            # Sending also notices what has arrived, and the descriptor then no longer signals it: check again.
            if not self._outbox:
                break
            while self._outbox:
                peer, frames = self._outbox.popleft()
                if isinstance(peer, bytes):
                    assert router is not None
                    router.send_multipart([peer, *divided(frames)])
                elif not peer.closed and peer.send(frames):
                    epoll.modify(peer.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + self._tick_s
            self._mind_doors()
            if self._on_tick:
                self._on_tick(self)
        return bool(events)

    def _mind_doors(self) -> None:
        if self._doors:
            full = crowded()
            for door in list(self._doors.values()):
                door.shut(full)

    def _handle(self, peer: Connection | bytes, message: list[bytes]) -> None:
        number, op, *frames = message
        answer = _RemoteAnswer(self, peer, number)
        try:
            _OPERATIONS[op](self, answer, frames)
        except (ChannelError, KeyError, ValueError) as error:
            if number:
                self.reply(peer, [number, b"error", f"{type(error).__name__}: {error}".encode()])

    def _op_put(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        name, key, nbytes, weight, segment, wait = pickle.loads(frames[0])
        with self.lock:
            answer.outlook = self.channel(name).outlook(key)
            admitted = self.channel(name).put(key, frames[1:], nbytes, weight, segment, answer)
            if not wait and admitted:
                refused = self.channel(name).cancel(lambda a: a is answer)
                if refused:
                    answer("full")

    def _op_get(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        name, key, target, wait, host = pickle.loads(frames[0])
        with self.lock:
            state = self.channel(name)
            state.queue(key).taker = host
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
                    discard(item.segment) if item.segment else None
                state.consumer_died(answer.who)  # an answer that crossed this: its items go back to the front

    def store(self, op: bytes, key: bytes, *values: bytes) -> list[bytes]:
        """torch's rendezvous store, for the groups whose rank 0 this process is."""
        with self.lock:
            held = self._store
            if op == b"set":
                held[key] = values[0]
                self._tell_waiters(key)
                return [b""]
            if op == b"get":
                return [held[key]]
            if op == b"has":
                return [b"1" if key in held else b"0"]
            if op == b"add":
                held[key] = str(int(held.get(key, b"0")) + int(values[0])).encode()
                self._tell_waiters(key)
                return [held[key]]
            if op == b"swap":  # torch's compare_set: an absent key counts as an empty value
                if held.get(key, b"") == values[0]:
                    held[key] = values[1]
                    self._tell_waiters(key)
                return [held.get(key, values[0])]
            if op == b"del":
                return [b"1" if held.pop(key, None) is not None else b"0"]
            if op == b"count":
                return [str(sum(known.startswith(key) for known in held)).encode()]
        raise ValueError(f"no store operation {op!r}")

    def _tell_waiters(self, key: bytes) -> None:
        self._store_grew.notify_all()
        for answer in self._store_waiters.pop(key, ()):
            answer.frames(self._store[key])

    def store_value(self, key: bytes, timeout: float) -> bytes | None:
        """The value of a key of the rendezvous store that this process holds; None if nobody has set it within `timeout`
        seconds."""
        with self._store_grew:
            self._store_grew.wait_for(lambda: key in self._store, timeout)
            return self._store.get(key)

    def _op_store(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        op, key, *values = (bytes(frame) for frame in frames)
        if op == b"wait":  # answered once somebody has set it
            with self.lock:
                if key not in self._store:
                    self._store_waiters.setdefault(key, []).append(answer)
                    return
            op = b"get"
        answer.frames(*self.store(op, key, *values))

    def _op_doing(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        answer.frames(pickle.dumps(self._doing()))

    def _op_abort(self, answer: _RemoteAnswer, frames: list[bytes]) -> None:
        self.aborted = True

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
    b"NOTE": Service._op_note,
    b"STORE": Service._op_store,
    b"ABORT": Service._op_abort,
    b"DOING": Service._op_doing,
}
