"""Recorder of a process's trace: what reaches its file, from threads, tasks and forks, and when the disk is full."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc.runtime import trace_recorder
from rlhpc.runtime.trace_recorder import (
    NO_SPAN,
    IdleSpan,
    Recorder,
    add_gauge,
    mark_flow,
    new_flow,
    record,
    recorder,
    span,
    traced,
)
from rlhpc.tracing.read import read_trace
from tests.false_clock import false_clock_variables

HEADER = {"group": "g", "rank": 0, "host": "h", "host_id": "h", "pid": 1}


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """File of a recording that is on during the test."""
    made = tmp_path / "trace" / "g-0.jsonl"
    recorder.start(str(made), HEADER)
    yield made
    recorder.stop()
    recorder.reset()


def lines(path: Path) -> list[dict[str, Any]]:
    recorder.stop(flush=True)
    return lines_of(path)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(line: dict[str, Any]) -> list[list[Any]]:
    """Returns the rows of a line's packed table: name, category, start, end, thread and arguments of each span."""
    table = line.get("packed", {"base_ns": 0, "kinds": []})
    base = table["base_ns"]
    return [
        [*kind[:2], base + start, base + start + length, *kind[2:-1]]
        for kind in table["kinds"]
        for start, length in zip(kind[-1][::2], kind[-1][1::2], strict=True)
    ]


def spans(path: Path) -> list[list[Any]]:
    return [row for line in lines(path) for row in rows_of(line)]


def test_nothing_is_recorded_while_it_is_off(tmp_path: Path) -> None:
    recorder.reset()
    with span("a", "call") as off:
        off.add(tokens=1)
    assert span("a", "call") is NO_SPAN and not recorder.spans
    idle = IdleSpan("a")
    idle.begin()
    idle.end()
    assert not recorder.spans and not list(tmp_path.iterdir())


def test_a_span_has_its_name_times_thread_and_arguments(path: Path) -> None:
    before = time.time_ns()
    with span("outer", "call", a=1) as outer:
        outer.add(b="x")
        with span("inner", "wait"):
            pass
    first = lines(path)[0]
    assert first["rlhpc_trace"] == 1 and {name: first[name] for name in HEADER} == HEADER
    inner, outer_row = spans(path)
    assert inner[:2] == ["inner", "wait"] and outer_row[:2] == ["outer", "call"]
    assert before <= outer_row[2] <= inner[2] <= inner[3] <= outer_row[3] <= time.time_ns()
    assert outer_row[4:] == ["main", {"a": 1, "b": "x"}]


def test_a_kind_of_span_stands_once_in_a_line(path: Path) -> None:
    for tokens in (1, 1, 2, 1):
        with span("a", "engine", tokens=tokens):
            pass
        with span("b", "wait"):
            pass
    (table,) = [line["packed"] for line in lines(path) if "packed" in line]
    assert [kind[3] for kind in table["kinds"]] == [{"tokens": 1}, {}, {"tokens": 2}, {"tokens": 1}]
    in_order = sorted(spans(path), key=lambda row: row[2])
    assert [(row[0], row[5]) for row in in_order] == [
        pair for tokens in (1, 1, 2, 1) for pair in (("a", {"tokens": tokens}), ("b", {}))
    ]


def test_a_loops_spans_take_few_bytes(path: Path) -> None:
    for _ in range(100):
        with span("simulate", "simulator", slots=8):
            pass
    recorder.stop(flush=True)
    assert path.stat().st_size < 100 * 30


#: Records a span of a second in which the wall clock is set, as a shell sets it by the file of `false_clock_variables`.
SET_CLOCK = """
import json, sys, time
from pathlib import Path
from rlhpc.runtime.trace_recorder import recorder, span
folder, set_to = Path(sys.argv[1]), sys.argv[2]
recorder.start(str(folder / "trace" / "driver-0.jsonl"), json.loads(sys.argv[3]))
with span("step 1", "step", step=1):
    before = time.time()
    (folder / "clock").write_text(set_to)
    while abs(time.time() - before) < 600:  # libfaketime looks at the file once a second
        time.sleep(0.1)
recorder.stop(flush=True)
"""


@pytest.mark.parametrize("set_to", ["+3600", "-3600"])
def test_a_wall_clock_that_is_set_changes_no_duration(tmp_path: Path, set_to: str) -> None:
    (tmp_path / "clock").write_text("+0")
    variables = false_clock_variables(tmp_path / "site", tmp_path / "clock")
    arguments = [sys.executable, "-c", SET_CLOCK, str(tmp_path), set_to, json.dumps({**HEADER, "group": "driver"})]
    script = "\n".join([*variables, f"export PYTHONPATH={tmp_path / 'site'}:$PYTHONPATH", shlex.join(arguments)])
    started, began = time.time(), time.monotonic()
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    ((start, end),) = read_trace(tmp_path).steps().values()
    assert 0 < end - start < (time.monotonic() - began) * 1e9
    assert started <= start / 1e9 <= end / 1e9 <= time.time()
    wall = [pair for line in lines_of(tmp_path / "trace" / "driver-0.jsonl") for pair in line.get("wall", ())]
    assert wall[-1][1] - wall[-1][0] == pytest.approx(float(set_to) * 1e9, abs=1e9)


def test_an_exception_passes_and_is_noted(path: Path) -> None:
    with pytest.raises(ZeroDivisionError), span("a", "call"):
        _ = 1 / 0
    assert spans(path)[0][5] == {"error": "ZeroDivisionError"}


def test_threads_and_tasks_have_their_names(path: Path) -> None:
    def work() -> None:
        with span("in a thread", "call"):
            pass

    async def task() -> None:
        with span("in a task", "turn"):
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(*(asyncio.create_task(task(), name=f"t{i}") for i in range(2)))

    thread = threading.Thread(target=work, name="worker-1")
    thread.start()
    thread.join()
    asyncio.run(both())
    assert {row[4] for row in spans(path)} == {"worker-1", "main/t0", "main/t1"}


def test_many_threads_lose_nothing(path: Path) -> None:
    def work(number: int) -> None:
        for i in range(2000):
            with span("s", "call", n=number, i=i):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted((row[5]["n"], row[5]["i"]) for row in spans(path)) == [(n, i) for n in range(8) for i in range(2000)]


def test_what_does_not_fit_is_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder.is_on = False  # nothing is written meanwhile
    time.sleep(0.3)
    monkeypatch.setattr(trace_recorder, "_MAX_WAITING", 10)
    recorder.is_on = True
    with recorder._lock:
        for _ in range(25):
            record("s", "call", 1, 2)
        for _ in range(12):
            new_flow("m")
    written = lines(path)
    assert sum(len(rows_of(line)) for line in written) == 10
    assert sum(line.get("dropped", 0) for line in written) == 15 + 2


def test_a_span_that_is_open_at_the_end_is_still_written(path: Path) -> None:
    with span("long", "call"):
        recorder.stop()
    deadline = time.monotonic() + 10
    while not (path.exists() and "long" in path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [row[0] for row in spans(path)] == ["long"]


def test_recording_goes_on_in_the_same_file(path: Path) -> None:
    for name in ("first", "second"):
        recorder.start(str(path), HEADER)
        with span(name, "call"):
            pass
        recorder.stop(flush=True)
    assert [row[0] for row in spans(path)] == ["first", "second"]
    assert sum("rlhpc_trace" in line for line in lines(path)) == 2


def test_messages_counters_and_clock_are_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "g-0.jsonl"
    samples = iter((t, t + 1, t + 1, t + 2) for t in range(100))
    monkeypatch.setattr(recorder, "gauges", {})  # without those of other tests
    add_gauge("depth", "items", lambda: 3)
    add_gauge("broken", "items", lambda: 1 // 0)
    add_gauge("absent", "items", lambda: None)
    recorder.start(str(path), HEADER, lambda: next(samples))
    first = new_flow("m")
    mark_flow("m", first, is_target=True)
    assert new_flow("m") != first
    written, deadline = [], time.monotonic() + 30
    while not {"counters", "clock"} <= {key for line in written for key in line} and time.monotonic() < deadline:
        time.sleep(0.05)
        written = lines(path) if path.exists() else []
    recorder.reset()
    flows = [row for line in written for row in line.get("flows", ())]
    assert [(row[0], row[1]) for row in flows[:2]] == [(first, 0), (first, 1)]
    counters = [row for line in written for row in line.get("counters", ())]
    assert {(row[0], row[1]) for row in counters} == {("memory", "B"), ("depth", "items")}
    assert all(row[3] > 1 << 20 for row in counters if row[0] == "memory")
    clock = [row for line in written for row in line.get("clock", ())]
    assert clock[:8] == [[t, t + 1, t + 1, t + 2] for t in range(8)]


def test_arguments_of_any_kind_are_written(path: Path) -> None:
    import numpy as np

    with span("a", "call", number=np.int64(3), part=np.float32(0.5), path=Path("/x"), bad="\udc80"):
        pass
    with span("a", "call", array=np.zeros(2)):
        pass
    with span("a", "call", array=np.zeros(2)):  # whose comparison with the one before is no single truth value
        pass
    first, *others = spans(path)
    assert first[5] == {"number": 3, "part": 0.5, "path": "/x", "bad": "\udc80"}
    assert [row[5] for row in others] == [{"array": "[0. 0.]"}] * 2


def test_a_full_disk_is_said_once_and_then_recording_goes_on(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with span("before", "call"):
        pass
    lines(path)
    recorder.start(str(path), HEADER)
    size, limits = path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (size + 20, limits[1])
    )  # the kernel writes a part of the line, then refuses
    try:
        with caplog.at_level(logging.WARNING, trace_recorder.__name__):
            for _ in range(2):
                with span("lost", "call"):
                    pass
                recorder._write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    warnings = [record.getMessage() for record in caplog.records if record.name == trace_recorder.__name__]
    assert len(warnings) == 1 and str(path) in warnings[0] and "File too large" in warnings[0]
    with span("after", "call"):
        pass
    recorder.stop(flush=True)
    readable = []
    for line in path.read_text().splitlines():
        try:
            readable.append(json.loads(line))
        except ValueError:
            continue
    rows = [row[0] for line in readable for row in rows_of(line)]
    assert rows == ["before", "after"] and sum(line.get("dropped", 0) for line in readable) >= 2
    assert sum("rlhpc_trace" in line for line in readable) >= 2, "the header of the second recording came later"


@pytest.mark.parametrize("plant", ["link", "folder", "pipe"])
def test_planted_files_are_not_followed(plant: str, tmp_path: Path) -> None:
    path, victim = tmp_path / "g-0.jsonl", tmp_path / "victim"
    victim.write_text("mine")
    if plant == "link":
        path.symlink_to(victim)
    elif plant == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    made = Recorder()
    made.start(str(path), HEADER)
    row = trace_recorder._new_span()
    row.name, row.category, row.start_ns, row.end_ns, row.thread, row.args = "a", "call", 1, 2, "main", None
    made.spans.append(row)
    made.stop(flush=True)
    assert victim.read_text() == "mine"


def test_a_forked_child_records_nothing_and_its_parent_goes_on(path: Path) -> None:
    with span("parent", "call"):
        pid = os.fork()
        if pid == 0:
            with span("child", "call"):
                pass
            recorder.stop(flush=True)
            os._exit(0 if not recorder.is_on and not recorder.spans else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [row[0] for row in spans(path)] == ["parent"]


def test_a_killed_process_leaves_what_it_recorded(tmp_path: Path) -> None:
    path = tmp_path / "g-0.jsonl"
    program = textwrap.dedent(f"""
        import os, signal, time
        from rlhpc.runtime.trace_recorder import recorder, span
        recorder.start({str(path)!r}, {HEADER!r})
        with span("kept", "call"):
            pass
        time.sleep(2.5)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert "kept" in path.read_text()


def test_a_process_that_ends_writes_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "g-0.jsonl"
    program = f"""
from rlhpc.runtime.trace_recorder import recorder, span
recorder.start({str(path)!r}, {HEADER!r})
with span("last", "call"):
    pass
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    assert "last" in path.read_text()


def test_traced_functions_and_idle_loops(path: Path) -> None:
    @traced("work", "train")
    def work(x: int, *, y: int) -> int:
        """Works."""
        return x + y

    assert work(1, y=2) == 3 and work.__name__ == "work" and work.__doc__ == "Works."
    idle = IdleSpan("prompts")
    for has_work in (True, False, False, True, True):
        if has_work:
            idle.end()
        else:
            idle.begin()
            time.sleep(0.001)
    idle.end()
    rows = spans(path)
    assert [row[:2] for row in rows] == [["work", "train"], ["prompts", "wait"]]
    assert rows[1][3] - rows[1][2] >= 2_000_000


def test_a_span_of_a_stack_records_nothing_while_recording_is_off() -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(span("step", "call")).add(tokens=1)
    with contextlib.suppress(ValueError), span("step", "call"):
        raise ValueError("passes")
    assert not recorder.spans


@pytest.mark.parametrize("is_there", [True, False])
def test_the_memory_of_a_process_while_torch_is_being_imported(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """Another thread may ask for it at any time: a module that is not complete yet is no accelerator."""
    if is_there:
        monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    else:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    resident_bytes, *of_accelerator = trace_recorder.process_usage()
    assert 2**20 < resident_bytes < 2**40 and of_accelerator == [None, None]


def test_the_utilisation_of_an_accelerator_as_long_as_it_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Module:
        def utilization(self) -> int:
            asked.append(1)
            if len(asked) > 2:
                raise RuntimeError("no driver")
            return 40 + len(asked)

        def memory_allocated(self) -> int:
            return 512

    monkeypatch.setattr(trace_recorder, "_find_accelerator", Module)
    monkeypatch.setattr(trace_recorder, "_read_utilisation", trace_recorder._Utilisation())
    assert [trace_recorder.process_usage()[1:] for _ in range(4)] == [(512, 41), (512, 42), (512, None), (512, None)]
    assert len(asked) == 3, "a library that fails is not asked again"
