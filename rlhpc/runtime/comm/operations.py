"""What other processes may ask of a service, by name. Each runs on the thread that leads the service's event loop."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlhpc.runtime.comm.answers import RemoteAnswer
from rlhpc.runtime.comm.segments import discard

if TYPE_CHECKING:
    from rlhpc.runtime.comm.service import Service


def _put(service: Service, answer: RemoteAnswer, frames: list[bytes]) -> None:
    name, key, nbytes, weight, segment, wait = pickle.loads(frames[0])
    with service.lock:
        answer.outlook = service.channel(name).outlook(key)
        admitted = service.channel(name).put(key, frames[1:], nbytes, weight, segment, answer)
        if not wait and admitted:
            refused = service.channel(name).cancel(lambda a: a is answer)
            if refused:
                answer("full")


def _get(service: Service, answer: RemoteAnswer, frames: list[bytes]) -> None:
    name, key, target, wait, host = pickle.loads(frames[0])
    with service.lock:
        state = service.channel(name)
        state.queue(key).taker = host
        if not wait and not state.queue(key).items:
            answer("empty")
        else:
            state.get(key, answer.who, target, answer)


def _ack(service: Service, answer: RemoteAnswer, frames: list[bytes]) -> None:
    name, numbers = pickle.loads(frames[0])
    with service.lock:
        service.channel(name).acknowledge(numbers)


def _stat(service: Service, answer: RemoteAnswer, frames: list[bytes]) -> None:
    name, key = pickle.loads(frames[0])
    with service.lock:
        state = service.channel(name)
        result = (len(state.queue(key).items), state.full(key))
    answer.frames(pickle.dumps(result))


def _open(service: Service, answer: RemoteAnswer, frames: list[bytes]) -> None:
    service.open_channel(*pickle.loads(frames[0]))
    answer([])


def _cancel(service: Service, answer: RemoteAnswer, frames: list[bytes]) -> None:
    def matches(other: Any) -> bool:
        return isinstance(other, RemoteAnswer) and (other.peer, other.number) == (answer.peer, frames[0])

    with service.lock:
        for state in service.channels.values():
            for item in state.cancel(matches):
                discard(item.segment) if item.segment else None
            state.consumer_died(answer.who)  # an answer that crossed this: its items go back to the front


def _store(service: Service, answer: RemoteAnswer, frames: list[bytes]) -> None:
    op, key, *values = (bytes(frame) for frame in frames)
    if op == b"wait":  # answered once somebody has set it
        service.held.when_set(key, answer.frames)
    else:
        answer.frames(*service.held.act(op, key, *values))


def _doing(service: Service, answer: RemoteAnswer, frames: list[bytes]) -> None:
    answer.frames(pickle.dumps(service.doing()))


def _abort(service: Service, answer: RemoteAnswer, frames: list[bytes]) -> None:
    service.aborted = True


def _note(service: Service, answer: RemoteAnswer, frames: list[bytes]) -> None:
    if service.on_note:
        service.on_note(pickle.loads(frames[0]))


OPERATIONS: dict[bytes, Callable[[Service, RemoteAnswer, list[bytes]], None]] = {
    b"PUT": _put,
    b"GET": _get,
    b"ACK": _ack,
    b"STAT": _stat,
    b"OPEN": _open,
    b"CANCEL": _cancel,
    b"NOTE": _note,
    b"STORE": _store,
    b"ABORT": _abort,
    b"DOING": _doing,
}
