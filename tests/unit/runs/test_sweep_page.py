"""The page of a sweep: what is compared, which way is better, and who is not in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlhpc.jobs.paths import SweepPaths
from rlhpc.runs.seed_scores import goal_of
from rlhpc.runs.sweep_page import rank_sweep, render_ranking, write_sweep_page
from rlhpc.runs.task_type import find_task_type, task_type_names


def sweep_of(folder: Path, scores: dict[str, list[float | None]], **record: object) -> SweepPaths:
    """A sweep with these labels and the scores of their seeds; one without a score is still training."""
    sweep, runs = SweepPaths(folder / "lr"), []
    for label, values in scores.items():
        for seed, value in enumerate(values, 1):
            name = f"{label.replace('=', '_')}-s{seed}"
            runs.append({"name": name, "label": label, "seed": seed, "values": {}})
            run = sweep.run(name)
            run.eval_result(4, "held").parent.mkdir(parents=True)
            run.config.write_text("env: {train: {env_id: Task-v1}}\n")
            rows = [{"step": step, "time/wall_s": 1.0 * step, "train/loss": value or 0.0} for step in (1, 2, 3, 4)]
            run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
            run.driver_state.write_text(
                json.dumps({"state": "finished" if value is not None else "failed", "stop_reason": "x"})
            )
            if value is not None:
                result = {"suite": "held", "global_step": 4, "return_mean": value, "episodes": 4}
                run.eval_result(4, "held").write_text(json.dumps(result))
    sweep.record.write_text(json.dumps({"name": "lr", "suite": "held", "runs": runs, **record}))
    return sweep


def order_of(page: Path) -> list[str]:
    """The labels of the table of scores, from the top."""
    table = page.read_text().split("<h2>Scores</h2>")[1].split("</table>")[0]
    return re.findall(r'<tr><td class="t">([^<]*)', table)


def test_the_best_comes_first_and_those_that_failed_are_named(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, {"lr=1": [1.0, 2.0, 3.0], "lr=2": [4.0, 5.0, None], "lr=3": [None]})
    page = write_sweep_page(sweep, sweep.page)
    assert order_of(page) == ["lr=2", "lr=1"]
    html = page.read_text()
    assert "5 of 7" in html and "2 of 3" in html and "Without a score yet: 1 of 3 configurations" in html
    assert "best so far" in html and "<td>too few seeds</td>" in html and "<td>100%</td>" not in html
    assert len(re.findall(r'<td class="t bad">failed', html)) == 2


def test_less_may_be_better(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, {"lr=1": [1.0, 2.0], "lr=2": [4.0, 5.0]}, metric="train/loss", goal="minimize")
    page = write_sweep_page(sweep, sweep.page)
    assert order_of(page) == ["lr=1", "lr=2"]


@pytest.mark.parametrize("count", range(1, 8))
def test_few_seeds_say_no_probability_and_no_number_has_an_interval_without_width(tmp_path: Path, count: int) -> None:
    """Also where all seeds are alike."""
    scores: dict[str, list[float | None]] = {"lr=1": [1.0 + k for k in range(count)], "lr=2": [500.0] * count}
    html = write_sweep_page(sweep := sweep_of(tmp_path, scores), sweep.page).read_text()
    assert ("<td>100%</td>" in html) == ("too few seeds" not in html) == (count >= 5)
    ends = re.findall(r"\(([-\d.k]+) (?:…|to) ([-\d.k]+)\)", html)
    assert all(low != high for low, high in ends) and bool(ends) == (count > 1)


@pytest.mark.parametrize("values", [[0.6, 0.8], [0.9, 0.9], [0.2, 0.5, 0.4, 0.9, 1.0]])
def test_both_tables_say_the_same_of_a_share(tmp_path: Path, values: list[float]) -> None:
    """The same number, the same interval, inside of 0 to 1."""
    sweep = sweep_of(tmp_path, {"lr=1": list(values)})
    for seed, value in enumerate(values, 1):
        run = sweep.run(f"lr_1-s{seed}")
        run.config.write_text("runner: {task_type: reasoning}\n")
        result = {
            "suite": "held",
            "global_step": 4,
            "accuracy": value,
            "accuracy_ci95": [0.0, 1.0],
            "n": 50,
            "failed": 0,
        }
        run.eval_result(4, "held").write_text(json.dumps({**result, "reward_mean": value}))
    html = write_sweep_page(sweep, sweep.page).read_text()
    scores, ended = (re.search(f"<h2>{part}</h2>.*?</table>", html, re.S)[0] for part in ("Scores", "How they ended"))
    mean = re.findall(r"<td[^>]*>([^<]*)</td>", scores)[2]
    share = next(cell for cell in re.findall(r"<td[^>]*>([^<]*)</td>", ended) if "%" in cell)
    first = [float(word) for word in re.findall(r"-?[\d.]+", mean)]
    second = [float(word) / 100 for word in re.findall(r"-?[\d.]+(?=%)", share)]
    assert second == pytest.approx(first, abs=0.01) and all(0 <= end <= 1 for end in first)
    assert len(first) == (1 if len(set(values)) == 1 else 3)


def test_a_configuration_has_one_colour(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, {"lr=1": [1.0, 2.0], "lr=2": [4.0, 5.0]})
    html = write_sweep_page(sweep, sweep.page).read_text()
    found = re.findall(r'var\(--(c\d)\)"/><text class="key"[^>]*>(lr=\d)<', html)
    found += re.findall(r'>(lr=\d)</text><path d="[^"]*" style="stroke:var\(--(c\d)\)', html)
    assert {frozenset(pair) for pair in found} == {frozenset(("c0", "lr=2")), frozenset(("c1", "lr=1"))}


def test_of_many_configurations_the_best_are_drawn(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, {f"lr={k}": [float(k)] for k in range(12)})
    page = write_sweep_page(sweep, sweep.page)
    assert order_of(page) == [f"lr={k}" for k in reversed(range(12))]
    assert (
        "IQM over seeds, the best 8 of 12" in page.read_text() and "The 8 best of 12 configurations" in page.read_text()
    )


def test_before_anything_has_begun(tmp_path: Path) -> None:
    sweep = SweepPaths(tmp_path)
    sweep.record.write_text(
        json.dumps({"name": "lr", "runs": [{"name": "a-s1", "label": "a", "seed": 1, "values": {}}]})
    )
    html = write_sweep_page(sweep, sweep.page).read_text()
    assert "No run has finished yet." in html and "not started" in html


def test_less_of_a_loss_is_better_unless_told_otherwise(tmp_path: Path) -> None:
    """And the card says which way it is read."""
    scores: dict[str, list[float | None]] = {"lr=1": [2.9, 2.8, 2.7], "lr=2": [0.4, 0.5, 0.6]}
    page = write_sweep_page(sweep := sweep_of(tmp_path / "a", scores, metric="train/loss"), sweep.page)
    assert order_of(page) == ["lr=2", "lr=1"] and "lowest IQM of train/loss at step 4" in page.read_text()
    told = sweep_of(tmp_path / "b", scores, metric="train/loss", goal="maximize")
    assert order_of(write_sweep_page(told, told.page)) == ["lr=1", "lr=2"]


def test_every_metric_by_which_runs_are_compared_knows_which_way_is_better() -> None:
    names = {name for kind in map(find_task_type, task_type_names()) for name, _, _ in kind.reporting.compared}
    less = {name for name in names if goal_of(name) == "minimize"}
    assert less == {"train/loss"} and len(names) > 4
    assert [goal_of(name) for name in ("eval/perplexity", "time/step_s", "time/tokens_per_s", "train/kl")] == [
        "minimize", "minimize", "maximize", "minimize",
    ]  # fmt: skip
    for kind in map(
        find_task_type, task_type_names()
    ):  # what is measured on held-out data is asked before what was trained on
        order = [name.startswith("eval/") for name, _, _ in kind.reporting.compared if "/" in name]
        assert order == sorted(order, reverse=True), kind.name


def test_scores_are_of_one_step(tmp_path: Path) -> None:
    """The last one that all have: one whose last evaluation has not run is not compared by an earlier one."""
    sweep = sweep_of(tmp_path, {"lr=1": [0.9], "lr=2": [0.5]})
    first, second = sweep.run("lr_1-s1"), sweep.run("lr_2-s1")
    for run, step, value in ((first, 2, 0.2), (second, 2, 0.4)):
        run.eval_result(step, "held").parent.mkdir(parents=True, exist_ok=True)
        result = {"suite": "held", "global_step": step, "return_mean": value, "episodes": 4}
        run.eval_result(step, "held").write_text(json.dumps(result))
    second.eval_result(4, "held").unlink()
    page = write_sweep_page(sweep, sweep.page)
    assert order_of(page) == ["lr=2", "lr=1"] and "eval/return_mean at step 2" in page.read_text()


def test_the_terminal_has_the_same_order(tmp_path: Path) -> None:
    scores: dict[str, list[float | None]] = {"lr=1": [1.0, 2.0, 3.0], "lr=2": [4.0, 5.0, None], "lr=10": [6.0]}
    lines = render_ranking(rank_sweep(sweep_of(tmp_path, scores)))
    assert lines[0] == "  eval/return_mean at step 4, interquartile mean over seeds, highest first:"
    assert [line.split()[0] for line in lines[1:]] == ["lr=10", "lr=2", "lr=1"]
    assert lines[1] == "    lr=10  6, 1 seed" and lines[2].endswith(", 2 of 3 seeds") and "…" in lines[3]
    assert render_ranking(rank_sweep(sweep_of(tmp_path / "b", {"lr=1": [None]}))) == []
