"""Weights on one accelerator and between two (`tests/accelerators.py`); on the CPU by the host and by gloo."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from weight_ranks import Actor, Trainer

from rlhpc import FlexiblePlacementStrategy, Session, WorkerGroup
from tests.accelerators import ON_CPU, cluster_of, placed

pytestmark = pytest.mark.gpu
Groups = dict[int, WorkerGroup]


@pytest.fixture
def launched(request: pytest.FixtureRequest) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    """A trainer, and one who follows it on the same accelerator or on another."""
    cluster, cards = cluster_of(request.param), request.param
    other = placed(1) if ON_CPU else FlexiblePlacementStrategy([[cards - 1]])
    yield (
        Trainer.create_group().launch(cluster, placement_strategy=placed(1), name="trainer"),
        Actor.create_group().launch(cluster, placement_strategy=other, name="near"),
    )
    if session := Session.running():
        session.stop()


def follow(launched: tuple[WorkerGroup, WorkerGroup], sync: str) -> int:
    """Parts that were not on the host in ten versions, each of which arrived bit for bit."""
    trainer, near = launched
    for handle in [trainer.open("frozen", sync, "", [("near", [0])]), near.open("frozen", False, sync)]:
        handle.wait()
    for version in range(10):
        handles = [near.take(), trainer.send(version, 0.5)]
        taken, (sent,) = [handle.wait() for handle in handles]
        assert taken == [(version, sent)]
    ((carried, _),) = trainer.carried().wait()
    return int(carried)


@pytest.mark.parametrize("launched", [1], indirect=True)
def test_weights_stay_on_one_accelerator(launched: tuple[WorkerGroup, WorkerGroup]) -> None:
    carried = follow(launched, "auto")
    assert carried == 0 if ON_CPU else carried >= 8  # all but the first


@pytest.mark.parametrize("launched", [2], indirect=True)
def test_weights_go_from_one_accelerator_to_the_other(launched: tuple[WorkerGroup, WorkerGroup]) -> None:
    assert follow(launched, "weight_ranks:ByGroup" if ON_CPU else "weight_ranks:InParts") > 0
