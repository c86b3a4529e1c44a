"""Service thread of a process: every process of a session has one. It is the home of channels and inboxes and serves payloads.

It never runs user code and never unpickles a payload, so it answers in microseconds whatever the main thread computes.
Other threads of the same process use the same state directly, under one lock, without a socket.

While a thread waits for an item of its process, it runs the event loop itself, so that a message wakes only the thread
that needs it; the service thread parks, and takes the loop back when no other thread runs it.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import os
import queue
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from rlhpc.runtime.comm.bulk_transfer import BulkServer
from rlhpc.runtime.comm.operations import OPERATIONS, DeviceChannel, HeldValues
from rlhpc.runtime.comm.payload import Origin, Packed, unpack
from rlhpc.runtime.comm.queues import ChannelState, Item, LocalAnswer, RemoteAnswer, Taker, TooEarly
from rlhpc.runtime.comm.remote_fetch import Fetching
from rlhpc.runtime.comm.shared_memory import Mappings, SegmentPool, discard
from rlhpc.runtime.comm.unix_sockets import Listener, UnixConnection, token_of
from rlhpc.runtime.comm.zero_copy import Loans, Offers
from rlhpc.runtime.comm.zmq_sockets import (
    Peers,
    TcpPort,
    ZapDoor,
    divided,
    join_pieces,
    make_socket,
    readable,
    shut_where_crowded,
)
from rlhpc.runtime.errors import CallAborted, ChannelError, DeadlineExceeded
from rlhpc.runtime.host import host_id, process_id
from rlhpc.runtime.registry import CurveKeys
from rlhpc.runtime.scratch import Scratch

#: Who has sent something: a connection on this host, or the ZeroMQ identity of one from another.
Peer = UnixConnection | bytes


class Traffic:
    """The sockets of a service.

    Args:
        listener: Listening socket for processes of this host.
        token: Secret that connecting processes prove to know.
        zap: Authenticator of ZeroMQ's connections.
        router: Socket for processes of other hosts, if there are any.
        bulk: Server of large data for other hosts.
        handle: Called with each message and its sender.
        on_close: Called with the name of a connection that has closed.
    """

    def __init__(
        self,
        listener: Listener,
        token: bytes,
        zap: ZapDoor,
        router: zmq.Socket[Any] | None,
        bulk: BulkServer | None,
        *,
        handle: Callable[[Peer, list[bytes]], None],
        on_close: Callable[[str], None],
    ) -> None:
        self._listener, self._token, self._zap, self._router, self._bulk = listener, token, zap, router, bulk
        self._handle = handle
        self._on_close = on_close
        self._outbox: collections.deque[tuple[Peer, list[Any]]] = collections.deque()
        self._connections: dict[int, UnixConnection] = {}
        self._doors: dict[int, TcpPort] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # not by `close`: another thread may be about to write to it, and its number may be a file's by then
        weakref.finalize(self, os.close, self._wake)
        self._epoll = select.epoll()
        for fd in (listener.sock.fileno(), self._wake, int(zap.socket.FD)):
            self._epoll.register(fd, select.EPOLLIN)
        if router:
            self._epoll.register(int(router.FD), select.EPOLLIN)
        if bulk:
            self._epoll.register(bulk.sock.fileno(), select.EPOLLIN)

    def mind(self, door: TcpPort) -> None:
        """Checks a port at once when a process connects to it."""
        self._doors[door.listener.fileno()] = door
        self._epoll.register(door.listener.fileno(), select.EPOLLIN | select.EPOLLET)

    def look_at_doors(self) -> None:
        """Shuts the ports where the process has too few descriptors left, and opens them again."""
        shut_where_crowded(self._doors.values())

    def post(self, peer: Peer, frames: list[Any]) -> None:
        """Queues a message to be sent at the end of an iteration."""
        self._outbox.append((peer, frames))

    def wake(self) -> None:
        """Wakes the thread that waits in `turn`."""
        os.eventfd_write(self._wake, 1)

    def turn(self, timeout: float) -> bool:
        """Receives arrived messages and sends queued ones; waits at most `timeout` seconds. Returns False if nothing
        happened.
        """
        events = self._epoll.poll(timeout)
        for fd, event in events:
            if fd in self._connections:
                self._serve(fd, event)
            elif fd == self._wake:
                os.eventfd_read(self._wake)
            elif fd == self._listener.sock.fileno():
                while (accepted := self._listener.accept(self._token)) is not None:
                    self._connections[accepted.sock.fileno()] = accepted
                    self._epoll.register(accepted.sock.fileno(), select.EPOLLIN)
            elif self._bulk and fd == self._bulk.sock.fileno():
                self._bulk.accept()
            elif fd in self._doors:
                self.look_at_doors()
            # ZeroMQ's descriptor only says that its state changed: read until there is nothing more.
            elif self._router and fd == self._router.FD:
                pass
            else:
                while readable(self._zap.socket):
                    self._zap.answer()
        self._exchange()
        return bool(events)

    def _serve(self, fd: int, event: int) -> None:
        connection = self._connections[fd]
        if event & select.EPOLLOUT and not connection.flush():
            self._epoll.modify(fd, select.EPOLLIN)
        if event & ~select.EPOLLOUT:
            for message in connection.receive():
                self._handle(connection, message)
        if connection.closed:
            self._epoll.unregister(fd)
            del self._connections[fd]
            connection.sock.close()
            self._on_close(connection.name)

    def _exchange(self) -> None:
        """Receives messages of other hosts, and sends all queued ones."""
        router = self._router
        while True:
            while router and readable(router):
                identity, *message = router.recv_multipart()
                self._handle(identity, join_pieces(message))
            # Sending also notices what has arrived, and the descriptor then no longer signals it: check again.
            if not self._outbox:
                return
            while self._outbox:
                peer, frames = self._outbox.popleft()
                if isinstance(peer, bytes):
                    assert router is not None
                    router.send_multipart([peer, *divided(frames)])
                elif not peer.closed and peer.send(frames):
                    self._epoll.modify(peer.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def close(self) -> None:
        """Closes all sockets."""
        for connection in self._connections.values():
            connection.sock.close()
        self._listener.sock.close()
        self._epoll.close()
        for port in self._doors.values():
            port.listener.close()
        if self._router:
            self._router.close()
        if self._bulk:
            self._bulk.close()
        self._zap.socket.close()


log = logging.getLogger(__name__)
INBOX = "\0inbox"
DEFAULT_MAX_BYTES = 2 << 30
_PARK_S = 0.002
_LONG_LEAD_S = 0.005
_numbers = itertools.count()


class Service:
    """The data plane of one process.

    Args:
        name: `group-rank` or `driver`, for socket names and messages.
        keys: The generation's key pair.
        scratch: The session's folders on this host.
        tcp_address: Address to listen on for other hosts; None where all processes share this host.
        check: Called while waiting; raises when the run has failed.
        on_tick: Called every `tick_s` on the service thread (heartbeats).
        tick_s: Seconds between ticks. Each tick wakes the process; an idle process costs nothing else.
        on_note: Called on the service thread with each note (HELLO, heartbeat) that another process posted.
        on_join: Places a process that asks to join the run, in the process that may do so.
        on_broken: Called on the service thread when an error ends it; from then on this process does not answer.
        doing: Returns what this process is doing, for other processes that ask.
    """

    def __init__(
        self,
        name: str,
        keys: CurveKeys,
        scratch: Scratch,
        tcp_address: str | None = None,
        check: Callable[[], None] = lambda: None,
        on_tick: Callable[[Service], None] | None = None,
        tick_s: float = 1.0,
        on_note: Callable[[dict[str, Any]], None] | None = None,
        on_join: Callable[[dict[str, Any]], bytes] | None = None,
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
        self.loans, self.offers = Loans(self.pool), Offers()
        self.fetch = Fetching(scratch, self.pool, self.mappings, self.peers, self.check).fetch
        self.held = HeldValues()
        #: Number of the newest recovery for which the driver wants the main thread's present call to be given up.
        self.aborted = 0
        #: Number of the last recovery that has ended. The request to give up comes by another way than calls: it may come
        #: behind this.
        self._resumed = 0
        #: By connection: reason for the refusal of an item whose sender waits for no answer.
        self._refusals: dict[str, bytes] = {}
        #: How often ranks have come or gone, as far as is known: records that were read earlier are read again.
        self.epoch = 0
        zap = ZapDoor(self.context, keys)
        path = scratch.sockets / f"d-{process_id()}-{next(_numbers)}"
        listener = Listener(str(path))
        self.endpoint = {"host": host_id(), "ipc": f"ipc://{path}", "tcp": "", "bulk": ""}
        router = self._bulk = None
        if tcp_address:
            router = make_socket(self.context, zmq.ROUTER, keys, server=True)
            tcp_port = TcpPort(router, tcp_address)
            self.endpoint["tcp"] = tcp_port.endpoint
            self._bulk = BulkServer(name, keys, tcp_address, (scratch.shm, scratch.spill), self.loans, self.offers)
            self.endpoint["bulk"] = self._bulk.endpoint
        self.lane = DeviceChannel(scratch, self.endpoint, self.peers, self._read)
        self.origin = Origin(host_id(), self.endpoint["tcp"] or self.endpoint["ipc"], self.endpoint["bulk"])
        self.doing = doing
        self._traffic = Traffic(
            listener, token_of(keys), zap, router, self._bulk, handle=self._handle, on_close=self.consumer_died
        )
        self._on_tick, self._tick_s, self._on_broken = on_tick, tick_s, on_broken
        self.on_note, self.on_join = on_note, on_join
        self._loop = threading.Lock()  # held by the thread that leads the event loop
        self._leader: int | None = None  # that thread: one of the guests, or else the service thread
        self._guests = 0  # threads that wait for an item stored here; the service thread leaves the loop to them
        self._followers: list[LocalAnswer] = []  # the answers of the other guests
        self._unparked = threading.Event()
        self._next_tick = time.monotonic()
        if router:
            self.mind(tcp_port)
        self._thread = threading.Thread(target=self._run, name=f"rlhpc-service-{name}", daemon=True)
        self._thread.start()

    # -- called by any thread -------------------------------------------------------------------------------------

    def mind(self, door: TcpPort) -> None:
        """Keeps a port shut while the process has too few descriptors left for its own files."""
        self._traffic.mind(door)

    @property
    def stopped(self) -> bool:
        """True if this process has left the run."""
        return self._stopping

    def check(self) -> None:
        """Raises when the run has failed, when this process is leaving it, or when its present call is to be given up."""
        if self._stopping:
            raise ChannelError(f"{self.name} has left the run: its session ended while it waited")
        if self.aborted > self._resumed:
            raise CallAborted(f"{self.name} gave up a call: another group failed")
        self._run_failed()

    def resume(self, recovery: int) -> None:
        """Takes calls again after a recovery, which has this number; messages from before it are dropped."""
        self.lane.forget()
        self._resumed = recovery

    def reply(self, peer: UnixConnection | bytes, frames: list[Any]) -> None:
        """Queues a reply; the thread that leads the loop sends it."""
        self._traffic.post(peer, frames)
        if threading.get_ident() != self._leader:
            self._traffic.wake()

    def channel(self, name: str) -> ChannelState:
        try:
            return self.channels[name]
        except KeyError:
            raise ChannelError(f"{self.name} is not the home of a channel named {name!r}") from None

    def open_channel(self, name: str, maxsize: int, max_bytes: int) -> None:
        """Makes this process the home of `name`; one of the same name is closed first."""
        with self.lock:
            previous = self.channels.get(name)
            if previous:
                previous.close(f"channel {name!r} was created anew")
                for item in [item for queued in previous.queues.values() for item in queued.items]:
                    discard(item.segment)
            self.channels[name] = ChannelState(maxsize, max_bytes)

    def wait_local(self, act: Callable[[LocalAnswer], bool], timeout: float, whom: str) -> list[Item]:
        """Runs `act` under the lock with a new waiter and waits for its answer.

        Raises:
            DeadlineExceeded: After `timeout` seconds.
            queue.Empty: `act` refused (a `nowait` call).
        """
        answer = LocalAnswer()
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

    def _await(self, answer: LocalAnswer, deadline: float) -> None:
        """Returns when the answer has arrived or the deadline has passed; runs the event loop if no other waiting thread
        does.
        """
        with self.lock:
            self._guests += 1
        started = time.monotonic()
        try:
            while answer.items is None and not self._stopping:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return
                if self._leader == self._thread.ident:
                    self._traffic.wake()  # ask the service thread to step aside
                if self._loop.acquire(timeout=min(0.002, remaining_s)):
                    try:
                        self._leader = threading.get_ident()
                        while answer.items is None and not self._stopping:
                            remaining_s = deadline - time.monotonic()
                            if remaining_s <= 0:
                                break
                            if not self._iterate(min(0.2, remaining_s)):
                                self.check()
                    finally:
                        self._leader = None
                        self._loop.release()
                        self._call_followers()
                else:
                    self._follow(answer, min(0.2, remaining_s))
        finally:
            with self.lock:
                self._guests -= 1
            if time.monotonic() - started > _LONG_LEAD_S:
                self._unparked.set()

    def _follow(self, answer: LocalAnswer, timeout: float) -> None:
        """Waits for the answer while another waiting thread runs the event loop.

        Returns at once if the service thread runs it: that thread is about to step aside, and no thread would then run the
        loop.
        """
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
        """Wakes the followers of a thread that has received its answer: one of them takes over the event loop."""
        with self.lock:
            for follower in self._followers:
                follower.wakes.put(None)

    def _abandon(self, answer: LocalAnswer) -> None:
        with self.lock:
            answer.abandoned = True
            self.withdraw(lambda a: a is answer)

    def withdraw(self, matches: Callable[[Callable[..., bool]], bool]) -> None:
        """Forgets waiters that have given up, and frees the data of those that wanted to put; called under the lock."""
        for state in self.channels.values():
            for item in state.cancel(matches):
                discard(item.segment)

    def consumer_died(self, consumer: str) -> None:
        """Puts items that a dead consumer had not acknowledged back into the queues."""
        self._refusals.pop(consumer, None)
        with self.lock:
            for state in self.channels.values():
                state.consumer_died(consumer)
        self._traffic.wake()

    def members_changed(self, epoch: int, processes: Iterable[str] = ()) -> None:
        """Registers that ranks have come, or have ended (`host.process_key`); the driver counts these changes by `epoch`."""
        self.epoch = max(self.epoch, epoch)
        for process in processes:
            self.peers.ended_processes.add(process)
            self.consumer_died(process)
            self.pool.forget_process(process)
            self.loans.forget_process(process)
            self.lane.pool.forget_process(process)

    def pack(
        self,
        obj: Any,
        readers: int = 1,
        *,
        lend: bool = False,
        takers: Sequence[Taker] = (),
        inline: bool = False,
        holders: Sequence[str] = (),
    ) -> Packed:
        """Serializes an object.

        Args:
            obj: Anything that can be pickled.
            readers: Number of processes that will read the object.
            lend: True if all readers are on other hosts and the caller calls `settle`.
            takers: Locations of the readers, if known.
            inline: Put all data into the message.
            holders: The readers' processes, see `shared_memory.ShmSegment`.
        """
        loans = self.loans if lend and self._bulk else None
        device_pool = self.lane.to(takers) if takers else None
        return Packed(obj, self.pool, self.origin, readers, loans, device_pool, inline, holders)

    def unpack(
        self, frames: Sequence[Any], *, borrow: bool = False, later: list[Callable[[], None]] | None = None
    ) -> Any:
        """Rebuilds an object from the frames that the transport delivered.

        Args:
            frames: The received frames.
            borrow: The caller only reads the result.
            later: List that gets the functions to call once the item is acknowledged, for data of another host; by default
                they are called now.
        """
        fetch = functools.partial(self.fetch, in_place=borrow, later=later)
        return unpack(frames, self.endpoint["host"], self.mappings, fetch, self.lane.land, borrow=borrow)

    def _read(self, origin: Origin, path: str, size: int) -> memoryview:
        if origin.host == self.endpoint["host"]:
            return self.mappings.lease(path, 0)
        return self.fetch(origin, path, size, 0, None, in_place=True)

    def bytes_sent(self) -> int:
        """Returns the bytes of data that other hosts have received from this process."""
        return self._bulk.sent if self._bulk else 0

    def stop(self) -> None:
        """Ends the thread and closes the sockets."""
        self._stopping = True
        self._traffic.wake()
        self._thread.join(timeout=2)
        if threading.current_thread() is not self._thread:
            self.peers.close()
        self.pool.close()
        self.lane.close()
        # it ends once all its sockets are closed: threads that wait at one get an error
        threading.Thread(target=self.context.term, name=f"rlhpc-end-{self.name}", daemon=True).start()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            if self._stopping:
                return
            log.exception("the service thread of %s has ended", self.name)
            if self._on_broken:
                self._on_broken(error)

    def _serve(self) -> None:
        pause_s = _PARK_S
        while not self._stopping:
            if self._guests:
                # While one guest runs the loop without a break the naps get longer; it sets the event when it leaves.
                pause_s = _PARK_S if self._unparked.wait(pause_s) else min(2 * pause_s, 0.1)
                self._unparked.clear()
                continue
            pause_s = _PARK_S
            with self._loop:
                self._leader = threading.get_ident()
                while not self._guests and not self._stopping:
                    self._iterate(max(0.0, self._next_tick - time.monotonic()))
                self._leader = None
        with self._loop:
            self._traffic.close()
            self.peers.close()

    def _iterate(self, timeout: float) -> bool:
        """Runs one iteration of the event loop, on the thread that runs it; returns False if nothing happened."""
        was_active = self._traffic.turn(timeout)
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + self._tick_s
            self._traffic.look_at_doors()
            self.lane.settle()
            if self._on_tick:
                self._on_tick(self)
        return was_active

    def _handle(self, peer: UnixConnection | bytes, message: list[bytes]) -> None:
        request_id, op, *frames = message
        answer = RemoteAnswer(self.reply, peer, request_id)
        if request_id and (refusal := self._refusals.pop(answer.connection_name, None)):
            self.reply(peer, [request_id, b"error", refusal])
            return
        try:
            OPERATIONS[op](self, answer, frames)
        except (ChannelError, KeyError, ValueError) as error:
            error_text = f"{type(error).__name__}: {error}".encode()
            if request_id:
                self.reply(peer, [request_id, b"too early" if isinstance(error, TooEarly) else b"error", error_text])
            elif (
                op == b"PUT"
            ):  # the first cause, for the sender's next request, which `Peers.confirm` makes at the latest
                self._refusals.setdefault(answer.connection_name, b"an item put before was refused: " + error_text)
