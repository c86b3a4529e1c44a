"""Report of a run with simulators: cards, charts and tables from rows of metrics and results of evaluations."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from rlhpc.embodied.reporting import (
    AVERAGE,
    all_curves,
    benchmark_tables,
    difficulty,
    learning_curves,
    parts,
    read_evaluations,
    read_judged,
)
from rlhpc.jobs.paths import RunPaths

TIMES = {"time/step_s": 1.0, "time/rollout_s": 0.6, "time/update_s": 0.3}
PLAYED = [
    {"step": step, "train/episode_return": 2.0 * step, "train/policy_loss": -0.1, "rollout/env_steps": 128 * step,
     "time/wall_s": float(step), "time/env_steps_per_s": 128.0, **TIMES}
    for step in range(1, 11)
]  # fmt: skip
CLONED = [
    {"step": step, "train/loss": 1.0 / step, "train/grad_norm": 0.5, "train/demonstrations": 40, "train/samples": 9 * step,
     "time/wall_s": 60.0 * step, "time/samples_per_s": 9.0 + step, **TIMES}
    for step in range(1, 11)
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths.from_run_dir(tmp_path, "run")
    paths.root.mkdir()
    paths.config.write_text("env: {train: {env_id: Pendulum-v1}}\nworkflow: {eval_suites: [default]}\n")
    return paths


def add_result(run: RunPaths, step: int, suite: str = "default", **result: Any) -> None:
    file = run.eval_result(step, suite)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"global_step": step, **result}))


def page(run: RunPaths, rows: list[dict[str, Any]], *, linked: bool = True) -> Any:
    return parts(run, rows, shown_metrics=(), linked=linked)


def test_evaluation_intervals(run: RunPaths) -> None:
    add_result(run, 100, return_mean=475.0, return_std=10.0, episodes=100)
    add_result(run, 100, "pair", return_mean=5, return_ci95=[4, 6])
    add_result(run, 100, "keys", return_mean=5, return_ci95_low=3, return_ci95_high=7)
    add_result(run, 100, "none", return_mean=5)
    add_result(run, 100, "other", accuracy=0.5)
    intervals = {result["suite"]: (result["low"], result["high"]) for result in read_evaluations(run)}
    assert intervals["pair"] == (4, 6) and intervals["keys"] == (3, 7) and intervals["none"] == (5, 5)
    assert [round(value, 2) for value in intervals["default"]] == [473.04, 476.96]
    assert [result["suite"] for result in read_judged(run)] == ["other"]


def test_cards_of_a_run_that_was_not_evaluated(run: RunPaths) -> None:
    report = page(run, PLAYED)
    assert report.subject == "Pendulum-v1" and report.evaluated == {}
    for text in ("not evaluated yet", "<b>20.0</b>", "1280", "10 training steps", "<b>128</b><span>mean over the run"):
        assert text in report.cards, text
    assert "Robot" not in report.cards and "No evaluation yet" in report.evaluation


def test_the_best_checkpoint_is_the_one_with_the_most_successes(run: RunPaths) -> None:
    add_result(run, 5, return_mean=1.0, success_once=0.9, success_once_ci95=[0.8, 0.95], return_std=0.5, episodes=20)
    add_result(run, 10, return_mean=3.0, success_once=0.7, return_std=0.5, episodes=20)
    report = page(run, PLAYED)
    best, _, last = report.cards.partition("Last evaluation")
    assert "90%" in best and "success (once), step 5, suite default" in best
    assert "70%" in last and "step 10" in last
    assert report.evaluated == {5: "90%, 1.0", 10: "70%, 3.0"}
    assert "90.0% (80.0% … 95.0%)" in report.evaluation and "3.00 ★" in report.evaluation


def test_the_last_evaluation_of_a_suite_of_tasks_is_shown_by_task(run: RunPaths) -> None:
    for step, rate in ((5, 0.25), (10, 0.75)):
        tasks = {
            "reach-v3": {"episodes": 4, "return_mean": 8.5, "success_once": rate},
            "<b>": {"episodes": 2, "return_mean": "x"},
        }
        add_result(run, step, return_mean=1.0, tasks=tasks)
    html = page(run, PLAYED).evaluation
    assert "75.0%" in html and "25.0%" not in html and "8.50" in html and "reach-v3" in html
    assert "&lt;b&gt;" in html and "<b>" not in html.partition("reach-v3")[2]
    add_result(run, 10, return_mean=1.0, tasks=[1])
    assert "25.0%" in page(run, PLAYED).evaluation


def test_suites_of_a_benchmark_have_the_benchmarks_own_table(run: RunPaths) -> None:
    for suite, rate in (("spatial", 0.9), ("object", 0.8), ("goal", 0.7), ("10", 0.4)):
        add_result(run, 10, suite, return_mean=1.0, success_once=rate, env_id=f"libero_{suite}")
    html = page(run, PLAYED).evaluation
    row = html.partition("LIBERO")[2].partition("</table>")[0]
    assert [text in row for text in ("Spatial", "Long", "average", "step 10", "70.0%")] == [True] * 5
    assert "The average is that of the suites" in html


def test_the_newest_video_of_each_suite_is_shown_where_files_can_be_linked(run: RunPaths) -> None:
    add_result(run, 5, return_mean=1.0, video="default.mp4")
    add_result(run, 10, return_mean=1.0, video="default.mp4")
    add_result(run, 10, "a&b", return_mean=1.0, video='"b".mp4')
    html = page(run, PLAYED).evaluation
    assert html.count("<video") == 2 and "../eval/global_step_10/default.mp4" in html
    assert "&quot;b&quot;.mp4" in html and "a&amp;b, step 10" in html
    assert "<video" not in page(run, PLAYED, linked=False).evaluation


def test_a_success_model_is_judged_by_its_accuracy(run: RunPaths) -> None:
    add_result(run, 5, accuracy=0.75, recall=0.5, specificity=1.0, episodes=8, steps=80, successes=40)
    add_result(run, 10, accuracy=0.7)
    report = page(run, CLONED)
    assert "<b>75.0%</b><span>of steps judged rightly, step 5, suite default" in report.cards
    assert "<b>70.0%</b><span>of steps judged rightly, step 10" in report.cards
    assert report.evaluated == {5: "75.0%", 10: "70.0%"}
    for text in ("75.0%", "50.0%", "100.0%", "of the others"):
        assert text in report.evaluation, text


def test_a_cloned_policy_has_a_loss_in_place_of_returns(run: RunPaths) -> None:
    report = page(run, CLONED)
    assert "<b>40</b><span>10 training steps" in report.cards and "<b>0.1</b>" in report.cards
    assert "Environment steps" not in report.cards and "Env steps / s" not in report.cards
    assert set(learning_curves(CLONED, ())) == {"loss", "loss_vs_time", "grad_norm"}
    assert "held out" not in report.curves[0]
    held_out = [{**row, "train/holdout_loss": 2.0} for row in CLONED]
    assert "held out" in page(run, held_out).curves[0] and "demonstrated steps / s" in report.times[-1]


def test_a_robot_has_a_card_with_the_commands_that_were_late_and_lost(run: RunPaths) -> None:
    rows = [{**row, "env/robot_latency_ms_p50": 4.25, "env/robot_late": 2, "env/robot_lost": 1} for row in PLAYED]
    cards = page(run, rows).cards
    assert "<b>4.2 ms</b>" in cards and "20 late, 0 dropped, 10 lost in all" in cards


def test_all_curves_are_svg_and_success_has_its_own_where_it_is_known(run: RunPaths) -> None:
    add_result(run, 10, return_mean=1.0)
    curves = all_curves(run, PLAYED, ())
    expected = {"return_vs_env_steps", "return_vs_time", "policy_loss", "evaluation", "throughput", "time_per_phase"}
    assert expected <= set(curves) and not {"success_vs_time", "evaluation_success"} & set(curves)
    assert "environment steps" in curves["return_vs_env_steps"]
    rows = [{**row, "train/success_once": 0.5} for row in PLAYED]
    add_result(run, 5, return_mean=1.0, success_once=0.5)
    more = all_curves(run, rows, ())
    assert {"success_vs_env_steps", "success_vs_time", "evaluation_success"} <= set(more)
    for name, chart in more.items():
        assert ElementTree.fromstring(chart) is not None, name


def test_a_damaged_configuration_leaves_the_report(run: RunPaths) -> None:
    run.config.write_text("a: [")
    assert page(run, []).subject == "" and "No evaluation yet" in page(run, []).evaluation


ROOT = Path(__file__).resolve().parents[4]


def result(step: int, env_id: str, rate: float, **further: Any) -> dict[str, Any]:
    return {"global_step": step, "env_id": env_id, "success_once": rate, **further}


def test_libero_has_an_average_where_its_four_suites_were_played() -> None:
    rates = {"libero_spatial": 0.8, "libero_object": 0.9, "libero_goal": 0.7, "libero_10": 0.4}
    results = [result(20, name, rate) for name, rate in rates.items()]
    results += [result(10, "libero_goal", 0.1), result(10, "libero_goal", 0.2), result(10, "CartPole-v1", 1.0)]
    [table] = benchmark_tables(results)
    assert table.benchmark == "LIBERO" and table.columns == ("Spatial", "Object", "Goal", "Long", AVERAGE)
    assert list(table.rows) == [10, 20]
    assert table.rows[10] == (None, None, 0.2, None, None), "the last result of a suite; no average of one suite"
    assert table.rows[20] == pytest.approx((0.8, 0.9, 0.7, 0.4, 0.7))
    [table] = benchmark_tables([*results, result(20, "libero_90", 0.5)])
    assert table.columns[-2:] == ("90", AVERAGE) and table.rows[20][-1] == pytest.approx(0.7), (
        "90 is not in the average"
    )


def test_mt50_is_grouped_by_difficulty() -> None:
    rates = {"reach-v3": 1.0, "door-open-v3": 0.5, "soccer-v3": 0.4, "push-v3": 0.2, "stick-pull-v3": 0.0}
    tasks = {name: {"episodes": 10, "return_mean": 1.0, "success_once": rate} for name, rate in rates.items()}
    [table] = benchmark_tables([result(5, "metaworld_50", 0.9, tasks=tasks)])
    assert table.columns == ("easy", "medium", "hard", "very hard", AVERAGE)
    assert table.rows[5] == pytest.approx((0.75, 0.4, 0.2, 0.0, 0.3375))
    del tasks["stick-pull-v3"]
    tasks["push-v3"].pop("success_once")
    [table] = benchmark_tables([result(5, "mt50", 0.9, tasks=tasks)])
    assert table.columns == ("easy", "medium")
    assert benchmark_tables([result(5, "mt50", 0.9)]) == []


def test_ml45_and_mt10_have_the_rates_of_all_episodes() -> None:
    results = [result(5, "metaworld_45_ind", 0.8), result(5, "metaworld_45_ood", 0.3), result(5, "mt10", 0.6)]
    assert [(table.benchmark, table.rows[5]) for table in benchmark_tables(results)] == [
        ("MetaWorld MT10", (0.6,)),
        ("MetaWorld ML45", (0.8, 0.3)),
    ]


def test_other_environments_have_no_table() -> None:
    assert (
        benchmark_tables([result(5, "PushCube-v1", 0.5), {"global_step": 5, "env_id": "mt10", "return_mean": 1.0}])
        == []
    )


def test_difficulties_are_those_of_lerobot() -> None:
    files = list(ROOT.glob(".venv-lerobot/lib/python*/site-packages/lerobot/envs/metaworld_config.json"))
    if not files:
        pytest.skip("there is no Python with LeRobot")
    groups = json.loads(files[0].read_text())["DIFFICULTY_TO_TASKS"]
    assert sum(map(len, groups.values())) == 50
    for name, tasks in groups.items():
        assert {difficulty(task) for task in tasks} == {name.replace("_", " ")}
