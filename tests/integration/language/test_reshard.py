"""Weights from shards to shards, between real processes: each box is the sender's bit for bit, nobody sends more than its
share, and what never changes is sent once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from reshard_ranks import FROZEN, LARGE, PART, SHAPES, Engine, Trainer, wanted

from rlhpc import Cluster, NodePlacementStrategy, Session, WorkerGroup

Groups = dict[str, WorkerGroup]


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    """Four ranks that train; an engine of two ranks on their host, and one on another."""
    session = Session.start(tcp_address="127.0.0.1")
    cluster = Cluster.local(1, 0)
    made = {"trainer": Trainer.create_group().launch(cluster, NodePlacementStrategy([0] * 4), "trainer", wait=False)}
    for name, env in (("near", {}), ("far", {"RLHPC_HOST_ID": "elsewhere"})):
        made[name] = Engine.create_group().launch(
            cluster, NodePlacementStrategy([0] * 2), name, env_vars=env, wait=False
        )
    for group in made.values():
        group.wait_ready()
    yield made
    session.stop()


def wait_all(*handles: object) -> list[list[object]]:
    return [handle.wait(120) for handle in handles]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("layout", "delta", "experts", "everything"),
    [
        ("4", "off", False, False),
        ("2x2", "frozen", True, False),
        ("copies", "elements", False, False),
        ("whole", "frozen", False, True),  # engines that do not say what they want get all of it
    ],
)
def test_each_box_arrives_bit_for_bit(groups: Groups, layout: str, delta: str, experts: bool, everything: bool) -> None:
    trainer, near, far = groups["trainer"], groups["near"], groups["far"]
    if everything:  # they have said otherwise, and a rank says so once
        for group in (near, far):
            group.shutdown()
            group.relaunch().wait_ready()
    wait_all(trainer.open(layout, delta, experts), near.open(everything), far.open(everything))
    parts = [(name, box) for rank in (0, 1) for name, boxes in wanted(rank).items() for box in boxes]
    total = sum(4 * box.numel for _, box in parts)
    fixed = sum(4 * box.numel for name, box in parts if FROZEN.match(name))
    for version in range(5):
        if version == 3:  # an engine that is started anew; the trainer is told that it may be another
            far.shutdown()
            far.relaunch().wait_ready()
            wait_all(far.open(everything))
            wait_all(trainer.forget())
        sent, *taken = wait_all(trainer.send(version), near.take(), far.take())
        for rank, (came, names, wrong) in enumerate([found for group in taken for found in group]):  # type: ignore[misc]
            assert came == version and not wrong
            assert sorted(names) == sorted(SHAPES if everything else wanted(rank % 2))
            if delta == "off":
                layers = [name.split(".")[1] for name in names if name.startswith("layers")]
                assert layers == sorted(layers, key=int), "an engine's loader wants a layer at a time"
        if not everything:
            news = total - (fixed if delta != "off" and version not in (0, 3) else 0)
            if delta == "elements":
                continue  # what changes is found out when it is written
            assert sum(sent) == news  # type: ignore[arg-type]
            assert max(sent) <= 1.1 * news / len(sent), sent  # type: ignore[operator,type-var]


def test_nobody_holds_more_than_a_layer_beside_its_share(groups: Groups) -> None:
    """Of 192 MB, each rank of a trainer has 48, and each rank of an engine wants 96."""
    trainer, engine = groups["trainer"], groups["near"]
    engine.shutdown()
    engine.relaunch().wait_ready()
    wait_all(trainer.open_large(), engine.open_large())
    layer = 8 << 20
    for version in range(3):
        gave, took = wait_all(trainer.send_large(version), engine.take_large())
        assert [total for _, total in took] == [24 * 512 * 2048] * 2  # type: ignore[misc]
        if version:  # what is imported, allocated and mapped once is there
            assert max(gave) < 3 * PART + layer  # type: ignore[operator,type-var]
            assert max(peak for peak, _ in took) < 4 * 3 * PART + layer  # type: ignore[misc]
    assert sum(rows * columns * 4 for rows, columns in LARGE.values()) == 192 << 20
