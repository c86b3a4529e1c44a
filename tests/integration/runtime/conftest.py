from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc import Cluster, NodePlacementStrategy, Session, WorkerGroup

sys.path.insert(0, str(Path(__file__).parent))

from roles_for_tests import Probe


@pytest.fixture
def launch() -> Iterator[Callable[..., WorkerGroup]]:
    """Launches Probe groups on this machine and ends them after the test."""
    groups: list[WorkerGroup] = []
    cluster = Cluster.local(num_nodes=1, accelerators_per_node=0)

    def start(n: int, name: str, *args: Any, **options: Any) -> WorkerGroup:
        strategy = NodePlacementStrategy([0] * n)
        group = Probe.create_group(*args).launch(cluster, placement_strategy=strategy, name=name, **options)
        groups.append(group)
        return group

    yield start
    for group in groups:
        group.shutdown()


@pytest.fixture(scope="module", autouse=True)
def end_session() -> Iterator[None]:
    yield
    session = Session.running()
    if session:
        session.stop()
