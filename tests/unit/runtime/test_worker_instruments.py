"""Log lines, timed sections and profiles of real ranks."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlhpc import Cluster, Session, Worker, WorkerFailed, WorkerGroup
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.placement import NodePlacementStrategy
from tests.instrumented import Instrumented


@pytest.fixture
def group() -> Iterator[WorkerGroup]:
    group = Instrumented.create_group().launch(Cluster.local(), NodePlacementStrategy([0, 0]), "tools")
    yield group
    group.shutdown()


def test_lines_are_in_the_rank_s_log_with_level_and_rank(group: WorkerGroup) -> None:
    group.speak("hello").wait()
    session = Session.running()
    assert session is not None
    first, last = (Path(session.processes[f"tools-{rank}"].spec.log_err).read_text() for rank in (0, 1))
    for log, rank in ((first, 0), (last, 1)):
        for level, text in (("INFO", "info hello"), ("WARNING", "warning hello 100%"), ("ERROR", "error hello")):
            assert f"{level} [tools-{rank}] {text}\n" in log
        assert "debug hello" not in log
    assert "first hello" in first and "first hello" not in last
    assert "last hello" in last and "last hello" not in first


def test_log_lines_name_the_caller_s_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Instrumented().speak("where")
    assert {record.funcName for record in caplog.records if "where" in record.message} == {"speak"}


def test_the_handle_of_a_call_has_its_timed_sections(group: WorkerGroup) -> None:
    handle, later = group.train(0.1), group.train(0.0)
    assert handle.wait() == [0, 1]
    durations, by_rank = handle.consume_durations(return_per_rank=True)
    assert set(durations) == {"train", "forward"}
    assert 0.2 <= durations["forward"] <= durations["train"], "both sections of a tag count"
    assert [set(each) for each in by_rank] == [{"train", "forward"}] * 2
    assert durations["forward"] == max(each["forward"] for each in by_rank)
    assert handle.consume_durations() == {}
    assert later.consume_durations("min")["forward"] < 0.2, "each call has its own sections"
    assert set(group.speak("x").consume_durations()) == {"speak"}
    totals = group.pop_execution_times().wait()
    assert all(set(each) == {"train", "forward"} and each["forward"] >= 0.2 for each in totals), "of both calls"
    assert group.pop_execution_times().wait() == [{}, {}]


def test_an_async_method_is_timed_to_its_end(group: WorkerGroup) -> None:
    handle = group.generate(0.2)
    assert 0.2 <= handle.consume_duration() < 20
    with pytest.raises(ValueError, match=r"tools\.generate\(\) was consumed before"):
        handle.consume_duration()
    assert set(group.generate(0.0).consume_durations()) == {"generate"}
    with pytest.warns(match="argument reduction of Handle.consume_durations"):
        assert set(group.generate(0.0).consume_durations(reduction="mean")) == {"generate"}
    with pytest.raises(ValueError, match="'median'; allowed: max, min, mean"):
        group.generate(0.0).consume_durations("median")


def test_a_section_without_a_tag_has_the_function_s_name(group: WorkerGroup) -> None:
    assert set(group.unnamed_section().consume_durations()) == {"unnamed_section"}
    assert group.survive().wait() == ["survived", "survived"]
    assert group.pop_execution_time("failing").wait() > [0.0, 0.0], "a section that raises is timed"
    with pytest.raises(
        WorkerFailed, match=r"no section 'failing' has been timed on tools-.; there are: unnamed_section"
    ):
        group.pop_execution_time("failing").wait()


def test_timer_keeps_the_method() -> None:
    class Plain(Worker):
        @Worker.timer("a")
        def act(self, x: int) -> int:
            """Acts."""
            return x + 1

    worker = Plain()
    assert worker.act(1) == 2 and worker.act.__doc__ == "Acts." and worker.act.__name__ == "act"
    assert worker.pop_execution_time("a") > 0


def test_a_profile_has_operators_and_timed_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    group = Instrumented.create_group().launch(Cluster.local(), NodePlacementStrategy([0, 0]), "profiled")
    group.multiply(8).wait()
    group.start_profile(3).wait()
    group.multiply(16).wait()
    paths = group.stop_profile().wait()
    assert paths == [str(tmp_path / "profiles" / f"profiled-{rank}.step-3.json") for rank in (0, 1)]
    for path in paths:
        events = json.loads(Path(path).read_text())["traceEvents"]
        names = [event.get("name") for event in events]
        assert names.count("multiply") == 1, "the call before the recording is not in it"
        assert "aten::mm" in names
    assert group.execute_on(1).start_profile(4).wait() == [None]
    with pytest.raises(
        WorkerFailed, match=r"start_profile\(5\): profiled-1 records a profile of step 4; call stop_profile"
    ):
        group.execute_on(1).start_profile(5).wait()


def test_profiles_of_a_run_lie_beside_its_logs(tmp_path: Path) -> None:
    session = Session.start(registry_root=tmp_path / "registry", log_dir=tmp_path / "logs")
    try:
        group = Instrumented.create_group().launch(Cluster.local(), name="logged")
        group.start_profile(0).wait()
        assert group.stop_profile().wait() == [str(tmp_path / "logs" / "profiles" / "logged-0.step-0.json")]
        assert os.path.getsize(tmp_path / "logs" / "profiles" / "logged-0.step-0.json") > 0
    finally:
        session.stop()


def test_a_profile_that_was_not_started_cannot_be_stopped() -> None:
    with pytest.raises(RlhpcError, match="Instrumented-0 records no profile; call start_profile first"):
        Instrumented().stop_profile()


def test_sections_of_ranks_with_different_tags_are_reduced_over_those_that_have_them() -> None:
    started = time.monotonic()
    worker = Instrumented()
    with worker.worker_timer("outer"), worker.worker_timer("inner"):
        time.sleep(0.01)
    durations = worker.pop_execution_times()
    assert 0.01 <= durations["inner"] <= durations["outer"] <= time.monotonic() - started


def test_a_range_of_nsight_systems_needs_cuda_and_never_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    worker = Instrumented()
    worker.capture_profile_range(True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    worker.capture_profile_range(True)
    worker.capture_profile_range(False)
    assert calls == ["start", "stop"]
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: 1 / 0)
    worker.capture_profile_range(True)
