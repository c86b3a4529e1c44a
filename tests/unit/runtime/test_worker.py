"""Base class of the ranks: placement, messages, broadcasts, the notice to leave, and a group of one rank."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlhpc.runtime import worker as worker_module
from rlhpc.runtime.comm.context import Context, install
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.worker import Worker, bind_spec
from rlhpc.runtime.worker_spec import WorkerSpec
from tests.serving import temporary_scratch
from tests.unit.runtime.comm.rank_pairs import rank_pair


class Robot(Worker):
    """Worker of one method."""

    def move(self) -> int:
        return self.rank


class Engine(Worker):
    """Worker with a method that a group has itself."""

    def shutdown(self) -> None:
        """Ends the engine."""


@pytest.fixture
def contexts(tmp_path: Path) -> Iterator[tuple[Context, Context]]:
    with temporary_scratch() as scratch, rank_pair(tmp_path, scratch) as pair:
        yield pair


def worker_of(monkeypatch: pytest.MonkeyPatch, group: str) -> Robot:
    """Returns the worker of rank 0 of a group."""
    monkeypatch.setattr(worker_module, "_spec", None)
    bind_spec(WorkerSpec(group, 0, 1, "n1", 2, 0, 1, (1, 3), "registry", "token", b"", "out", "err"))
    return Robot()


@pytest.fixture
def pair(contexts: tuple[Context, Context], monkeypatch: pytest.MonkeyPatch) -> tuple[Robot, Robot]:
    """Workers of `left-0` and `right-0`; the context of the first is installed."""
    return worker_of(monkeypatch, "left"), worker_of(monkeypatch, "right")


def test_a_worker_knows_its_rank_and_place(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with caplog.at_level(logging.INFO):
        worker = worker_of(monkeypatch, "robots")
    assert (worker.group_name, worker.rank, worker.world_size) == ("robots", 0, 1)
    assert (worker.node, worker.node_rank, worker.local_rank, worker.local_world_size) == ("n1", 2, 0, 1)
    assert worker.accelerators == (1, 3)
    assert "Robot: rank 0 of 1 on n1" in caplog.text and "accelerators 1, 3, threads 5" in caplog.text


def test_a_worker_without_a_run_is_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_spec", None)
    worker = Robot()
    assert (worker.group_name, worker.rank, worker.world_size, worker.accelerators) == ("Robot", 0, 1, ())
    assert worker.all_reduce(torch.ones(2), "mean").tolist() == [1, 1]
    assert worker.all_gather_object("a") == ["a"] and worker.init_process_group() is None
    worker.barrier()
    assert not worker.told_to_leave
    worker.before_leaving(lambda: None)  # nobody will tell it to leave
    worker.stay_until_let_go()


def test_a_group_is_created_of_a_class_and_its_arguments() -> None:
    group = Robot.create_group()
    assert group.worker_class is Robot and group.world_size == 0
    with pytest.raises(ConfigError, match="'Robot' is not running: call launch"):
        group.move()
    with pytest.raises(AttributeError, match="Robot has no method 'fly'"):
        group.fly()
    with pytest.raises(ConfigError, match=r"Engine\.shutdown could not be called"):
        Engine.create_group()


def test_messages_arrive_in_order(pair: tuple[Robot, Robot], contexts: tuple[Context, Context]) -> None:
    left, right = pair
    left.send({"number": 1}, "right", 0)
    work = left.send([2], "right", 0, async_op=True)
    assert work is not None
    work.wait(20)
    install(contexts[1])
    assert right.recv("left", 0) == {"number": 1}
    assert right.recv("left", 0, async_op=True).wait(20) == [2]


def test_a_tensor_is_received_in_place(pair: tuple[Robot, Robot], contexts: tuple[Context, Context]) -> None:
    left, right = pair
    for _ in range(3):
        left.send_tensor(torch.arange(6.0).reshape(2, 3), "right", 0)
    left.send("of another kind", "right", 0)
    install(contexts[1])
    first, second = torch.zeros(2, 3), torch.zeros(2, 3)
    assert right.recv_tensor(first, "left", 0) is first
    right.recv_tensor(second, "left", 0, async_op=True).wait(20)
    assert first.tolist() == second.tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match=r"was given \(3, 2\).*\(2, 3\).*was sent"):
        right.recv_tensor(torch.zeros(3, 2), "left", 0)
    assert right.recv("left", 0) == "of another kind"


def test_notices_are_read_by_subject(pair: tuple[Robot, Robot], contexts: tuple[Context, Context]) -> None:
    left, right = pair
    assert left.notify("first", "right", 0, "news") and left.notify("second", "right", 0, "news")
    install(contexts[1])
    assert [right.notice("news"), right.notice("news")] == ["first", "second"]
    with pytest.raises(queue.Empty):
        right.notice("news")


def test_a_broadcast_reaches_receivers_and_its_sender(
    pair: tuple[Robot, Robot], contexts: tuple[Context, Context]
) -> None:
    left, right = pair
    groups, weights = [("left", [0]), ("right", [0])], torch.arange(1000.0)
    assert torch.equal(left.broadcast(weights, groups, ("left", 0)), weights)
    install(contexts[1])
    assert torch.equal(right.broadcast(None, groups, ("left", 0)), weights)


def test_a_rank_acts_before_it_leaves(pair: tuple[Robot, Robot], contexts: tuple[Context, Context]) -> None:
    worker, leave, actions = pair[0], contexts[0].graceful_leave, list[str]()
    worker.before_leaving(lambda: actions.append("saved"))
    assert not worker.told_to_leave
    assert leave.notify(), "the main thread ends the rank"
    assert worker.told_to_leave and leave.is_over
    leave.run_action()
    assert actions == ["saved"]


def test_a_rank_that_is_ended_at_once_begins_nothing(
    pair: tuple[Robot, Robot], contexts: tuple[Context, Context]
) -> None:
    """Another thread ends it: of prompts that it began to hand back then, some would come back twice."""
    worker, leave = pair[0], contexts[0].graceful_leave
    worker.before_leaving(None)
    assert not leave.notify() and leave.is_over and not worker.told_to_leave
    worker.before_leaving(lambda: None)  # too late: the end is on its way
    assert not worker.told_to_leave


def test_a_rank_that_stays_is_in_the_run_until_it_is_let_go(
    pair: tuple[Robot, Robot], contexts: tuple[Context, Context]
) -> None:
    worker, leave = pair[0], contexts[0].graceful_leave
    worker.stay_until_let_go()
    assert leave.notify() and worker.told_to_leave and not leave.is_over
    worker.before_leaving(None)
    assert leave.is_over
