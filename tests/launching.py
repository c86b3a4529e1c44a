"""Fixtures of tests that launch real ranks on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rlhpc import Worker, WorkerGroup

#: Function that launches `n` ranks of a worker class as a group of a name.
Launch = Callable[..., "WorkerGroup"]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Launches groups of `Probe` on this machine and ends them after the test."""
    from tests.probes import Probe

    with _launching(Probe) as start:
        yield start


@pytest.fixture
def meet() -> Iterator[Launch]:
    """Launches groups of `Meeting`, like `launch`."""
    from tests.strangers import Meeting

    with _launching(Meeting) as start:
        yield start


@contextmanager
def _launching(worker: type[Worker]) -> Iterator[Launch]:
    from rlhpc import Cluster, NodePlacementStrategy

    groups: list[WorkerGroup] = []
    cluster = Cluster.local(num_nodes=1, accelerators_per_node=0)

    def start(n: int, name: str, *args: Any, **options: Any) -> WorkerGroup:
        strategy = NodePlacementStrategy([0] * n)
        group = worker.create_group(*args).launch(cluster, placement_strategy=strategy, name=name, **options)
        groups.append(group)
        return group

    yield start
    for group in groups:
        group.shutdown()


@pytest.fixture(scope="module", autouse=True)
def end_session() -> Iterator[None]:
    """Stops the session that the module's tests have started, if they have started one."""
    yield
    if "rlhpc.runtime.session" in sys.modules:
        from rlhpc import Session

        if session := Session.running():
            session.stop()
