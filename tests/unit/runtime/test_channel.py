"""Channels of several homes: each key has one, which hands its items out and takes them back."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.runtime import channel as module
from rlhpc.runtime.channel import Channel, LeasedItem


@pytest.mark.parametrize("key", [str(k) for k in range(6)] + ["prompts", "default_queue"])
def test_a_leased_item_is_acknowledged_where_it_was_leased(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    homes = [{"ipc": f"home{k}"} for k in range(3)]
    channel = Channel("spread", homes, maxsize=0)
    posts: list[tuple[Any, bytes, list[bytes]]] = []
    context = SimpleNamespace(
        host="here",
        wait_deadline=1.0,
        service=SimpleNamespace(peers=SimpleNamespace(post=lambda *post: posts.append(post))),
    )
    monkeypatch.setattr(module, "current", lambda: context)
    monkeypatch.setattr(module, "choose", lambda home: home)
    monkeypatch.setattr(module, "address", lambda: "")
    monkeypatch.setattr(Channel, "_fetch", lambda self, *args, **options: [("item", 7)])
    leased = channel.take_nowait(key)
    assert leased == LeasedItem("item", 7, key)
    channel.done(leased)
    [(home, kind, [message])] = posts
    assert (home, kind) == (channel._home_of(key), b"ACK") and pickle.loads(message) == ("spread", [7])
