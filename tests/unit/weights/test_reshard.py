"""Weights from shards to shards, between real processes: each slice is the sender's bit for bit, nobody sends more than its
share, and what never changes is sent once."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from rlhpc import FlexiblePlacementStrategy, NodePlacementStrategy, Session, WorkerGroup
from rlhpc.checkpoint.tensor_slice import full_slice
from rlhpc.runtime.policies import GroupPolicy, SessionPolicies
from tests.accelerators import OTHERS_ON_CARD, cluster_of
from tests.unit.weights.reshard_ranks import FROZEN, LARGE, PART, SHAPES, Engine, Trainer, wanted

Groups = dict[str, WorkerGroup]


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    """Four ranks that train; an engine of two ranks on their host, and one on another."""
    session = Session.start(tcp_address="127.0.0.1")
    cluster = cluster_of(1, OTHERS_ON_CARD)
    four, two = (
        FlexiblePlacementStrategy([[0]] * n) if OTHERS_ON_CARD else NodePlacementStrategy([0] * n) for n in (4, 2)
    )
    made = {"trainer": Trainer.create_group().launch(cluster, four, "trainer", wait=False)}
    for name, env in (("near", {}), ("far", {"RLHPC_HOST_ID": "elsewhere"})):
        made[name] = Engine.create_group().launch(cluster, two, name, env_vars=env, wait=False)
    for group in made.values():
        group.wait_ready()
    yield made
    session.stop()


def wait_all(*handles: object) -> list[list[object]]:
    return [handle.wait(120) for handle in handles]  # type: ignore[attr-defined]


GROUP = "tests.unit.weights.reshard_ranks:ByGroup"


def passed_on(everything: bool, delta: str) -> list[int]:
    """Bytes that each rank of the engines sends over a group, to the next one that wants the same."""
    if everything:
        return [sum(4 * math.prod(shape) for shape in SHAPES.values())] * 3 + [0]
    trained = [{n: b for n, b in wanted(rank).items() if delta == "off" or not FROZEN.match(n)} for rank in (0, 1)]
    return [
        *(
            sum(4 * tensor_slice.numel for tensor_slices in named.values() for tensor_slice in tensor_slices)
            for named in trained
        ),
        0,
        0,
    ]


@pytest.mark.parametrize(
    ("layout", "delta", "experts", "everything", "sync"),
    [
        ("4", "off", False, False, "shards"),
        ("2x2", "frozen", True, False, "shards"),
        ("copies", "elements", False, False, "shards"),
        ("2x2", "frozen", True, False, GROUP),
        ("copies", "off", False, False, GROUP),
        ("4", "off", False, True, GROUP),  # engines that do not say what they want get all of it
        ("whole", "frozen", False, True, "shards"),
    ],
)
def test_each_slice_arrives_bit_for_bit(
    groups: Groups, layout: str, delta: str, experts: bool, everything: bool, sync: str
) -> None:
    trainer, near, far = groups["trainer"], groups["near"], groups["far"]
    if everything and sync == GROUP:  # they have said otherwise, and a rank says so once
        for group in (near, far):
            group.shutdown()
            group.relaunch().wait_ready()
    wait_all(trainer.open(layout, delta, experts, sync), near.open(everything, sync), far.open(everything, sync))
    each = [{name: (full_slice(shape),) for name, shape in SHAPES.items()}] if everything else [wanted(0), wanted(1)]
    parts = [
        (name, tensor_slice) for want in each for name, tensor_slices in want.items() for tensor_slice in tensor_slices
    ]
    total = sum(4 * tensor_slice.numel for _, tensor_slice in parts)
    fixed = sum(4 * tensor_slice.numel for name, tensor_slice in parts if FROZEN.match(name))
    for version in range(5):
        if version == 3:  # an engine that is started anew; the trainer is told that it may be another
            far.shutdown()
            far.relaunch().wait_ready()
            wait_all(far.open(everything, sync))
            wait_all(trainer.forget())
        sent, *taken = wait_all(trainer.send(version), near.take(), far.take())
        passed = []
        for rank, (came, names, wrong, nbytes) in enumerate([found for group in taken for found in group]):  # type: ignore[misc]
            assert came == version and not wrong
            passed.append(nbytes)
            assert sorted(names) == sorted(SHAPES if everything else wanted(rank % 2))
            if delta == "off":
                layers = [name.split(".")[1] for name in names if name.startswith("layers")]
                assert layers == sorted(layers, key=int), "an engine's loader wants a layer at a time"
        news = total - (fixed if delta != "off" and version not in (0, 3) else 0)
        if delta == "elements":
            continue  # what changes is found out when it is written
        assert sum(sent) == news  # type: ignore[arg-type]
        assert max(sent) <= 1.1 * news / len(sent), sent  # type: ignore[operator,type-var]
        over_group = sync == GROUP and version not in (0, 3)
        assert passed == (passed_on(everything, delta) if over_group else [0] * 4)


@pytest.mark.parametrize("sync", ["shards", GROUP])
def test_nobody_holds_more_than_a_layer_beside_its_share(groups: Groups, sync: str) -> None:
    """Of 192 MB, each rank of a trainer has 48, and each rank of an engine wants 96."""
    trainer, engine = groups["trainer"], groups["near"]
    engine.shutdown()
    engine.relaunch().wait_ready()
    wait_all(trainer.open_large(sync), engine.open_large(sync))
    layer, peaks = 8 << 20, []
    for version in range(5):
        gave, took = wait_all(trainer.send_large(version), engine.take_large())
        assert [total for _, total in took] == [24 * 512 * 2048] * 2  # type: ignore[misc]
        peaks.append((max(gave), max(peak for peak, _ in took)))  # type: ignore[misc,type-var]
    # The first version has what is imported, allocated and mapped once. Of the others the least counts: on a busy machine a
    # rank that waits for a processor lets parts pile up.
    given, taken = (min(column) for column in zip(*peaks[1:], strict=True))
    assert given < 3 * PART + layer, peaks  # type: ignore[operator]
    assert taken < (6 if sync == GROUP else 4 * 3) * PART + layer, peaks  # type: ignore[operator]
    assert sum(rows * columns * 4 for rows, columns in LARGE.values()) == 192 << 20


def test_who_is_lost_in_the_middle_costs_the_others_nothing(groups: Groups) -> None:
    """The last test of these groups: one rank is not started again."""
    trainer, near, far = groups["trainer"], groups["near"], groups["far"]
    session = Session.running()
    assert session is not None
    for group in (near, far):
        group.shutdown()
        group.relaunch().wait_ready()
    wait_all(trainer.open("4", "off", False, GROUP), near.open(False, GROUP), far.open(False, GROUP))
    with session.training(SessionPolicies({"near": GroupPolicy(min_ranks=1)})):
        for version in range(4):
            handles = [trainer.send(version), far.take(), near.execute_on(0).take()]
            if version < 3:
                handles.append(near.execute_on(1).take() if version < 2 else near.execute_on(1).die())
            _, *taken = wait_all(*handles)
            found = [result for group in taken[: 2 + (version < 2)] for result in group]
            assert [(came, wrong) for came, _, wrong, _ in found] == [(version, [])] * (3 + (version < 2))  # type: ignore[misc]
            assert any(nbytes for *_, nbytes in found) == (version == 1), "else it goes through the host"  # type: ignore[misc]
