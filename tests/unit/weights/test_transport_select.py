"""Which road a version takes, by what its ends have said of themselves."""

from __future__ import annotations

import pytest

from rlhpc.runtime.errors import ConfigError
from rlhpc.weights.transport_select import AUTO, GLOO, HOST, IPC, NCCL, SEVERAL, EndpointDevice, choose


def end(host: str = "a", card: str = "0", nccl: bool = True, peers: str = "") -> EndpointDevice:
    return EndpointDevice("1", host, card, nccl, (card, *peers))


CASES = [
    ("all on the sender's card", [end(), end()], AUTO, IPC),
    (
        "the sender's card is a peer of all others",
        [end(), end(card="1", peers="02"), end(card="2", peers="0")],
        AUTO,
        IPC,
    ),
    ("it is a peer of some", [end(card="1", peers="0"), end(card="2", peers="1")], AUTO, NCCL),
    ("the same number on another host is none", [end("b", "1", peers="0")], AUTO, NCCL),
    ("several streams to a peer", [end(card="1", peers="0")], SEVERAL, IPC),
    ("each on its own, of one host or two", [end(card="1"), end("b")], AUTO, NCCL),
    ("two on one card, which NCCL does not take", [end("b"), end("b")], AUTO, HOST),
    ("one on the sender's card, one on another", [end(), end(card="1")], AUTO, HOST),
    ("the same number of card on another host", [end("b", "0")], AUTO, NCCL),
    ("one on the CPU", [end(card=""), end("b")], AUTO, HOST),
    ("one without NCCL", [end("b", nccl=False)], AUTO, HOST),
    ("one has not said anything", [end(card="1"), None], AUTO, HOST),
    ("nobody", [], AUTO, HOST),
    ("several streams of a rank", [end("b")], SEVERAL, HOST),
    ("several streams to one card", [end()], SEVERAL, IPC),
    ("asked for", [end()], HOST, HOST),
    ("asked for, on CPUs", [end(card="", nccl=False)], GLOO, GLOO),
    ("asked for, and not all have said anything", [None], NCCL, HOST),
]


@pytest.mark.parametrize(("receivers", "wanted", "road"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_road_follows_from_where_all_compute(
    receivers: list[EndpointDevice | None], wanted: str, road: str
) -> None:
    assert choose(end(), receivers, wanted)[0] == road


@pytest.mark.parametrize(("wanted", "receiver"), [(NCCL, end()), (IPC, end("b"))])
def test_a_road_that_is_not_there_is_refused(wanted: str, receiver: EndpointDevice) -> None:
    with pytest.raises(ConfigError, match=f"rollout.weight_sync is '{wanted}'"):
        choose(end(), [receiver], wanted)
