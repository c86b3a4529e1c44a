"""The pages of `rlhpc serve` as a person uses them: in headless Chromium, with the real command."""

from __future__ import annotations

import base64
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.live.run_views import _MAX_CHART_POINTS
from tests.chromium_pipe import Browser
from tests.extras import needs_programs
from tests.unit.live.test_run_index import write_run
from tests.unit.live.test_run_views import sample, write_samples

pytestmark = needs_programs("chromium")

#: What a planted name, value or text would do if it entered the page as HTML.
HOSTILE = "<img src=x onerror=window.hacked=1>"


#: Picture of one point.
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
#: Picture that tries to be more than one.
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="40" onload="parent.hacked=1;hacked=1">'
    '<script>parent.hacked=1</script><rect width="40" height="40" fill="red"/></svg>'
)


def write_metrics(folder: Path, steps: int, seed: int = 0) -> None:
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = {
                "step": step, "train/reward": 1 - math.exp(-step / (20 + 10 * seed)), "train/loss": math.exp(-step / 30),
                "train/accuracy": 0.5, "train/extra": seed, "time/wall_s": 2.0 * step,
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages") / "runs"
    for seed in range(4):
        run = write_run(
            folder / f"push-s{seed}", state="finished", step=300, max_steps=300, reward=seed / 4, elapsed_s=4000
        )
        write_metrics(run, 300, seed)
    hostile = write_run(folder / HOSTILE, state="failed", step=2, reward=0.5, stop_reason=HOSTILE)
    (hostile / "config.yaml").write_text(f"runner: {{task_type: reasoning}}\n# {HOSTILE}\n")
    write_metrics(hostile, 5)
    with (hostile / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, HOSTILE: 1.0, "train/reward": 0.25}) + "\n")
    texts = {"prompt": HOSTILE, "response": f"\x1b[31m{HOSTILE}", "level": HOSTILE, "terms": {HOSTILE: 1.0}}
    episode = [
        {
            "role": HOSTILE,
            "parts": [{"turn": 0, "read": HOSTILE}, {"turn": 0, "drawn": [[HOSTILE, -2.0], ["ok", -0.1]]}],
        }
    ]
    drawn = [[HOSTILE, -3.0], ["\x1b[31m", -0.1], ["ok", "no number"], 7, None]
    write_samples(RunPaths(hostile), [sample(n, drawn=drawn) for n in range(3)], step=2)
    images = ["shown.png", "inert.svg", "missing.png", "../../../config.yaml", f"{HOSTILE}.png", "torn.jpg"]
    write_samples(
        RunPaths(hostile),
        [sample(n, **{**texts, "episode": episode, "images": images, "num_images": 9}) for n in range(30)],
    )
    previews = hostile / "eval" / "global_step_3" / "held-out.images"
    previews.mkdir()
    (previews / "shown.png").write_bytes(PIXEL)
    (previews / "inert.svg").write_text(SVG)
    (previews / "torn.jpg").write_text(f"<script>parent.hacked=1</script>{HOSTILE}")
    logs = RunPaths(hostile).segment_logs(0)
    logs.mkdir(parents=True)
    (logs / "driver.out").write_text(f"begin\n\x1b]0;title\x07{HOSTILE}\n")
    (logs / "rollout-0.out").write_text("rollout line\n")
    curves = RunPaths(hostile).report.with_name("curves")
    curves.mkdir(parents=True)
    (curves / "loss.svg").write_text(SVG)
    return folder


@contextmanager
def serving(folder: Path, *options: str, log: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The first line of the command, and its process."""
    command = [sys.executable, "-m", "rlhpc.cli", "serve", str(folder), *options]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.terminate()
            process.wait(20)
    assert log.read_text() == ""


@pytest.fixture
def browser(runs: Path, tmp_path: Path) -> Iterator[Browser]:
    with serving(runs, "--port", "0", log=tmp_path / "log") as (address, _), Browser(tmp_path) as browser:
        browser.open(address)
        browser.wait("document.querySelectorAll('canvas[data-range]').length > 0")
        yield browser
        origin = address.partition("/?")[0]
        assert all(request.startswith((origin, "data:")) for request in browser.requests)
        assert browser.evaluate("window.hacked") is None
        assert browser.problems == []


def names(browser: Browser) -> list[str]:
    found: list[str] = browser.evaluate(
        "[...document.querySelectorAll('#table tbody tr')].map(row => row.dataset.name)"
    )
    return found


def chosen(browser: Browser) -> list[str]:
    found: list[str] = browser.evaluate(
        "[...document.querySelectorAll('#table tr[aria-selected=true]')].map(row => row.dataset.name)"
    )
    return found


def set_value(browser: Browser, selector: str, value: object, event: str = "change") -> None:
    """Sets a control to a value, as its user does."""
    browser.evaluate(
        f"(() => {{ const control = document.querySelector('{selector}'); control.value = {json.dumps(value)};"
        f" control.dispatchEvent(new Event('{event}')); }})()"
    )


def row(number: int) -> str:
    return f"#table tbody tr:nth-child({number}) td.name"


def legend(browser: Browser) -> list[str]:
    found: list[str] = browser.evaluate(
        "[...document.querySelectorAll('#legend > span')].map(line => line.textContent)"
    )
    return found


def test_runs_are_chosen_filtered_and_sorted(browser: Browser) -> None:
    assert len(names(browser)) == 5
    assert browser.evaluate("[...document.querySelectorAll('.reason')].map(text => text.textContent)") == [HOSTILE]
    browser.click("#clear")
    browser.wait("document.querySelector('#view').textContent.includes('Choose runs')")
    browser.type("#filter", "push state:finished reward>0.3")
    browser.wait("document.querySelectorAll('#table tbody tr').length === 2")
    assert names(browser) == ["push-s2", "push-s3"]
    browser.click("#choose")
    browser.wait("document.querySelectorAll('#legend > span').length === 2")
    browser.type("#filter", "")
    browser.press("Escape")
    set_value(browser, "#filter", "", "input")
    browser.click("#table th:nth-child(4)")  # by reward, the highest first
    assert names(browser)[:2] == ["push-s3", HOSTILE]
    browser.click("#table th:nth-child(4)")
    assert names(browser)[0] == "push-s0"
    browser.click(row(1))
    assert set(chosen(browser)) == {"push-s0", "push-s2", "push-s3"}
    assert "push-s0" in browser.evaluate("decodeURIComponent(location.hash)")


def test_curves_are_zoomed_smoothed_grouped_and_put_over_time(browser: Browser) -> None:
    browser.click("#clear")
    browser.type("#filter", "push")
    browser.click("#choose")
    canvas = "figure[data-metric='train/reward'] canvas"
    browser.wait(f"document.querySelector(\"{canvas}\")?.dataset.points === '1200'")
    ends = f"document.querySelector(\"{canvas}\").dataset.range.split(' ').map(Number)"
    assert browser.evaluate(ends) == [1, 300]
    box = browser.box(canvas)
    middle = box["top"] + 100
    browser.point(box["left"] + 200, middle)
    tip = browser.wait("[...document.querySelectorAll('.tip')].find(tip => !tip.hidden)?.textContent")
    assert "push-s3" in tip
    browser.wait("[...document.querySelectorAll('.tip')].filter(tip => !tip.hidden).length > 1")  # all charts follow
    browser.drag((box["left"] + 120, middle), (box["left"] + 240, middle))
    browser.wait(f"{ends}[0] > 1 && {ends}[1] < 300")
    browser.click("#zoom-out")
    browser.wait(f"{ends}[1] === 300")
    browser.click("#log-axis")
    browser.wait("document.querySelector('#log-axis').getAttribute('aria-pressed') === 'true'")
    browser.click("#grouped")
    browser.wait("document.querySelectorAll('#legend > span').length === 1")
    assert legend(browser) == ["push (4 runs that differ only in their seeds; band: 95 % interval of the mean)"]
    browser.click("#grouped")
    set_value(browser, "#smoothing", 0.3, "input")
    set_value(browser, "#x-axis", "time/wall_s")
    browser.wait(f"{ends}[1] === 600")
    browser.click("#picker summary")
    browser.type("#metric-filter", "extra")
    browser.wait("[...document.querySelectorAll('.names label')].filter(label => label.checkVisibility()).length === 1")
    browser.click(".names label:not([hidden]) input")
    browser.wait("document.querySelector(\"figure[data-metric='train/extra']\") !== null")
    browser.click("figure[data-metric='train/extra'] button")
    browser.wait("document.querySelector(\"figure[data-metric='train/extra']\") === null")


def test_values_beside_the_pointer_stay_within_their_chart(browser: Browser) -> None:
    browser.click("#clear")
    set_value(browser, "#filter", "push", "input")
    browser.click("#choose")
    canvas = "figure[data-metric='train/reward'] canvas"
    browser.wait(f"document.querySelector(\"{canvas}\")?.dataset.points === '1200'")
    browser.click("#grouped")
    browser.wait(f"document.querySelector(\"{canvas}\").dataset.points !== '1200'")
    box = browser.box(canvas)
    for share in (0.3, 0.52, 0.9):
        browser.point(box["left"] + share * box["width"], box["top"] + 100)
        browser.wait("[...document.querySelectorAll('.tip')].some(tip => !tip.hidden && tip.textContent.includes('…'))")
        outside = browser.evaluate(
            "[...document.querySelectorAll('.tip')].filter(tip => !tip.hidden).filter(tip => {"
            " const inner = tip.getBoundingClientRect(), outer = tip.parentElement.getBoundingClientRect();"
            " return inner.left < outer.left || inner.right > outer.right || tip.scrollWidth > tip.clientWidth"
            "   || [...tip.children].some(row => row.scrollWidth > row.clientWidth); }).map(tip => tip.textContent)"
        )
        assert outside == [], share


#: Lengths of the painted stretches of a chart's pixel column at a value of x, from top to bottom, in pixels of the page.
COLUMN = """(() => {
  const canvas = document.querySelector("figure[data-metric='train/loss'] canvas"), ratio = devicePixelRatio;
  if (!canvas?.dataset.range) return [];  // it is being drawn anew
  const [left, right] = canvas.dataset.range.split(' ').map(Number), box = canvas.getBoundingClientRect();
  const column = Math.round((58 + (%s - left) / (right - left) * (box.width - 68)) * ratio);
  const {data} = canvas.getContext('2d').getImageData(column - 1, 0, 2, canvas.height), stretches = [];
  const isMark = (pixel) => data[pixel + 3] > 60 && data[pixel + 2] - data[pixel] > 60;
  for (let y = 0, length = 0; y <= canvas.height; y += 1) {
    if (y < canvas.height && (isMark(8 * y) || isMark(8 * y + 4))) length += 1;
    else { if (length) stretches.push(length / ratio); length = 0; }
  }
  return stretches;
})()"""


def test_a_dashed_line_marks_where_a_run_was_resumed_with_another_configuration(browser: Browser, runs: Path) -> None:
    provenance = runs / "push-s0" / "provenance.json"
    starts = [{}, {"resumed": {"step": 150, "changes": [f"actor.optim.lr: 0.1 → {HOSTILE}"]}}]
    provenance.write_text(json.dumps({"segments": starts}))
    try:
        browser.click("#clear")
        set_value(browser, "#filter", "push-s0", "input")
        browser.click(row(1))
        browser.wait("document.querySelector('#legend')?.textContent.includes('step 150')")
        assert legend(browser) == [f"push-s0 ┆ push-s0 from step 150 on: actor.optim.lr: 0.1 → {HOSTILE}"]
        dashes = browser.wait(f"(() => {{ const dashes = {COLUMN % 150}; return dashes.length > 10 && dashes; }})()")
        assert all(3 <= dash <= 5 for dash in sorted(dashes)[2:-2]), dashes
        assert len(browser.evaluate(COLUMN % 200)) <= 2  # only the curve itself
        set_value(browser, "#x-axis", "time/wall_s")
        browser.wait(f"{COLUMN % 300}.length > 10")
        assert len(browser.evaluate(COLUMN % 150)) <= 2
        set_value(browser, "#x-axis", "step")
        browser.click("#grouped")
        browser.wait(f"{COLUMN % 150}.length > 10")
    finally:
        provenance.unlink()


def test_configurations_of_the_chosen_runs_are_compared(browser: Browser, runs: Path) -> None:
    """The keys that differ come first; what a run has written stays text, and a damaged file hides no other."""
    configs = {name: runs / name / "config.yaml" for name in ("push-s0", "push-s1")}
    before = {path: path.read_text() for path in configs.values()}
    try:
        configs["push-s0"].write_text("runner: {name: push-s0, task_type: reasoning, seed: 0}\n")
        configs["push-s1"].write_text(f"runner: {{name: push-s1, task_type: reasoning, seed: '{HOSTILE}'}}\n")
        browser.click("#clear")
        set_value(browser, "#filter", "push", "input")
        browser.click(row(1))
        browser.click("#tab-config")
        browser.wait("document.querySelector('#view pre')?.textContent.includes('push-s0')")
        assert browser.evaluate("document.querySelector('#differences')") is None
        browser.click(row(2))
        browser.wait("document.querySelectorAll('#differences tbody tr').length === 1")
        cells = "[...document.querySelectorAll('#differences th, #differences td')].map(cell => cell.textContent)"
        assert browser.evaluate(cells) == ["key", "push-s0", "push-s1", "runner.seed", "0", f'"{HOSTILE}"']
        assert "push-s1" in browser.evaluate("document.querySelector('#view pre').textContent")
        configs["push-s0"].write_text("runner: [\n")
        browser.click("#tab-config")
        browser.wait("document.querySelector('#view .problem')?.textContent.includes('config.yaml of push-s0')")
        assert "push-s1" in browser.evaluate("document.querySelector('#view pre').textContent")
    finally:
        for path, text in before.items():
            path.write_text(text)
    # A failed question is an error of the console, too.
    browser.problems[:] = [problem for problem in browser.problems if "/api/differences" not in problem]


def test_samples_films_logs_report_and_configuration_of_a_hostile_run(browser: Browser) -> None:
    """What a run has written stays text: names, values, answers, tool output, pictures, log lines."""
    browser.click("#clear")
    browser.click(row(names(browser).index(HOSTILE) + 1))
    browser.wait("document.querySelectorAll('canvas[data-range]').length > 0")
    browser.click("#picker summary")
    assert HOSTILE in browser.evaluate("document.querySelector('.names').textContent")
    browser.click("#tab-samples")
    browser.wait("document.querySelectorAll('#samples article').length === 20")
    text = browser.evaluate("document.querySelector('#samples').textContent")
    assert HOSTILE in text
    assert "\x1b" not in text
    browser.click("#later")
    browser.wait("document.querySelectorAll('#samples article').length === 10")
    set_value(browser, "#verdict", "right")
    browser.wait("document.querySelector('#samples p').textContent.startsWith('15 of 30')")
    browser.type("#sample-text", "What matches nothing")
    browser.wait("document.querySelector('#samples p').textContent.startsWith('0 of 30')")
    browser.type("#sample-text", "onerror")
    browser.wait("document.querySelector('#samples p').textContent.startsWith('15 of 30')")
    assert browser.evaluate("[...document.querySelectorAll('.token')][0].title") == "log-prob -2"
    browser.press("Escape")
    browser.click("#tab-media")
    browser.wait("document.querySelector('.media img')?.naturalWidth === 40")
    browser.click("#tab-logs")
    browser.wait("document.querySelector('pre.log')?.textContent.includes('onerror')")
    assert "\x1b" not in browser.evaluate("document.querySelector('pre.log').textContent")
    set_value(browser, "#log", "rollout-0")
    browser.wait("document.querySelector('pre.log').textContent.includes('rollout line')")
    browser.click("#tab-report")
    browser.wait("document.querySelector('iframe')?.src.includes('/report')")
    browser.click("#tab-config")
    browser.wait("document.querySelector('#view pre')?.textContent.includes('onerror')")


def test_samples_are_chosen_by_evaluation_and_reward_and_paged_back(browser: Browser) -> None:
    browser.click("#clear")
    browser.click(row(names(browser).index(HOSTILE) + 1))
    browser.click("#tab-samples")
    count = "(document.querySelector('#samples p')?.textContent ?? '')"
    browser.wait(f"{count}.startsWith('30 of 30 samples, from 1 ')")
    browser.click("#later")
    browser.wait(f"{count}.includes('from 21 ')")
    browser.click("#samples p button:first-of-type")
    browser.wait(f"{count}.includes('from 1 ')")
    low, high = (f".bar label:nth-of-type({number}) input" for number in (3, 4))
    set_value(browser, low, "0.95", "input")
    browser.wait(f"{count}.startsWith('20 of 30')")
    set_value(browser, high, "1.25", "input")
    browser.wait(f"{count}.startsWith('3 of 30')")
    browser.click("#samples details summary")
    browser.wait("document.querySelector('#samples details').open")
    assert "onerror" in browser.evaluate("document.querySelector('#samples details pre').textContent")
    for bound in (low, high):
        set_value(browser, bound, "", "input")
    earlier = browser.evaluate("document.querySelector('#evaluation option').value")
    set_value(browser, "#evaluation", earlier)
    browser.wait(f"{count}.startsWith('3 of 3 samples')")
    # the tokens of an answer of one turn
    browser.click("#samples article:first-of-type details:nth-of-type(2) summary")
    browser.wait("[...document.querySelectorAll('.token')].length === 9")
    titles = browser.evaluate("[...document.querySelectorAll('.token')].map(token => token.title)")
    assert titles[:3] == ["log-prob -3", "log-prob -0.1", "log-prob –"]
    assert browser.evaluate("document.querySelector('.token').textContent") == HOSTILE
    assert "\x1b" not in browser.evaluate("document.querySelector('#samples').textContent")


def test_samples_show_the_images_of_their_prompts(browser: Browser) -> None:
    browser.click("#clear")
    browser.click(row(names(browser).index(HOSTILE) + 1))
    browser.click("#tab-samples")
    browser.wait("document.querySelectorAll('#samples article').length === 20")
    first = "#samples article:first-of-type .images"
    images = f"[...document.querySelectorAll('{first} img')]"
    assert browser.evaluate(f"{images}.map(image => image.alt)") == ["shown.png", "inert.svg", "torn.jpg"]
    browser.wait(f"{images}.every(image => image.complete)")
    assert browser.evaluate(f"{images}.map(image => image.naturalWidth)") == [1, 40, 0]
    assert browser.evaluate(f"document.querySelector('{first} .note').textContent") == (
        "6 more images of the prompt were not saved"
    )
    earlier = browser.evaluate("document.querySelector('#evaluation option').value")
    set_value(browser, "#evaluation", earlier)
    browser.wait("document.querySelectorAll('#samples article').length === 3")
    assert browser.evaluate("document.querySelector('#samples .images')") is None, "prompts without images"


def test_buttons_and_a_double_click_do_what_keys_do(browser: Browser) -> None:
    browser.click("#theme")
    browser.wait("document.documentElement.classList.contains('dark')")
    browser.click("#theme")
    browser.wait("document.documentElement.classList.contains('light')")
    browser.click("#help-button")
    browser.wait("document.querySelector('#help').open")
    browser.click("#help-close")
    browser.wait("!document.querySelector('#help').open")
    canvas = "figure[data-metric='train/reward'] canvas"
    ends = f"document.querySelector(\"{canvas}\").dataset.range.split(' ').map(Number)"
    box = browser.box(canvas)
    browser.drag((box["left"] + 120, box["top"] + 100), (box["left"] + 240, box["top"] + 100))
    browser.wait(f"{ends}[0] > 1")
    browser.evaluate(
        f"document.querySelector(\"{canvas}\").dispatchEvent(new MouseEvent('dblclick', {{bubbles: true}}))"
    )
    browser.wait(f"{ends}[0] === 1")


def test_keys(browser: Browser) -> None:
    browser.press("x")
    browser.press("j")
    browser.press("j")
    browser.press("k")
    browser.press(" ")
    browser.wait("document.querySelectorAll('#table tr[aria-selected=true]').length === 1")
    assert chosen(browser) == [names(browser)[0]]
    browser.press("a")
    browser.wait("document.querySelectorAll('#table tr[aria-selected=true]').length === 5")
    browser.press("6")
    browser.wait("document.querySelector('#tab-config').getAttribute('aria-selected') === 'true'")
    browser.press("1")
    browser.wait("document.querySelectorAll('canvas[data-range]').length > 0")
    browser.press("l")
    browser.press("m")
    browser.press("0")
    browser.press("t")
    browser.wait("document.documentElement.classList.contains('dark')")
    browser.press("?")
    browser.wait("document.querySelector('#help').open")
    browser.click("#help-close")
    browser.press("/")
    browser.wait("document.activeElement.id === 'filter'")


def test_what_has_the_focus_is_operated_by_keys(browser: Browser) -> None:
    """A space ticks a box and opens a list, and chooses no run meanwhile; a tab, a column and a chart keep the focus."""
    focused = "document.activeElement?.id || document.activeElement?.dataset.column"
    before = chosen(browser)
    for selector, state in (("#picker summary", "#picker').open"), (".names input", ".names input').checked")):
        was = browser.evaluate(f"document.querySelector('{state}")
        browser.evaluate(f"document.querySelector('{selector}').focus()")
        browser.press(" ")
        browser.wait(f"document.querySelector('{state} === {json.dumps(not was)}")
    assert chosen(browser) == before
    browser.evaluate("document.querySelector('#tab-logs').focus()")
    browser.press(" ")
    browser.wait("document.querySelector('#tab-logs').getAttribute('aria-selected') === 'true'")
    assert browser.evaluate(focused) == "tab-logs"
    browser.evaluate("document.querySelector('#table th:nth-child(3)').focus()")
    browser.press("Enter")
    browser.wait("document.querySelector('#table th:nth-child(3)').getAttribute('aria-sort') === 'descending'")
    assert browser.evaluate(focused) == browser.evaluate(
        "document.querySelector('#table th:nth-child(3)').dataset.column"
    )


def test_a_chart_is_read_and_zoomed_by_keys(browser: Browser) -> None:
    canvas = "document.querySelector(\"figure[data-metric='train/reward'] canvas\")"
    ends = f"{canvas}.dataset.range.split(' ').map(Number)"
    browser.press("x")
    set_value(browser, "#filter", "push-s0", "input")
    browser.press("a")
    browser.wait(f"{canvas}?.dataset.points === '300'")
    browser.press("Tab")  # any: the browser shows the focus as of a keyboard
    browser.evaluate(f"{canvas}.focus()")
    browser.press("ArrowRight")
    shown = "[...document.querySelectorAll('.tip')].find(tip => !tip.hidden)?.textContent"
    first = browser.wait(shown)
    browser.press("ArrowRight")
    browser.wait(f"{shown} !== {json.dumps(first)}")
    browser.press("+")
    browser.wait(f"{ends}[0] > 1 && {ends}[1] < 300")
    narrow = browser.evaluate(ends)
    assert browser.evaluate(f"document.activeElement === {canvas}")
    browser.press("-")
    browser.wait(f"{ends}[1] - {ends}[0] > {narrow[1] - narrow[0]}")
    browser.press("Escape")
    browser.wait(f"{shown} === undefined")
    browser.press("0")
    browser.wait(f"{ends}[0] === 1 && {ends}[1] === 300")


#: Texts whose contrast with what is behind them is below 4.5, the limit of WCAG's level AA for small letters.
CONTRAST = """(() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (color) => color.slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const color = channels(getComputedStyle(element).backgroundColor);
      if (color.length < 4 || color[3] > 0.5) return color;
    }
    return [255, 255, 255];
  };
  const weak = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || !element.checkVisibility()) continue;
    const pair = [light(channels(getComputedStyle(element).color)), light(behind(element))].sort();
    if ((pair[1] + 0.05) / (pair[0] + 0.05) < 4.5) weak.push(`${element.className} ${node.data.trim().slice(0, 30)}`);
  }
  return weak;
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_all_texts_stand_out_in_light_and_dark(tmp_path: Path, dark: bool) -> None:
    folder = tmp_path / "runs"
    for state in ("running", "failed", "pending", "waiting", "starting", "finished", "stopped"):
        write_metrics(
            write_run(folder / state, state=state, step=3, reward=0.5, host="elsewhere", stop_reason="why"), 3
        )
    for step in (2, 3):
        write_samples(RunPaths(folder / "failed"), [sample(n) for n in range(3)], step=step)
    with (
        serving(folder, "--port", "0", log=tmp_path / "log") as (address, _),
        Browser(tmp_path, dark=dark) as browser,
    ):
        browser.open(address)
        browser.wait("document.querySelectorAll('canvas[data-range]').length > 0")
        set_value(browser, "#filter", "failed", "input")
        browser.press("x")
        browser.press("a")
        set_value(browser, "#filter", "", "input")
        for number, drawn in enumerate(("canvas", "article", "p", "p", "iframe", "pre"), 1):
            browser.press(str(number))
            browser.wait(f"document.querySelector('#view {drawn}') !== null")
            assert browser.evaluate(CONTRAST) == [], number


def test_a_phone_and_a_bookmark(runs: Path, tmp_path: Path) -> None:
    with (
        serving(runs, "--port", "0", log=tmp_path / "log") as (address, _),
        Browser(tmp_path, 390, 844, dark=True) as phone,
    ):
        phone.open(address)
        phone.wait("document.querySelectorAll('canvas[data-range]').length > 0")
        assert phone.evaluate("document.documentElement.scrollWidth") <= 390
        assert phone.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 21, 29)"
        for tab in ("samples", "media", "logs", "config", "report"):
            phone.click(f"#tab-{tab}")
            phone.wait(f"document.querySelector('#tab-{tab}').getAttribute('aria-selected') === 'true'")
            assert phone.evaluate("document.documentElement.scrollWidth") <= 390
        phone.wait("document.querySelector('iframe')?.clientHeight > 600")  # most of the screen, to scroll in
        phone.wait("document.querySelector('#view .note') === null")  # it has been drawn
        phone.open(f"{address.partition('/?')[0]}/#runs=push-s1&metrics=train/loss&x=step&low=10&high=20")
        phone.evaluate("location.reload()")
        phone.wait("document.querySelector('canvas')?.dataset.range === '10 20'")
        assert chosen(phone) == ["push-s1"]
        assert phone.problems == []


def test_a_hundred_runs(tmp_path: Path) -> None:
    """All are listed, four are drawn, and a filter finds those of a name."""
    for number in range(100):
        run = write_run(tmp_path / "runs" / f"run{number:02}", state="finished", step=20, reward=number / 100)
        write_metrics(run, 20, number)
    with (
        serving(tmp_path / "runs", "--port", "0", log=tmp_path / "log") as (address, _),
        Browser(tmp_path) as browser,
    ):
        browser.open(address)
        browser.wait("document.querySelectorAll('canvas[data-range]').length > 0")
        browser.wait("document.querySelectorAll('#table tbody tr').length === 100")
        assert len(chosen(browser)) == 4
        set_value(browser, "#filter", "run9", "input")
        browser.wait("document.querySelectorAll('#table tbody tr').length === 10")
        assert sorted(names(browser)) == [f"run9{number}" for number in range(10)]
        assert browser.problems == []


def test_fifty_long_runs_at_once(tmp_path: Path) -> None:
    """All are drawn at once, from samples until they have been read, and no chart gets more points than it can show."""
    for number in range(50):
        run = write_run(tmp_path / "runs" / f"run{number:02}", state="finished", step=4000, reward=number / 100)
        write_metrics(run, 4000, number)
    with (
        serving(tmp_path / "runs", "--port", "0", log=tmp_path / "log") as (address, _),
        Browser(tmp_path) as browser,
    ):
        browser.open(address)
        browser.wait("document.querySelectorAll('canvas[data-range]').length > 0")
        browser.click("#choose")
        browser.wait("document.querySelectorAll('#legend > span').length === 50")
        first = browser.evaluate("document.querySelector('#sampled').textContent")
        assert "of 50 curves are drawn from a sample of their rows" in first
        browser.wait("document.querySelector('#sampled').textContent === ''", timeout_s=120)
        points = browser.evaluate(
            "[...document.querySelectorAll('canvas')].map(canvas => Number(canvas.dataset.points))"
        )
        assert min(points) > 0 and max(points) <= _MAX_CHART_POINTS + 100
        assert browser.problems == []


def test_a_run_that_trains_and_one_that_disappears(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    live = write_run(folder / "live", state="running", step=10, max_steps=100, host="elsewhere")
    write_metrics(live, 10)
    write_metrics(write_run(folder / "gone", state="finished", step=3), 3)
    with serving(folder, "--port", "0", log=tmp_path / "log") as (address, _), Browser(tmp_path) as browser:
        browser.open(address)
        points = "[...document.querySelectorAll('canvas')].map(canvas => canvas.dataset.points)"
        browser.wait(f"{points}.includes('13')")
        shutil.rmtree(folder / "gone")
        write_metrics(live, 40)
        status: dict[str, Any] = json.loads((live / "status.json").read_text())
        (live / "status.json").write_text(json.dumps({**status, "step": 40}))
        browser.wait(f"{points}.includes('40')")
        browser.wait("document.querySelector('#table tbody').textContent.includes('40/100')")
        browser.wait("document.querySelectorAll('#table tbody tr').length === 1", timeout_s=60)
        assert browser.problems == []


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_socket_and_its_ssh_line(runs: Path, tmp_path: Path, end: signal.Signals) -> None:
    path = tmp_path / "page.sock"
    with serving(runs, "--socket", str(path), log=tmp_path / "log") as (line, process):
        assert line == f"serving {runs} on {path}"
        assert process.stdout is not None
        assert f"ssh -N -L 8080:{path} " in process.stdout.readline()
        process.send_signal(end)
        assert process.wait(20) == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "99999"], "--port is 99999; it must be between 0 and 65535"),
        (["--socket", "/missing/folder/page.sock"], "--socket /missing/folder/page.sock: No such file or directory"),
    ],
)
def test_mistakes_are_one_message(runs: Path, options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "rlhpc.cli", "serve", str(runs), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done
    assert message in done.stderr
    assert done.stderr.count("rlhpc: error:") == 1


def test_there_is_no_such_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlhpc.cli", "serve", str(tmp_path / "missing")],
        capture_output=True, text=True, timeout=60, env={**os.environ},
    )  # fmt: skip
    assert (done.returncode, "there is no folder" in done.stderr) == (2, True)
