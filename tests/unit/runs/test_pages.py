"""Reports, samples, comparisons and sweeps as a browser shows them: light and dark, on a screen and on a phone."""

from __future__ import annotations

import itertools
import json
import math
import re
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhpc.jobs.paths import RunPaths, SweepPaths
from rlhpc.language.reporting.eval_metrics import summarize
from rlhpc.language.reporting.sample_pages import samples_path, write_samples_page
from rlhpc.metrics import MetricLogger, update_provenance, write_provenance
from rlhpc.runs.compare import write_comparison
from rlhpc.runs.report import write_report
from rlhpc.runs.sweep_page import write_sweep_page
from tests import browser
from tests.browser import Measured

WIDTHS = (1280, 768, 390)
STEPS = 40
QUESTION = "A train leaves at 9:40 and arrives at 12:05. How long does it take, in minutes? "


def write_run(paths: RunPaths, config: dict[str, Any], rows: list[dict[str, float]]) -> None:
    """Writes what a run leaves, by the writers of runs."""
    write_provenance(paths, {}, f"rlhpc train configs/reasoning/{paths.root.name}.yaml runner.max_steps={STEPS}")
    update_provenance(
        paths, placement={"actor": [{"rank": r, "node": "node-17", "accelerators": [r]} for r in range(4)]}
    )
    paths.config.write_text(yaml.safe_dump(config))
    with MetricLogger(paths, ["jsonl"]) as logger:
        for step, row in enumerate(rows, start=1):
            times = {
                "time/step_s": 4.0,
                "time/rollout_s": 2.0 + step % 3 / 10,
                "time/update_s": 1.5,
                "time/wall_s": 4.0 * step,
            }
            logger.log(step, {**row, **times})
    paths.driver_state.write_text(
        json.dumps({"state": "finished", "stop_reason": "max_steps", "step": STEPS, "max_steps": STEPS})
    )


def language_run(paths: RunPaths, gain: float) -> RunPaths:
    """GRPO with several samples a problem: reward that is accuracy, a loss that is its only term, and what never changes."""
    rows: list[dict[str, float]] = []
    for step in range(1, STEPS + 1):
        reward = 0.2 + gain * step / STEPS + 0.03 * math.sin(step)
        row = {
            "train/reward": reward, "train/accuracy": reward, "train/policy_loss": -0.1 / step, "train/loss": -0.1 / step,
            "train/response_tokens": 180.0 - step, "train/entropy": 1.0 / step, "train/lr": 1e-6, "train/clip_fraction": 0.0,
            "rollout/staleness": 0.0, "train/mismatch_kl": 1e-9 * (step % 3), "train/grad_norm": 1 + 1 / step,
            "train/ref_kl": 0.01 * step, "time/tokens_per_s": 9000.0 + 50 * step, "reward/exact": reward, "reward/format": 0.1,
        }  # fmt: skip
        if step % 10 == 0:
            row |= {"eval/accuracy": 0.2 + gain * step / 80, "eval/pass_at_4": 0.5, "eval/problems": 30}
        rows.append(row)
    config = {
        "runner": {"task_type": "reasoning"},
        "actor": {"model": {"model_path": "/scratch/runs/words-sft/export/global_step_150"}},
        "data": {"train": {"source": "jsonl", "path": "/data/words_of_trains.jsonl"}, "eval": [{"name": "held_out"}]},
        "workflow": {"eval_suites": ["held_out"]},
    }  # fmt: skip
    write_run(paths, config, rows)
    for step in (20, STEPS):
        samples = [
            {
                "id": i, "sample": j, "level": f"{1 + i % 3} steps", "prompt": QUESTION * (1 + i % 4), "answer": "145",
                "response": f"12:05 − 9:40 = 2 h 25 min = {140 + j + i % 7} minutes. " * 5, "vote": str(j), "reward": 0.1,
                "right": (i * 7 + j) % 10 < gain * 10 * step / STEPS, "terms": {"exact": 0.0, "format": 0.1}, "tokens": 96,
                "finished": i % 5 > 0, "failed": False,
            }
            for i in range(30) for j in range(4)
        ]  # fmt: skip
        result = paths.eval_result(step, "held_out")
        result.parent.mkdir(parents=True)
        samples_path(result).write_text("".join(json.dumps(row) + "\n" for row in samples))
        record = {"suite": "held_out", "global_step": step, "backend": "vllm", **summarize(samples)}
        result.write_text(json.dumps(record))
    return paths


def robot_run(paths: RunPaths, gain: float) -> RunPaths:
    """PPO with success, evaluated in training and by checkpoint."""
    rows: list[dict[str, float]] = []
    for step in range(1, STEPS + 1):
        row = {
            "train/episode_return": gain * step, "train/success_once": min(1.0, gain * step / 60),
            "rollout/env_steps": 2048.0 * step,
            "train/policy_loss": -0.1 / step, "train/value_loss": 3 / step, "train/entropy": 0.5, "train/lr": 3e-4,
            "train/approx_kl": 0.01 / step, "time/env_steps_per_s": 800.0 + step,
        }  # fmt: skip
        if step % 5 == 0:
            row |= {"eval/return_mean": 1.1 * gain * step, "eval/return_std": 4.0, "eval/episodes": 20,
                    "eval/success_once": min(1.0, gain * step / 50)}  # fmt: skip
        rows.append(row)
    config = {"runner": {"task_type": "embodied"}, "env": {"train": {"env_id": "PushCube-v1"}},
              "actor": {"optim": {"lr": gain / 1000}}}  # fmt: skip
    write_run(paths, config, rows)
    for step in (20, STEPS):
        result = paths.eval_result(step, "default")
        result.parent.mkdir(parents=True)
        mean = 1.2 * gain * step
        record = {"suite": "default", "global_step": step, "env_id": "PushCube-v1", "episodes": 50, "return_mean": mean,
                  "return_std": 5.0, "return_ci95": [mean - 1.4, mean + 1.4], "success_once": 0.5,
                  "success_once_ci95": [0.36, 0.64]}  # fmt: skip
        result.write_text(json.dumps(record))
    return paths


def write_pages(folder: Path) -> list[Path]:
    """Writes every page that people look at, of runs of both wings."""
    words = language_run(RunPaths.from_run_dir(folder, "words"), 0.5)
    push = robot_run(RunPaths.from_run_dir(folder, "push"), 0.9)
    once = language_run(RunPaths.from_run_dir(folder, "once"), 0.4)
    once.eval_result(20, "held_out").unlink()
    rows = [json.loads(line) for line in once.metrics.read_text().splitlines()]
    plain = [{key: value for key, value in row.items() if not key.startswith("eval/")} for row in rows]
    once.metrics.write_text("".join(json.dumps(row) + "\n" for row in plain))
    sweep, runs = SweepPaths(folder / "lr"), []
    for lr, gain in (("0.0001", 0.3), ("0.001", 0.6)):
        for seed in (1, 2):
            name = f"actor.optim.lr_{lr}-s{seed}"
            language_run(sweep.run(name), gain + seed / 50)
            runs.append({"name": name, "label": f"actor.optim.lr={lr}", "seed": seed, "values": {}})
    sweep.record.write_text(json.dumps({"name": "lr", "suite": "held_out", "runs": runs}))
    write_report(words)
    pages = {
        "report_language": words.report.read_text(),
        "report_robot": write_report(push).read_text(),
        "report_once": write_report(once).read_text(),
        "samples": words.report.with_name("samples.html").read_text(),
        "compare_language": write_comparison([("from words", words), ("once", once)], folder / "c1.html").read_text(),
        "compare_robot": write_comparison([("push", push)], folder / "c2.html").read_text(),
        "sweep": write_sweep_page(sweep, sweep.page).read_text(),
    }
    (folder / "pages").mkdir()
    for name, html in pages.items():
        (folder / "pages" / f"{name}.html").write_text(html)
    return sorted((folder / "pages").glob("*.html"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_pages(tmp_path_factory.mktemp("runs"))


def charts_of(html: str) -> list[tuple[str, list[str]]]:
    """Title and tooltips of each chart, where a page is wide."""
    shown = re.sub(r'<div class="narrow">.*?</svg></div>', "", html, flags=re.DOTALL)
    svgs = re.findall(r'<svg[^>]*class="chart"[^>]*aria-label="([^"]*)"[^>]*>(.*?)</svg>', shown, re.DOTALL)
    return [(title, re.findall(r'class="strip"[^>]*><title>([^<]*)<', body)) for title, body in svgs]


def test_no_curve_is_drawn_twice_and_no_chart_is_of_a_constant(pages: list[Path]) -> None:
    for page in pages:
        charts = charts_of(page.read_text())
        assert page.stem == "samples" or len(charts) > 2
        for (one, first), (other, second) in itertools.combinations(charts, 2):
            assert not first or first != second, f"{page.name}: {one} and {other}"
        for title, tooltips in charts:
            numbers = {line for tooltip in tooltips for line in tooltip.split("\n")[1:]}
            assert not tooltips or len(numbers) > 1, f"{page.name}: {title}"


def test_what_never_changes_is_told_in_sentences(pages: list[Path]) -> None:
    html = {page.stem: page.read_text() for page in pages}
    for sentence in ("Learning rate: 1e-6", "Clipped ratios: 0", "Staleness: 0", "Trainer against rollout engine: 0",
                     "Accuracy on training prompts: the same as Reward", "train/loss: the same as Policy loss"):  # fmt: skip
        assert f"<li>{sentence}</li>" in html["report_language"], sentence
    assert re.search(
        r"<li>Accuracy in evaluations: held_out: [\d.]+ \([\d.]+ … [\d.]+\) at global step 40</li>", html["report_once"]
    )
    for page in ("report_language", "report_robot"):
        assert html[page].index("<h2>Evaluation</h2>") < html[page].index("<h2>Learning curves</h2>")


def test_the_best_evaluation_may_be_one_of_training(pages: list[Path]) -> None:
    html = {page.stem: page.read_text() for page in pages}
    for title, value, step in (("Best", "63%", 35), ("Last", "50%", 40)):
        card = f"<span>{title} evaluation</span><b>{value}</b><span>success (once), step {step}, suite default</span>"
        assert card in html["report_robot"]
    assert "<span>accuracy, held_out, step 40</span>" in html["report_language"]


#: Sets fields of the filter in turn, and notes which problems each leaves.
_TRY_FILTERS = """
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument, form = page.querySelector("form.filter"), found = [];
  for (const fields of TRIED) {
    form.reset();
    for (const [name, value] of Object.entries(fields)) form.elements[name].value = value;
    form.dispatchEvent(new Event("input"));
    const shown = [...page.querySelectorAll("article.problem")].filter((problem) => problem.checkVisibility());
    const names = shown.map((problem) => problem.querySelector("header b").textContent);
    found.push([names, form.querySelector("output").textContent]);
  }
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify(found);
  document.body.append(result);
});
"""


def test_samples_are_filtered_by_answer_reward_and_text(pages: list[Path], tmp_path: Path) -> None:
    rows = [
        {"id": i, "sample": j, "level": "", "prompt": f"question {i}", "response": f"It is {i + j}.", "tokens": 4,
         "vote": "", "finished": True, "failed": False,
         "right": (i + j) % 4 == 0, "reward": i / 4 - j, "terms": {"exact": 1.0}}
        for i in range(4) for j in range(2)
    ]  # fmt: skip
    paths = RunPaths(tmp_path / "run")
    for step in (1, 2):
        result = paths.eval_result(step, "test")
        result.parent.mkdir(parents=True)
        now = [{**row, "right": row["right"] or (step == 2 and row["id"] == 2)} for row in rows]
        samples_path(result).write_text("".join(json.dumps(row) + "\n" for row in now))
        result.write_text(json.dumps({"suite": "test", "global_step": step, **summarize(now)}))
    tried: list[dict[str, str]] = [
        {}, {"answers": "right"}, {"answers": "wrong"}, {"answers": "changed"}, {"least": "0.5"}, {"most": "-1"},
        {"least": "0", "most": "0.25"}, {"text": "QUESTION 3"}, {"text": "it is 2."}, {"text": "nowhere"},
        {"answers": "right", "text": "it is 0."}, {"answers": "right", "text": "it is 1."},
    ]  # fmt: skip
    expected = [
        [0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3], [2], [2, 3], [0], [0, 1], [3], [1, 2], [], [0], [],
    ]  # fmt: skip
    page = write_samples_page(paths)
    assert page is not None
    frame = f'<iframe width="900" height="1600" srcdoc="{escape(page.read_text(), quote=True)}"></iframe>'
    script = _TRY_FILTERS.replace("TRIED", json.dumps(tried))
    (tmp_path / "try.html").write_text(f"<!doctype html><meta charset=utf-8><body>{frame}<script>{script}</script>")
    dom = browser.chromium(tmp_path, "--dump-dom", (tmp_path / "try.html").as_uri())
    found = re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None, dom[-500:]
    shown = json.loads(unescape(found[1]))
    for fields, ids, (problems, words) in zip(tried, expected, shown, strict=True):
        assert problems == [f"Problem {i}" for i in ids], fields
        assert words == f"{len(ids)} of 4 problems", fields


def contrast(text: str, background: str) -> float:
    """The contrast of two colours of CSS (WCAG 2.1)."""

    def luminance(color: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(text), luminance(background)))
    return (high + 0.05) / (low + 0.05)


@pytest.fixture(scope="module", params=["light", "dark"])
def measured(
    request: pytest.FixtureRequest, pages: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], Measured]:
    folder = tmp_path_factory.mktemp("browser")
    found = browser.measure(pages, folder, WIDTHS, dark=request.param == "dark")
    assert len(found) == len(pages) * len(WIDTHS)
    dark = {contrast("rgb(255, 255, 255)", page.background) > 10 for page in found.values()}
    assert dark == {request.param == "dark"}
    return found


def test_pages_fit_and_can_be_read(measured: dict[tuple[str, int], Measured]) -> None:
    for where, page in measured.items():
        assert page.overflow == 0, where
        small = [text for text in page.texts if text["px"] < 11]
        assert len(page.texts) > 30 and not small, (where, small[:5])
        pale = [t for t in page.texts if contrast(t["color"], page.background) < 4 and "rgb" in t["color"]]
        chips = [text for text in pale if not text["svg"]]
        assert len(chips) <= len(page.texts) // 20, (where, chips[:5])


def test_charts_of_a_page_have_one_size_of_letters(measured: dict[tuple[str, int], Measured]) -> None:
    for where, page in measured.items():
        letters = [size for chart in page.charts for size in chart["letters"]]
        assert not letters or max(letters) <= 1.03 * min(letters), (where, min(letters), max(letters))
        assert not [(where, chart["title"], chart["outside"]) for chart in page.charts if chart["outside"]]
        titles = [chart["title"] for chart in page.charts]
        assert len(titles) == len(set(titles)), where


def test_the_evaluation_is_the_largest_chart(measured: dict[tuple[str, int], Measured]) -> None:
    for name in ("report_language.html", "report_robot.html"):
        first, *later = measured[name, 1280].charts
        assert "evaluations" in first["title"] and first["width"] > 1.8 * max(chart["width"] for chart in later)
