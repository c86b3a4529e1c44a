"""Pages of traced steps, without a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.report import render_report, write_report
from rlhpc.runs.step_pages import read_config, read_steps, render_step, step_page_path, step_rows
from rlhpc.tracing.analysis import analyze
from tests.unit.tracing.test_critical_path import two_ranks
from tests.unit.tracing.traces import driver, span, trace, track, write_trace


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path / "run")
    found.root.mkdir()
    (found.root / "config.yaml").write_text("runner: {task_type: reasoning}\nreward: {processes: 2}\n")
    return found


def slow_judge() -> list[object]:
    rank = track("rollout", 0, span("decode", "engine", 0, 40), span("reward", "judge", 40, 90))
    return [driver(100, span("wait", "wait", 0, 100)), rank]


def test_the_report_lists_the_steps_and_links_their_pages(paths: RunPaths) -> None:
    write_trace(paths.root, trace(*slow_judge()))  # type: ignore[arg-type]
    html = write_report(paths).read_text()
    assert '<a href="steps/step-1.html">step 1</a>' in html
    assert "slow judge" in html
    page = step_page_path(paths, 1).read_text()
    assert "8 (now 2)" in page  # by the run's own configuration
    data = json.loads(re.findall(r'id="timeline-data">(.*?)</script>', page)[0])
    assert [one["name"] for one in data["tracks"]] == ["driver-0", "rollout-0"]


def test_a_short_steps_durations_are_in_milliseconds(paths: RunPaths) -> None:
    rank = track("rollout", 0, span("decode", "engine", 0, 11), span("reward", "judge", 11, 29))
    write_trace(paths.root, trace(driver(29, span("wait", "wait", 0, 29)), rank))
    report = write_report(paths).read_text()
    page = step_page_path(paths, 1).read_text()
    assert "<b>29 ms</b>" in page and ">29 ms<" in report and "18 ms of the step" in page
    assert not re.search(r"\b0\.0\d* s\b", page + report)


def test_a_report_without_links_writes_no_page_of_a_step(paths: RunPaths) -> None:
    write_trace(paths.root, trace(*slow_judge()))  # type: ignore[arg-type]
    html = render_report(paths, None, linked=False)
    assert "slow judge" in html
    assert "steps/step-1.html" not in html
    assert not step_page_path(paths, 1).exists()


def test_without_a_trace_the_report_says_how_to_record_one(paths: RunPaths) -> None:
    html = write_report(paths).read_text()
    assert "runner.trace.steps=10-12" in html
    assert f"rlhpc trace {paths.root} --steps 3" in html
    assert read_steps(paths) is None


@pytest.mark.parametrize("content", [b"", b"no json\n", b'{"spans": 3}\n', b"\x00" * 100])
def test_a_broken_trace_does_not_break_the_report(paths: RunPaths, content: bytes) -> None:
    paths.trace.mkdir()
    (paths.trace / "driver-0.jsonl").write_bytes(content)
    assert "No step of this run was traced" in write_report(paths).read_text()


@pytest.mark.parametrize("args", [{}, {"step": "x"}, {"step": -1}, {"step": None}, {"step": [1]}, {"step": 1e400}])
def test_a_step_without_a_number_is_left_out(paths: RunPaths, args: dict[str, object]) -> None:
    write_trace(
        paths.root, trace(track("driver", 0, span("step", "step", 0, 100, **args), span("step", "step", 0, 9, step=7)))
    )
    html = write_report(paths).read_text()
    assert "step 7" in html
    assert '<a href="steps/step-7.html">step 7</a>' in html
    assert [path.name for path in step_page_path(paths, 7).parent.iterdir()] == ["step-7.html"]


def test_times_beyond_all_clocks(paths: RunPaths) -> None:
    paths.trace.mkdir()
    spans = [["step", "step", 0, (1 << 62) + 5, "main", {"step": 1}], ["wait", "wait", 1 << 61, 1 << 62, "main", {}]]
    lines = [
        {"rlhpc_trace": 1, "group": "driver", "rank": 0, "host": "n", "host_id": "n", "pid": 1},
        {"spans": spans, "flows": [[1, 0, 1 << 62, "m"], [1, 1, 5, "m"]], "counters": [["c", "", 1 << 61, 1e300]]},
    ]
    (paths.trace / "driver-0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "step 1" in write_report(paths).read_text()


def test_rows_of_steps() -> None:
    (row,) = step_rows(analyze(two_ranks()), {})
    assert (row["step"], row["seconds"], row["bottlenecks"]) == (1, 0.1, [])
    assert next(iter(row["categories"].items())) == ("train", 0.44)


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "\x00"])
def test_a_broken_configuration_counts_as_none(paths: RunPaths, text: str) -> None:
    paths.config.write_text(text)
    assert read_config(paths) == {}


def test_no_name_of_a_span_leaves_the_element_of_the_data() -> None:
    hostile = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>"
    rank = track(hostile, 0, span(hostile, "engine", 0, 60, thread=hostile, note=hostile))
    found = trace(driver(100, span("wait", "wait", 0, 100)), rank)
    page = render_step(found, analyze(found)[1], {})
    assert page.count("<script") == 3  # data, colours and the page's own
    assert "<img" not in page
    assert page.count("</script>") == 3
    assert "default-src &#x27;none&#x27;" in page or "default-src 'none'" in page
