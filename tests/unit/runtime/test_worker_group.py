"""Groups of real ranks: calls, their order and results, names, attaching, and the end of a group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import torch

from rlhpc import (
    Channel,
    Cluster,
    DeadlineExceeded,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementError,
    Session,
    WorkerFailed,
    WorkerGroup,
)
from rlhpc.runtime.comm.shared_memory import bytes_in_use
from rlhpc.runtime.errors import ConfigError
from tests.eventually import has_ended
from tests.instrumented import Instrumented
from tests.launching import Launch
from tests.probes import Awkward, Greedy, Pair, Probe


def test_calls_return_results_in_rank_order(launch: Launch) -> None:
    group = launch(3, "adders", 10)
    assert group.add(5).wait() == [15, 16, 17]
    assert group.execute_on(2, 0).add(1).wait() == [11, 13]
    assert group.add(0).wait() == [10, 11, 12]
    handle = group.nap(0.3)
    assert not handle.done()
    assert handle.wait() == [0, 1, 2]
    durations = handle.consume_durations()
    assert 0.3 <= durations["nap"] < 5 and handle.consume_durations() == {}


def test_calls_of_one_rank_keep_their_order_and_async_wait_works(launch: Launch) -> None:
    group = launch(1, "ordered")
    handles = [group.echo(i) for i in range(50)]
    assert [h.wait()[0] for h in handles] == list(range(50))

    async def both() -> list[list[int]]:
        return await asyncio.gather(group.add(1).async_wait(), group.add(2).async_wait())

    assert asyncio.run(both()) == [[1], [2]]


def test_large_arguments_and_results_travel_whole(launch: Launch) -> None:
    group = launch(2, "large")
    tensor = torch.randn(600_000)
    results = group.echo({"t": tensor, "n": tensor.numpy()}).wait()
    for result in results:
        assert torch.equal(result["t"], tensor) and (result["n"] == tensor.numpy()).all()
    session = Session.running()
    assert session is not None and bytes_in_use(session.scratch.shm) > 0, "what came is looked at where it lies"
    del results, result
    assert bytes_in_use(session.scratch.shm) == 0


def test_private_and_unknown_names_are_refused(launch: Launch) -> None:
    group = launch(1, "private")
    with pytest.raises(AttributeError, match="private"):
        group._secret()
    with pytest.raises(AttributeError, match="no method 'fly'"):
        group.fly()
    with pytest.raises(ValueError, match="ranks 0 to 0"):
        group.execute_on(3)


def test_attach_from_driver_and_from_a_worker(launch: Launch) -> None:
    launch(2, "served", 100)
    callers = launch(1, "callers")
    assert WorkerGroup.from_group_name(Probe, "served").add(1).wait() == [101, 102]
    assert callers.call_group("served", 5).wait() == [[105, 106]]


def test_two_groups_of_one_name_are_refused_and_a_name_is_free_after_shutdown(launch: Launch) -> None:
    first = launch(1, "twice")
    with pytest.raises(PlacementError, match="running already"):
        launch(1, "twice")
    first.shutdown()
    assert launch(1, "twice").add(1).wait() == [1]


def test_wait_has_a_deadline_that_names_the_late_ranks(launch: Launch) -> None:
    group = launch(2, "late")
    handle = group.execute_on(1).nap(1.0)
    with pytest.raises(DeadlineExceeded, match=r"late.nap\(\) on ranks \[1\]"):
        handle.wait(timeout=0.1)
    assert handle.wait() == [1]


def test_shutdown_ends_a_busy_group_in_time(launch: Launch) -> None:
    group = launch(1, "busy")
    pid = group.identity().wait()[0]["pid"]
    group.nap(600)
    started = time.monotonic()
    group.shutdown(grace=0.5)
    assert time.monotonic() - started < 60 and has_ended(pid)


def test_node_placement_strategy_default(launch: Launch) -> None:
    group = Probe.create_group().launch(Cluster.local(1, 0), NodePlacementStrategy([0]))
    assert group.name == "Probe" and group.world_size == 1
    group.shutdown()


def test_methods_that_a_group_would_hide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Greedy.shutdown could not be called.*another name.*launch"):
        Greedy.create_group()


def test_groups_with_ranks_that_hang_while_they_start_are_not_waited_for() -> None:
    group = Awkward.create_group("slow").launch(Cluster.local(1, 0), name="slow", wait=False)
    started = time.monotonic()
    group.shutdown()
    assert time.monotonic() - started < 60, "shutdown waited for the ranks to be ready (300 s)"


def test_ranks_know_who_and_where_they_are() -> None:
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


def test_ranks_that_share_devices_see_each_others() -> None:
    group = Pair.create_group().launch(
        Cluster.local(num_nodes=1, accelerators_per_node=4), PackedPlacementStrategy(0, 3), "pairs"
    )
    try:
        facts = group.identity().wait()
        assert [f["cuda"] for f in facts] == ["0,1", "0,1", "2,3", "2,3"]
        assert [f["device_index"] for f in facts] == [0, 1, 0, 1]
        assert [f["accelerators"] for f in facts] == [(0,), (1,), (2,), (3,)]
        assert group.accelerators == [frozenset({(0, index)}) for index in range(4)]
    finally:
        group.shutdown()


@pytest.fixture
def tools() -> Iterator[WorkerGroup]:
    group = Instrumented.create_group().launch(Cluster.local(), NodePlacementStrategy([0, 0]), "tools")
    yield group
    group.shutdown()


def test_async_methods_run_on_the_event_loop_of_their_rank(tools: WorkerGroup) -> None:
    channel = Channel.create("later")
    assert tools.start_task(channel).wait() == [5, 5], "other tasks run while a method waits"
    for item in ("first", "second"):
        channel.put(item)
    assert sorted(tools.finish_task().wait()) == ["first", "second"], (
        "what a method leaves behind goes on in the next one"
    )
    with pytest.raises(WorkerFailed, match="raised in a coroutine"):
        tools.execute_on(0).raise_later().wait()


def test_a_rank_whose_event_loop_is_idle_waits_and_is_not_called_busy(tools: WorkerGroup) -> None:
    channel = Channel.create("never")
    waiting = tools.execute_on(0).wait_for_item(channel)
    napping = tools.execute_on(1).survive_for(3.0)
    with pytest.raises(DeadlineExceeded) as overdue:
        waiting.wait(1.0)
    assert "tools[1]" in str(overdue.value) and "survive_for" in str(overdue.value)
    assert "tools[0]" not in str(overdue.value), "its tasks wait for an item"
    napping.wait()
    channel.put("at last")
    assert waiting.wait() == ["at last"]


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("src", [None, ("tools", 1)])
def test_a_broadcast_has_a_source_or_takes_the_first_rank(
    tools: WorkerGroup, async_op: bool, src: tuple[str, int] | None
) -> None:
    more = Instrumented.create_group().launch(Cluster.local(), name="more")
    groups = [("tools", [0, 1]), ("more", 0)]
    handles = [group.shout(groups, src, async_op) for group in (tools, more)]
    expected = "from tools-1" if src else "from tools-0"
    assert [result for handle in handles for result in handle.wait()] == [expected] * 3
    more.shutdown()


def test_items_are_taken_in_batches_in_the_background() -> None:
    channel = Channel.create("weights")
    work = channel.get_batch(3, async_op=True)
    for weight in (1, 2, 3):
        assert not work.done()
        channel.put(f"item {weight}", weight=weight)
        if weight == 2:
            break
    assert work.wait(20) == ["item 1", "item 2"]
    with pytest.raises(asyncio.QueueEmpty):
        channel.get_nowait()


def test_a_rank_outside_a_broadcast_is_told_so(tools: WorkerGroup) -> None:
    with pytest.raises(
        WorkerFailed, match=r"tools-1 takes no part in a broadcast from \('tools', 0\) to \[\('tools', 0\)\]"
    ):
        tools.execute_on(1).shout([("tools", 0)], None, False).wait()
