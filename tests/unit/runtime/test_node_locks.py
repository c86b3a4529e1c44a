"""Locks on accelerators and ports, between real ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc import Cluster, FlexiblePlacementStrategy, NodePlacementStrategy, PackedPlacementStrategy, WorkerGroup
from rlhpc.runtime import node_locks
from rlhpc.runtime.errors import DeadlineExceeded, RlhpcError
from rlhpc.runtime.node_locks import DeviceLock, acquire_port
from tests.instrumented import Instrumented


@pytest.fixture
def cluster() -> Cluster:
    return Cluster.local(accelerators_per_node=4)


@pytest.fixture
def groups() -> Iterator[list[WorkerGroup]]:
    groups: list[WorkerGroup] = []
    yield groups
    for group in groups:
        group.shutdown()


def test_ranks_on_the_same_accelerators_take_turns(cluster: Cluster, groups: list[WorkerGroup], tmp_path: Path) -> None:
    groups += [
        Instrumented.create_group().launch(cluster, PackedPlacementStrategy(0, 1, 2), "actor"),
        Instrumented.create_group().launch(cluster, FlexiblePlacementStrategy([[1], [1], [1, 2]]), "rollout"),
        Instrumented.create_group().launch(cluster, FlexiblePlacementStrategy([[3]]), "other"),
        Instrumented.create_group().launch(cluster, NodePlacementStrategy([0, 0]), "cpu"),
    ]
    actor, rollout, other, cpu = groups
    shared = [group.hold_device(str(tmp_path / "shared"), 0.05) for _ in range(3) for group in (actor, rollout)]
    assert all(alone for handle in shared for alone in handle.wait())
    actor.keep_device().wait()
    assert other.lock_device().wait()[0] < 20 and len(cpu.lock_device().wait()) == 2, "these do not wait"
    blocked = rollout.execute_on(0).lock_device()
    time.sleep(0.3)
    assert not blocked.done()
    actor.release_device().wait()
    assert blocked.wait()[0] >= 0.2


def test_a_rank_that_dies_frees_its_accelerators(cluster: Cluster, groups: list[WorkerGroup]) -> None:
    first = Instrumented.create_group().launch(cluster, FlexiblePlacementStrategy([[0]]), "dying")
    first.die_with_device()
    deadline = time.monotonic() + 30
    from rlhpc import Session

    session = Session.running()
    assert session is not None
    while session.failure is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert session.failure is not None
    groups += [Instrumented.create_group().launch(cluster, FlexiblePlacementStrategy([[0]]), "successor")]
    assert groups[0].lock_device().wait()[0] < 20


def test_the_message_of_a_wait_names_the_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_locks, "installed_context", lambda: None)
    monkeypatch.setenv("RLHPC_WAIT_DEADLINE_S", "0.2")
    holder, waiter = DeviceLock(tmp_path, ["0-1"], "actor-0"), DeviceLock(tmp_path, ["0-0", "0-1"], "rollout-3")
    free = DeviceLock(tmp_path, ["0-0"], "env-1")
    with holder:
        with pytest.raises(
            DeadlineExceeded, match=r"rollout-3 waited 0\.2 s for accelerator-0-1, which actor-0 has locked"
        ):
            waiter.acquire()
        with free:
            pass  # the failed wait has not kept the other accelerator
    with waiter:
        pass


def test_only_the_thread_with_the_lock_releases_it(tmp_path: Path) -> None:
    lock, errors = DeviceLock(tmp_path, ["0"], "actor-0"), list[str]()
    with pytest.raises(RuntimeError, match="actor-0 does not have the lock"):
        lock.release()

    def release() -> None:
        try:
            lock.release()
        except RuntimeError as error:
            errors.append(str(error))

    other = DeviceLock(tmp_path, ["0"], "rollout-0")
    with lock:
        thread = threading.Thread(target=release)
        thread.start()
        thread.join()
        assert not node_locks._try_lock(node_locks._open_lock(other._paths[0]), "x"), "it is still locked"
    assert errors == ["device_lock.release: this thread of actor-0 does not have the lock"]
    with other:
        pass


def test_a_second_thread_waits_for_the_first(tmp_path: Path) -> None:
    lock, order = DeviceLock(tmp_path, ["0"], "actor-0"), list[str]()

    def second() -> None:
        with lock:
            order.append("second")

    with lock:
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.1)
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"]


def test_ports_are_free_and_no_rank_gets_one_twice(cluster: Cluster, groups: list[WorkerGroup]) -> None:
    groups += [
        Instrumented.create_group().launch(cluster, NodePlacementStrategy([0, 0, 0]), "servers"),
        Instrumented.create_group().launch(cluster, name="more"),
    ]
    handles = [group.ports(40, 33000 if narrow else None) for narrow in (True, False) for group in groups]
    ports = [port for handle in handles for of_rank in handle.wait() for port in of_rank]
    assert len(set(ports)) == len(ports) == 320
    assert max(port for of_rank in handles[0].wait() for port in of_rank) <= 33000
    assert all(1024 <= port <= 65535 for port in ports)
    assert len(set(groups[0].serve().wait())) == 3, "a server can use one"


def test_bounds_and_exhaustion_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for port in (1023, 65536):
        with pytest.raises(ValueError, match=f"max_port_num is {port}; allowed: 1024 to 65535"):
            acquire_port(tmp_path, port, "a-0")
    monkeypatch.setattr(node_locks, "_MAX_ATTEMPTS", 30)
    monkeypatch.setattr(node_locks, "_reserved_ports", {})
    acquire_port(None, None, "a-0")
    taken = set(node_locks._reserved_ports)
    for number in range(1024, 1028):
        monkeypatch.setitem(node_locks._reserved_ports, number, -1)
    with pytest.raises(RlhpcError, match=r"a-0 found no free port in 30 attempts \(max_port_num=1027\)"):
        acquire_port(None, 1027, "a-0")
    assert len(taken) == 1
