"""What other processes may ask of a service, by name. Each runs on the thread that leads the service's event loop."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from rlhpc.runtime.comm.answers import RemoteAnswer
from rlhpc.runtime.comm.held import HeldValues
from rlhpc.runtime.comm.lane import Lane
from rlhpc.runtime.comm.pool import SegmentPool
from rlhpc.runtime.comm.queues import ChannelState, Refusal, Taker
from rlhpc.runtime.comm.segments import discard
from rlhpc.runtime.errors import ChannelError


class Home(Protocol):
    """What the operations need of a service; its attributes say more (`service.Service`)."""

    lock: threading.Lock
    channels: dict[str, ChannelState]
    held: HeldValues
    pool: SegmentPool
    lane: Lane
    aborted: int

    def members_changed(self, epoch: int, ended: Iterable[str] = ()) -> None: ...
    @property
    def doing(self) -> Callable[[], Any]: ...
    @property
    def name(self) -> str: ...
    @property
    def on_note(self) -> Callable[[dict[str, Any]], None] | None: ...
    @property
    def on_join(self) -> Callable[[dict[str, Any]], bytes] | None: ...
    def channel(self, name: str) -> ChannelState: ...
    def open_channel(self, name: str, maxsize: int, max_bytes: int) -> None: ...


def _put(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    name, key, nbytes, weight, segment, wait = pickle.loads(frames[0])
    with service.lock:
        answer.outlook = service.channel(name).outlook(key)
        admitted = service.channel(name).put(key, frames[1:], nbytes, weight, segment, answer)
        if not wait and admitted:
            refused = service.channel(name).cancel(lambda a: a is answer)
            if refused:
                answer(Refusal("full"))


def _get(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    name, key, target, wait, taker, owner = pickle.loads(frames[0])
    with service.lock:
        state = service.channel(name)
        state.note_taker(key, Taker(*taker))
        if not wait and not state.count(key):
            answer(Refusal("empty"))
        else:
            state.get(key, (owner, answer.who), target, answer)


def _ack(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    name, numbers = pickle.loads(frames[0])
    with service.lock:
        service.channel(name).acknowledge(numbers)


def _stat(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    name, key = pickle.loads(frames[0])
    with service.lock:
        state = service.channel(name)
        result = (state.count(key), state.full(key))
    answer.frames(pickle.dumps(result))


def _open(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    service.open_channel(*pickle.loads(frames[0]))
    answer([])


def _cancel(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    def matches(other: Any) -> bool:
        return isinstance(other, RemoteAnswer) and (other.peer, other.number) == (answer.peer, frames[0])

    with service.lock:
        for state in service.channels.values():
            for item in state.cancel(matches):
                discard(item.segment) if item.segment else None
            state.consumer_died(answer.who)  # an answer that crossed this: its items go back to the front


def _store(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    op, key, *values = (bytes(frame) for frame in frames)
    if op == b"wait":  # answered once somebody has set it
        service.held.when_set(key, answer.frames)
    else:
        answer.frames(*service.held.act(op, key, *values))


def _to_host(service: Home, answer: RemoteAnswer, frames: list[bytes]) -> None:
    """For a reader that cannot read a buffer on this process's accelerator; that is rare, and the only copy made here."""
    copied = service.lane.pool.to_host(*pickle.loads(frames[0]))
    path, spans = service.pool.write([memoryview(copied.numpy())])
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
