"""Messages whose tensors stay on the accelerator: through channels, between ranks, to several; and where that cannot be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc import Channel, Cluster, NodePlacementStrategy, WorkerGroup

sys.path.insert(0, str(Path(__file__).parent))

from lane_roles import OnDevice

SIZES = [20_000, 20_000, 30_000, 20_000, 5, 60_000]
ON_DEVICE = ["pictures", "again", "state"]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., WorkerGroup]]:
    """Launches ranks that compute on the device of an address; on none where that is empty."""
    groups: list[WorkerGroup] = []
    cluster = Cluster.local(num_nodes=1, accelerators_per_node=0)

    def start(name: str, address: str = "one", count: int = 1, **options: Any) -> WorkerGroup:
        made = OnDevice.create_group(tmp_path, address, options)
        groups.append(made.launch(cluster, placement_strategy=NodePlacementStrategy([0] * count), name=name))
        return groups[-1]

    yield start
    for group in groups:
        group.shutdown()


def check(found: list[dict[str, Any]], sizes: list[int], there: list[int]) -> None:
    """What came is what was sent, and on the device where its number is in `there`."""
    assert len(found) == len(sizes)
    for number, (got, size) in enumerate(zip(found, sizes, strict=True)):
        assert torch.equal(got["pictures"], torch.full((size, 3), number, dtype=torch.uint8))
        assert torch.equal(got["state"], torch.arange(size) * 0.5 + number)
        np.testing.assert_array_equal(got["array"], np.full(size, number))
        assert got["note"] == (number, "text") and got["small"].tolist() == [number]
        assert got["there"] == (ON_DEVICE if number in there else []), number
        assert got["same"]


def check_known(found: list[dict[str, Any]], crossed: int) -> None:
    """The first is sent before the reader is known, the second perhaps, and the fifth is small."""
    there = [number for number, got in enumerate(found) if got["there"]]
    assert there in ([1, 2, 3, 5], [2, 3, 5]) and crossed == len(there)
    check(found, SIZES, there)


def exchange(source: WorkerGroup, sink: WorkerGroup, home: str | None) -> tuple[int, list[dict[str, Any]]]:
    messages, turns = Channel.create("messages", home=home), Channel.create("turns")
    sent, got = source.put(messages, SIZES, turns), sink.get(messages, len(SIZES), turns)
    return sent.wait()[0], got.wait()[0]


@pytest.mark.parametrize("home", [None, "sink", "source"])
def test_tensors_stay_on_the_device_that_both_have(ranks, home):
    """Once it is known where they go, from the second or third message on; small ones travel in the message."""
    source, sink = ranks("source"), ranks("sink")
    crossed, found = exchange(source, sink, home)
    check_known(found, crossed)


@pytest.mark.parametrize(("one", "other"), [("one", "two"), ("one", ""), ("", "one"), ("", "")])
def test_elsewhere_they_go_through_the_host(ranks, one, other):
    crossed, found = exchange(ranks("source", one), ranks("sink", other), None)
    check(found, SIZES, [])
    assert crossed == 0


@pytest.mark.parametrize("options", [{"opens": False}, {"exports": False}])
def test_a_device_that_shares_nothing_costs_no_message(ranks, options):
    crossed, found = exchange(ranks("source", **options), ranks("sink", **options), None)
    check(found, SIZES, [])
    assert crossed == (0 if "exports" in options else 1), "after one that could not be opened there is no other"


def test_whoever_takes_it_gets_it(ranks):
    """The next to take from a key computes elsewhere: what was sent by the lane is copied for it."""
    source, near, far, plain = ranks("source"), ranks("near"), ranks("far", "two"), ranks("plain", "")
    channel = Channel.create("messages", home="source")
    _first(source, near, channel)
    # What a put is told of the key's taker counts from the next one on.
    for sink, sent in ((far, 2), (plain, 1), (near, 0)):
        assert source.put(channel, SIZES[:2]).wait() == [sent]
        check(sink.get(channel, 2).wait()[0], SIZES[:2], [])
    assert source.put(channel, SIZES[:2]).wait() == [1]
    check(near.get(channel, 2).wait()[0], SIZES[:2], [1])


def test_more_messages_than_there_is_room_for(ranks):
    """Nobody takes them meanwhile: those for which there is no room go through the host, and nothing waits."""
    source, sink = ranks("source", budget=450_000), ranks("sink")
    channel = Channel.create("messages", home="sink")
    check(_first(source, sink, channel), [20_000], [])
    assert source.put(channel, [20_000] * 8).wait() == [3]
    check(sink.get(channel, 8).wait()[0], [20_000] * 8, [0, 1, 2])
    assert sink.park().wait() == [0]
    assert source.put(channel, [20_000] * 8).wait() == [3], "what was taken is free"
    check(sink.get(channel, 8).wait()[0], [20_000] * 8, [0, 1, 2])
    assert sink.park().wait() == [0] and source.park().wait() == [0], "and all of it is given back"


def _first(source: WorkerGroup, sink: WorkerGroup, channel: Channel) -> list[dict[str, Any]]:
    """Messages by which the source learns where the sink is: the first of them, and more until one has crossed."""
    found: list[list[dict[str, Any]]] = []
    crossed = [0]
    while crossed == [0] and len(found) < 20:
        got = sink.get(channel, 1)
        crossed = source.put(channel, [20_000]).wait()
        found.append(got.wait()[0])
    sink.park().wait()
    return found[0]


def test_between_ranks(ranks):
    one, other = ranks("one"), ranks("other")
    sent, got = one.tell(SIZES, "other", 0), other.hear(len(SIZES), "one", 0)
    check_known(got.wait()[0], sent.wait()[0])


@pytest.mark.parametrize(("third", "crossed"), [("one", [1, 2, 3, 5]), ("two", [])])
def test_to_several_at_once(ranks, third, crossed):
    """By the lane only if it reaches all of them."""
    one, two, three = ranks("one"), ranks("two"), ranks("three", third)
    groups = [("one", [0]), ("two", [0]), ("three", [0])]
    calls = [group.tell_all(SIZES, groups, ("one", 0)) for group in (one, two, three)]
    sent, *found = [call.wait()[0] for call in calls]
    for got in found:
        there = [number for number, one_of in enumerate(got) if one_of["there"]]
        assert len(there) == sent
        check(got, SIZES, there)
    assert sent <= len(crossed)


def test_a_channel_that_is_made_anew_holds_no_memory(ranks):
    source, sink = ranks("source"), ranks("sink")
    channel = Channel.create("messages", home="sink")
    _first(source, sink, channel)
    assert source.put(channel, SIZES[:2]).wait() == [2]
    Channel.create("messages", home="sink")
    assert source.park().wait() == [0], "nobody will come for what was in it"
