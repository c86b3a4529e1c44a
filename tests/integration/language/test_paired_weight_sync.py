"""Weights from each trainer rank to the engine on its accelerator: within that accelerator, and through no host memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from weight_ranks import Actor, Trainer

from rlhpc import Session, WorkerGroup
from rlhpc.runtime.comm import shared_memory
from rlhpc.runtime.comm.shared_memory import bytes_in_use
from tests.accelerators import OTHERS_ON_CARD, cluster_of, placed
from tests.eventually import wait_until


def writers_of_segments(folder: Path) -> set[str]:
    return {writer for _, writer, *_ in shared_memory._segments(folder)}


@pytest.fixture
def groups() -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    session = Session.start()
    cluster = cluster_of(1, OTHERS_ON_CARD)
    trainer = Trainer.create_group().launch(cluster, placed(2, False), "trainer")
    near = Actor.create_group().launch(cluster, placed(2, False), "near")
    yield trainer, near
    session.stop()


def test_each_rank_hands_its_weights_to_the_engine_beside_it(
    groups: tuple[WorkerGroup, WorkerGroup], tmp_path: Path
) -> None:
    """On stand-ins for two accelerators, neither of which can read the other's memory. The first version finds receivers that
    have not said yet where they compute; of each other one no byte is in the host's memory, though receivers come late, and
    though a weight is larger than all buffers together."""
    trainer, near = groups
    session = Session.running()
    assert session is not None
    for handle in (trainer.open_pair(str(tmp_path)), near.open_pair(str(tmp_path))):
        handle.wait()
    staged, written = [], []
    for version in range(5):
        handles = [trainer.send(version, 0.5)]
        if version == 0:
            wait_until(lambda: len(writers_of_segments(session.scratch.shm)) == 2, 60)
        handles.append(near.take_late(0.3))
        sent, taken = [handle.wait() for handle in handles]
        assert taken == [(version, digest) for digest in sent]
        roads = [{key: row[key] for key in row if key.startswith("time/weights_by_")} for row in near.roads().wait()]
        assert roads == [{"time/weights_by_host" if version == 0 else "time/weights_by_ipc": 1.0}] * 2
        staged.append([number for number, _ in trainer.carried().wait()])
        written.append(bytes_in_use(session.scratch.shm))
    for rank in range(2):
        parts = [after[rank] - before[rank] for before, after in itertools.pairwise(staged[1:])]
        assert len({*parts}) == 1 and parts[0] > 20, "all parts of a version"
    assert len({*written[1:]}) == 1, "and none in a segment"
