"""The page of generations and the report of a language-model run: what they show, and that foreign text stays text."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhpc.jobs.paths import RunPaths
from rlhpc.language.export import _write_model_card
from rlhpc.language.reporting.eval_metrics import summarize
from rlhpc.language.reporting.sample_pages import FILTER, read_samples, samples_path, spread, write_samples_page
from rlhpc.metrics import MetricLogger
from rlhpc.metrics.phase_times import phase_columns
from rlhpc.metrics.provenance import describe_result, read_results
from rlhpc.runs.report import write_curves, write_report
from rlhpc.runs.task_type import find_task_type

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> & \x00\x1b[31m \u202eevil \ud800 end"
CONFIG = """
runner: {task_type: %s}
actor: {model: {model_path: /models/tiny}}
data: {train: {source: arithmetic}}
"""


class Page(HTMLParser):
    """Collects the tags, and fails on one that does not close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def parse(path: Path) -> tuple[str, Page]:
    text, parser = path.read_text().replace(f"<script>{FILTER}</script>", ""), Page()
    parser.feed(text)
    assert parser.open == []
    tags = {tag for tag, _ in parser.seen}
    assert not tags & {"script", "img", "link", "iframe", "object", "base"}
    assert not re.search(r"@import|url\(", text)
    assert not any(name.startswith("on") or name == "src" for _, attributes in parser.seen for name in attributes)
    assert not set(text) & {chr(code) for code in range(32) if chr(code) not in "\n\t"}
    return text, parser


def rows(problems: int, right: int, samples: int = 1, response: str = "It is {}.") -> list[dict[str, Any]]:
    return [
        {
            "id": i, "sample": j, "level": f"{1 + i % 2} digits", "prompt": f"What is {i} + {i}?", "answer": str(2 * i),
            "response": response.format(2 * i), "vote": str(2 * i), "right": i < right, "reward": float(i < right) + 0.1,
            "terms": {"math": float(i < right), "format": 0.1}, "tokens": 5 + i, "finished": i % 3 > 0, "failed": i == 4,
        }
        for i in range(problems) for j in range(samples)
    ]  # fmt: skip


def evaluate(paths: RunPaths, step: int, suite: str, samples: list[dict[str, Any]]) -> None:
    path = paths.eval_result(step, suite)
    path.parent.mkdir(parents=True, exist_ok=True)
    samples_path(path).write_text("".join(json.dumps(row) + "\n" for row in samples))
    path.write_text(json.dumps({"suite": suite, "global_step": step, "backend": "hf", **summarize(samples)}))


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths.of(tmp_path, "sums")
    paths.root.mkdir()
    paths.config.write_text(CONFIG % "reasoning")
    with MetricLogger(paths, ["jsonl"]) as logger:
        for step in range(1, 21):
            values = {"train/reward": step / 20, "train/accuracy": step / 25, "train/response_tokens": 30.0 - step,
                      "train/mismatch_kl": 1e-6 * step, "train/my_own_metric": step**2,
                      "reward/math": step / 25, "reward/format": 0.1 + step / 1000,
                      "rollout/samples": step * 64.0, "train/constant": 1.0}  # fmt: skip
            times = {
                "time/step_s": 2.0,
                "time/rollout_s": 1.0,
                "time/update_s": 0.5,
                "time/generate_s": 1.2,
                "time/tokens_per_s": 900.0 + step,
            }
            logger.log(step, {**values, **times, "time/wall_s": 2.0 * step})
    for step, right in ((10, 4), (20, 7)):
        evaluate(paths, step, "default", rows(10, right, samples=4))
    return paths


def test_the_card_and_the_subtitle_name_the_run_and_pass_at_k_its_k(run: RunPaths) -> None:
    export = RunPaths(run.root.parent / "words").export(150)
    run.config.write_text((CONFIG % "reasoning").replace("/models/tiny", str(export)))
    write_report(run)
    text, samples = run.report.read_text(), (run.report.parent / "samples.html").read_text()
    assert "words on arithmetic" in text and "global_step_150" not in text.split("</header>")[0]
    assert ">pass@4<" in samples and describe_result(read_results(run, "default")[1]).startswith("accuracy 70.0%")
    assert ", pass@4 70.0%, majority 70.0% on 10 problems" in describe_result(read_results(run, "default")[1])
    folder = run.root / "somewhere"
    folder.mkdir()
    _write_model_card(folder, {"from": str(run.checkpoint(20)), "global_step": 20, "base": str(export)})
    card = (folder / "README.md").read_text()
    facts = next(yaml.safe_load_all(card))["model-index"][0]
    assert "# sums\n" in card and facts["name"] == "sums"
    assert facts["results"][0]["metrics"] == [{"type": "accuracy", "name": "accuracy", "value": 0.7}]
    assert "| default | 10 problems | 70.0% | 39.7% to 89.2% | pass@4 70.0% |" in card
    (empty := run.root / "empty").mkdir()
    _write_model_card(empty, {"from": str(run.checkpoint(5)), "global_step": 5, "base": "x"})
    assert "| accuracy |" not in (empty / "README.md").read_text()


def test_problems_stand_side_by_side(run: RunPaths) -> None:
    path = write_samples_page(run)
    assert path is not None and path.parent == run.report.parent
    text, page = parse(path)
    assert text.count('<article class="problem"') == 10
    assert text.count('<div class="answer">') == 20  # two checkpoints each
    ninth = text[text.index("What is 6 + 6?") :].split("</article>")[0]
    assert "✗ wrong" in ninth.split("step 20")[0] and "✓ right" in ninth.split("step 20")[1]
    assert "4 of 4 right" in ninth and "3 more of its 4 samples" in ninth and "cut off" in ninth
    assert "reward 1.1 (math 1, format 0.1)" in ninth
    assert "could not be judged" in text
    # 3 problems better than before, none worse.
    assert re.search(r"<td>20</td><td>10</td><td>70.0%</td><td>[^<]+</td><td>70.0%</td><td>3</td><td>0</td>", text)
    assert "1 digits" in text and sum(tag == "rect" for tag, _ in page.seen) == 20


def test_foreign_text_stays_text(run: RunPaths) -> None:
    hostile = rows(2, 1)
    for row in hostile:
        row |= {
            "prompt": HOSTILE,
            "response": HOSTILE,
            "answer": HOSTILE,
            "level": HOSTILE,
            "terms": {HOSTILE: 1.0, "b": 0},
        }
    evaluate(run, 30, "hostile", hostile)
    write_report(run)
    path = write_samples_page(run)
    assert path is not None
    text, _ = parse(path)
    assert "&lt;/pre&gt;&lt;script&gt;alert(1)" in text and "␛[31m" in text and "␀" in text
    parse(run.report)


def test_large_suites_and_long_answers_stay_readable(tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path, "large")
    for step in range(0, 100, 10):
        evaluate(paths, step, "default", rows(1000, 10 * step, response="{} " + "x" * 20_000 if step == 90 else "{}"))
    path = write_samples_page(paths)
    assert path is not None
    text, page = parse(path)
    assert text.count('<article class="problem"') == 24 and "24 of 1000 problems" in text
    assert "6 of 10 checkpoints" in text and "step 0<" in text and "step 90<" in text
    assert sum(tag == "rect" for tag, _ in page.seen) == 10 * 240
    assert "more characters are in the samples file" in text
    assert path.stat().st_size < 1_500_000


def test_a_changed_suite_is_not_compared(run: RunPaths) -> None:
    other = rows(10, 5)
    for row in other:
        row["prompt"] = "Something else"
    evaluate(run, 20, "default", other)
    path = write_samples_page(run)
    assert path is not None
    assert path.read_text().count("Not asked at this checkpoint") == 10


def test_broken_files_do_not_stop_the_page(run: RunPaths) -> None:
    broken = samples_path(run.eval_result(10, "default"))
    whole = broken.read_text().splitlines()
    broken.write_text("\n".join(["[1]", '{"id": 1}', "null", *whole[:3], whole[4][:20]]) + "\n\xff")
    assert len(list(read_samples(broken))) == 3
    run.eval_result(20, "default").write_text("{torn")
    write_report(run)
    assert write_samples_page(run) is not None
    broken.write_text("")
    assert write_samples_page(run) is None


def test_spread() -> None:
    assert spread(3, 5) == [0, 1, 2]
    assert spread(10, 4) == [0, 3, 6, 9]
    assert spread(10, 1) == [9]


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


def test_rates_and_stages_are_no_phases() -> None:
    stages = {"time/generate_s": 0.9, "time/train_s": 0.8, "time/score_s": 0.7}  # inside the phases, and side by side
    rows = [{"step": 1, "time/step_s": 1.0, "time/rollout_s": 1.0, "time/tokens_per_s": 9.0, **stages}]
    assert phase_columns(rows) == {"rollout": [1.0]}


def test_empty_language_run(tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path, "empty")
    paths.root.mkdir()
    paths.config.write_text(CONFIG % "reasoning")
    assert write_samples_page(paths) is None
    write_report(paths)
    text, _ = parse(paths.report)
    assert "No evaluation yet" in text and "href" not in text
