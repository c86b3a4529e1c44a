"""Pages of traced steps and Perfetto's interface as a person uses them: in headless Chromium, with the real commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chromium_pipe import Browser
from tests.extras import need_extra, needs_programs
from tests.integration.live.test_pages import HOSTILE, serving, write_metrics
from tests.integration.tiny_run import TinyRun
from tests.unit.live.test_run_index import write_run
from tests.unit.tracing.traces import driver, flow, span, trace, track, write_trace

pytestmark = needs_programs("chromium")

#: What would end the element that holds the timeline's data, and then run.
ENDS_DATA = f"</script><script>window.hacked=1</script>{HOSTILE}\u202e\x1b[31m"
STEP_MS = 4000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose ranks have recorded a step, with names that try to be more than text."""
    folder = write_run(tmp_path_factory.mktemp("steps") / "runs" / "traced", state="finished", step=2)
    write_metrics(folder, 2)
    waits = span("rollout", "phase", 10, 3000), span("rollout.generate", "wait", 20, 2990)
    tracks = [driver(STEP_MS, *waits, step=1)]
    flows = []
    for rank in range(3):
        decodes = [
            span(
                ENDS_DATA, "engine", 100 * part, 100 * part + 90, batch=8 if part < 20 else 1, **{ENDS_DATA: ENDS_DATA}
            )
            for part in range(1, 26 + rank)
        ]
        judged = span(HOSTILE, "judge", 200, 900, thread=ENDS_DATA)
        tracks.append(track("rollout", rank, span("generate", "call", 30, 2700 + 100 * rank), *decodes, judged))
        flows.append(flow(ENDS_DATA, f"rollout-{rank}", 2700 + 100 * rank, "driver-0", 2701 + 100 * rank))
    write_trace(folder, trace(*tracks, flows=tuple(flows)))
    return folder


def opened(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.wait("document.querySelector('#timeline-canvas')?.dataset.range !== undefined")


def view(browser: Browser) -> list[float]:
    """Ends of what the timeline shows, in microseconds."""
    found: list[float] = browser.evaluate(
        "document.querySelector('#timeline-canvas').dataset.range.split(' ').map(Number)"
    )
    return found


def use(browser: Browser) -> None:
    """Zooms, moves and selects on a step's page, by mouse and by keys."""
    assert view(browser) == [0, STEP_MS * 1000]
    assert browser.evaluate("document.querySelector('#timeline-canvas').dataset.tracks") == "4"
    text = browser.evaluate("document.body.innerText")
    assert "long tail of generation" in text
    assert "algorithm.max_staleness" in text
    box = browser.box("#timeline-canvas")
    right, row = box["left"] + box["width"], box["top"] + 7 + 48 + 16 + 8 + 4  # lanes of the driver, then rollout-0
    browser.point(box["left"] + box["width"] / 2, row)
    tip = browser.wait(
        "document.querySelector('#timeline-tip').hidden ? '' : document.querySelector('#timeline-tip').textContent"
    )
    assert "onerror" in tip
    browser.drag((right - 300, row), (right - 150, row))
    low, high = view(browser)
    assert 0 < low < high < STEP_MS * 1000
    browser.evaluate("document.querySelector('#timeline-canvas').focus()")
    browser.press("-")
    assert view(browser)[1] - view(browser)[0] > high - low
    browser.press("0")
    assert view(browser) == [0, STEP_MS * 1000]
    browser.press("ArrowDown")
    browser.press("n")
    assert browser.evaluate("document.querySelector('#timeline-status').textContent").startswith(
        "rollout (phase): 2.99 s"
    )
    browser.press("Enter")
    assert view(browser)[0] == 0
    assert view(browser)[1] < STEP_MS * 1000
    browser.press("c")
    assert browser.evaluate("document.querySelector('#timeline-path').getAttribute('aria-pressed')") == "false"
    browser.click("#timeline-whole")
    assert view(browser) == [0, STEP_MS * 1000]


def assert_inert(browser: Browser, origin: str) -> None:
    assert browser.evaluate("window.hacked") is None
    assert browser.problems == []
    assert all(request.startswith((origin, "data:")) for request in browser.requests)


def test_the_page_of_a_step_beside_the_report(run: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "rlhpc.cli", "report", str(run)], check=True, capture_output=True)
    assert 'href="steps/step-1.html"' in (run / "report" / "index.html").read_text()
    page = (run / "report" / "steps" / "step-1.html").as_uri()
    with Browser(tmp_path) as browser:
        opened(browser, page)
        use(browser)
        assert_inert(browser, page)


def test_the_page_of_a_step_on_a_phone_in_the_dark(run: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "rlhpc.cli", "report", str(run)], check=True, capture_output=True)
    with Browser(tmp_path, 390, 844, dark=True) as phone:
        opened(phone, (run / "report" / "steps" / "step-1.html").as_uri())
        assert phone.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        assert phone.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 21, 29)"
        phone.click("#timeline-in")
        assert view(phone)[1] - view(phone)[0] == STEP_MS * 500


def test_serve_shows_the_steps_of_a_run(run: Path, tmp_path: Path) -> None:
    with serving(run.parent, "--port", "0", log=tmp_path / "log") as (address, _), Browser(tmp_path) as browser:
        origin = address.partition("/?")[0]
        browser.open(address)
        browser.wait("document.querySelectorAll('#table tbody tr').length === 1")
        browser.press("7")
        browser.wait("document.querySelector('#step')?.textContent.includes('long tail')")
        source = browser.wait("document.querySelector('iframe')?.src")
        assert source.startswith(f"{origin}/step?")
        assert browser.evaluate("document.querySelector('iframe').getAttribute('sandbox')") == "allow-scripts"
        assert_inert(browser, origin)
        opened(browser, source)
        use(browser)
        assert_inert(browser, origin)
        browser.open(f"{origin}/step?run=traced&step=9")
        browser.wait("document.body.innerText.includes('step 9 of this run was not traced')")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = TinyRun(tmp_path_factory.mktemp("traced"), "runner.max_steps=3", "runner.trace.steps=2-3")
    run.train()
    return run.root


@contextmanager
def serving_trace(run: Path, folder: Path) -> Iterator[tuple[list[str], subprocess.Popen[str]]]:
    """The lines that `rlhpc trace --open` prints, and its process."""
    need_extra("trace")
    command = [sys.executable, "-m", "rlhpc.cli", "trace", str(run), "--open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        assert process.stdout is not None
        try:
            yield [process.stdout.readline().strip() for _ in range(3)], process
        finally:
            process.kill()


def wait_for_tracks(browser: Browser, ranks: Sequence[str]) -> None:
    """Waits until Perfetto's interface shows a process for each rank, and checks that it has asked nobody else."""
    titles = "[...document.querySelectorAll('.pf-track__title')].map(title => title.textContent)"
    browser.wait(f"{json.dumps(ranks)}.every(rank => {titles}.some(title => title.includes(rank)))", 120)
    origin = browser.evaluate("location.origin")
    assert [request for request in browser.requests if not request.startswith((origin, "data:", "blob:"))] == []


@pytest.fixture
def perfetto(trained: Path, tmp_path: Path) -> Iterator[tuple[list[str], subprocess.Popen[str]]]:
    with serving_trace(trained, tmp_path) as served:
        yield served


def test_perfettos_interface_opens_a_real_trace_and_asks_nobody_else(
    trained: Path, perfetto: tuple[list[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    lines, process = perfetto
    origin = lines[0].partition("/?")[0]
    port = origin.rpartition(":")[2]
    assert lines[1].startswith(f"from your own machine: ssh -N -L {port}:127.0.0.1:{port} ")
    files = sorted(trained.rglob("*"))
    (tmp_path / "browser").mkdir()
    with Browser(tmp_path / "browser") as browser:
        browser.open(f"{origin}/localtrace")
        browser.wait("document.body.innerText.includes('the token is missing')")
        browser.open(lines[0])
        wait_for_tracks(browser, ["driver-0", "actor-0", "env-0", "rollout-0"])
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert sorted(trained.rglob("*")) == files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["browser"]
