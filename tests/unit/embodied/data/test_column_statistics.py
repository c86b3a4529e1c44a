"""Statistics in one pass, equal to those of arrays in memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from rlhpc import cli
from rlhpc.embodied.data import column_statistics
from rlhpc.embodied.data.column_statistics import QUANTILES, DatasetStatistics, RunningStatistics, number_statistics
from rlhpc.embodied.models.normalization import NormStats, read_norm_stats
from tests.unit.embodied.data.test_demo_stream import write


def columns(rows: int = 30_000) -> np.ndarray:
    """Components of very different distributions: far from 0, constant, of two values, with outliers, growing."""
    rng = np.random.default_rng(0)
    heavy = rng.standard_cauchy(rows)
    return np.stack(
        [
            1e4 + rng.normal(size=rows), np.full(rows, 3.25), rng.integers(0, 2, rows).astype(float), heavy,
            np.linspace(-1, 50, rows) ** 3, 1e-6 * rng.uniform(size=rows), np.zeros(rows),
        ], 1,
    )  # fmt: skip


@pytest.mark.parametrize("size", [90, 2500, 30_000])
def test_one_pass_equals_arrays_in_memory(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_statistics, "EXACT_ROWS", 1000)
    rows, running = columns(), RunningStatistics()
    for start in range(0, len(rows), size):
        running.add(rows[start : start + size])
    found, expected = running.all(), number_statistics(rows)
    for name in ("min", "max", "count"):
        np.testing.assert_array_equal(found[name], expected[name])
    for name in ("mean", "std"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, atol=1e-12)
    spans = expected["max"] - expected["min"]
    for level in QUANTILES:
        name = f"q{round(level * 100):02d}"
        assert (np.abs(found[name] - expected[name]) <= spans / 4000).all(), name


def test_quantiles_are_exact_up_to_a_number_of_rows() -> None:
    rows, statistics = columns(2000), DatasetStatistics()
    for start in range(0, 2000, 40):
        statistics.add("action", rows[start : start + 40], pictures=False)
    for name, values in number_statistics(rows).items():
        np.testing.assert_array_equal(statistics.all()["action"][name], values)


def test_memory_does_not_grow_with_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_statistics, "EXACT_ROWS", 1000)
    rows, running, held = columns(500), RunningStatistics(), []
    tracemalloc.start()
    for _ in range(60):
        running.add(rows)
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert held[-1] - held[10] < 10_000


def test_the_command_writes_what_policies_read(tmp_path: Path) -> None:
    """openpi's file, of datasets in any format; images are not read."""
    path, output = write(tmp_path / "a.h5", [30, 20]), tmp_path / "out" / "norm_stats.json"
    assert cli.main(["data", "stats", str(path), "--output", str(output)]) == 0
    stats = read_norm_stats(str(output), "model")
    assert stats is not None and set(stats) == {"state", "actions"}
    assert len(stats["state"]["q01"]) == 3 and len(json.loads(output.read_text())["norm_stats"]["actions"]["mean"]) == 2
    assert NormStats(stats["actions"], "quantiles", 2, "file").shift.shape == (2,)
