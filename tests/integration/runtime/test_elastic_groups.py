"""Ranks of a group leave and come, and what the others do goes on."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import zmq

from rlhpc import Channel, Cluster
from rlhpc.runtime import failure_detection, joining
from rlhpc.runtime.cluster_config import ClusterConfig
from rlhpc.runtime.comm.zmq_sockets import Peers
from rlhpc.runtime.errors import ConfigError, RlhpcError, WorkerFailed
from rlhpc.runtime.joining import DriverConnection, JoinRefused, LeaveEvent, NotYet, join_request, stay
from rlhpc.runtime.placement import NodePlacementStrategy
from rlhpc.runtime.policies import GroupPolicy, SessionPhase, SessionPolicies
from rlhpc.runtime.registry import CurveKeys
from rlhpc.runtime.session import Session
from rlhpc.runtime.worker_group import WorkerGroup
from tests.probes import Probe
from tests.users import BOB, needs_root, run_as

pytestmark = pytest.mark.long(together=True)


@pytest.fixture
def events() -> list[dict[str, Any]]:
    """Events of ranks that join and leave."""
    return []


@pytest.fixture
def groups(events: list[dict[str, Any]]) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    """Three ranks of which one must stay, and a rank of which none may be lost."""
    session = Session.start(on_membership=events.append)
    cluster = Cluster(ClusterConfig(num_nodes=1))
    many = Probe.create_group().launch(cluster, NodePlacementStrategy([0, 0, 0]), "many")
    other = Probe.create_group().launch(cluster, name="other")
    with session.training(SessionPolicies({"many": GroupPolicy(min_ranks=1)})):
        yield many, other
    session.stop()


def kill(group: WorkerGroup, rank: int) -> None:
    os.kill(group.execute_on(rank).identity().wait()[0]["pid"], signal.SIGKILL)


def until(condition) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_calls_go_on_without_a_rank_that_ended(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    many, other = groups
    under_way, elsewhere = many.nap(1.0), other.nap(1.0)
    kill_soon = many.execute_on(2).leave(9)
    assert len(under_way.wait(60)) == 3, "it had answered this call before"
    assert kill_soon.wait(60) == [] and elsewhere.wait(60)
    assert many.present == [0, 1] and many.add(1).wait() == [1, 2] and other.add(1).wait() == [1]
    assert Session.running().failure is None


def test_the_last_one_that_must_stay_is_a_failure(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    many, other = groups
    for rank in (0, 2):
        many.execute_on(rank).leave(9).wait(60)
    with pytest.raises(WorkerFailed, match=r"many\[1\]"):
        many.leave(9).wait(60)
    with pytest.raises(WorkerFailed, match=r"many\[1\]"):
        other.add(1).wait(60)


def test_what_a_rank_raises_is_a_failure_all_the_same(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    many, _ = groups
    with pytest.raises(WorkerFailed, match="kaboom"):
        many.boom(1).wait(60)


def test_it_comes_back_when_it_is_ready(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    many, other = groups
    session = Session.running()
    many.execute_on(1).leave(9).wait(60)
    epoch = session.membership.epoch
    assert many.restart() == [1]
    assert many.add(1).wait() == [1, 3], "nobody waits for it"
    until(lambda: many.admit() == [1])
    assert many.add(1).wait() == [1, 2, 3] and many.present == [0, 1, 2] and session.membership.epoch == epoch + 1
    assert other.tell("welcome", "many", 1).wait() == [True] and many.heard().wait() == [[], ["welcome"], []]


def test_who_sends_to_a_rank_that_ended_is_told(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    many, other = groups
    assert other.tell({"a": np.arange(100_000)}, "many", 1).wait() == [True]
    (heard,) = many.execute_on(1).heard().wait()[0]
    assert (heard["a"] == np.arange(100_000)).all()
    many.execute_on(1).leave(9).wait(60)
    assert other.tell("late", "many", 1).wait() == [False] and other.tell("on time", "many", 0).wait() == [True]


def test_a_broadcast_reaches_the_others(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    many, other = groups
    everyone = [("many", [0, 1, 2])]
    for handle in (other.broadcast_from(("other", 0), everyone), many.broadcast_from(("other", 0), everyone)):
        handle.wait(60)
    many.execute_on(2).leave(9).wait(60)
    for handle in (other.broadcast_from(("other", 0), everyone), many.broadcast_from(("other", 0), everyone)):
        handle.wait(60)


def test_what_it_had_taken_goes_back_to_the_front(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    many, _ = groups
    channel = Channel.create("taken")
    for item in range(4):
        channel.put(item)
    assert many.execute_on(0).take_and_do(channel).wait() == [0]
    assert many.execute_on(1).take(channel).wait() == [1] and many.execute_on(2).take(channel).wait() == [2]
    many.execute_on(0).leave(9).wait(60)
    many.execute_on(1).leave(9).wait(60)
    assert [channel.get(timeout=10) for _ in range(2)] == [1, 3], "what was done stays done, what is held is held"


def test_what_was_entrusted_outlives_its_giver(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    many, _ = groups
    channel = Channel.create("entrusted")
    item = {"rows": np.arange(300_000)}
    many.execute_on(1).entrust(channel, item).wait()
    many.execute_on(1).leave(9).wait(60)
    assert (channel.get(timeout=10)["rows"] == item["rows"]).all()


class Look:
    """Looks at the running session's registry at each question.

    Args:
        over: Returns whether the run has ended.
    """

    def __init__(self, over: Callable[[], bool]) -> None:
        self.is_over, self._registry = over, Session.running().registry.root.parent

    def generation(self) -> str:
        return (self._registry / "current").read_text()

    def release(self) -> None:
        pass


@contextmanager
def helper(
    leaving: LeaveEvent, job: str = "", over: Callable[[], bool] = lambda: True, **patience: Any
) -> Iterator[list[str]]:
    """A rank of `many` that has joined; what is said of it."""
    said: list[str] = []
    root, wish = Session.running().registry.root.parent, {**join_request("many", 1, 0), "job": job}
    stays = threading.Thread(
        target=stay,
        args=(root, wish, leaving, said.append, Look(over)),
        kwargs=patience or {"patience_s": 0.0},
        daemon=True,
    )
    stays.start()
    yield said
    leaving.set_reason("the test is over")
    stays.join(30)
    assert not stays.is_alive()


def test_what_a_rank_that_joined_raises_is_its_own_affair(
    groups: tuple[WorkerGroup, WorkerGroup], events: list[dict[str, Any]]
) -> None:
    many, other = groups
    session = Session.running()
    with helper(LeaveEvent(), "78") as said:
        until(lambda: many.admit() == [3])
        assert many.add(1).wait() == [1, 2, 3, 4]
        assert many.execute_on(3).boom(3).wait(60) == [], "nobody waits for it"
        until(
            lambda: any("many-3 ended: the run goes on without it: " in words and "kaboom" in words for words in said)
        )
    assert session.failure is None and many.present == [0, 1, 2] and other.add(1).wait() == [1]
    assert session.membership.faulty == {"78"}
    assert [event["event"] for event in events] == ["joined", "left"] and "kaboom" in str(events[-1]["why"])


def test_a_job_has_joined_when_a_rank_of_it_takes_part(
    groups: tuple[WorkerGroup, WorkerGroup], events: list[dict[str, Any]]
) -> None:
    """One whose rank fails while it loads is not worth another."""
    many, _ = groups
    membership = Session.running().membership
    with helper(LeaveEvent(), "77"):
        until(lambda: many.admit() == [3])
        assert membership.by_job() == {}
        many.took_in(3)
        assert membership.by_job() == {"77": 1} and [event["event"] for event in events] == ["joined", "works"]
    until(lambda: membership.by_job() == {"77": 0})


def test_one_that_leaves_as_told_is_not_lost(
    groups: tuple[WorkerGroup, WorkerGroup], caplog: pytest.LogCaptureFixture
) -> None:
    many, _ = groups
    leaving = LeaveEvent()
    with helper(leaving):
        until(lambda: many.admit() == [3])
        leaving.set_reason("its time is over")
        until(lambda: many.present == [0, 1, 2])
    assert many.find_leave_reason(3) == "its time is over" and not [
        r for r in caplog.records if r.levelname == "WARNING"
    ]


@pytest.mark.parametrize("how", ["between calls", "in a call", "by a signal of its own"])
def test_one_that_leaves_as_told_does_something_first(groups: tuple[WorkerGroup, WorkerGroup], how: str) -> None:
    many, _ = groups
    channel, leaving = Channel.create("left behind"), LeaveEvent()
    with helper(leaving):
        until(lambda: many.admit() == [3])
        pid = many.execute_on(3).identity().wait()[0]["pid"]
        call = many.execute_on(3).entrust_before_leaving(channel, np.arange(300_000), how == "in a call")
        assert channel.get(timeout=10) == "ready"
        if how != "in a call":
            call.wait()
        if how == "by a signal of its own":
            os.kill(pid, signal.SIGTERM)  # as Slurm sends it to all processes of a job
        leaving.set_reason("its time is over")
        until(lambda: many.present == [0, 1, 2])
        call.wait(10)
    assert len(channel.get(timeout=10)) == 300_000 and channel.empty()
    assert Session.running().failure is None


def test_what_it_does_first_must_not_take_long(
    groups: tuple[WorkerGroup, WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_REQUEUE_S", 0.5)
    many, _ = groups
    leaving = LeaveEvent()
    with helper(leaving):
        until(lambda: many.admit() == [3])
        many.execute_on(3).linger().wait()
        leaving.set_reason("its time is over")
        until(lambda: many.present == [0, 1, 2])
    assert many.find_leave_reason(3) == "its time is over"


def test_one_that_is_suspended_is_soon_done_without(
    groups: tuple[WorkerGroup, WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a partition preempts by suspending jobs. It notices when it wakes up."""
    monkeypatch.setattr(failure_detection, "JOINED_LOST_S", 9.0)
    many, _ = groups
    with helper(LeaveEvent()) as said:
        until(lambda: many.admit() == [3])
        pid = many.execute_on(3).identity().wait()[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            assert many.add(1).wait(60) == [1, 2, 3] and many.present == [0, 1, 2]
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: any("many-3 ended: the run goes on without it" in words for words in said))
    assert Session.running().failure is None


def test_a_driver_that_was_only_silent_is_joined_again(
    groups: tuple[WorkerGroup, WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who took it for one that is gone must not wait for another until its patience ends. And who is to leave does not wait
    for an answer first."""
    many, _ = groups
    session, leaving = Session.running(), LeaveEvent()
    answers, usual = threading.Event(), session.service.on_note

    def late(note: dict[str, Any]) -> None:
        if note["note"] == "late":
            answers.wait(60)
        usual(note)

    monkeypatch.setattr(joining, "_CHECK_S", 0.1)
    monkeypatch.setattr(joining, "_ANSWER_S", 1.0)
    monkeypatch.setattr(session.service, "on_note", late)
    door = DriverConnection(session.registry.root.parent)
    with helper(leaving, over=lambda: False, patience_s=60.0) as said:
        until(lambda: many.admit() == [3])
        door._peers.post(door._endpoint(), b"NOTE", [pickle.dumps({"note": "late", "name": "", "incarnation": ""})])
        until(lambda: any("many-3 ended: the run has ended, or its driver is gone" in words for words in said))
        assert door.lives(lambda: True) and not door.lives()
        answers.set()
        until(lambda: many.admit() == [4])
        until(lambda: many.present == [0, 1, 2, 4])
    door.close()
    assert session.failure is None


def test_one_that_is_killed_with_who_started_it_is_soon_done_without(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    """Nobody says so: the driver and those that send it something find that it has ended. That is no failure of theirs."""
    many, other = groups
    session, door = Session.running(), DriverConnection(Session.running().registry.root.parent)
    for number in (3, 4):
        rank = joining.JoinedRank(door.ask(join_request("many", 1, 0)))
        until(lambda number=number: many.admit() == [number])
        assert other.tell("hello", "many", number).wait() == [True]
        kill(many, number)
        rank.process.wait()
        if number == 3:
            assert other.tell("late", "many", number).wait() == [False]
        until(lambda: many.present == [0, 1, 2])
    door.close()
    assert session.failure is None and many.add(1).wait() == [1, 2, 3] and other.add(1).wait() == [1]


def test_one_that_never_arrives_is_given_up(
    groups: tuple[WorkerGroup, WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed between the driver's answer and its first sign of life, together with who started it."""
    many, _ = groups
    session = Session.running()
    door = DriverConnection(session.registry.root.parent)
    spec = door.ask(join_request("many", 1, 0))
    assert door.find_leave_reason(spec) == door.ask_leave_reason(spec) == ""
    monkeypatch.setattr(failure_detection, "ARRIVES_S", 1.0)
    until(lambda: "gave no sign of life" in door.find_leave_reason(spec))
    assert door.ask_leave_reason(spec) == door.find_leave_reason(spec), "the driver says the same as its file"
    door.close()
    assert session.failure is None and many.add(1).wait() == [1, 2, 3]


def test_a_driver_that_has_not_said_where_it_is_is_waited_for(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    """Who comes between a driver's first file and its last must not take it for one that is gone."""
    many, _ = groups
    driver = Session.running().registry.root / "members" / "driver.json"
    hidden, looked, leaving = driver.with_suffix(".hidden"), threading.Event(), LeaveEvent()

    def over() -> bool:
        looked.set()
        return False

    driver.rename(hidden)
    with pytest.raises(ConfigError, match="its driver has not said where it is"):
        DriverConnection(Session.running().registry.root.parent)
    with helper(leaving, over=over, patience_s=60.0, await_driver=True):
        assert looked.wait(30)
        hidden.rename(driver)
        until(lambda: many.admit() == [3])


def test_who_may_not_join(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    session = Session.running()
    door, wish = DriverConnection(session.registry.root.parent), join_request("many", 1, 0)
    try:
        for change, said in (
            ({"code": "other"}, "another rlhpc than the run's own"),
            ({"group": "other"}, "groups that take some: many"),
            ({"host": "elsewhere"}, "listens to processes of its own host only"),
        ):
            with pytest.raises(JoinRefused, match=said):
                door.ask({**wish, **change})
        session.failures.enter(SessionPhase.CLOSING)
        with pytest.raises(NotYet, match="the ranks that the run starts with are starting or ending"):
            door.ask(wish)
        assert len(session.processes) == 4 and session.failure is None
        (door.registry.root.parent / "current").write_text("local-77")
        assert not door.is_current, "who came through here is of an older generation"
        (door.registry.root.parent / "current").write_text(door.registry.generation)
    finally:
        door.close()


def test_keys_of_an_earlier_driver_open_nothing(
    groups: tuple[WorkerGroup, WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has read them, and has the way to the driver of now, is not heard; one message says so."""
    monkeypatch.setattr(joining, "_ANSWER_S", 1.0)
    many, other = groups
    session = Session.running()
    door, earlier = DriverConnection(session.registry.root.parent), CurveKeys.fresh()
    door.close()
    door._context = zmq.Context()
    door._peers, door.keys = Peers(door._context, earlier, lambda: None), earlier
    try:
        with pytest.raises(RlhpcError, match="the driver"):
            door.ask(join_request("many", 1, 0))
        assert not door.is_current and not door.lives()
        note = {"note": "exit", "name": "many-0", "incarnation": "any", "status": 9, "why": ""}
        door.tell(note)  # nor can it end anybody
    finally:
        door.close()
    assert len(session.processes) == 4 and session.failure is None and many.present == [0, 1, 2]
    assert many.add(1).wait() == [1, 2, 3] and other.add(1).wait() == [1]


#: What another user types comes down to this.
OF_BOB = """
from rlhpc.runtime.joining import DriverConnection
try:
    DriverConnection(pathlib.Path(sys.argv[1]))
except Exception as error:
    print(type(error).__name__, error)
"""


@needs_root
def test_nobody_else_may_join(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    session = Session.running()
    done = run_as(BOB, OF_BOB, session.registry.root.parent)
    (line,) = done.stdout.splitlines()
    assert line.startswith("ConfigError ") and "only the user whose run it is can join it" in line, done.stderr
    assert len(session.processes) == 4 and session.failure is None
