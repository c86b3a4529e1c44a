"""Failures while another failure is handled: each write of the driver fails or stalls once while a rank is killed."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlhpc import Cluster
from rlhpc.runtime import registry
from rlhpc.runtime.cluster_config import ClusterConfig
from rlhpc.runtime.errors import StorageError, WorkerFailed
from rlhpc.runtime.failure_detection import _make_lost_rank_error
from rlhpc.runtime.launchers import local
from rlhpc.runtime.placement import NodePlacementStrategy
from rlhpc.runtime.policies import GroupPolicy, SessionPolicies
from rlhpc.runtime.registry import DEPARTED
from rlhpc.runtime.session import Session
from rlhpc.runtime.worker_group import WorkerGroup
from tests.probes import Probe

pytestmark = pytest.mark.long(together=True)


@pytest.fixture
def groups() -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    """Three ranks of which one must stay, and a rank of which none may be lost."""
    cluster = Cluster(ClusterConfig(num_nodes=1))
    many = Probe.create_group().launch(cluster, NodePlacementStrategy([0, 0, 0]), "many")
    other = Probe.create_group().launch(cluster, name="other")
    driver = Session.running()
    assert driver is not None
    with driver.training(SessionPolicies({"many": GroupPolicy(min_ranks=1)})):
        yield many, other
    driver.stop()


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def pid_of(group: WorkerGroup, rank: int) -> int:
    pid: int = group.execute_on(rank).identity().wait(60)[0]["pid"]
    return pid


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def failing_writes(monkeypatch: pytest.MonkeyPatch, fault: Callable[[], None], first: int) -> Iterator[list[str]]:
    """Every atomic write of this process from the `first`-th on meets `fault`, until the fault lets one through."""
    written: list[str] = []
    real = registry.write_atomic

    def write(path: Any, *args: Any, **kwargs: Any) -> None:
        written.append(str(path))
        if len(written) > first:
            fault()
        real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(registry, "write_atomic", write)
        yield written


def raising_once(error: Exception) -> Callable[[], None]:
    pending = [error]

    def fault() -> None:
        if pending:
            raise pending.pop()

    return fault


FAULTS: dict[str, Callable[[], Callable[[], None]]] = {
    "EIO": lambda: raising_once(OSError(errno.EIO, "Input/output error")),
    "ENOSPC": lambda: raising_once(StorageError("the filesystem is full")),
    "ESTALE": lambda: raising_once(OSError(errno.ESTALE, "Stale file handle")),
    "stall": lambda: lambda: time.sleep(3.0),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_write_that_fails_while_a_rank_is_lost_changes_nothing_else(
    groups: tuple[WorkerGroup, WorkerGroup], monkeypatch: pytest.MonkeyPatch, fault: str, first: int
) -> None:
    many, other = groups
    driver = Session.running()
    assert driver is not None
    actor = pid_of(other, 0)
    with failing_writes(monkeypatch, FAULTS[fault](), first):
        for rank in (1, 2):
            os.kill(pid_of(many, rank), signal.SIGKILL)
            until(lambda rank=rank: rank not in many.present, f"the group goes on without rank {rank}")  # type: ignore[misc]
        assert many.add(1).wait(20) == [1], "calls go on without them"
        for name in ("many-1", "many-2"):
            until(lambda name=name: driver.registry.get(DEPARTED, name), "peers read that it has left")  # type: ignore[misc]
        os.kill(actor, signal.SIGKILL)  # and the next death is heard of at once, as the first failure
        with pytest.raises(WorkerFailed, match=r"other\[0\]"):
            other.nap(30.0).wait(15)


@pytest.mark.parametrize("reporter", ["rlhpc-monitor", "rlhpc-departures"])
def test_reporting_threads_outlive_what_they_report(
    groups: tuple[WorkerGroup, WorkerGroup], monkeypatch: pytest.MonkeyPatch, reporter: str
) -> None:
    many, other = groups
    driver = Session.running()
    assert driver is not None

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault of the report's own")

    monkeypatch.setattr(driver.membership, "register_departure", broken)
    monkeypatch.setattr(local.ForkLauncher, "kill", broken)
    actor = pid_of(other, 0)
    os.kill(pid_of(many, 1), signal.SIGKILL)
    until(lambda: driver.processes["many-1"].has_exited, "the exit is noted")
    assert any(thread.name == reporter for thread in threading.enumerate())
    os.kill(actor, signal.SIGKILL)
    with pytest.raises(WorkerFailed, match=r"other\[0\]"):
        other.nap(30.0).wait(15)


def test_no_successor_is_started_beside_the_process_of_a_rank_that_was_given_up(
    groups: tuple[WorkerGroup, WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process takes a while to go, as in the kernel's uninterruptible sleep, and its exit is reported late."""
    many, _ = groups
    driver = Session.running()
    assert driver is not None
    old, late = pid_of(many, 1), list[dict[str, Any]]()
    hear = driver._fork_launcher._handle_event
    monkeypatch.setattr(driver._fork_launcher, "_handle_event", late.append)
    driver.fail(_make_lost_rank_error(driver.processes["many-1"].spec, "gave no sign of life for 180 s"))
    until(lambda: late and not is_running(old), "the rank that was given up is killed")
    assert many.present == [0, 2] and many.restart() == [], "nobody has said that its process is gone"

    monkeypatch.undo()
    hear(late[0])
    assert many.restart() == [1]
    until(many.admit, "the successor arrives")
    new = pid_of(many, 1)
    hear(late[0])
    assert many.present == [0, 1, 2] and is_running(new), "the exit was the earlier process's"
