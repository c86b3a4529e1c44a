"""Phases of a start: what ranks report, what is published, and what is made of it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc import Cluster, DeadlineExceeded, NodePlacementStrategy, RendezvousTimeout, Session, Worker
from rlhpc.runtime import registry, start_phases
from rlhpc.runtime.errors import StorageError
from rlhpc.runtime.registry import GenerationFolder
from rlhpc.runtime.start_phases import (
    WAITING,
    RankPhases,
    connect_reporter,
    enter_phase,
    phase_record,
    phases_within,
    read_phases,
)


def rank(number: int, *phases: tuple[str, float], group: str = "rollout") -> RankPhases:
    return RankPhases(group, number, phases)


def test_phases_last_until_the_next_and_add_up() -> None:
    phases = rank(0, ("environment", 1.0), ("imports", 1.5), (WAITING, 4.0), ("imports", 10.0), ("profile", 11.0))
    assert phases.durations() == {"environment": 0.5, "imports": 3.5, WAITING: 6.0}
    assert phases.describe(31.0) == "in phase 'profile' for 20.0 s, after environment 0.5 s, imports 3.5 s"
    assert rank(0, ("environment", 1.0)).describe(3.5) == "in phase 'environment' for 2.5 s"
    assert rank(0).describe(1.0) == rank(0, ("a", 1.0), (WAITING, 2.0)).describe(9.0) == ""
    assert rank(0, ("a", 5.0), ("b", 4.0)).durations() == {"a": 0.0}, "the clock was set back"


def test_a_start_ends_with_the_first_step() -> None:
    phases = rank(0, ("environment", 1.0), ("update", 3.0), (WAITING, 900.0), ("update", 950.0))
    assert phases.truncate_at(5.0).durations() == {"environment": 2.0, "update": 2.0}
    assert rank(0, ("environment", 7.0)).truncate_at(5.0).durations() == {}, "a rank that was started again later"


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    ranks = [rank(1, ("environment", 1.0), ("imports", 2.5)), rank(0), rank(0, (WAITING, 4.0), group="actor")]
    kind, name, record = phase_record(ranks)
    (tmp_path / kind).mkdir()
    (tmp_path / kind / f"{name}.json").write_text(json.dumps(record))
    assert read_phases(tmp_path) == [RankPhases(r.group, r.rank, [*r.phases]) for r in (ranks[2], ranks[1], ranks[0])]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"ranks": 3}', '{"ranks": [{"group": "a", "rank": "x", "phases": []}]}', '{"ranks": [[1]]}',
     '{"ranks": [{"group": "a", "rank": 0, "phases": [["b"]]}]}', '{"ranks": [{"group": "a", "rank": 0, "phases": 1}]}',
     '{"ranks": [{"group": "a", "rank": 0, "phases": [["b", "NaN"]]}]}'],
)  # fmt: skip
def test_broken_records_are_left_out(tmp_path: Path, content: str) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "ranks.json").write_text(content)
    assert read_phases(tmp_path) == read_phases(tmp_path / "missing") == []


def test_a_reporter_sends_changes_and_comes_back_to_the_phase_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_phases._reporter, "send", None)
    monkeypatch.setattr(start_phases._reporter, "phase", "")
    with phases_within():
        enter_phase("no rank, so nothing hears it")
    sent = list[str]()
    connect_reporter(lambda phases: sent.extend(phase for phase, _ in phases), [("rendezvous", 1.0), ("imports", 2.0)])
    enter_phase("imports")
    with pytest.raises(ValueError, match="broken"), phases_within():
        enter_phase("profile")
        raise ValueError("broken")
    enter_phase(WAITING)
    assert sent == ["rendezvous", "imports", "profile", "imports", WAITING]


class Slow(Worker):
    """Worker with a long start; importable by its ranks."""

    def __init__(self, slow_rank: int = -1) -> None:
        super().__init__()
        if self.rank == slow_rank:
            enter_phase("reads a slow disk")
            time.sleep(600)

    def load(self, slow_rank: int) -> None:
        with phases_within():
            enter_phase("graphs")
            if self.rank == slow_rank:
                time.sleep(600)


@pytest.fixture
def session(tmp_path: Path) -> Any:
    session = Session.start(registry_root=tmp_path / "registry", reports_calls=True)
    yield session
    session.stop()


def launch(session: Session, **options: Any) -> Any:
    cluster = Cluster.local(num_nodes=1, accelerators_per_node=0)
    return Slow.create_group(*options.pop("args", ())).launch(
        cluster, NodePlacementStrategy([0, 0]), name="slow", **options
    )


def test_a_start_that_is_stuck_names_rank_and_phase(session: Session) -> None:
    """In a constructor; a call is the next test."""
    with pytest.raises(RendezvousTimeout) as caught:
        launch(session, args=(1,), timeout=30.0)
    [line] = [line for line in str(caught.value).splitlines() if "slow-1" in line and "pid" in line]
    assert re.search(r"in phase 'reads a slow disk' for \d+\.\d s, after environment .* rendezvous .* imports", line)
    assert "slow-0" not in str(caught.value)


def names_of(session: Session, rank: int) -> list[str]:
    return [phase for phase, _ in session.ranks.processes[f"slow-{rank}"].phases]


def wait_for(session: Session, rank: int, phases: list[str]) -> None:
    """Waits until the driver has the notes of these phases."""
    deadline = time.monotonic() + 60
    while names_of(session, rank) != phases:
        assert time.monotonic() < deadline, names_of(session, rank)
        time.sleep(0.01)


BEGINNING = ["environment", "rendezvous", "imports", WAITING, "load", "graphs"]


def test_a_call_that_is_stuck_names_rank_and_phase(session: Session) -> None:
    handle = launch(session).load(1)
    wait_for(session, 0, [*BEGINNING, "load", WAITING])
    wait_for(session, 1, BEGINNING)
    with pytest.raises(DeadlineExceeded) as caught:
        handle.wait(timeout=1.0)
    text = str(caught.value)
    assert re.search(r"slow\[1\] is in phase 'graphs' for \d+\.\d s, after environment", text)
    assert "slow[0] is" not in text


def test_calls_are_phases_until_the_first_step_is_done(session: Session) -> None:
    group = launch(session)
    group.load(-1).wait()
    for rank_number in (0, 1):
        wait_for(session, rank_number, [*BEGINNING, "load", WAITING])
    session.end_start()
    group.load(-1).wait()
    later = [*BEGINNING, "load", WAITING, "graphs", WAITING]  # what a library reports, but no call
    wait_for(session, 0, later)
    session.stop()
    [first, _] = read_phases(session.registry.root)
    assert [phase for phase, _ in first.phases] == later and min(first.durations().values()) >= 0.0


def test_phases_are_published_after_changes_only_and_again_after_a_failure(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that watches the registry; a disk that is full for a while loses nothing."""
    monkeypatch.setattr(registry, "LOOK_S", 0.01)
    launch(session)
    wait_for(session, 1, BEGINNING[:4])
    deadline = time.monotonic() + 60
    while not (ranks := read_phases(session.registry.root)) or [p for p, _ in ranks[1].phases] != BEGINNING[:4]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    published, failures = session.registry.root / "start" / "ranks.json", [StorageError("full")]
    published.unlink()
    session._publish_phases()
    assert not published.exists(), "nothing has changed"
    put = GenerationFolder.put

    def failing_put(self: GenerationFolder, kind: str, *words: Any) -> None:
        if kind == "start" and failures:
            raise failures.pop()
        put(self, kind, *words)

    monkeypatch.setattr(GenerationFolder, "put", failing_put)
    session._has_new_phases = True
    while not published.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert failures == []
