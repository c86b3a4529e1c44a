"""Page of generations: its content, and foreign text, which stays text."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from rlhpc.jobs.paths import RunPaths
from rlhpc.language.export import _write_model_card
from rlhpc.language.reporting.sample_pages import read_samples, samples_path, spread, write_samples_page
from rlhpc.metrics.provenance import describe_result, read_results
from rlhpc.runs.report import write_report
from tests.unit.language.reporting.language_runs import CONFIG, evaluate, parse, rows

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> & \x00\x1b[31m \u202eevil \ud800 end"


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
    paths = RunPaths.from_run_dir(tmp_path, "large")
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
