"""Report of a language run: curves, evaluations and key figures."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from rlhpc.jobs.paths import RunPaths
from rlhpc.language.reporting.report import learning_curves
from rlhpc.language.reporting.sample_pages import write_samples_page
from rlhpc.runs.report import write_curves, write_report
from rlhpc.runs.task_type import find_task_type
from tests.unit.language.reporting.language_runs import CONFIG, evaluate, parse, rows


def test_report_of_a_language_run(run: RunPaths) -> None:
    evaluate(run, 20, "hard", rows(10, 1))
    write_report(run)
    text, page = parse(run.report)
    links = [attributes["href"] for tag, attributes in page.seen if tag == "a"]
    assert links == ["samples.html"] and (run.report.parent / "samples.html").is_file()
    for part in ("tiny on arithmetic", "70.0% ★", "39.7% … 89.2%", "Response length", "train/my_own_metric",
                 "Trainer against rollout engine", "Terms of the reward", "Work of the stages",
                 "<li>pass@k: ", "80.0% (37.6% … 96.4%)",
                 "default: accuracy by level", "Tokens / s", "accuracy, default, step 20"):  # fmt: skip
        assert part in text, part
    assert "train/constant" not in text and "Environment steps" not in text and "rollout/samples" not in text


def test_curves_of_language_runs(run: RunPaths, tmp_path: Path) -> None:
    names = {path.stem for path in write_curves(run, tmp_path / "curves")}
    assert (
        set(find_task_type("reasoning").reporting.curves) < names
        and {"pass_at_k", "mismatch", "train_my_own_metric"} <= names
    )
    for path in (tmp_path / "curves").iterdir():
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    run.config.write_text(CONFIG % "sft")
    run.metrics.write_text('{"step": 1, "train/loss": 2.5}\n')
    assert {path.stem for path in write_curves(run, tmp_path / "sft")} >= set(find_task_type("sft").reporting.curves)
    write_report(run)
    assert "Loss: 2.5 at global step 1" in parse(run.report)[0]


def test_classes_of_one_metric_share_a_chart() -> None:
    names = [f"train/mismatch_abs/{label}" for label in ("likely", "uncertain", "unlikely", "first")]
    names += [f"train/policy/{label}/tokens" for label in ("a", "b")]
    rows = [
        {"step": step, **{name: step * number for number, name in enumerate(names, 1)}, "train/constant/one": 1.0}
        for step in (1, 2, 3)
    ]
    charts = learning_curves(rows, ())
    shared = {name: chart for name, chart in charts.items() if "mismatch" in name or "policy_" in name}
    assert set(shared) == {"train_mismatch_abs", "train_policy_tokens"}
    for label in ("likely", "uncertain", "unlikely", "first"):
        assert f">{label}<" in shared["train_mismatch_abs"]
    assert 'aria-label="train/policy/tokens"' in shared["train_policy_tokens"]
    assert ">a<" in shared["train_policy_tokens"] and ">b<" in shared["train_policy_tokens"]
    assert not any("constant" in name for name in charts)


def test_empty_language_run(tmp_path: Path) -> None:
    paths = RunPaths.from_run_dir(tmp_path, "empty")
    paths.root.mkdir()
    paths.config.write_text(CONFIG % "reasoning")
    assert write_samples_page(paths) is None
    write_report(paths)
    text, _ = parse(paths.report)
    assert "No evaluation yet" in text and "href" not in text
