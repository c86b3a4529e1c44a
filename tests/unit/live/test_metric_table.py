"""Curves of runs that are being written: rows that come, change and go, and curves that keep their spikes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.jobs.paths import RunPaths
from rlhpc.live.metric_table import (
    MAX_POINTS,
    SAMPLE_ROWS,
    MetricCurve,
    MetricTable,
    combine_seeds,
    cut_range,
    smooth,
    thin,
)
from rlhpc.live.run_views import _MAX_TABLE_BYTES
from rlhpc.metrics.charts import running_mean
from rlhpc.metrics.logger import MetricLogger, read_metrics, series
from rlhpc.metrics.statistics import mean_interval


def line(step: int, **metrics: Any) -> str:
    return json.dumps({"step": step, **metrics}) + "\n"


def assert_as_read(table: MetricTable, path: Path) -> None:
    """The columns are those of a reader that reads the whole file."""
    table.update()
    rows = read_metrics(path)
    for name in {"train/loss", *table.names()}:
        curve = table.curve(name)
        assert (curve.x.tolist(), curve.y.tolist()) == series(rows, name)


def test_rows_that_come_and_a_last_line_that_is_not_finished(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    table = MetricTable(path)
    table.update()
    assert table.names() == []
    with path.open("a") as file:
        parts = ['{"step": 3, "tra', 'in/loss": 1.0}\n', "nonsense\n"]
        first, last = line(1, **{"train/loss": 3.0}), line(4, **{"train/loss": None, "eval/return_mean": 5})
        for text in (first, line(2, **{"train/loss": 2.0}), *parts, last):
            file.write(text)
            file.flush()
            assert_as_read(table, path)
    assert table.curve("eval/return_mean").y.tolist() == [5.0]
    table.update()
    assert table.curve("eval/return_mean").y.tolist() == [5.0]


def test_what_the_logger_writes_merges_and_drops_on_resume(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    table = MetricTable(paths.metrics)
    with MetricLogger(paths, ["jsonl"]) as logger:
        for step in range(1, 9):
            logger.log(step, {"train/loss": 1.0 / step})
            assert_as_read(table, paths.metrics)
            logger.log(step, {"eval/return_mean": float(step)})  # the row grows in place
            assert_as_read(table, paths.metrics)
            if step == 4:
                logger.commit()
                logger.log(step, {"eval/episodes": 7})
                assert_as_read(table, paths.metrics)
    with MetricLogger(paths, ["jsonl"], resume_step=3) as logger:
        assert_as_read(table, paths.metrics)
        logger.log(4, {"train/loss": 9.0})
        assert_as_read(table, paths.metrics)
    assert table.column("step").tolist() == [1, 2, 3, 4]
    with MetricLogger(paths, ["jsonl"]):
        assert_as_read(table, paths.metrics)
    paths.metrics.unlink()
    table.update()
    assert table.names() == []


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    values = [1.5, 2, None, "3", [4], {}, True, 1e301, -1e305, 5]
    rows = [{"step": step, "train/loss": value, "train/big": 1e301} for step, value in enumerate(values, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = MetricTable(tmp_path / "metrics.jsonl")
    table.update()
    curve = table.curve("train/loss")
    assert (curve.x.tolist(), curve.y.tolist()) == ([1, 2, 7, 10], [1.5, 2.0, 1.0, 5.0])
    assert len(table.curve("train/big").y) == 0


def test_the_tables_of_fifty_long_runs_stay_in_memory(tmp_path: Path) -> None:
    """A page that shows them all must not read their files again for each of its charts."""
    names = [f"train/metric_{number}" for number in range(30)]
    row = dict.fromkeys(names, 0.123456789)
    (tmp_path / "metrics.jsonl").write_text("".join(line(step, **row) for step in range(1, 1001)))
    table = MetricTable(tmp_path / "metrics.jsonl")
    table.update()
    assert table.names() == sorted(names)
    assert table.nbytes >= 30 * 1000 * 8 and 50 * 10 * table.nbytes < _MAX_TABLE_BYTES


def test_a_sample_has_the_first_and_the_last_row_and_skips_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [line(step, **{"train/loss": 1.0 / step}) for step in range(1, 3001)]
    path.write_text("".join([*lines[:1500], "no row\n", *lines[1500:], '{"step": 3001, "tr']))
    table = MetricTable.sample(path)
    curve = table.curve("train/loss")
    assert table.is_sample and 0.9 * SAMPLE_ROWS < len(curve.x) <= SAMPLE_ROWS + 1
    assert (curve.x[0], curve.x[-1]) == (1, 3000)
    assert np.array_equal(curve.y, 1.0 / curve.x)
    assert np.diff(curve.x).max() <= 2 * 3000 / SAMPLE_ROWS
    path.write_text("".join(lines[:5]))
    assert MetricTable.sample(path).curve("train/loss").x.tolist() == [1, 2, 3, 4, 5]
    path.unlink()
    assert MetricTable.sample(path).names() == []


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=20))
def test_numbers_of_a_page_have_seven_digits_at_least(values: list[float]) -> None:
    rounded = MetricCurve(np.arange(len(values), dtype=float), np.array(values)).to_json()["y"]
    for value, shown in zip(values, rounded, strict=True):
        if math.isfinite(value):
            assert math.isclose(value, shown, rel_tol=5.001e-7)
        else:
            assert shown is None
    assert MetricCurve(np.array([1.0]), np.array([1.23456789e-5])).to_json()["y"] == [1.234568e-5]


def test_an_axis_that_does_not_ascend_is_sorted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, x=5, y=1) + line(2, x=3, y=2) + line(3, x=1e400, y=3))
    table = MetricTable(path)
    table.update()
    curve = table.curve("y", "x")
    assert (curve.x.tolist(), curve.y.tolist()) == ([3, 5], [2, 1])


@given(st.lists(st.floats(-1e6, 1e6), min_size=0, max_size=400), st.integers(4, 60))
def test_a_thin_curve_keeps_its_ends_and_extremes(values: list[float], limit: int) -> None:
    curve = MetricCurve(np.arange(len(values), dtype=float), np.array(values))
    thinned = thin(curve, limit)
    assert len(thinned.x) <= max(limit + 2, 1) or len(values) <= limit
    if values:
        assert thinned.x[0] == 0
        assert thinned.x[-1] == len(values) - 1
        assert (thinned.y.min(), thinned.y.max()) == (min(values), max(values))
        assert set(zip(thinned.x, thinned.y, strict=True)) <= set(zip(curve.x, curve.y, strict=True))


def test_a_spike_among_a_hundred_thousand_points_stays() -> None:
    y = np.zeros(100_000)
    y[54_321] = 7.0
    thinned = thin(MetricCurve(np.arange(100_000.0), y))
    assert len(thinned.x) <= MAX_POINTS + 2
    assert thinned.y.max() == 7.0


def test_smoothing_is_a_mean_over_neighbours() -> None:
    curve = MetricCurve(np.arange(10.0), np.arange(10.0) ** 2)
    assert smooth(curve, 0.0) is curve
    smoothed = smooth(curve, 0.2)
    assert math.isclose(smoothed.y[5], (16 + 25 + 36) / 3)
    assert math.isclose(smoothed.y[0], 0.5)
    long = MetricCurve(np.arange(500.0), np.sin(np.arange(500.0)))
    assert smooth(long, 0.04).y.tolist() == running_mean(long.y.tolist())  # as reports draw it


def test_a_range_reaches_to_the_next_points() -> None:
    curve = MetricCurve(np.arange(10.0), np.arange(10.0))
    assert cut_range(curve, 3.5, 5.5).x.tolist() == [3, 4, 5, 6]
    assert cut_range(curve, -5, 50).x.tolist() == curve.x.tolist()


def test_seeds_become_a_mean_with_its_interval() -> None:
    up, down = (MetricCurve(np.arange(5.0), np.full(5, value)) for value in (1.0, 3.0))
    curve = combine_seeds([up, down, MetricCurve(np.array([]), np.array([]))])
    assert set(curve.y) == {2.0}
    assert curve.low is not None
    assert curve.high is not None
    low, high = mean_interval([1.0, 3.0])
    assert (set(curve.low), set(curve.high)) == ({low}, {high}) and low < 1.0 < 3.0 < high
    assert combine_seeds([up]).low is None
    assert combine_seeds([]).to_json() == {"x": [], "y": []}
    assert MetricCurve(np.array([1.0]), np.array([math.nan])).to_json() == {"x": [1.0], "y": [None]}
