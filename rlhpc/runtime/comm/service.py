"""Service of a process: stores its channels and inbox, and serves its payloads to other processes.

Every process of a session has a service thread. That thread never runs user code and never unpickles a payload, so it
answers in microseconds even if the main thread is computing. Other threads of the process access the same state directly,
under one lock and without a socket, and unpickle payloads themselves (`Service.unpack`).

A thread that waits for an item of this process runs the event loop itself, so that a message wakes only the thread that needs
it. The service thread sleeps during that time, and runs the loop again when no other thread does.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from rlhpc.runtime.comm.bulk_transfer import BulkServer
from rlhpc.runtime.comm.key_value_store import KeyValueStore
from rlhpc.runtime.comm.payload import Origin, Packed, unpack
from rlhpc.runtime.comm.queues import ChannelState, ConsumerLocation, Item, LocalAnswer, Refusal, RemoteAnswer, TooEarly
from rlhpc.runtime.comm.remote_fetch import DeviceChannel, Fetching
from rlhpc.runtime.comm.service_sockets import ServiceSockets
from rlhpc.runtime.comm.shared_memory import Mappings, SegmentPool, discard
from rlhpc.runtime.comm.unix_sockets import Listener, UnixConnection, token_of
from rlhpc.runtime.comm.zero_copy import ForwardedData, Lender
from rlhpc.runtime.comm.zmq_sockets import (
    Peers,
    TcpPort,
    ZapAuthenticator,
    choose,
    make_socket,
)
from rlhpc.runtime.errors import CallAborted, ChannelError, DeadlineExceeded
from rlhpc.runtime.host import host_id, process_id
from rlhpc.runtime.registry import CurveKeys
from rlhpc.runtime.scratch import Scratch
from rlhpc.runtime.trace_recorder import ClockSample, add_gauge, recorder

log = logging.getLogger(__name__)
INBOX = "\0inbox"
DEFAULT_MAX_BYTES = 2 << 30
_MIN_SLEEP_S = 0.002
_LONG_WAIT_S = 0.005
#: Seconds that the driver may take to answer with its clock.
_CLOCK_TIMEOUT_S = 2.0
_numbers = itertools.count()


class Service:
    """Data plane of one process.

    Args:
        name: `group-rank` or `driver`, for thread names and messages.
        keys: The generation's key pair.
        scratch: The session's folders on this host.
        tcp_address: Address to listen on for other hosts; None if all processes run on this host.
        check: Called while waiting; raises when the run has failed.
        on_tick: Called every `tick_s` on the thread that runs the event loop (heartbeats).
        tick_s: Seconds between ticks. Each tick wakes the process; an idle process uses no other CPU time.
        on_note: Called, on the thread that runs the event loop, with each note from another process. The event of a note is
            ready, alive, failed, exit, leaving or unreachable.
        on_join: Called with each request of a process to join the run; returns the reply. None except in the driver.
        on_broken: Called on the service thread when an error ends this thread. Afterwards the process answers no requests.
        describe_activity: Returns the current activity of this process; called when another process requests it.
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
        describe_activity: Callable[[], Any] = lambda: None,
    ) -> None:
        self.name, self.keys, self.scratch = name, keys, scratch
        self.context: zmq.Context[Any] = zmq.Context()
        self.lock = threading.Lock()
        self.channels: dict[str, ChannelState] = {INBOX: ChannelState(0, DEFAULT_MAX_BYTES)}
        self._check_run, self._is_stopping = check, False
        self.peers = Peers(self.context, keys, self.check)
        self.pool, self.mappings = SegmentPool(scratch), Mappings()
        self.lender, self.forwarded_data = Lender(self.pool), ForwardedData()
        self.fetch = Fetching(scratch, self.pool, self.mappings, self.peers, self.check).fetch
        self.store = KeyValueStore()
        #: Number of the newest recovery for which the driver has requested an abort of this process's current call.
        self.abort_recovery = 0
        #: Number of the last completed recovery. The request to abort arrives over a different connection than calls, so it
        #: may arrive after this has been set.
        self._resumed_recovery = 0
        #: By connection: reason for refusing an item that was sent without waiting for an answer.
        self._refusals: dict[str, bytes] = {}
        #: Latest known number of membership changes. A change makes `Context.rank_record` read the records again.
        self.epoch = 0
        zap = ZapAuthenticator(self.context, keys)
        path = scratch.sockets / f"d-{process_id()}-{next(_numbers)}"
        listener = Listener(str(path))
        self.endpoint = {"host": host_id(), "ipc": f"ipc://{path}", "tcp": "", "bulk": ""}
        router = self._bulk = None
        if tcp_address:
            router = make_socket(self.context, zmq.ROUTER, keys, server=True)
            tcp_port = TcpPort(router, tcp_address)
            self.endpoint["tcp"] = tcp_port.endpoint
            self._bulk = BulkServer(
                name, keys, tcp_address, (scratch.shm, scratch.spill), self.lender, self.forwarded_data
            )
            self.endpoint["bulk"] = self._bulk.endpoint
        self.device_channel = DeviceChannel(scratch, self.endpoint, self.peers, self._read)
        self.origin = Origin(host_id(), self.endpoint["tcp"] or self.endpoint["ipc"], self.endpoint["bulk"])
        self.doing = describe_activity
        self._sockets = ServiceSockets(
            listener, token_of(keys), zap, router, self._bulk, handle=self._handle, on_close=self.consumer_died
        )
        self._on_tick, self._tick_s, self._on_broken = on_tick, tick_s, on_broken
        self.on_note, self.on_join = on_note, on_join
        self._loop = threading.Lock()  # held by the thread that runs the event loop
        self._leader: int | None = None  # identifier of that thread: a waiting thread, or else the service thread
        self._num_waiting = (
            0  # number of threads that wait for an item of this process; if it is not 0, they run the loop
        )
        #: Expected answers of the threads that wait while another thread runs the loop.
        self._followers: list[LocalAnswer] = []
        self._resume_event = threading.Event()
        self._next_tick = time.monotonic()
        if router:
            self.watch_port(tcp_port)
        self._thread = threading.Thread(target=self._run, name=f"rlhpc-service-{name}", daemon=True)
        self._thread.start()

    # -- called by any thread -------------------------------------------------------------------------------------

    def watch_port(self, port: TcpPort) -> None:
        """Refuses new connections to a port while the process is short of file descriptors."""
        self._sockets.watch_port(port)

    @property
    def stopped(self) -> bool:
        """True if this process has left the run."""
        return self._is_stopping

    def check(self) -> None:
        """Raises if the run has failed, if this process has left the run, or if the driver has aborted the current call.

        Raises:
            ChannelError: The session has ended.
            CallAborted: The driver has aborted the calls because of a failure.
        """
        if self._is_stopping:
            raise ChannelError(f"{self.name} has left the run: its session ended while it waited")
        if self.abort_recovery > self._resumed_recovery:
            raise CallAborted(f"{self.name} gave up a call: another group failed")
        self._check_run()

    @property
    def last_recovery(self) -> int:
        """Number of the last completed recovery of the run; 0 before the first one."""
        return self._resumed_recovery

    def resume(self, recovery: int) -> None:
        """Ends the abort of calls after a recovery, and drops sent accelerator tensors that no process has read.

        Args:
            recovery: Number of the recovery.
        """
        self.device_channel.forget()
        self._resumed_recovery = recovery

    def reply(self, peer: UnixConnection | bytes, frames: list[Any]) -> None:
        """Queues a reply; the thread that runs the event loop sends it."""
        self._sockets.queue(peer, frames)
        if threading.get_ident() != self._leader:
            self._sockets.wake()

    def channel(self, name: str) -> ChannelState:
        """Returns the state of a channel that this process stores.

        Raises:
            ChannelError: This process stores no channel with this name.
        """
        try:
            return self.channels[name]
        except KeyError:
            raise ChannelError(f"{self.name} is not the home of a channel named {name!r}") from None

    def open_channel(self, name: str, maxsize: int, max_bytes: int) -> None:
        """Creates channel `name` in this process; first closes an existing channel with this name."""
        with self.lock:
            previous_channel = self.channels.get(name)
            if previous_channel:
                previous_channel.close(f"channel {name!r} was created anew")
                for item in [item for item_queue in previous_channel.queues.values() for item in item_queue.items]:
                    discard(item.segment)
            channel_state = self.channels[name] = ChannelState(maxsize, max_bytes)
        add_gauge(
            f"queue depth/{name}",
            "items",
            lambda: sum(len(item_queue.items) for item_queue in [*channel_state.queues.values()]),
        )

    def wait_local(self, action: Callable[[LocalAnswer], bool], timeout_s: float, wait_purpose: str) -> list[Item]:
        """Calls `action` with a new waiter under the lock, waits for the answer, and returns the items.

        Raises:
            DeadlineExceeded: No answer arrived within `timeout_s` seconds.
            queue.Empty: `action` returned False, because the operation does not wait.
            ChannelError: The channel was closed.
        """
        answer = LocalAnswer()
        with self.lock:
            if not action(answer):
                raise queue.Empty
        if answer.items is None:
            try:
                self._await(answer, time.monotonic() + timeout_s)
            except BaseException:
                self._abandon(answer)
                raise
        if answer.items is None:
            self._abandon(answer)
            if answer.items is None and self._is_stopping:
                self.check()
            if answer.items is None:  # the answer did not arrive before `_abandon` took the lock
                raise DeadlineExceeded(f"{self.name} waited {timeout_s:.1f} s for {wait_purpose}")
        if isinstance(answer.items, str):
            raise ChannelError(answer.items)
        return answer.items

    def _await(self, answer: LocalAnswer, deadline: float) -> None:
        """Waits for the answer until the deadline; runs the event loop if no other waiting thread does."""
        with self.lock:
            self._num_waiting += 1
        start_time = time.monotonic()
        try:
            while answer.items is None and not self._is_stopping:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return
                if self._leader == self._thread.ident:
                    self._sockets.wake()  # makes the service thread stop running the loop
                if self._loop.acquire(timeout=min(0.002, remaining_s)):
                    try:
                        self._leader = threading.get_ident()
                        while answer.items is None and not self._is_stopping:
                            remaining_s = deadline - time.monotonic()
                            if remaining_s <= 0:
                                break
                            if not self._run_iteration(min(0.2, remaining_s)):
                                self.check()
                    finally:
                        self._leader = None
                        self._loop.release()
                        self._wake_followers()
                else:
                    self._follow(answer, min(0.2, remaining_s))
        finally:
            with self.lock:
                self._num_waiting -= 1
            if time.monotonic() - start_time > _LONG_WAIT_S:
                self._resume_event.set()

    def _follow(self, answer: LocalAnswer, timeout: float) -> None:
        """Waits for the answer while another waiting thread runs the event loop.

        Returns at once if the service thread runs the loop: that thread is about to stop, and no thread would then run the
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

    def _wake_followers(self) -> None:
        """Wakes the other waiting threads, so that one of them takes over the event loop."""
        with self.lock:
            for follower in self._followers:
                follower.wakes.put(None)

    def _abandon(self, answer: LocalAnswer) -> None:
        with self.lock:
            answer.abandoned = True
            self.withdraw(lambda a: a is answer)

    def withdraw(self, matches: Callable[[Callable[..., bool]], bool]) -> None:
        """Removes waiters for which `matches` returns True, and frees the data of their puts; called under the lock."""
        for channel_state in self.channels.values():
            for item in channel_state.cancel(matches):
                discard(item.segment)

    def consumer_died(self, consumer: str) -> None:
        """Requeues the items that a dead consumer has not acknowledged.

        Args:
            consumer: Name of the consumer's process, connection or request.
        """
        self._refusals.pop(consumer, None)
        with self.lock:
            for channel_state in self.channels.values():
                channel_state.consumer_died(consumer)
        self._sockets.wake()

    def members_changed(self, epoch: int, processes: Iterable[str] = ()) -> None:
        """Registers a change of the run's membership.

        Args:
            epoch: Number of membership changes that the driver has counted.
            processes: Processes that have ended (`host.process_key`).
        """
        self.epoch = max(self.epoch, epoch)
        for process in processes:
            self.peers.ended_processes.add(process)
            self.consumer_died(process)
            self.pool.forget_process(process)
            self.lender.forget_process(process)
            self.device_channel.pool.forget_process(process)

    def pack(
        self,
        obj: Any,
        num_readers: int = 1,
        *,
        lend: bool = False,
        consumers: Sequence[ConsumerLocation] = (),
        inline: bool = False,
        holders: Sequence[str] = (),
        about: str = "message",
    ) -> Packed:
        """Serializes an object.

        Args:
            obj: Picklable object.
            num_readers: Number of processes that will read the object.
            lend: Let readers on other hosts read directly from the caller's memory (`zero_copy`); only if all readers are on
                other hosts and the caller calls `Packed.finish_reads`.
            consumers: Locations of the readers, if known.
            inline: Put all data into the message.
            holders: For each reader, the reader's process or the process that stores its message. When this process ends, the
                data is free for the reader; see `shared_memory.ShmSegment`.
            about: Name of the message in traces.
        """
        lender = self.lender if lend and self._bulk else None
        device_pool = self.device_channel.to(consumers) if consumers else None
        payload = Packed(obj, self.pool, self.origin, num_readers, lender, device_pool, inline, holders)
        if recorder.is_on:
            payload.trace(about)
        return payload

    def unpack(
        self, frames: Sequence[Any], *, borrow: bool = False, releases: list[Callable[[], None]] | None = None
    ) -> Any:
        """Rebuilds an object from the frames that the transport delivered.

        Args:
            frames: The received frames.
            borrow: The caller only reads the result.
            releases: List for the functions that release data on other hosts; the caller calls them after it has acknowledged
                the item. By default the data is released at once.
        """
        fetch = functools.partial(self.fetch, in_place=borrow, releases=releases)
        return unpack(frames, self.endpoint["host"], self.mappings, fetch, self.device_channel.land, borrow=borrow)

    def _read(self, origin: Origin, path: str, size: int) -> memoryview:
        if origin.host == self.endpoint["host"]:
            return self.mappings.lease(path, 0)
        return self.fetch(origin, path, size, 0, None, in_place=True)

    def bytes_sent(self) -> int:
        """Returns the number of bytes of bulk data that this process has sent to other hosts."""
        return self._bulk.sent if self._bulk else 0

    def stop(self) -> None:
        """Ends the thread and closes the sockets."""
        self._is_stopping = True
        self._sockets.wake()
        self._thread.join(timeout=2)
        if threading.current_thread() is not self._thread:
            self.peers.close()
        self.pool.close()
        self.device_channel.close()
        # `term` returns once all sockets are closed; threads that wait on one of them get an error
        threading.Thread(target=self.context.term, name=f"rlhpc-end-{self.name}", daemon=True).start()

    # -- the service thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            if self._is_stopping:
                return
            log.exception("the service thread of %s has ended", self.name)
            if self._on_broken:
                self._on_broken(error)

    def _serve(self) -> None:
        pause_s = _MIN_SLEEP_S
        while not self._is_stopping:
            if self._num_waiting:
                # Sleep longer each time, as long as other threads run the loop; a thread sets the event after a long wait.
                pause_s = _MIN_SLEEP_S if self._resume_event.wait(pause_s) else min(2 * pause_s, 0.1)
                self._resume_event.clear()
                continue
            pause_s = _MIN_SLEEP_S
            with self._loop:
                self._leader = threading.get_ident()
                while not self._num_waiting and not self._is_stopping:
                    self._run_iteration(max(0.0, self._next_tick - time.monotonic()))
                self._leader = None
        with self._loop:
            self._sockets.close()
            self.peers.close()

    def _run_iteration(self, timeout_s: float) -> bool:
        """Runs one iteration of the event loop; returns False if no event occurred."""
        was_active = self._sockets.run_once(timeout_s)
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + self._tick_s
            self._sockets.check_ports()
            self.device_channel.free_read_buffers()
            if self._on_tick:
                self._on_tick(self)
        return was_active

    def _handle(self, peer: UnixConnection | bytes, message: list[bytes]) -> None:
        request_id, operation, *frames = message
        answer = RemoteAnswer(self.reply, peer, request_id)
        if request_id and (refusal := self._refusals.pop(answer.connection_name, None)):
            self.reply(peer, [request_id, b"error", refusal])
            return
        try:
            _OPERATIONS[operation](self, answer, frames)
        except (ChannelError, KeyError, ValueError) as error:
            error_text = f"{type(error).__name__}: {error}".encode()
            if request_id:
                self.reply(peer, [request_id, b"too early" if isinstance(error, TooEarly) else b"error", error_text])
            elif (
                operation == b"PUT"
            ):  # report the first cause in the reply to the sender's next request, at the latest that of `Peers.confirm`
                self._refusals.setdefault(answer.connection_name, b"an item put before was refused: " + error_text)

    # -- requests of other processes, on the thread that runs the loop --------------------------------------------

    def _on_put(self, answer: RemoteAnswer, frames: list[bytes]) -> None:
        name, key, num_bytes, weight, segment, should_wait = pickle.loads(frames[0])
        with self.lock:
            channel_state = self.channel(name)
            answer.estimate = channel_state.estimate(key)
            channel_state.put(key, frames[1:], num_bytes, weight, segment, answer)
            if not should_wait and channel_state.cancel(lambda a: a is answer):
                answer(Refusal("full"))

    def _on_get(self, answer: RemoteAnswer, frames: list[bytes]) -> None:
        name, key, target, should_wait, consumer, owner = pickle.loads(frames[0])
        with self.lock:
            channel_state = self.channel(name)
            channel_state.record_consumer(key, ConsumerLocation(*consumer))
            if not should_wait and not channel_state.count(key):
                answer(Refusal("empty"))
            else:
                channel_state.get(key, (owner, answer.connection_name, answer.request_name), target, answer)

    def _on_ack(self, answer: RemoteAnswer, frames: list[bytes]) -> None:
        name, item_ids = pickle.loads(frames[0])
        with self.lock:
            self.channel(name).acknowledge(item_ids)

    def _on_stat(self, answer: RemoteAnswer, frames: list[bytes]) -> None:
        name, key = pickle.loads(frames[0])
        with self.lock:
            channel_state = self.channel(name)
            answer.frames(pickle.dumps((channel_state.count(key), channel_state.full(key))))

    def _on_open(self, answer: RemoteAnswer, frames: list[bytes]) -> None:
        self.open_channel(*pickle.loads(frames[0]))
        answer([])

    def _on_cancel(self, answer: RemoteAnswer, frames: list[bytes]) -> None:
        name = RemoteAnswer(answer.reply, answer.peer, frames[0]).request_name
        with self.lock:
            self.withdraw(lambda a: isinstance(a, RemoteAnswer) and a.request_name == name)
            for channel_state in self.channels.values():
                channel_state.consumer_died(name)  # requeues the items of an answer that was already sent

    def _on_store(self, answer: RemoteAnswer, frames: list[bytes]) -> None:
        op, key, *arguments = (bytes(frame) for frame in frames)
        if op == b"wait":  # answered once the keys have been set
            self.store.when_set(key, answer.frames)
        else:
            answer.frames(self.store.execute(op, key, *arguments))

    def _on_to_host(self, answer: RemoteAnswer, frames: list[bytes]) -> None:
        """Copies an accelerator buffer of this process to a segment, for a reader that cannot open the buffer.

        This is a rare request, and the only one that copies data on the service thread.
        """
        path, spans = self.pool.write([memoryview(self.device_channel.pool.to_host(*pickle.loads(frames[0])).numpy())])
        answer.frames(pickle.dumps((path, spans[0][0])))

    def _on_doing(self, answer: RemoteAnswer, frames: list[bytes]) -> None:
        answer.frames(pickle.dumps(self.doing()))

    def _on_trace(self, answer: RemoteAnswer, frames: list[bytes]) -> None:
        """Starts or ends the recording of this process's trace, as the driver asks (`TraceControl`)."""
        request = pickle.loads(frames[0])
        answer.frames()
        if not request["on"]:
            recorder.stop()
            return
        header = {name: request[name] for name in ("group", "rank", "host", "pid")} | {"host_id": self.endpoint["host"]}
        driver = request["driver"]
        is_here = driver["host"] == self.endpoint["host"]
        sample = None if is_here else functools.partial(self._sample_clock, choose(driver))
        recorder.start(os.path.join(request["folder"], f"{header['group']}-{header['rank']}.jsonl"), header, sample)

    def _sample_clock(self, driver: str) -> ClockSample:
        """Returns a sample of the driver's clock; called on the recorder's thread."""
        sent_ns = recorder.now_ns()
        reply = self.peers.request(driver, b"CLOCK", [], _CLOCK_TIMEOUT_S, "the driver's clock")
        received_ns = recorder.now_ns()
        there_ns = int(reply[0])
        return sent_ns, there_ns, there_ns, received_ns

    def _on_clock(self, answer: RemoteAnswer, frames: list[bytes]) -> None:
        answer.frames(b"%d" % recorder.now_ns())

    def _on_abort(self, answer: RemoteAnswer, frames: list[bytes]) -> None:
        self.abort_recovery = int(frames[0])

    def _on_sync(self, answer: RemoteAnswer, frames: list[bytes]) -> None:
        answer.frames()  # all earlier messages of the same connection have been handled

    def _on_members(self, answer: RemoteAnswer, frames: list[bytes]) -> None:
        self.members_changed(*pickle.loads(frames[0]))
        answer.frames()

    def _on_note(self, answer: RemoteAnswer, frames: list[bytes]) -> None:
        if self.on_note:
            self.on_note(pickle.loads(frames[0]))
        if answer.number:
            answer.frames()

    def _on_join(self, answer: RemoteAnswer, frames: list[bytes]) -> None:
        if self.on_join is None:
            raise ChannelError(f"{self.name} is no driver: nobody joins a run there")
        answer.frames(self.on_join(pickle.loads(frames[0])))


_OPERATIONS: dict[bytes, Callable[[Service, RemoteAnswer, list[bytes]], None]] = {
    b"PUT": Service._on_put,
    b"GET": Service._on_get,
    b"ACK": Service._on_ack,
    b"STAT": Service._on_stat,
    b"OPEN": Service._on_open,
    b"CANCEL": Service._on_cancel,
    b"MEMBERS": Service._on_members,
    b"SYNC": Service._on_sync,
    b"NOTE": Service._on_note,
    b"JOIN": Service._on_join,
    b"STORE": Service._on_store,
    b"ABORT": Service._on_abort,
    b"DOING": Service._on_doing,
    b"TO_HOST": Service._on_to_host,
    b"TRACE": Service._on_trace,
    b"CLOCK": Service._on_clock,
}
