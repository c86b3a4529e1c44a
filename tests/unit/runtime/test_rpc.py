"""Calls and ranks that leave while they are under way, without processes."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.runtime import rpc
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.runtime.rpc import RpcClient


class Lines:
    """Sockets whose ranks answer only when they are told to."""

    def __init__(self, service: Any) -> None:
        self.sent: dict[int, bytes] = {}
        self.answers: deque[list[bytes]] = deque()
        self.gone: set[int] = set()

    def interrupt(self) -> None: ...

    def send(self, record: dict[str, Any], frames: list[Any]) -> bool:
        self.sent[int(record["ipc"])] = frames[0]
        return int(record["ipc"]) not in self.gone

    def receive(self, timeout_ms: int) -> list[list[bytes]]:
        return [self.answers.popleft() for _ in range(min(4, len(self.answers)))]

    def answer(self, *ranks: int) -> None:
        self.answers.extend([self.sent[rank], b"ok", b"0.1", b"%d" % rank] for rank in ranks)


class Walked(dict[bytes, Any]):
    """A dictionary that counts how often somebody went through all of it."""

    walks = 0

    def items(self) -> Any:
        self.walks += 1
        return super().items()


class Packed:
    def __init__(self) -> None:
        self.discarded: list[int] = []

    def frames(self, reader: int) -> list[bytes]:
        return [b""]

    def discard(self, first: int, end: int) -> None:
        self.discarded += range(first, end)


@pytest.fixture
def packed() -> Packed:
    return Packed()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, packed: Packed) -> RpcClient:
    monkeypatch.setattr(rpc, "CallSender", Lines)
    monkeypatch.setattr(rpc, "busy", lambda *_: [])
    service = SimpleNamespace(epoch=0, pack=lambda *_, **__: packed, unpack=lambda frames: int(frames[0]))
    context: Any = SimpleNamespace(service=service, wait_deadline=30.0)
    made = RpcClient(context, lambda error: None, lambda: None)
    made._pending_calls = Walked()
    return made


def records(count: int) -> list[dict[str, Any]]:
    ends = [{"host": "here", "ipc": str(rank)} for rank in range(count)]
    return [
        {"group": "g", "rank": rank, "incarnation": "a", "rpc": end, "data": end}
        for rank, end in zip(itertools.count(), ends)
    ]


def test_calls_are_looked_through_once_for_each_rank_that_leaves(client: RpcClient) -> None:
    ranks = records(200)
    client.leave({**ranks[0], "rank": 1000})
    call = client.call(ranks, "m", (), {})
    client._sender.answer(*range(200))
    assert call.wait() == list(range(200))
    assert client._pending_calls.walks == 1


def test_whoever_leaves_is_not_waited_for(client: RpcClient) -> None:
    """Whether it leaves before, during or after the call; what it had answered before counts."""
    ranks = records(5)
    client.leave(ranks[1])
    call = client.call(ranks, "m", (), {})
    client._sender.answer(0, 2)
    client.leave(ranks[2])
    client.leave(ranks[3])
    client.leave({**ranks[4], "incarnation": "another"})
    with pytest.raises(DeadlineExceeded, match=r"on ranks \[4\]"):
        call.wait(0.05)
    threading.Timer(0.05, client._sender.answer, [4]).start()
    assert call.wait() == [0, 2, 4] and call.ranks == [0, 2, 4]
    assert not client._pending_calls


def test_what_a_rank_that_is_gone_does_not_get_is_freed(client: RpcClient, packed: Packed) -> None:
    client._sender.gone = {1, 3}
    client.call(records(4), "m", (), {})
    assert packed.discarded == [1, 3]
