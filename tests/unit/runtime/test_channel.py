"""Channels: what ranks put is got by others in order; each key has one home, which hands its items out and takes them back."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhpc.runtime import channel as module
from rlhpc.runtime.channel import Channel, LeasedItem, QueueEmpty, QueueFull
from rlhpc.runtime.comm.context import Context, install
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded
from rlhpc.runtime.host import process_key
from tests.serving import temporary_scratch
from tests.unit.runtime.comm.rank_pairs import rank_pair


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
    assert (home, kind) == (channel._find_home(key), b"ACK") and pickle.loads(message) == ("spread", [7])


# -- two ranks -------------------------------------------------------------------------------------------------------


class Pair:
    """Two ranks in this process, each with its service and sockets; one of them acts at a time."""

    def __init__(self, contexts: tuple[Context, Context]) -> None:
        self.left, self.right = contexts

    def act(self, context: Context) -> None:
        install(context)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with temporary_scratch() as scratch, rank_pair(tmp_path, scratch) as contexts:
        yield Pair(contexts)


@pytest.fixture(params=["here", "elsewhere"])
def channel(pair: Pair, request: pytest.FixtureRequest) -> Channel:
    """A channel for three items a key, whose home is the rank that acts, or the other."""
    Channel.create("items", maxsize=3)
    if request.param == "elsewhere":
        pair.act(pair.right)
    return pickle.loads(pickle.dumps(Channel.connect("items", timeout=5.0)))  # type: ignore[no-any-return]  # as a rank gets it


def test_items_come_in_order_and_by_key(channel: Channel) -> None:
    large = np.arange(100_000.0)
    for item in (1, {"large": large}, "three"):
        channel.put(item)
    channel.put("other", key="1")
    assert channel.qsize() == 3 and channel.full() and not channel.empty("1") and channel.empty("2")
    assert channel.get() == 1
    np.testing.assert_array_equal(channel.get()["large"], large)
    assert channel.get_nowait() == "three" and channel.get(1) == "other"
    assert channel.empty() and repr(channel) == "Channel('items')"


def test_a_full_and_an_empty_one_do_not_keep_who_does_not_wait(channel: Channel) -> None:
    with pytest.raises(QueueEmpty, match="an item in channel 'items', key 'default_queue'"):
        channel.get_nowait()
    for item in range(3):
        channel.put_nowait(item)
    with pytest.raises(QueueFull, match="room in channel 'items'"):
        channel.put_nowait(3)
    with pytest.raises(DeadlineExceeded):
        channel.get("nothing", timeout=0.05)
    assert [channel.get() for _ in range(3)] == [0, 1, 2]


def test_put_and_get_in_the_background(channel: Channel) -> None:
    rows = np.zeros(20_000)
    waiting = channel.get(async_op=True)
    put = channel.put({"rows": rows}, async_op=True)
    rows += 1  # it was copied
    assert put is not None
    put.wait(10.0)
    assert (waiting.wait(10.0)["rows"] == 0).all() and channel.empty()


def test_who_waits_for_room_gets_it(channel: Channel) -> None:
    for item in range(3):
        channel.put(item)
    put = channel.put("late", async_op=True)
    assert channel.get() == 0 and put is not None
    put.wait(10.0)
    assert [channel.get() for _ in range(3)] == [1, 2, "late"]


def test_a_batch_has_the_weight_that_was_asked_for(channel: Channel) -> None:
    for item, weight in enumerate((2.0, 3.0, 9.0)):
        channel.put(item, weight=weight)
    assert channel.get_batch(5.0) == [0, 1]
    assert channel.get_batch(5.0, async_op=True).wait(10.0) == [2], "one at least"


def test_what_is_entrusted_is_whole_at_the_home(channel: Channel, pair: Pair) -> None:
    channel.entrust({"large": np.ones(100_000)})
    pair.act(pair.left)
    assert pair.left.service.channel("items").count("default_queue") == 1
    assert Channel.connect("items").get()["large"].sum() == 100_000


def test_a_leased_item_is_another_ranks_until_it_is_done(pair: Pair) -> None:
    made = Channel.create("prompts")
    for item in range(2):
        made.put(item)
    pair.act(pair.right)
    other = Channel.connect("prompts")
    first = other.take_nowait()
    other.done(other.take_nowait())
    with pytest.raises(QueueEmpty):
        other.take_nowait()
    other.qsize()  # answered after the acknowledgement
    with pair.left.service.lock:
        pair.left.service.channel("prompts").consumer_died(process_key(pair.right.service.endpoint))
    assert first.item == 0 and other.get() == 0 and other.empty(), "only the one that was not done comes back"


def test_many_small_items_are_not_confirmed_one_by_one(pair: Pair) -> None:
    Channel.create("open")
    pair.act(pair.right)
    other = Channel.connect("open")
    for item in range(200):
        other.put(item)
    assert [other.get() for _ in range(200)] == list(range(200))


def test_keys_have_their_homes_among_the_ranks(pair: Pair) -> None:
    pair.left.registry.put("groups", "right", {"world_size": 1})
    made = Channel.create("spread", home="right")
    assert made._homes == [pair.right.service.endpoint]
    made.put("x", key="5")
    # `put` does not wait for the home: the answer to `qsize` comes after the item.
    assert made.qsize("5") == 1 and pair.right.service.channel("spread").count("5") == 1 and made.get("5") == "x"
    both = Channel("both", [pair.left.service.endpoint, pair.right.service.endpoint], 0)
    assert [both._find_home(str(key))["ipc"] == pair.left.service.endpoint["ipc"] for key in range(4)] == [1, 0, 1, 0]
    assert both._find_home("prompts") == both._find_home("prompts")


def test_a_channel_that_nobody_makes_is_named(pair: Pair) -> None:
    with pytest.raises(ChannelError, match=r"Channel.create\('none'\)"):
        Channel.connect("none", timeout=0.05)
