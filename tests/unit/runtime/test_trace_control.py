"""Control of the trace from the driver: which steps are recorded, and which ranks are profiled when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc import Cluster, NodePlacementStrategy, Session, Worker, WorkerGroup
from rlhpc.runtime.trace_control import ProfileOptions, TraceControl
from rlhpc.runtime.trace_recorder import recorder


class Busy(Worker):
    def multiply(self, size: int) -> float:
        import torch

        return float((torch.ones(size, size) @ torch.ones(size, size)).sum())

    def break_profiles(self) -> None:
        self._profile_folder = Path("/proc/nothing")


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    made = Session.start(registry_root=tmp_path / "registry", log_dir=tmp_path / "logs")
    yield made
    made.stop()
    recorder.stop()
    recorder.reset()


def launch(name: str) -> WorkerGroup:
    return Busy.create_group().launch(Cluster.local(), NodePlacementStrategy([0, 0]), name)


def test_without_a_session_nothing_happens(tmp_path: Path) -> None:
    control = TraceControl(tmp_path / "trace", {1}, None, ProfileOptions({"busy"}, {0}, {1}))
    control.begin_step(1)
    control.end()
    assert not recorder.is_on and not (tmp_path / "trace").exists()


def test_the_chosen_ranks_profile_the_chosen_steps(session: Session, tmp_path: Path) -> None:
    group, other = launch("busy"), launch("other")
    control = TraceControl(tmp_path / "trace", (), session, ProfileOptions({"busy"}, {1}, {2, 3}))
    for step in range(1, 6):
        control.begin_step(step)
        for handle in (group.multiply(10 * step), other.multiply(10)):
            handle.wait()
    control.end()
    files = sorted((tmp_path / "logs" / "profiles").iterdir())
    assert [file.name for file in files] == ["busy-1.step-2.json", "busy-1.step-3.json"]
    for file in files:
        names = [event.get("name") for event in json.loads(file.read_text())["traceEvents"]]
        assert names.count("aten::mm") == 1, "one step's call"
    assert not (tmp_path / "trace").exists()


def test_a_profile_that_fails_ends_no_run(session: Session, tmp_path: Path) -> None:
    group = launch("busy")
    group.break_profiles().wait()
    control = TraceControl(tmp_path / "trace", (), session, ProfileOptions({"busy"}, {0, 1}, {1}))
    control.begin_step(1)
    assert len(group.multiply(10).wait()) == 2
    control.end()
    assert len(group.multiply(10).wait()) == 2
    assert "step None is not profiled" in (tmp_path / "logs" / "busy-0.err").read_text()


def test_a_request_counts_from_the_next_step_on(session: Session, tmp_path: Path) -> None:
    control = TraceControl(tmp_path / "trace", {9}, session)
    recorded = []
    for step in range(1, 11):
        if step == 3:
            session.trace_request = 2
        control.begin_step(step)
        recorded += [step] if recorder.is_on else []
    control.end()
    assert recorded == [3, 4, 9] and not recorder.is_on


class Ranged(Busy):
    """Worker that writes down the ranges that Nsight Systems would record."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []

    def capture_profile_range(self, on: bool) -> None:
        self.calls.append(on)

    def note(self, step: int) -> list[object]:
        self.calls.append(step)
        return self.calls


def test_ranks_under_nsight_systems_open_a_range_for_their_steps(session: Session, tmp_path: Path) -> None:
    ranged, other = (Ranged.create_group().launch(Cluster.local(), None, name) for name in ("ranged", "other"))
    options = ProfileOptions((), (), (), {"ranged"}, {2, 3, 5})
    control = TraceControl(tmp_path / "trace", (), session, options)
    for step in range(1, 6):
        control.begin_step(step)
        for handle in (ranged.note(step), other.note(step)):
            handle.wait()
    control.end()
    assert ranged.note(0).wait() == [[1, True, 2, 3, False, 4, True, 5, False, 0]]
    assert other.note(0).wait() == [[1, 2, 3, 4, 5, 0]]
