"""Leases: silence makes a rank suspect; only long silence makes it lost."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable

import pytest

from rlhpc import Session, WorkerFailed
from rlhpc.runtime import failure_detection
from rlhpc.runtime.policies import GroupPolicy, SessionPolicies
from rlhpc.runtime.worker_process import HEARTBEAT_S

SUSPECT_S = 1.5 * HEARTBEAT_S
LOG = failure_detection.__name__


def until(condition: Callable[[], bool], within: float = 20.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def suspect(name: str) -> bool:
    session = Session.running()
    assert session is not None
    return session.processes[name].suspect


def failure() -> Exception | None:
    session = Session.running()
    assert session is not None
    return session.failure


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., None]:
    """Shortens the leases of the ranks that are watched from then on."""
    caplog.set_level(logging.WARNING, logger=LOG)

    def shorten(suspect_s: float, lost_s: float) -> None:
        monkeypatch.setattr(failure_detection, "SUSPECT_S", suspect_s)
        monkeypatch.setattr(failure_detection, "LOST_S", lost_s)

    return shorten


def test_a_stopped_rank_is_suspect_and_recovers(launch, leases, caplog):
    group = launch(2, "leased")
    pid = group.identity().wait()[1]["pid"]
    leases(SUSPECT_S, 600.0)
    os.kill(pid, signal.SIGSTOP)
    try:
        handle = group.add(1)
        until(lambda: suspect("leased-1"))
        until(lambda: "leased-1 has been silent" in caplog.text)
        time.sleep(2.5)  # it is said once
        assert [r.levelname for r in caplog.records if "leased-1" in r.getMessage()] == ["WARNING"]
        assert not handle.done() and failure() is None
    finally:
        os.kill(pid, signal.SIGCONT)
    assert handle.wait() == [1, 2]
    until(lambda: not suspect("leased-1"))
    assert failure() is None and group.add(5).wait() == [5, 6]


@pytest.mark.parametrize("own", [False, True])
def test_a_rank_that_stays_silent_is_lost(own: bool, launch, leases):
    """After the time that all groups have, or one of the group's own."""
    group = launch(2, "silent")
    facts = group.identity().wait()
    leases(SUSPECT_S, 600.0 if own else SUSPECT_S + 4.0)
    policies = SessionPolicies({"silent": GroupPolicy(lease_s=SUSPECT_S + 4.0 if own else None)})
    with (
        Session.current().training(policies),
        pytest.raises(
            WorkerFailed, match=r"silent\[0\] on node .* gave no sign of life for \d+ s \(log .*\)"
        ) as caught,
    ):
        os.kill(facts[0]["pid"], signal.SIGSTOP)
        group.add(1).wait(timeout=60)
    lost = caught.value
    assert (lost.group, lost.rank, lost.node) == ("silent", 0, os.uname().nodename)
    assert lost.log_path and lost.log_path in str(lost) and os.path.exists(lost.log_path)
    for fact in facts:  # the stopped one is killed, too
        until(lambda pid=fact["pid"]: not os.path.exists(f"/proc/{pid}"))
    assert launch(1, "next").add(1).wait() == [1], "the session goes on"


def test_a_busy_rank_is_not_dead(launch, leases, caplog):
    group = launch(2, "busy")
    group.identity().wait()
    leases(SUSPECT_S, 600.0)
    seconds = SUSPECT_S + 1.5 * HEARTBEAT_S
    hogging, napping = group.execute_on(0).hold_the_interpreter(seconds), group.execute_on(1).nap(seconds)
    until(lambda: suspect("busy-0"))
    assert hogging.wait() == [0] and napping.wait() == [1]
    until(lambda: not suspect("busy-0"))
    assert failure() is None
    assert "busy-0 has been silent" in caplog.text
    assert "busy-1" not in caplog.text, "a call that lets other threads run is not silent"


def test_a_job_that_was_suspended_loses_nobody(launch):
    """The driver's first look after a pause of everybody comes before any heartbeat."""
    group = launch(1, "paused")
    session = Session.running()
    assert session is not None
    for member in session.processes.values():
        member.last_heartbeat -= 3600.0
    session.leases.last_check -= 3600.0
    time.sleep(HEARTBEAT_S)
    assert failure() is None and not suspect("paused-0")
    assert group.add(1).wait() == [1]
