"""Membership of a run: the ranks that are known, and those that are waited for."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.runtime import membership
from rlhpc.runtime.comm.background import in_background
from rlhpc.runtime.comm.queues import TooEarly
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded, WorkerFailed
from rlhpc.runtime.failure_detection import FailurePolicy
from rlhpc.runtime.joining import join_request
from rlhpc.runtime.launchers import RankProcess
from rlhpc.runtime.membership import Membership, RankTable, exit_failure, state_check
from rlhpc.runtime.policies import GroupPolicy, SessionPhase, SessionPolicies
from rlhpc.runtime.registry import DEPARTED, GenerationFolder
from rlhpc.runtime.worker_spec import WorkerSpec
from tests.eventually import wait_until


def test_who_is_starting_is_waited_for_before_anything_is_decided() -> None:
    """A rank that starts again, or joins, while another fails: it is ready, or has ended, by the time it counts."""
    launcher: Any = SimpleNamespace(limit_s=0.0)
    specs: list[Any] = [SimpleNamespace(name=f"many-{rank}", group="many") for rank in range(3)]
    here, starting, ending = members = [RankProcess(spec, launcher) for spec in specs]
    ranks = RankTable(lambda ended: None)
    ranks.add(members)
    ranks.record_arrival(here, 1, {})
    ranks.await_settled()
    assert starting.state == ending.state == "starting"
    timers = [
        threading.Timer(0.1, ranks.record_arrival, [starting, 1, {}]),
        threading.Timer(0.2, ranks.record_ends, [[ending]]),
    ]
    for timer in timers:
        timer.start()
    ranks.await_settled(30.0)
    assert [member.state for member in members] == ["ready", "ready", "ended"]


def test_ranks_that_do_not_answer_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the failure of a switch there may be thousands of them."""
    monkeypatch.setattr(membership, "_CONFIRM_S", 0.2)
    timeouts: list[float] = []

    def reply_to(request: int, timeout: float) -> None:
        timeouts.append(timeout)
        time.sleep(timeout)
        raise DeadlineExceeded("no answer")

    peers = SimpleNamespace(begin=lambda *arguments: 0, reply_to=reply_to)
    specs: list[Any] = [SimpleNamespace(name=f"many-{rank}", group="many", rank=rank) for rank in range(20)]
    members = [RankProcess(spec, SimpleNamespace(limit_s=0.0)) for spec in specs]  # type: ignore[arg-type]
    ranks = RankTable(lambda ended: None)
    ranks.add(members)
    for member in members:
        data = {"host": "elsewhere", "ipc": "", "tcp": "tcp://10.0.0.1:1"}
        ranks.record_arrival(member, 1, {"group": "many", "rank": member.spec.rank, "data": data})
    ranks.announce(SimpleNamespace(epoch=1, peers=peers))  # type: ignore[arg-type]
    in_background("members", lambda: None).wait(30.0)
    assert len(timeouts) == 20 and sum(timeouts) <= 0.2


def spec_of(group: str, rank: int, folder: Path, world_size: int = 2) -> WorkerSpec:
    stem = folder / f"{group}-{rank}"
    return WorkerSpec(group, rank, world_size, "n1", 0, rank, world_size, (), "registry", "token", b"",
                      f"{stem}.out", f"{stem}.err", incarnation=f"{group}{rank}")  # fmt: skip


class Launched:
    """A launcher of ranks without processes, which notes the ranks that it has to kill."""

    limit_s = 0.0

    def __init__(self) -> None:
        self.killed: list[str] = []

    def kill(self, members: list[RankProcess]) -> None:
        self.killed += [member.spec.name for member in members]


class Run:
    """The driver's part of a run: ranks 0 and 1 of a group `rollout` that others may join, and one of an actor."""

    def __init__(self, folder: Path, replica_size: int) -> None:
        (folder / "run").mkdir()
        self.registry = GenerationFolder.create(folder / "run" / "registry", "local-0")
        self.ranks, self.failures, self.launcher = RankTable(lambda ended: None), FailurePolicy(), Launched()
        self.events: list[dict[str, Any]] = []
        self.lost: list[tuple[str, int, str]] = []
        self.rpc: Any = SimpleNamespace(left=[], leave=lambda record: self.rpc.left.append(record["incarnation"]))
        self.membership = Membership(
            self.ranks, self.registry, self.failures, folder, False, self.events.append,
            lambda group, rank, why: self.lost.append((group, rank, why)),
        )  # fmt: skip
        specs = [spec_of("rollout", 0, folder), spec_of("rollout", 1, folder), spec_of("actor", 0, folder, 1)]
        self.members = [RankProcess(spec, self.launcher) for spec in specs]  # type: ignore[arg-type]
        self.ranks.add(self.members)
        for member in self.members:
            self.arrive(member)
        elastic = {"rollout": GroupPolicy(min_ranks=1, replica_size=replica_size)}
        self.policies = SessionPolicies(elastic, closed_reason="set algorithm.max_staleness")

    def begin(self) -> None:
        self.failures.enter(SessionPhase.RUNNING, self.policies)

    def arrive(self, member: RankProcess) -> None:
        spec = member.spec
        data = {"host": "here", "ipc": "", "tcp": ""}
        record = {"group": spec.group, "rank": spec.rank, "incarnation": spec.incarnation, "pid": 1, "data": data}
        self.ranks.record_arrival(member, 1, record)

    def join(self, **changes: Any) -> RankProcess:
        spec = json.loads(self.membership.join(join_request("rollout", 2, 0) | changes))
        return self.ranks.processes[f"{spec['group']}-{spec['rank']}"]


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    made = Run(tmp_path, getattr(request, "param", 1))
    yield made
    made.membership.close()


def test_a_rank_joins_works_and_leaves(run: Run) -> None:
    run.begin()
    member = run.join(job="7")
    assert (member.spec.rank, member.spec.world_size, member.spec.threads, member.state) == (2, 2, 2, "starting")
    assert run.membership.by_job() == {} and run.membership.newcomers("rollout", ()) == [
        each.record for each in run.members[:2]
    ]
    epoch = run.membership.epoch
    run.arrive(member)
    known = [each.spec.incarnation for each in run.members]
    assert [record["rank"] for record in run.membership.newcomers("rollout", known)] == [2]
    assert run.membership.epoch == epoch + 1
    run.membership.register_participant("rollout", 2)
    run.membership.register_participant("rollout", 0)  # has not joined: no event
    assert run.membership.by_job() == {"7": 1} and run.membership.ranks_of_job("7") == [member]
    asked = {"incarnation": member.spec.incarnation}
    assert json.loads(run.membership.join(asked)) == "", "it takes part"
    member.leave_reason, member.asks_to_leave = "its job ends", True
    assert run.membership.leaving("rollout") == [2]
    run.membership.register_departure(member, WorkerFailed("gone"), run.rpc)
    assert member.state == "ended" and member.has_departed and run.rpc.left == [member.spec.incarnation]
    assert json.loads(run.membership.join(asked)) == "its job ends" == run.membership.find_leave_reason("rollout", 2)
    assert run.membership.by_job() == {"7": 0} and run.membership.ranks_of_job("7") == []
    wait_until(lambda: len(run.events) == 3, 10.0)
    assert [event["event"] for event in run.events] == ["joined", "works", "left"]
    assert run.events[0]["job"] == "7" and run.events[-1]["why"] == "its job ends" and run.lost == []


def test_a_rank_that_is_lost_is_killed_reported_and_published(run: Run) -> None:
    run.begin()
    lost = run.members[1]
    failure = WorkerFailed("silent for 9 s\nmore", group="rollout", rank=1)
    run.membership.register_departure(lost, failure, run.rpc)
    wait_until(lambda: run.registry.get(DEPARTED, "rollout-1") is not None, 10.0)
    published = run.registry.get(DEPARTED, "rollout-1")
    assert published is not None and (published["why"], published["incarnation"]) == ("silent for 9 s", "rollout1")
    assert run.launcher.killed == ["rollout-1"] and run.lost == [("rollout", 1, "silent for 9 s")]
    assert run.membership.restartable("rollout") == [lost] and run.membership.find_leave_reason("rollout", 1) == ""
    assert run.events == [], "those are of joined ranks"


@pytest.mark.parametrize("run", [2], indirect=True)
def test_ranks_of_one_engine_leave_together_and_fill_one_engine(run: Run) -> None:
    run.begin()
    first, other, alone = run.join(job="7"), run.join(job="8"), run.join(job="7")
    assert [member.spec.rank for member in (first, other, alone)] == [2, 4, 3], "an engine has ranks of one job"
    failure = WorkerFailed("raised", remote_traceback="Traceback ...")
    run.membership.register_departure(first, failure, run.rpc)
    assert (first.state, alone.state, other.state) == ("ended", "ended", "starting")
    assert run.membership.faulty == {"7"}, "its program, or its node, is at fault"
    assert run.join(job="7").spec.rank == 6, "not beside ranks that have ended"
    two = [run.join(job="", node="n7").spec.rank for _ in range(2)]
    assert two == [8, 9] and run.join(job="", node="n8").spec.rank == 10, (
        "without a job, an engine has ranks of one node"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"group": "actor"},
            "no rank can join group 'actor' of this run; groups that take some: rollout; set algorithm",
        ),
        ({"code": "other"}, "this is another rlhpc than the run's own"),
        ({"host": "elsewhere"}, "this run listens to processes of its own host only"),
    ],
)
def test_who_may_not_join(run: Run, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TooEarly, match="are starting or ending"):
        run.join()
    run.begin()
    with pytest.raises(ChannelError) as refused:
        run.join(**changes)
    assert message in str(refused.value) and len(run.ranks.processes) == 3 and run.events == []


def test_what_a_failed_rank_says(tmp_path: Path) -> None:
    spec = spec_of("actor", 0, tmp_path)
    Path(spec.log_err).write_text("the last line\n")
    killed = exit_failure(spec, signal.SIGKILL)
    assert (killed.exit_signal, killed.exit_code, killed.restartable) == (signal.SIGKILL, 1, True)
    assert "was killed by signal 9 (SIGKILL); if nobody killed it" in str(killed) and "the last line" in str(killed)
    refused = exit_failure(spec, 2 << 8, "\n    its output")
    assert refused.exit_code == 2 and "exited with status 2" in str(refused)
    assert str(refused).endswith("its output") and not refused.restartable, "the user has to change something"


def test_the_table_has_the_newest_rank_of_each_name(tmp_path: Path) -> None:
    changes: list[list[str]] = []
    table, launcher = RankTable(lambda ended: changes.append([*ended])), Launched()
    old, other = (RankProcess(spec_of("env", rank, tmp_path), launcher) for rank in range(2))  # type: ignore[arg-type]
    new = RankProcess(replace(old.spec, incarnation="later"), launcher)  # type: ignore[arg-type]
    table.add([old, other])
    table.add([new])
    assert table.find("env-0", "later") is new and table.find("env-0", "env0") is None
    assert table.give_up([old]) == [], "another has its name"
    table.mark_stopping([other])
    assert table.record_ends([other, new]) == [new], "the other was told to end"
    assert state_check("ended", [new, other])() and table.await_exit([new, old], 0.0) == [old]
    assert table.await_ended([new, other], 0.0) and table.alive_processes() == []
    table.forget_ended("nothing")
    assert table.all_processes() == [] and len(changes) == 3
