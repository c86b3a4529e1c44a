"""Groups of real processes: calls, placement facts, failures by really killing things."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from roles_for_tests import Probe

from rlhpc import (
    Channel,
    Cluster,
    DeadlineExceeded,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementError,
    RendezvousTimeout,
    Session,
    WorkerFailed,
    WorkerGroup,
)
from rlhpc.runtime.comm.shared_memory import bytes_in_use
from tests import warm


def gone(pid: int, within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def leftovers(token: str) -> list[str]:
    return [str(p) for root in ("/tmp", "/dev/shm") for p in Path(root).glob(f"rlhpc-{os.getuid()}-{token}*")]


def test_calls_return_results_in_rank_order(launch):
    group = launch(3, "adders", 10)
    assert group.add(5).wait() == [15, 16, 17]
    assert group.execute_on(2, 0).add(1).wait() == [11, 13]
    assert group.add(0).wait() == [10, 11, 12]
    handle = group.nap(0.3)
    assert not handle.done()
    assert handle.wait() == [0, 1, 2]
    durations = handle.consume_durations()
    assert 0.3 <= durations["nap"] < 5 and handle.consume_durations() == {}


def test_calls_of_one_rank_keep_their_order_and_async_wait_works(launch):
    group = launch(1, "ordered")
    handles = [group.echo(i) for i in range(50)]
    assert [h.wait()[0] for h in handles] == list(range(50))

    async def both() -> list[list[int]]:
        return await asyncio.gather(group.add(1).async_wait(), group.add(2).async_wait())

    assert asyncio.run(both()) == [[1], [2]]


def test_large_arguments_and_results_travel_whole(launch):
    group = launch(2, "large")
    tensor = torch.randn(600_000)
    results = group.echo({"t": tensor, "n": tensor.numpy()}).wait()
    for result in results:
        assert torch.equal(result["t"], tensor) and (result["n"] == tensor.numpy()).all()
    session = Session.running()
    assert session is not None and bytes_in_use(session.scratch.shm) > 0, "what came is looked at where it lies"
    del results, result
    assert bytes_in_use(session.scratch.shm) == 0


def test_neither_side_of_a_call_waits_for_the_other_to_read(launch):
    """More than a socket's buffer holds, either way, while the other side does something else."""
    group = launch(1, "bulky")
    names = [f"name {i}" for i in range(200_000)]
    busy = group.nap(3.0)
    echoes = [group.echo(names) for _ in range(3)]
    assert not busy.done(), "the call itself waited for the rank"
    channel = Channel.create("after")
    group.produce(channel, 1, 10)
    # The rank comes to this call although nobody has read its three answers yet.
    assert channel.get(timeout=20)
    assert busy.wait() == [0] and all(echo.wait() == [names] for echo in echoes)


def test_private_and_unknown_names_are_refused(launch):
    group = launch(1, "private")
    with pytest.raises(AttributeError, match="private"):
        group._secret()
    with pytest.raises(AttributeError, match="no method 'fly'"):
        group.fly()
    with pytest.raises(ValueError, match="ranks 0 to 0"):
        group.execute_on(3)


def test_ranks_know_who_and_where_they_are():
    cluster = Cluster.local(num_nodes=2, accelerators_per_node=4)
    group = Probe.create_group().launch(
        cluster, PackedPlacementStrategy(0, 7, num_accelerators_per_process=2), "placed"
    )
    try:
        facts = group.identity().wait()
        assert [(f["rank"], f["node_rank"], f["local_rank"]) for f in facts] == [
            (0, 0, 0),
            (1, 0, 1),
            (2, 1, 0),
            (3, 1, 1),
        ]
        assert [f["accelerators"] for f in facts] == [(0, 1), (2, 3), (0, 1), (2, 3)]
        assert facts[1]["cuda"] == "2,3"
        assert all(f["omp"] == str(f["threads"]) and f["threads"] >= 1 for f in facts)
        assert len({f["ppid"] for f in facts}) == 1, "all ranks are forked by one server"
    finally:
        group.shutdown()


def test_environment_and_fresh_interpreter(launch):
    group = launch(1, "spawned", env_vars={"RLHPC_TEST": "yes"}, fork=False)
    assert group.environ("RLHPC_TEST").wait() == ["yes"]
    forked = launch(1, "forked")
    assert forked.environ("RLHPC_TEST").wait() == [None]


def test_attach_from_driver_and_from_a_worker(launch):
    launch(2, "served", 100)
    callers = launch(1, "callers")
    assert WorkerGroup.from_group_name(Probe, "served").add(1).wait() == [101, 102]
    assert callers.call_group("served", 5).wait() == [[105, 106]]


def test_two_groups_of_one_name_are_refused_and_a_name_is_free_after_shutdown(launch):
    first = launch(1, "twice")
    with pytest.raises(PlacementError, match="running already"):
        launch(1, "twice")
    first.shutdown()
    assert launch(1, "twice").add(1).wait() == [1]


def test_wait_has_a_deadline_that_names_the_late_ranks(launch):
    group = launch(2, "late")
    handle = group.execute_on(1).nap(1.0)
    with pytest.raises(DeadlineExceeded, match=r"late.nap\(\) on ranks \[1\]"):
        handle.wait(timeout=0.1)
    assert handle.wait() == [1]


def test_an_exception_carries_rank_node_log_and_traceback_and_stops_the_groups(launch):
    bystander, group = launch(1, "bystander"), launch(3, "failing")
    pids = [f["pid"] for f in group.identity().wait() + bystander.identity().wait()]
    with pytest.raises(WorkerFailed, match="ValueError: kaboom") as caught:
        group.boom().wait()
    failure = caught.value
    assert (failure.group, failure.rank) == ("failing", 1) and failure.node
    assert "raise ValueError(text)" in failure.remote_traceback
    assert isinstance(failure.__cause__, ValueError)
    assert all(gone(pid) for pid in pids)


def test_the_first_failure_is_raised_by_whatever_is_being_waited_for(launch):
    slow, bad = launch(1, "slow"), launch(2, "bad")
    waiting = slow.nap(60)
    bad.boom()
    started = time.monotonic()
    with pytest.raises(WorkerFailed, match="kaboom"):
        waiting.wait()
    assert time.monotonic() - started < 60


def test_a_failing_constructor_is_an_error_of_launch(launch):
    with pytest.raises(WorkerFailed, match="ValueError: no such robot") as caught:
        launch(2, "constructed", 0, 1)
    assert caught.value.rank == 1


def test_missing_ranks_are_named_with_node_and_log(launch):
    with pytest.raises(RendezvousTimeout, match=r"1 of 1 ranks of 'never' did not arrive.*\n.*never-0 on .*log"):
        launch(1, "never", timeout=0.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_worker_is_reported_and_nothing_is_left(launch, number):
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
    assert all(gone(f["pid"]) for f in facts) and gone(child)
    session = Session.running()
    assert session is not None and bytes_in_use(session.scratch.shm) == 0
    assert launch(1, "after").add(1).wait() == [1], "the session goes on"


def test_a_worker_that_exits_by_itself_is_a_failure(launch):
    group = launch(1, "leaver")
    with pytest.raises(WorkerFailed, match="exited with status 3"):
        group.leave(3).wait()


def test_a_fault_below_python_names_what_called_it(launch):
    group = launch(1, "faulty")
    with pytest.raises(WorkerFailed, match=r"killed by signal 11(?s:.)*Current thread(?s:.)* in fault\n") as caught:
        group.fault().wait()
    assert "Extension modules" not in str(caught.value)


def test_a_stopped_worker_is_not_taken_for_dead(launch):
    group = launch(1, "stopped")
    pid = group.identity().wait()[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    handle = group.add(1)
    time.sleep(1.0)
    assert not handle.done()
    os.kill(pid, signal.SIGCONT)
    assert handle.wait() == [1]


def test_job_signals_do_not_end_workers(launch):
    group = launch(1, "signalled")
    pid = group.identity().wait()[0]["pid"]
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        os.kill(pid, number)
    assert group.add(1).wait() == [1]


def test_shutdown_ends_a_busy_group_in_time(launch):
    group = launch(1, "busy")
    pid = group.identity().wait()[0]["pid"]
    group.nap(600)
    started = time.monotonic()
    group.shutdown(grace=0.5)
    assert time.monotonic() - started < 60 and gone(pid)


_DRIVER = """
import sys, time, os
sys.path.insert(0, {here!r})
import torch
from roles_for_tests import Probe
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
    source = _DRIVER.format(here=str(Path(__file__).parent), end=end)
    driver = warm.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    token, *pids = driver.stdout.readline().split()
    return driver, token, [int(p) for p in pids]


def test_a_killed_driver_leaves_nothing_behind():
    driver, token, pids = run_driver("group.nap(600).wait()")
    assert leftovers(token)
    driver.kill()
    driver.wait()
    assert all(gone(pid) for pid in pids)
    deadline = time.monotonic() + 5
    while leftovers(token) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers(token) == []


def test_a_driver_that_ends_without_shutdown_leaves_nothing_behind():
    driver, token, pids = run_driver("")
    assert driver.wait(timeout=20) == 0
    assert all(gone(pid) for pid in pids) and leftovers(token) == []


def test_a_killed_fork_server_is_reported_and_takes_its_workers_along():
    driver, token, pids = run_driver(
        "import rlhpc\ntry:\n    group.nap(600).wait()\nexcept rlhpc.WorkerFailed as e:\n    print('raised:', e, flush=True)"
    )
    os.kill(pids[1], signal.SIGKILL)
    out, _ = driver.communicate(timeout=20)
    assert "raised: the fork server of node" in out
    assert all(gone(pid) for pid in pids) and leftovers(token) == []


def test_what_a_massacre_leaves_is_removed_by_the_next_session():
    driver, token, pids = run_driver("group.nap(600).wait()")
    for pid in (driver.pid, *pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.wait()
    assert all(gone(pid) for pid in pids) and leftovers(token)
    second, _, _ = run_driver("")
    assert second.wait(timeout=20) == 0
    assert leftovers(token) == []


def test_classes_of_a_main_script_can_be_launched(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "from dataclasses import dataclass\nfrom rlhpc import Cluster, Worker\n"
        "@dataclass\nclass Point:\n    x: int\n"
        "class Mine(Worker):\n    def move(self, p):\n        return Point(p.x + 1)\n"
        "if __name__ == '__main__':\n    g = Mine.create_group().launch(Cluster.local(1, 0))\n"
        "    print(g.move(Point(1)).wait())\n"
    )
    done = warm.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert "Point(x=2)" in done.stdout, done.stderr


def test_node_placement_strategy_default(launch):
    group = Probe.create_group().launch(Cluster.local(1, 0), NodePlacementStrategy([0]))
    assert group.name == "Probe" and group.world_size == 1
    group.shutdown()
