"""Comparison of a run with that of a bundle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.publishing.bundle import write_bundle
from rlhpc.publishing.comparison import Comparison, compare
from rlhpc.publishing.contents import BundleOptions
from rlhpc.publishing.reader import open_bundle
from tests.finished_runs import make_run


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_bundle(make_run(tmp_path / "there"), tmp_path / "a.zip", BundleOptions(code="commit"))
    return tmp_path / "a.zip"


def compared(path: Path, paths: RunPaths) -> Comparison:
    with open_bundle(path) as bundle:
        return compare(bundle, paths)


def test_the_same_run_is_the_same_whatever_the_clock_said(bundle: Path, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "here")
    rows = [
        json.loads(line) | {"time/step_s": 99.0, "time/more_s": 1.0} for line in paths.metrics.read_text().splitlines()
    ]
    paths.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    comparison = compared(bundle, paths)
    assert comparison.is_equal
    assert comparison.render() == ["the same bit for bit: 1 files with weights, 2 rows of metrics, 1 evaluations"]


def test_differences_are_named(bundle: Path, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "here")
    rows = [{"step": 1, "train/loss": 1.0}, {"step": 2, "train/loss": 0.4, "train/new": 1}]
    paths.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    paths.eval_result(2, "default").write_text(
        '{"return_mean": 9.0, "episodes": 4, "suite": "default", "global_step": 2}'
    )
    manifest = paths.checkpoint(2) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"sha256": "', '"sha256": "0'))
    comparison = compared(bundle, paths)
    assert not comparison.is_equal and comparison.weights == ["weights of step 2: model.safetensors differs"]
    assert comparison.metrics == {"train/loss": (2, pytest.approx(0.2)), "train/new": (2, 1.0)}
    assert comparison.evaluations == [("global_step_2/default", "return_mean", 9.5, 9.0)]
    text = "\n".join(comparison.render())
    assert "train/loss" in text and "20.00%" in text and "9.5" in text
    assert json.loads(json.dumps(comparison.to_json()))["metrics"]["train/loss"]["step"] == 2


def test_an_evaluation_by_a_separate_command_is_named_and_is_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = make_run(tmp_path / "there")
    (paths.eval / "by_hand.json").write_text('{"return_mean": 9.0, "suite": "default"}')
    write_bundle(paths, tmp_path / "a.zip", BundleOptions(code="commit"))
    comparison = compared(tmp_path / "a.zip", make_run(tmp_path / "here"))
    assert comparison.is_equal and comparison.to_json()["missing_evaluations"] == ["by_hand"]
    assert comparison.render() == [
        "the same bit for bit: 1 files with weights, 2 rows of metrics, 1 evaluations",
        "not repeated, because the run's command does not make it: eval/by_hand.json",
    ]


def test_a_run_that_never_began_is_not_the_same(bundle: Path, tmp_path: Path) -> None:
    comparison = compared(bundle, RunPaths(tmp_path / "nothing"))
    assert not comparison.is_equal and "never made" in comparison.weights[0]
    assert comparison.metrics["train/loss"] == (1, 1.0)
