"""Sessions of real ranks: failures, by really killing processes, and what a session leaves behind."""

from __future__ import annotations

import contextlib
import gc
import json
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rlhpc import Channel, Cluster, NodePlacementStrategy, RendezvousTimeout, Session, WorkerFailed
from rlhpc.runtime import registry
from rlhpc.runtime.comm.shared_memory import bytes_in_use
from rlhpc.runtime.policies import GroupPolicy, SessionPolicies
from tests import warm
from tests.eventually import has_ended, wait_until
from tests.launching import Launch
from tests.probes import Probe


def test_an_exception_carries_rank_node_log_and_traceback_and_stops_the_groups(launch: Launch) -> None:
    bystander, group = launch(1, "bystander"), launch(3, "failing")
    pids = [f["pid"] for f in group.identity().wait() + bystander.identity().wait()]
    with pytest.raises(WorkerFailed, match="ValueError: kaboom") as caught:
        group.boom().wait()
    failure = caught.value
    assert (failure.group, failure.rank) == ("failing", 1) and failure.node
    assert "raise ValueError(text)" in failure.remote_traceback
    assert isinstance(failure.__cause__, ValueError)
    assert all(has_ended(pid) for pid in pids)


def test_the_first_failure_is_raised_by_whatever_is_being_waited_for(launch: Launch) -> None:
    slow, bad = launch(1, "slow"), launch(2, "bad")
    waiting = slow.nap(60)
    bad.boom()
    started = time.monotonic()
    with pytest.raises(WorkerFailed, match="kaboom"):
        waiting.wait()
    assert time.monotonic() - started < 60


def test_a_failing_constructor_is_an_error_of_launch(launch: Launch) -> None:
    with pytest.raises(WorkerFailed, match="ValueError: no such robot") as caught:
        launch(2, "constructed", 0, 1)
    assert caught.value.rank == 1


def test_missing_ranks_are_named_with_node_and_log(launch: Launch) -> None:
    with pytest.raises(RendezvousTimeout, match=r"1 of 1 ranks of 'never' did not arrive.*\n.*never-0 on .*log"):
        launch(1, "never", timeout=0.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_worker_is_reported_and_nothing_is_left(launch: Launch, number: int) -> None:
    group, other = launch(2, "victims"), launch(1, "others")
    facts = group.identity().wait() + other.identity().wait()
    child = group.execute_on(1).start_child().wait()[0]
    handle = other.nap(600)
    os.kill(facts[1]["pid"], number)
    started = time.monotonic()
    with pytest.raises(WorkerFailed, match=rf"victims\[1\] on node .* killed by signal {int(number)}") as caught:
        handle.wait()
    assert time.monotonic() - started < 60
    assert caught.value.exit_signal == number and caught.value.rank == 1 and caught.value.log_path
    assert all(has_ended(f["pid"]) for f in facts) and has_ended(child)
    session = Session.running()
    assert session is not None and bytes_in_use(session.scratch.shm) == 0
    assert launch(1, "after").add(1).wait() == [1], "the session goes on"


def test_a_worker_that_exits_by_itself_is_a_failure(launch: Launch) -> None:
    group = launch(1, "leaver")
    with pytest.raises(WorkerFailed, match="exited with status 3"):
        group.leave(3).wait()


def test_a_fault_below_python_names_what_called_it(launch: Launch) -> None:
    group = launch(1, "faulty")
    with pytest.raises(WorkerFailed, match=r"killed by signal 11(?s:.)*Current thread(?s:.)* in fault\n") as caught:
        group.fault().wait()
    assert "Extension modules" not in str(caught.value)


def test_a_stopped_worker_is_not_taken_for_dead(launch: Launch) -> None:
    group = launch(1, "stopped")
    pid = group.identity().wait()[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    handle = group.add(1)
    time.sleep(1.0)
    assert not handle.done()
    os.kill(pid, signal.SIGCONT)
    assert handle.wait() == [1]


def test_a_session_that_was_stopped_leaves_nothing_in_its_process() -> None:
    """No thread, no descriptor: a script or a notebook may start a hundred of them."""

    def use(tcp_address: str | None) -> None:
        session = Session.start(tcp_address=tcp_address)
        group = Probe.create_group().launch(Cluster.local(1, 0), NodePlacementStrategy([0, 0]), "many")
        with session.training(SessionPolicies({"many": GroupPolicy(min_ranks=1)})):
            Channel.create("of it").put(np.arange(300_000))
            os.kill(group.execute_on(1).identity().wait()[0]["pid"], signal.SIGKILL)
            wait_until(lambda: group.present == [0], 60)
        session.stop()

    def left() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for tcp_address in (None, "127.0.0.1"):
        use(tcp_address)  # what a first session loads stays
        before = left()
        for _ in range(3):
            use(tcp_address)
        wait_until(lambda before=before: all(map(operator.le, left(), before)), 20)  # type: ignore[misc]


ROOT = Path(__file__).resolve().parents[3]


def leftovers(token: str) -> list[str]:
    return [str(p) for root in ("/tmp", "/dev/shm") for p in Path(root).glob(f"rlhpc-{os.getuid()}-{token}*")]


_DRIVER = """
import sys, time, os
sys.path.insert(0, {root!r})
import torch
from tests.probes import Probe
from rlhpc import Cluster, NodePlacementStrategy, Channel, Session
group = Probe.create_group().launch(Cluster.local(1, 0), NodePlacementStrategy([0, 0]), "orphans")
channel = Channel.create("c")
channel.put(torch.zeros(1_000_000))
pids = [f["pid"] for f in group.identity().wait()]
session = Session.running()
print(session.scratch.token, group._records[0]["pid"], session._fork_launcher.server.process.pid, *pids, flush=True)
{end}
"""


def run_driver(end: str) -> tuple[subprocess.Popen[str], str, list[int]]:
    source = _DRIVER.format(root=str(ROOT), end=end)
    driver = warm.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    token, *pids = driver.stdout.readline().split()
    return driver, token, [int(p) for p in pids]


def test_a_killed_driver_leaves_nothing_behind() -> None:
    driver, token, pids = run_driver("group.nap(600).wait()")
    assert leftovers(token)
    driver.kill()
    driver.wait()
    assert all(has_ended(pid) for pid in pids)
    deadline = time.monotonic() + 5
    while leftovers(token) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers(token) == []


def test_a_driver_that_ends_without_shutdown_leaves_nothing_behind() -> None:
    driver, token, pids = run_driver("")
    assert driver.wait(timeout=20) == 0
    assert all(has_ended(pid) for pid in pids) and leftovers(token) == []


def test_a_killed_fork_server_is_reported_and_takes_its_workers_along() -> None:
    driver, token, pids = run_driver(
        "import rlhpc\ntry:\n    group.nap(600).wait()\nexcept rlhpc.WorkerFailed as e:\n    print('raised:', e, flush=True)"
    )
    os.kill(pids[1], signal.SIGKILL)
    out, _ = driver.communicate(timeout=20)
    assert "raised: the fork server of node" in out
    assert all(has_ended(pid) for pid in pids) and leftovers(token) == []


def test_what_a_massacre_leaves_is_removed_by_the_next_session() -> None:
    driver, token, pids = run_driver("group.nap(600).wait()")
    for pid in (driver.pid, *pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.wait()
    assert all(has_ended(pid) for pid in pids) and leftovers(token)
    second, _, _ = run_driver("")
    assert second.wait(timeout=20) == 0
    assert leftovers(token) == []


def test_a_rank_that_dies_before_it_has_a_log(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said is in the message, and in the log that the message names."""
    session = Session.current()
    logs = tmp_path / "logs"
    monkeypatch.setattr(session, "log_dir", logs)  # which is not there yet: no log can be opened in it
    with pytest.raises(WorkerFailed, match=r"early\[0\] on node .* exited with status 1 .*\n.*last lines"):
        launch(1, "early")


def test_a_driver_with_many_open_files_starts_ranks(launch: Launch) -> None:
    """Their descriptors, and so those of the connections to its fork server, are beyond 1023."""
    Session.start().stop()  # raises the limit
    running = Session.running()
    assert running is None
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert launch(2, "many").add(1).wait() == [1, 2]
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_the_processor_time_and_memory_of_ranks_are_published_and_removed_at_the_end(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that watches the registry, at most every ten seconds, for `rlhpc watch` on any host."""
    monkeypatch.setattr(registry, "LOOK_S", 0.01)
    launch(2, "used")
    running = Session.current()
    assert running is not None
    path = running.registry.root / "ranks" / "usage.json"

    def usage() -> dict[str, list[float | None]]:
        return dict(json.loads(path.read_text())["usage"]) if path.exists() else {}

    running._next_usage_at = 0.0
    wait_until(lambda: {"used-0", "used-1"} <= set(usage()), 30)
    cores, memory, accelerator_memory, accelerator_use = usage()["used-1"]
    assert cores is not None and memory is not None and accelerator_memory is None and accelerator_use is None
    assert 0 <= cores <= 64 and 2**22 < memory < 2**36
    (member,) = (member for member in running.ranks.all_processes() if member.spec.name == "used-0")
    for usage_now, is_due in ((7.0, False), (8.0, True)):
        if is_due:
            running._next_usage_at = 0.0
        member.usage = (usage_now, 1.0, None)
        running._publish()
        assert (usage()["used-0"][0] == usage_now) is is_due
    running.stop()
    assert not path.exists()
