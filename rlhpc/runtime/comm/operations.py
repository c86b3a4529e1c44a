"""Operations that other processes may request of a service, by name. Each runs on the thread that runs the service's event
loop.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from rlhpc.runtime.comm.device_memory import Crossing, DeviceMappings, DevicePool, NotReadable
from rlhpc.runtime.comm.payload import Origin, rebuild_tensor
from rlhpc.runtime.comm.queues import ChannelState, Refusal, RemoteAnswer, Taker
from rlhpc.runtime.comm.shared_memory import SegmentPool
from rlhpc.runtime.comm.zmq_sockets import Peers, choose
from rlhpc.runtime.errors import ChannelError
from rlhpc.runtime.scratch import Scratch


class HeldValues:
    """Key-value store of a process group. Any thread may call any method."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, list[Callable[[bytes], None]]] = {}
        self._grew = threading.Condition()

    def act(self, op: bytes, key: bytes, *values: bytes) -> list[bytes]:
        """Executes one of the store's operations, by torch's names.

        Raises:
            KeyError: The key has not been set.
            ValueError: There is no such operation.
        """
        with self._grew:
            stored_values = self._values
            if op == b"set":
                stored_values[key] = values[0]
                self._tell(key)
                return [b""]
            if op == b"get":
                return [stored_values[key]]
            if op == b"has":
                return [b"1" if key in stored_values else b"0"]
            if op == b"add":
                stored_values[key] = str(int(stored_values.get(key, b"0")) + int(values[0])).encode()
                self._tell(key)
                return [stored_values[key]]
            if op == b"swap":  # torch's compare_set: an absent key counts as an empty value
                if stored_values.get(key, b"") == values[0]:
                    stored_values[key] = values[1]
                    self._tell(key)
                return [stored_values.get(key, values[0])]
            if op == b"del":
                return [b"1" if stored_values.pop(key, None) is not None else b"0"]
            if op == b"count":
                return [str(sum(stored_key.startswith(key) for stored_key in stored_values)).encode()]
        raise ValueError(f"no store operation {op!r}")

    def _tell(self, key: bytes) -> None:
        self._grew.notify_all()
        for answer in self._waiting.pop(key, ()):
            answer(self._values[key])

    def when_set(self, key: bytes, answer: Callable[[bytes], None]) -> None:
        """Calls `answer` with the value of a key: now, or once it has been set."""
        with self._grew:
            if key in self._values:
                answer(self._values[key])
            else:
                self._waiting.setdefault(key, []).append(answer)

    def wait(self, key: bytes, timeout: float) -> bytes | None:
        """Returns the value of a key; None if it is not set within `timeout` seconds."""
        with self._grew:
            self._grew.wait_for(lambda: key in self._values, timeout)
            return self._values.get(key)


#: Seconds for the sender's service to copy a message to the host.
_DEADLINE_S = 60.0

#: `(origin, path, bytes)` -> memory laid out as a segment.
Read = Callable[[Origin, str, int], memoryview]


class DeviceChannel:
    """This process's ends of the device channel.

    Args:
        scratch: The session's folders on this host.
        endpoint: This process's service.
        peers: Connections to other processes.
        read: Reads a segment, of this host or another.

    Attributes:
        pool: Buffers that this process sends from.
        takers: Host and accelerator of the ranks that this process has sent to.
    """

    def __init__(self, scratch: Scratch, endpoint: dict[str, str], peers: Peers, read: Read) -> None:
        self.pool = DevicePool(scratch, endpoint)
        self._mappings = DeviceMappings(self.pool.local)
        self._peers, self._read = peers, read
        self.takers: dict[tuple[str, int], Taker] = {}

    @property
    def crossed(self) -> int:
        """Number of messages of this process whose tensors stayed on the accelerator."""
        return self.pool.crossed

    def to(self, takers: Collection[Taker]) -> DevicePool | None:
        """Returns the pool to send from to these consumers; None if it does not reach all of them, as far as is known."""
        return self.pool if takers and all(self.pool.reaches(*taker) for taker in takers) else None

    def settle(self) -> None:
        """Releases buffers whose copies are complete; called before this process waits."""
        if not self._mappings.reading:
            return
        with contextlib.suppress(RuntimeError):  # of an accelerator that has failed; who uses it will say so
            self._mappings.settle()

    def park(self) -> None:
        """Releases the accelerator memory of messages, and closes other processes' buffers."""
        self._mappings.park()
        self.pool.park()

    def forget(self) -> None:
        """Drops all unread messages and known locations after other ranks have died: ranks may restart elsewhere."""
        self.pool.forget()
        self.takers.clear()

    def close(self) -> None:
        """Closes other processes' buffers, and drops all messages."""
        with contextlib.suppress(RuntimeError):
            self._mappings.park()
        self.pool.forget()

    def land(self, crossing: Crossing, origin: Origin, reader: int) -> list[Any]:
        """Returns the tensors of a message, on this process's accelerator, or on the CPU if it has none.

        Raises:
            SegmentGone: The sender has ended, or has forgotten the message.
            ChannelError: As above, when the sender was asked for a copy on the host.
        """
        try:
            return self._mappings.take(crossing, reader)
        except NotReadable as error:
            return self._through_the_host(crossing, origin, reader, str(error))

    def _through_the_host(self, crossing: Crossing, origin: Origin, reader: int, why: str) -> list[Any]:
        request = pickle.dumps((crossing.path, reader, why))
        purpose = "the sender of a message to copy it from its accelerator"
        (reply,) = self._peers.request(choose(crossing.endpoint), b"TO_HOST", [request], _DEADLINE_S, purpose)
        path, start = pickle.loads(reply)
        host_copy = self._read(origin, path, crossing.size)[start:]
        return [
            rebuild_tensor(host_copy[view.offset : view.offset + view.nbytes], view.dtype, view.shape, "", False, False)
            for view in crossing.parts
        ]


class Home(Protocol):
    """The service's attributes that the operations use; documented in `service.Service`."""

    lock: threading.Lock
    channels: dict[str, ChannelState]
    held: HeldValues
    pool: SegmentPool
    lane: DeviceChannel
    aborted: int

    def members_changed(self, epoch: int, processes: Iterable[str] = ()) -> None: ...
    @property
    def doing(self) -> Callable[[], Any]: ...
    @property
    def name(self) -> str: ...
    @property
    def on_note(self) -> Callable[[dict[str, Any]], None] | None: ...
    @property
    def on_join(self) -> Callable[[dict[str, Any]], bytes] | None: ...
    def channel(self, name: str) -> ChannelState: ...
    def withdraw(self, matches: Callable[[Callable[..., bool]], bool]) -> None: ...
    def open_channel(self, name: str, maxsize: int, max_bytes: int) -> None: ...


def _put(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    name, key, nbytes, weight, segment, should_wait = pickle.loads(frames[0])
    with service.lock:
        answer.outlook = service.channel(name).outlook(key)
        service.channel(name).put(key, frames[1:], nbytes, weight, segment, answer)
        if not should_wait and service.channel(name).cancel(lambda a: a is answer):
            answer(Refusal("full"))


def _get(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    name, key, target, should_wait, taker, owner = pickle.loads(frames[0])
    with service.lock:
        state = service.channel(name)
        state.note_taker(key, Taker(*taker))
        if not should_wait and not state.count(key):
            answer(Refusal("empty"))
        else:
            state.get(key, (owner, answer.connection_name, answer.request_name), target, answer)


def _ack(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    name, item_ids = pickle.loads(frames[0])
    with service.lock:
        service.channel(name).acknowledge(item_ids)


def _stat(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    name, key = pickle.loads(frames[0])
    with service.lock:
        state = service.channel(name)
        answer.frames(pickle.dumps((state.count(key), state.full(key))))


def _open(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    service.open_channel(*pickle.loads(frames[0]))
    answer([])


def _cancel(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    def matches(other: Any) -> bool:
        return isinstance(other, RemoteAnswer) and (other.peer, other.number) == (answer.peer, frames[0])

    request_name = RemoteAnswer(answer.reply, answer.peer, frames[0]).request_name
    with service.lock:
        service.withdraw(matches)
        for state in service.channels.values():
            state.consumer_died(request_name)  # an answer that crossed this: its items go back to the front


def _store(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    op, key, *values = (bytes(frame) for frame in frames)
    if op == b"wait":  # answered once it has been set
        service.held.when_set(key, answer.frames)
    else:
        answer.frames(*service.held.act(op, key, *values))


def _to_host(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    """Answers a reader that cannot read a buffer on this process's accelerator with a copy on the host. This is rare; no other
    operation here copies.
    """
    path, spans = service.pool.write([memoryview(service.lane.pool.to_host(*pickle.loads(frames[0])).numpy())])
    answer.frames(pickle.dumps((path, spans[0][0])))


def _doing(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    answer.frames(pickle.dumps(service.doing()))


def _abort(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    service.aborted = int(frames[0])


def _sync(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    answer.frames()  # all that the same connection has brought before has been handled


def _members(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    service.members_changed(*pickle.loads(frames[0]))
    answer.frames()


def _note(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    if service.on_note:
        service.on_note(pickle.loads(frames[0]))


def _noted(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    _note(service, answer, frames)
    answer.frames()


def _join(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    if service.on_join is None:
        raise ChannelError(f"{service.name} is no driver: nobody joins a run there")
    answer.frames(service.on_join(pickle.loads(frames[0])))


OPERATIONS: dict[bytes, Callable[[Home, RemoteAnswer, list[bytes]], None]] = {
    b"PUT": _put,
    b"GET": _get,
    b"ACK": _ack,
    b"STAT": _stat,
    b"OPEN": _open,
    b"CANCEL": _cancel,
    b"MEMBERS": _members,
    b"SYNC": _sync,
    b"NOTE": _note,
    b"NOTED": _noted,
    b"JOIN": _join,
    b"STORE": _store,
    b"ABORT": _abort,
    b"DOING": _doing,
    b"TO_HOST": _to_host,
}
