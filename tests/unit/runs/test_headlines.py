"""Headline numbers: each kind of run shows its own, alike on pages and in `rlhpc status`, and no column is empty."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlhpc import cli
from rlhpc.metrics.logger import series
from rlhpc.runs.headlines import NO_VALUE, headline_columns, read_run, run_headlines
from rlhpc.runs.task_type import find_task_type, task_type_names

#: What runs of a kind log at their last step, and what an evaluation of them says.
PLAYED = {"train/episode_return": 21.5, "rollout/env_steps": 12800}
EPISODES = {
    "return_mean": 30.0,
    "return_std": 4.0,
    "episodes": 20,
    "success_once": 0.5,
    "success_once_ci95": [0.3, 0.7],
}
ANSWERS = {
    "accuracy": 0.25, "accuracy_ci95": [0.1, 0.45], "n": 30, "pass_at_k": {"1": 0.25, "2": 0.4, "4": 0.625},
    "pass_at_k_ci95": {"1": [0.1, 0.45], "2": [0.2, 0.6], "4": [0.4, 0.8]},
}  # fmt: skip
PAIRS = {"accuracy": 0.75, "accuracy_ci95": [0.6, 0.9], "n": 30, "unit": "pairs"}
KINDS: dict[str, tuple[dict[str, float], dict[str, Any], dict[str, str]]] = {
    "embodied": (PLAYED, EPISODES, {"success once": "50.0% (30.0% … 70.0%)", "evaluated return": "30.0",
                                    "training return": "21.5", "env steps": "12.8k"}),
    "off_policy": (PLAYED, EPISODES, {"success once": "50.0% (30.0% … 70.0%)", "evaluated return": "30.0",
                                      "training return": "21.5", "env steps": "12.8k"}),
    "bc": ({"train/loss": 0.5, "train/holdout_loss": 0.75}, EPISODES, {
        "success once": "50.0% (30.0% … 70.0%)", "evaluated return": "30.0", "held-out loss": "0.750",
        "training loss": "0.500"}),
    "reasoning": ({"train/reward": 0.125, "train/response_tokens": 96.0}, ANSWERS, {
        "accuracy": "25.0% (10.0% … 45.0%)", "pass@4": "62.5% (40.0% … 80.0%)", "training reward": "0.125",
        "tokens per response": "96.0"}),
    "sft": ({"train/loss": 1.5, "train/tokens_total": 1.5e6}, ANSWERS, {
        "accuracy": "25.0% (10.0% … 45.0%)", "pass@4": "62.5% (40.0% … 80.0%)", "training loss": "1.500", "tokens": "1.5M"}),
    "dpo": ({"train/loss": 0.5, "train/accuracy": 0.8, "train/tokens_total": 2e4}, ANSWERS, {
        "accuracy": "25.0% (10.0% … 45.0%)", "pass@4": "62.5% (40.0% … 80.0%)", "training pairs decided rightly": "80.0%",
        "training loss": "0.500", "tokens": "20k"}),
    "reward_model": ({"train/loss": 0.5, "train/accuracy": 0.8, "train/tokens_total": 2e4}, PAIRS, {
        "accuracy": "75.0% (60.0% … 90.0%)", "training accuracy": "80.0%", "training loss": "0.500", "tokens": "20k"}),
}  # fmt: skip


def run_of(folder: Path, kind: str, *, evaluated: bool = True) -> Path:
    row, result, _ = KINDS[kind]
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"runner: {{task_type: {kind}}}\nworkflow: {{eval_suites: [held]}}\n")
    (folder / "status.json").write_text(json.dumps({"state": "finished", "stop_reason": "max_steps", "step": 4}))
    rows = [{"step": step, "time/wall_s": 2.0 * step, **row} for step in (1, 2, 3, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if evaluated:
        place = folder / "eval/global_step_4/held.json"
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps({"suite": "held", "global_step": 4, **result}))
    return folder


def test_every_kind_has_headlines_and_is_tried_here() -> None:
    assert set(KINDS) == set(task_type_names()) and all(
        find_task_type(name).reporting.headlines for name in task_type_names()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers_stand_on_the_page_in_the_status_and_in_the_list(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, expected = run_of(tmp_path / "runs" / "a", kind), KINDS[kind][2]
    assert {
        title: texts[0] for title, texts in headline_columns({"a": [read_run(run_paths(folder))]}).items()
    } == expected
    page = tmp_path / "page.html"
    assert cli.main(["compare", str(folder), "--output", str(page)]) == 0
    assert cli.main(["status", str(folder)]) == 0
    assert cli.main(["status", str(folder.parent)]) == 0
    printed, html = capsys.readouterr().out, page.read_text()
    for title, text in expected.items():
        assert f">{title}<" in html and f">{text}<" in html, title
        assert f"{title} {text}" in printed, title
    header, line = printed.splitlines()[-2:]
    assert all(title in header for title in expected) and all(text in line for text in expected.values())
    assert line.endswith("ended: all steps are done") and "max_steps" not in printed and "left" not in header


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("evaluated", [True, False])
def test_no_column_is_empty(tmp_path: Path, kind: str, evaluated: bool) -> None:
    folder = run_of(tmp_path / "a", kind, evaluated=evaluated)
    page = tmp_path / "page.html"
    assert cli.main(["compare", str(folder), "--output", str(page)]) == 0
    table = page.read_text().split("<h2>How they ended</h2>")[1].split("</table>")[0]
    assert f">{NO_VALUE}<" not in table
    assert NO_VALUE not in "".join(text for texts in run_headlines([run_paths(folder)]).values() for text in texts)


def test_runs_without_a_number_have_a_dash_beside_those_with_one(tmp_path: Path) -> None:
    folders = [run_of(tmp_path / "a", "reasoning"), run_of(tmp_path / "b", "embodied", evaluated=False)]
    columns = run_headlines([run_paths(folder) for folder in folders])
    assert columns["accuracy"][1] == columns["training return"][0] == NO_VALUE and columns["env steps"][1] == "12.8k"


@pytest.mark.parametrize(
    ("kind", "name", "title"), [("reasoning", "accuracy", "accuracy"), ("embodied", "success_once", "success once")]
)
def test_evaluations_in_training_count_until_a_checkpoint_is_evaluated(
    tmp_path: Path, kind: str, name: str, title: str
) -> None:
    folder = run_of(tmp_path / "a", kind, evaluated=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[1] |= {f"eval/{name}": 0.5, "eval/problems": 30, "eval/episodes": 30}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    run = read_run(run_paths(folder))
    text = headline_columns({"a": [run]})[title][0]
    assert re.fullmatch(r"50\.0% \(33\.\d% … 66\.\d%\)", text) and series(run.rows, f"eval/{name}")[0] == [2.0]


def run_paths(folder: Path) -> Any:
    from rlhpc.jobs.paths import RunPaths

    return RunPaths(folder)
