"""The lane on a real accelerator (`tests/accelerators.py`); on the CPU the same messages go through the host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhpc import Channel, WorkerGroup
from tests.accelerators import ON_CPU, cluster_of, kind, placed

sys.path.insert(0, str(Path(__file__).parent))

from lane_roles import OnCard

pytestmark = pytest.mark.gpu
COUNT, SIZE = 200, 300_000


@pytest.fixture
def card() -> Iterator[Callable[[str], WorkerGroup]]:
    """Launches ranks on one accelerator."""
    groups: list[WorkerGroup] = []

    def start(name: str) -> WorkerGroup:
        groups.append(OnCard.create_group(kind()).launch(cluster_of(1), placement_strategy=placed(1), name=name))
        return groups[-1]

    yield start
    for group in groups:
        group.shutdown()


def test_what_is_written_late_arrives(card: Callable[[str], WorkerGroup]) -> None:
    """Each message is made by work that the accelerator is still at when it is sent: whoever did not wait would see what was
    there before."""
    source, sink = card("source"), card("sink")
    messages, turns = Channel.create("messages", home="sink"), Channel.create("turns", home="source")
    sent, got = source.pour(messages, turns, COUNT, SIZE), sink.drain(messages, turns, COUNT)
    crossed = sent.wait()[0]
    assert got.wait()[0] == [(float(number), float(number), kind()) for number in range(COUNT)]
    assert crossed == 0 if ON_CPU else crossed >= COUNT - 2, "the first ones are sent before it is known where they go"


def test_memory_is_bounded_and_given_back(card: Callable[[str], WorkerGroup]) -> None:
    """Nobody takes the messages meanwhile; what is sent afterwards is whole."""
    source, sink = card("source"), card("sink")
    messages, turns = Channel.create("messages", home="sink"), Channel.create("turns", home="source")
    for _ in range(2):
        sent, got = source.pour(messages, turns, 5, SIZE), sink.drain(messages, turns, 5)
        sent.wait()
        assert got.wait()[0] == [(float(number), float(number), kind()) for number in range(5)]
        assert sink.park().wait() == [0] and source.park().wait() == [0]
