"""The report: whole, partial and empty runs; numbers and axes."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlhpc.checkpoint import CheckpointWriter
from rlhpc.jobs.paths import RunPaths
from rlhpc.language.evaluation.evaluate import describe
from rlhpc.metrics import MetricLogger, update_provenance, write_provenance
from rlhpc.metrics.charts import Line, line_chart, number, thin, ticks
from rlhpc.metrics.phase_times import phase_columns
from rlhpc.metrics.provenance import describe_result
from rlhpc.runs.report import render_placement_grid, write_curves, write_report
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.registry import GenerationFolder
from rlhpc.runtime.text import format_bytes, format_duration


class Balanced(HTMLParser):
    """Fails on tags that do not close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass


def check(path: Path) -> str:
    text = path.read_text()
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert not re.search(r"(src|href)=|@import|url\(|<script", text)
    return text


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths.from_run_dir(tmp_path, "a <run>")
    write_provenance(paths, {}, "rlhpc train x.yaml")
    update_provenance(paths, placement={"actor": [{"rank": 0, "node": "n1", "accelerators": [0]}]})
    paths.config.write_text("env:\n  train:\n    env_id: CartPole-v1\n    note: <b>\n")
    with MetricLogger(paths, ["jsonl"]) as logger:
        for step in range(1, 101):
            row = {
                "train/episode_return": step * 2.0,
                "rollout/env_steps": step * 128,
                "train/policy_loss": -0.1 / step,
            }
            times = {"time/step_s": 1.0, "time/rollout_s": 0.6, "time/update_s": 0.3, "time/wall_s": float(step)}
            logger.log(step, {**row, **times} if step > 1 else times)
    for step in (50, 100):
        with CheckpointWriter(paths, step) as writer:
            writer.add_bytes("model.safetensors", b"x" * 2048)
            writer.commit()
        result = paths.eval_result(step, "default")
        result.parent.mkdir(parents=True)
        result.write_text(
            json.dumps({"global_step": step, "return_mean": step * 4.75, "return_std": 10.0, "episodes": 100})
        )
    (paths.checkpoint(50) / "model.safetensors").write_bytes(b"short")
    return paths


def test_whole_run(run: RunPaths) -> None:
    assert write_report(run) == run.report
    text = check(run.report)
    for part in (
        "a &lt;run&gt;",
        "CartPole-v1",
        "475.0",
        "12.8k",
        "1 min 40 s",
        "473.04 … 476.96",
        "faulty: model.safetensors: 5 bytes, the manifest says 2048 (truncated)",
        "2.0 KiB",
        "actor 0",
        "note: &lt;b&gt;",
        "rlhpc train x.yaml",
        "environment steps",
        "wall time (s)",
    ):
        assert part in text, part
    assert "<run>" not in text


def test_the_weight_sync_is_reported_with_its_strategy_and_rate(run: RunPaths) -> None:
    """Also where some values were not finite, and some rows have none; a run that measured nothing has no such section."""
    assert "Weight sync" not in check(write_report(run))
    with MetricLogger(run, ["jsonl"]) as logger:
        for step in range(101, 106):
            row = {"time/weights_gb": 2.0, "time/weights_s": 0.25 * (step - 100), "time/weights_by_ipc": 1.0}
            row["time/weights_gb_per_s"] = row["time/weights_gb"] / row["time/weights_s"]
            logger.log(step, row)
        logger.log(106, {"time/weights_gb": float("nan"), "time/weights_s": 1.0})
    page = check(write_report(run))
    for text in ("Weight sync", "broadcast by ipc", "1.9 GiB", "0.75 (median)", "2.67 GB/s (median)", "Rate of weight"):
        assert text in page, text


def test_empty_run_says_what_is_missing(tmp_path: Path) -> None:
    paths = RunPaths.from_run_dir(tmp_path, "empty")
    with pytest.raises(RlhpcError, match="no such run folder"):
        write_report(paths)
    assert not paths.root.exists()
    paths.root.mkdir()
    text = check(write_report(paths))
    for part in ("No metrics yet", "No evaluation yet", "No checkpoint yet", "No placement", "config.yaml is missing"):
        assert part in text, part


def test_broken_pieces_do_not_stop_the_report(run: RunPaths) -> None:
    run.metrics.write_text('{"step": 1, "train/episode_return": null}\n{"torn')
    run.provenance.write_text("[]")
    run.config.write_text("a: [")
    run.eval_result(50, "default").write_text("{")
    run.eval_result(100, "default").write_text('{"global_step": 100}')
    check(write_report(run))


@pytest.mark.parametrize("kind", ["embodied", "language"])
def test_an_interval_without_width_is_not_shown(run: RunPaths, kind: str) -> None:
    """All episodes or answers were alike: that says nothing of the next one, and "500 … 500" would say that it is known."""
    result = {
        "global_step": 100,
        "suite": "default",
        "episodes": 9,
        "env_id": "X-v0",
        "n": 9,
        "failed": 0,
        "backend": "hf",
    }
    result |= (
        {"return_mean": 500.0, "return_std": 0.0, "return_ci95": [500.0, 500.0]}
        if kind == "embodied"
        else {"accuracy": 0.5, "accuracy_ci95": [0.5, 0.5], "reward_mean": 0.5, "truncated": 0.0, "response_tokens": {}}
    )
    run.eval_result(100, "default").write_text(json.dumps(result))
    text = check(write_report(run))
    assert re.search("500.00|50.0%", text) and not re.search(r"([\d.]+%?) (?:…|to) \1(?![\d.])", text)
    said = [describe_result(result)] if kind == "embodied" else [describe_result(result), describe(result)]
    assert all("interval" not in words and " to " not in words for words in said)


def suites_of(run: RunPaths, figure: str, results: dict[str, dict[int, float]]) -> str:
    """The report of a run with these results by suite and step."""
    for suite, figures in results.items():
        for step, value in figures.items():
            file = run.eval_result(step, suite)
            file.parent.mkdir(parents=True, exist_ok=True)
            result = {
                "global_step": step,
                "suite": suite,
                "episodes": 9,
                "return_mean": value,
                "n": 9,
                "reward_mean": 0.0,
            }
            file.write_text(json.dumps({**result, "accuracy": value} if figure == "accuracy" else result))
    return check(write_report(run))


@pytest.mark.parametrize("order", [("default", "again"), ("again", "default")])
def test_a_run_is_judged_by_its_first_suite(run: RunPaths, order: tuple[str, str]) -> None:
    """Whichever suite has the larger figures, or comes first by its name; each suite's best has a star."""
    run.config.write_text(json.dumps({"env": {"train": {"env_id": "x"}}, "workflow": {"eval_suites": list(order)}}))
    results = {"default": {50: 301.0, 100: 302.0}, "again": {50: 903.0, 100: 4.0}}
    text = suites_of(run, "return_mean", results)
    first = results[order[0]]
    best, last = max(first, key=lambda step: first[step]), 100
    for title, step in (("Best evaluation", best), ("Last evaluation", last)):
        card = f"<span>{title}</span><b>{first[step]:.1f}</b><span>mean return, step {step}, suite {order[0]}</span>"
        assert card in text
    assert text.count("★") == 2 and "302.00 ★" in text and "903.00 ★" in text
    beside = text[text.index("Checkpoints") :]
    assert all(f">{value:.1f}<" in beside for value in first.values())
    assert not any(f">{value:.1f}<" in beside for value in results[order[1]].values())


def test_a_language_run_is_judged_by_its_first_suite(tmp_path: Path) -> None:
    paths = RunPaths.from_run_dir(tmp_path, "words")
    paths.root.mkdir()
    paths.config.write_text(json.dumps({"runner": {"task_type": "reasoning"}, "workflow": {"eval_suites": ["hard"]}}))
    text = suites_of(paths, "accuracy", {"easy": {5: 0.99, 10: 0.98}, "hard": {5: 0.31, 10: 0.22}})
    assert "<b>31.0%</b><span>accuracy, hard, step 5</span>" in text
    assert "<b>22.0%</b><span>accuracy, hard, step 10</span>" in text


def test_a_suite_without_results_leaves_the_others(run: RunPaths) -> None:
    run.config.write_text(json.dumps({"env": {"train": {"env_id": "x"}}, "workflow": {"eval_suites": ["planned"]}}))
    assert "mean return, step 100, suite default" in check(write_report(run))


def test_curves_are_files_of_their_own(run: RunPaths, tmp_path: Path) -> None:
    files = write_curves(run, tmp_path / "curves")
    assert {"return_vs_env_steps.svg", "return_vs_time.svg", "evaluation.svg", "time_per_phase.svg"} <= {
        path.name for path in files
    }
    for path in files:
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    empty = RunPaths.from_run_dir(tmp_path, "nothing")
    assert "nothing logged yet" in write_curves(empty, tmp_path / "empty")[0].read_text()


def test_evaluations_of_training_and_of_checkpoints_are_one_chart_and_come_first(run: RunPaths) -> None:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for row in lines[4::5]:
        row |= {"eval/return_mean": 3.0 * row["step"], "eval/return_std": 5.0, "eval/episodes": 25}
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in lines))
    text = write_report(run).read_text()
    titles = re.findall(r'class="chart" viewBox="0 0 (\d+) \d+" role="img" aria-label="([^"]*)"', text)
    assert titles[:3] == [
        ("766", "Return in evaluations"), ("364", "Return in evaluations"), ("364", "Return over experience")
    ]  # fmt: skip
    assert len(titles) == len(set(titles))
    chart = text.split('aria-label="Return in evaluations"')[1].split("</svg>")[0]
    rings, points = re.findall("<circle[^>]*fill:var.--panel.", chart), re.findall("<circle", chart)
    assert len(points) == 20 and len(rings) == 18  # those of steps 50 and 100 are of checkpoints
    assert "global step 25\ndefault: 75 (73.04 to 76.96)" in chart and "default: 475 (473 to 477)" in chart


def test_other_time_is_what_the_phases_leave() -> None:
    rows = [{"step": 1, "time/step_s": 1.0, "time/update_s": 0.25, "time/rollout_s": 0.5, "time/wall_s": 9.0}]
    assert phase_columns(rows) == {"rollout": [0.5], "update": [0.25], "other": [0.25]}


def test_ticks_are_round_and_enclose() -> None:
    assert ticks(0, 500) == [0, 100, 200, 300, 400, 500]
    assert ticks(-0.013, 0.004)[0] <= -0.013 and ticks(-0.013, 0.004)[-1] >= 0.004
    assert len(ticks(3.0, 3.0)) > 1 and len(ticks(0, 0)) > 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (1024, "1024"),
        (225280, "225.3k"),
        (1.2e6, "1.2M"),
        (2.5e-4, "2.5e-4"),
        (-0.00001, "-1e-5"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_units() -> None:
    assert [format_duration(s) for s in (4.25, 59.98, 200, 18420)] == ["4.2 s", "60.0 s", "3 min 20 s", "5 h 07 min"]
    assert [format_duration(s) for s in (0, 0.0291, 0.9994, 0.9996)] == ["0 ms", "29.1 ms", "999 ms", "1.0 s"]
    assert format_duration(176.1 * 3600) == "7 d 8 h"  # no wider than a card
    assert [format_bytes(b) for b in (12, 2048, 3 * 2**30)] == ["12 B", "2.0 KiB", "3.0 GiB"]


@pytest.mark.parametrize("y", [[1.0], [2.0, 2.0], [0.0, 0.0], [-5.0, 1e9]])
def test_odd_data_draws(y: list[float]) -> None:
    chart = line_chart("t", "x", "y", [Line("a", range(len(y)), y, markers=True), Line("b", [], [])])
    assert "nan" not in chart and ElementTree.fromstring(chart) is not None


def test_thinning_keeps_spikes() -> None:
    y = [0.0] * 100_000
    y[54_321] = 9.0
    x_thin, y_thin = thin(range(100_000), y)
    assert len(x_thin) <= 600 and max(y_thin) == 9.0 and x_thin == sorted(x_thin)


def test_placement_picture_joins_stretches_of_ranks() -> None:
    ranks = [{"rank": rank, "node_rank": 0, "accelerators": []} for rank in (*range(8), 12)]
    grid = render_placement_grid({"env": ranks})
    assert "env 0–7, 12" in grid and "CPU" in grid and "node 0" in grid and "9 processes" in grid
    assert "No placement" in render_placement_grid(None) and "No placement" in render_placement_grid({})
    assert "No placement" in render_placement_grid({"env": []})
    assert "cannot be read" in render_placement_grid({"env": [{"rank": None}]})
    twins = render_placement_grid({"env": [{"rank": rank, "node": "vm", "node_rank": rank} for rank in range(2)]})
    assert "vm (0)" in twins and "vm (1)" in twins


def test_the_report_shows_where_the_start_went(run: RunPaths) -> None:
    """By group and phase, up to the end of the first step: later calls and ranks that were started again are none of it."""
    assert "<h2>Start" not in check(write_report(run))
    registry = GenerationFolder.create(run.registry, "27-0")
    phases = [["environment", 10.0], ["imports", 11.0], ["vLLM: profile", 20.0]]
    ranks = [
        {"group": "rollout", "rank": 0, "phases": [*phases, ["waiting", 31.5], ["generate", 90.0]]},
        {"group": "rollout", "rank": 1, "phases": [*phases, ["waiting", 24.25]]},
        {"group": "actor", "rank": 0, "phases": [["environment", 400.0], ["imports", 410.0], ["waiting", 411.0]]},
    ]
    registry.put("start", "ranks", {"ranks": ranks})
    unfinished = check(write_report(run))
    assert "The first step was not finished; the last phases: actor 0 in &#x27;waiting&#x27;" in unfinished
    (registry.root / "timeline.json").write_text(json.dumps({"driver": 9.0, "ready": 33.0, "first_step": 40.0}))
    text = check(write_report(run))
    assert "Seconds after the start of the driver: models ready 24.0, first step done 31.0" in text
    row = re.sub(r"<[^>]*>", " ", text[text.index("vLLM: profile") :].partition("</tr>")[0]).split()
    assert row == ["vLLM:", "profile", "2", "11.50", "0", "4.25"]
    start = text[text.index("<h2>Start") :].partition("<h2>Checkpoints")[0]
    assert "generate" not in start and "actor" not in start
