"""provenance.json and the results of evaluations: starts, placement, metrics, intervals, suites, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics import read_provenance, update_provenance, write_provenance
from rlhpc.metrics.provenance import (
    describe_result,
    evaluations_by_suite,
    evaluations_of,
    interval_of,
    judging_suite,
    last_result,
    list_skipped_results,
    metric_title,
    placed_starts,
    read_all_results,
    read_results,
    record_placement,
    resumes_with_changes,
    scored_results,
    typed_results,
)
from rlhpc.runtime.errors import RlhpcError


def test_segments_are_appended_and_the_rest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths.from_run_dir(tmp_path, "run")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    first = write_provenance(paths, OmegaConf.create({"a": 1}), ["rlhpc", "train", "a b.yaml"])
    assert first["command"] == "rlhpc train 'a b.yaml'" and first["slurm"]["JOB_ID"] == "77"
    assert {"rlhpc", "python", "torch", "numpy"} <= set(first["versions"])
    update_provenance(paths, placement={"actor": [{"rank": 0, "node": "n", "accelerators": []}]})
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    write_provenance(paths, {"a": 1}, "rlhpc train again")
    record = json.loads(paths.provenance.read_text())
    assert [segment["slurm"]["JOB_ID"] for segment in record["segments"]] == ["77", "78"]
    assert record["command"] == first["command"] and "actor" in record["placement"]
    assert record["segments"][0]["config_sha256"] == record["segments"][1]["config_sha256"]


def test_damaged_record_is_replaced(tmp_path: Path) -> None:
    paths = RunPaths.from_run_dir(tmp_path, "run")
    paths.root.mkdir()
    paths.provenance.write_text("{")
    assert read_provenance(paths) == {}
    assert len(write_provenance(paths, None, "x")["segments"]) == 1


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RlhpcError, match=r"provenance could not be written"):
        write_provenance(RunPaths.from_run_dir(tmp_path, "run"), None, "x")


def test_starts_in_slurm_jobs_have_their_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths.from_run_dir(tmp_path, "run")
    for job, node in (("77", 0), ("78", 1)):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        changes = {"step": 5, "changes": ["actor.lr: 0.1 → 0.2", "seed: 1 → 2"]} if job == "78" else None
        write_provenance(paths, {"a": 1}, "rlhpc train", resumed_provenance=changes)
        record_placement(paths, {"actor": [{"rank": 0, "node_rank": node, "accelerators": [0]}]})
    record = read_provenance(paths)
    starts = placed_starts(record)
    assert [(start.job, start.placement["actor"][0]["node_rank"]) for start in starts] == [("77", 0), ("78", 1)]
    assert starts[0].start_time <= starts[1].start_time and record["placement"] == starts[1].placement
    assert resumes_with_changes(record) == [(5, "actor.lr: 0.1 → 0.2; seed: 1 → 2")]


def test_fields_of_another_type_are_left_out(tmp_path: Path) -> None:
    paths = RunPaths.from_run_dir(tmp_path, "run")
    paths.root.mkdir()
    foreign = {"git": "main", "command": "x", "placement": {"actor": [{"rank": -1}]}, "segments": [3, {"slurm": []}]}
    paths.provenance.write_text(json.dumps(foreign))
    assert read_provenance(paths) == {"command": "x", "segments": [{}]}


def test_how_a_run_ended(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert last_result(paths) == (0, {}, "")
    paths.segments.mkdir()
    for segment, step in enumerate((5, 10)):
        paths.segment_done(segment).write_text(json.dumps({"global_step": step}))
    paths.eval_result(10, "default").parent.mkdir(parents=True)
    result = {"return_mean": 9.5, "return_ci95": [9.0, 10.0], "episodes": 100, "env_id": "X-v0", "success_once": 0.5,
              "success_once_ci95": [0.4, 0.6]}  # fmt: skip
    paths.eval_result(10, "default").write_text(json.dumps(result))
    assert last_result(paths) == (
        10, result, "mean return 9.5 (95 % interval 9.0 to 10.0), success 50% (40% to 60%) over 100 episodes of X-v0"
    )  # fmt: skip
    language = {"accuracy": 0.57, "accuracy_ci95": [0.526, 0.613], "n": 500}
    assert describe_result(language) == "accuracy 57.0% (95 % interval 52.6% to 61.3%) on 500 problems"


def evaluated(paths: RunPaths, step: int, suite: str, **result: Any) -> None:
    path = paths.eval_result(step, suite)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"global_step": step, "suite": suite, **result}))


@pytest.fixture
def results(tmp_path: Path) -> RunPaths:
    """A run that was evaluated on two suites, and one of whose results another program has damaged."""
    paths = RunPaths.from_run_dir(tmp_path, "run")
    evaluated(paths, 20, "gsm", accuracy=0.5, n=100, accuracy_ci95=[0.4, 0.6], pass_at_k={"1": 0.5, "4": 0.75})
    evaluated(paths, 10, "gsm", accuracy=0.25, n=100)
    evaluated(paths, 10, "hard", accuracy=0.1, n="many", levels={"1": {"accuracy": "x", "n": 3}})
    paths.config.write_text("data: {eval: [{name: gsm}]}\nworkflow: {eval_suites: [hard]}\n")
    return paths


def test_results_are_sorted_and_their_damaged_fields_named(results: RunPaths) -> None:
    assert [(r["suite"], r["global_step"]) for r in typed_results(results, "accuracy")] == [
        ("gsm", 10), ("gsm", 20), ("hard", 10)
    ]  # fmt: skip
    assert [result["global_step"] for result in read_results(results, "gsm")] == [10, 20]
    assert list_skipped_results(results) == ["global_step_10/hard.json: n, levels.1.accuracy"]
    [hard] = read_results(results, "hard")
    assert "n" not in hard and hard["levels"] == {"1": {"n": 3}}


def test_an_interval_is_the_recorded_one_or_follows_from_counts(results: RunPaths) -> None:
    [early, late] = read_results(results, "gsm")
    assert interval_of(late, "accuracy") == (0.4, 0.6)
    low, high = interval_of(early, "accuracy")
    assert (round(low, 3), round(high, 3)) == (0.175, 0.343), "by Wilson's formula"
    assert interval_of({"accuracy": 0.1}, "accuracy") == (0.1, 0.1)
    assert interval_of({"return_mean": 5.0, "return_std": 10.0, "episodes": 100}, "return_mean") == (3.04, 6.96)
    assert interval_of({"return_mean": 5.0, "return_ci95_low": 4, "return_ci95_high": 7}, "return_mean") == (4.0, 7.0)
    assert interval_of({"reward_mean": 0.5, "n": 10}, "reward_mean") == (0.5, 0.5), "no share"


def test_the_evaluation_of_a_checkpoint_comes_before_that_of_training(results: RunPaths) -> None:
    rows = [{"step": 5, "eval/accuracy": 0.2}, {"step": 10, "eval/accuracy": 0.9}, {"step": 15, "eval/accuracy": None},
            {"step": 10, "eval/other/accuracy": 0.3}]  # fmt: skip
    points = evaluations_of(rows, read_results(results, "gsm"), "accuracy")
    assert [(point.step, point.value, point.in_training) for point in points] == [
        (5, 0.2, True), (10, 0.25, False), (20, 0.5, False)
    ]  # fmt: skip
    by_suite = evaluations_by_suite(results, rows, read_all_results(results), "accuracy")
    assert {suite: [point.step for point in points] for suite, points in by_suite.items()} == {
        "gsm": [5, 10, 20], "hard": [10], "other": [10]
    }  # fmt: skip
    scored = scored_results(results, rows, read_all_results(results), "gsm", "accuracy")
    assert [(result["global_step"], result["accuracy"]) for result in scored] == [(5, 0.2), (10, 0.25), (20, 0.5)]


def test_runs_are_compared_by_the_configured_suite_where_it_has_results(results: RunPaths) -> None:
    everything = read_all_results(results)
    assert judging_suite(results, everything) == "hard"
    assert judging_suite(results, read_results(results, "gsm")) == "gsm"
    results.config.unlink()
    assert judging_suite(results, []) == "default"


def test_several_samples_a_problem_are_described_by_the_largest_k(results: RunPaths) -> None:
    late = json.loads(results.eval_result(20, "gsm").read_text()) | {"majority": 0.6}
    assert describe_result(late) == (
        "accuracy 50.0% (95 % interval 40.0% to 60.0%), pass@4 75.0%, majority 60.0% on 100 problems"
    )
    assert describe_result({"loss": 1.0}) == ""
    assert metric_title("eval/pass_at_8") == "pass@8" and metric_title("eval/success_once") == "success once"
