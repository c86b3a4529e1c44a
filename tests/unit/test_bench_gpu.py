"""`bench.gpu` keeps what a part found before it failed or was ended, and says what it skipped."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as bench
from bench.gpu.part import Report
from tests.drawn import seed
from tests.eventually import has_ended, wait_until

CODE = """
import os, time
from bench.gpu.part import Report

def measure(report: Report) -> None:
    report.figure("found", [1.0, 3.0, 2.0], "GB/s")
    with report.piece("a piece"):
        raise ValueError("broken\\nand why")
    report.figure("found after it", 1, "s")
    {then}
"""


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A part of this test's own, in the package as its processes find it."""
    (tmp_path / "sitecustomize.py").write_text(f"import bench.gpu\nbench.gpu.__path__.append({str(tmp_path)!r})\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{bench.ROOT}")
    return tmp_path / "own_part.py"


@pytest.mark.parametrize(
    ("then", "deadline", "why"),
    [
        ("raise RuntimeError('late')", 60, {"own_part": "RuntimeError: late"}),
        ("os._exit(7)", 60, {"own_part": "its process ended with 7"}),
        ("time.sleep(300)", 4, {"own_part": "it took longer than 4 s"}),
        ("report.skip('more', 'one card')", 60, {}),
    ],
    ids=["raises", "ends", "hangs", "goes on"],
)
def test_figures_outlive_their_part(part: Path, then: str, deadline: float, why: dict[str, str]) -> None:
    part.write_text(CODE.format(then=then))
    found = bench.run_part("own_part", "cpu", 0, deadline)
    assert found["figures"] == {
        "found (GB/s)": {"min": 1.0, "median": 2.0, "max": 3.0, "n": 3},
        "found after it (s)": {"min": 1, "median": 1, "max": 1, "n": 1},
    }
    assert found["failed"] == {"a piece": "ValueError: broken", **why}
    assert found["skipped"] == ({} if why else {"more": "one card"})
    assert found["seconds"] < deadline + 30


def test_a_part_is_interrupted_where_a_shell_has_interrupts_ignored(part: Path, tmp_path: Path) -> None:
    """As in a background job: runs that a part has started end their ranks when it is interrupted."""
    part.write_text(
        "import time\n"
        "def measure(report):\n"
        "    try:\n"
        "        report.figure('started', 1, 's')\n"
        "        time.sleep(300)\n"
        "    except KeyboardInterrupt:\n"
        f"        open({str(tmp_path / 'interrupted')!r}, 'w').close()\n"
    )
    interrupted = threading.Event()
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            bench.run_part("own_part", "cpu", 0, 200, lambda _: interrupted.set(), interrupted)
    finally:
        signal.signal(signal.SIGINT, former)
    assert (tmp_path / "interrupted").exists()


def test_a_failed_part_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_part(name: str, device: str, cards: int, deadline: float, keep: Any, interrupted: Any) -> None:
        keep({"seconds": 1.0, "figures": {}, "skipped": {}, "failed": {"it": "broke"} if name == "cards" else {}})

    monkeypatch.setattr(bench, "run_part", run_part)
    bench.main(["--device", "cpu", "--only", "engine", "--out", str(tmp_path / "figures.json")])
    with pytest.raises(SystemExit) as ended:
        bench.main(["--device", "cpu"])
    assert ended.value.code == 1
    assert "failed: cards: it: broke" in capsys.readouterr().out
    assert '"commit"' in (tmp_path / "figures.json").read_text()


def test_one_card_lists_what_needs_two(tmp_path: Path) -> None:
    from bench.gpu import cards

    report = Report("cards", "an accelerator", 1, tmp_path / "rows")
    cards.measure(report)
    rows = [json.loads(line) for line in report.file.read_text().splitlines()]
    assert [row["why"] for row in rows[1:]] == ["one card"] * 3
    assert rows[0]["skipped"] == "NCCL with two ranks on one card" and "it is refused" in rows[0]["why"]


def test_parts_stand_beside_those_of_the_same_code_and_cards(tmp_path: Path) -> None:
    def content(part: str, commit: str = "c0ffee", card: str = "H200") -> dict[str, Any]:
        return {"command": part, "machine": {"commit": commit}, "cards": [card], "parts": {part: {"seconds": 1.0}}}

    path = tmp_path / "gpu.json"
    assert bench.merge_parts(content("lane"), path) == content("lane")
    path.write_text(json.dumps(content("lane")))
    both = bench.merge_parts(content("engine"), path)
    assert both["parts"].keys() == {"lane", "engine"} and both["command"] == "lane; engine"
    assert bench.merge_parts(content("lane"), path) == content("lane")
    for other in (content("engine", commit="decade"), content("engine", card="H100")):
        assert bench.merge_parts(other, path) == other


def test_kernels_that_change_a_family_of_models_come_last() -> None:
    """Liger changes classes and functions of transformers' module, so all models that are built later have its kernels."""
    from bench.gpu import step

    assert [name for name, (changes, _) in step.VARIANTS.items() if "kernels" in changes] == [[*step.VARIANTS][-1]]


def test_a_run_says_how_long_updates_of_weights_took(tmp_path: Path) -> None:
    """The last step sends none, and of a transport that was not used a row has no column."""
    from bench.gpu import grpo

    report = Report("grpo", "cpu", 0, tmp_path / "figures")
    times = dict.fromkeys((key for key, _ in grpo.TIMES.values()), 1.0)
    moved = {"time/weights_gb_per_s": 2.0, "time/weights_by_host": 1.0}
    grpo.report_rows(
        report, [times | moved | {"time/sync_s": 0.5}, times | moved | {"time/sync_s": 0.25}, times | moved]
    )
    figures = bench.collect(report.file)["figures"]
    medians = {name: figure["median"] for name, figure in figures.items() if name.startswith("update")}
    assert [*medians.values()] == [0.375, 2.0, 0.0] and len(figures) == len(grpo.TIMES) + 3


def row(median: float, of: str = "") -> dict[str, Any]:
    return {"median": median, **({"of": of} if of else {})}


def test_figures_are_fractions_of_the_cards_ceilings() -> None:
    parts = {
        "ceilings": {"figures": {"product (TFLOP/s)": row(800.0)}},
        "step": {
            "figures": {
                "operations (TFLOP/s)": row(320.0, "product (TFLOP/s)"),
                "moved (GB/s)": row(1.0, "copy (GB/s)"),
            }
        },
    }
    figures = bench.with_fractions(parts)["step"]["figures"]
    assert figures["operations (TFLOP/s)"]["of_ceiling"] == pytest.approx(0.4)
    assert "of_ceiling" not in figures["moved (GB/s)"], "a ceiling that was not measured"


class Clock:
    """Seconds that pass while parts are measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_budget_is_kept_and_what_is_there_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, measured = Clock(), list[tuple[str, float]]()
    monkeypatch.setattr(bench, "time", clock)
    monkeypatch.setattr(bench, "AT_ONCE", 1)

    def run_part(name: str, device: str, cards: int, deadline: float, keep: Any, interrupted: Any) -> None:
        measured.append((name, deadline))
        clock.now += 40.0
        failed = {"it": "broke"} if name == "step" else {}
        keep({"seconds": 40.0, "figures": {"found (s)": row(1.0)}, "skipped": {}, "failed": failed})

    monkeypatch.setattr(bench, "run_part", run_part)
    words = ["--device", "cpu", "--budget", "100", "--out", str(tmp_path / "figures.json")]
    with pytest.raises(SystemExit):
        bench.main(words)
    names = list(bench.PARTS)
    assert [name for name, _ in measured] == names[:3], "the last one begins with 20 s left"
    assert measured[-1][1] == 20.0 and measured[0][1] == 60.0
    content = json.loads((tmp_path / "figures.json").read_text())
    assert [*content["parts"]] == names and "of the budget are left" in content["parts"][names[3]]["skipped"][names[3]]
    measured.clear()
    with pytest.raises(SystemExit):
        bench.main(words)
    # What failed is measured again, and what there was no time for.
    assert [name for name, _ in measured] == ["step", *names[3:5]]
    assert "ceilings    was measured before" in capsys.readouterr().out


#: Measures in forked processes with a part that does nothing but report figures, and kills each at a moment of its own.
KILLED = """
import os, pathlib, random, signal, sys, time
from bench.gpu import __main__ as bench
from bench.gpu.part import Report

folder, moments = pathlib.Path(sys.argv[1]), random.Random(sys.argv[2])
bench.machine = lambda: {"commit": "c0ffee"}
bench.measured_on = lambda device, cards: {"device": device, "versions": {}}
bench.PARTS.clear()
bench.PARTS.update(first=100, second=100)

def run_part(name, device, cards, deadline, keep, interrupted):
    report = Report(name, device, cards, folder / f"{name}-{os.getpid()}")
    for number in range(1, 31):
        report.figure(f"figure {number}", number, "s")
        keep({**bench.collect(report.file), "seconds": 1.0, "cut": True})
    keep({**bench.collect(report.file), "seconds": 1.0})

bench.run_part = run_part
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for number in range(40):
    moment, process = moments.uniform(0, 0.1), os.fork()
    if not process:
        bench.main(["--device", "cpu", "--budget", "60", "--out", str(folder / f"figures-{number}.json")])
        os._exit(0)
    time.sleep(moment)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
"""


def test_figures_are_valid_whenever_a_measurement_is_killed(tmp_path: Path) -> None:
    """At forty moments, drawn by the seed: before the first figure, within a part, between parts and at the end."""
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), seed()], cwd=bench.ROOT, check=True, timeout=120)
    left = [json.loads(path.read_text())["parts"] for path in tmp_path.glob("figures-*.json")]
    numbers = set[int]()
    for parts in left:
        for name, measured in parts.items():
            figures = [int(figure.split()[1]) for figure in measured["figures"]]
            assert figures == [*range(1, len(figures) + 1)] and not measured["failed"]
            assert measured.get("cut", False) or len(figures) == 30, "what is cut is measured again"
            numbers.add(len(figures) + 30 * (name == "second"))
    assert len(numbers) > 1, "all were killed at one place"


def test_a_figure_that_is_half_written_is_left_out(tmp_path: Path) -> None:
    report = Report("any", "cpu", 0, tmp_path / "figures")
    for number in range(3):
        report.figure(f"figure {number}", number + 0.5, "s")
    report.skip("more", "é")
    content = report.file.read_bytes()
    for size in range(len(content) + 1):
        report.file.write_bytes(content[:size])
        assert len(bench.collect(report.file)["figures"]) == min(content[:size].count(b"\n"), 3)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_measurement_leaves_valid_figures_and_no_process(
    part: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """With processes of parts: what was measured until then is in the file, and none goes on."""
    seconds = random.Random(f"{seed()} {number}").uniform(0, 4)
    part.write_text(
        "import os, time\n"
        "def measure(report):\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "    for number in range(100000):\n"
        "        report.figure(f'figure {number}', number, 's')\n"
        "        time.sleep(0.01)\n"
    )
    out = tmp_path / "figures.json"
    program = (
        "import bench.gpu, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started the tests beside others\n"
        f"bench.gpu.__path__.append({str(tmp_path)!r})\n"
        "from bench.gpu import __main__ as main\n"
        "main.PARTS.clear(); main.PARTS['own_part'] = 300\n"
        f"main.main(['--device', 'cpu', '--budget', '600', '--out', {str(out)!r}])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=bench.ROOT, stdout=subprocess.DEVNULL)
    wait_until(out.exists, timeout=60)
    time.sleep(seconds)
    process.send_signal(number)
    wait_until(lambda: process.poll() is not None, timeout=60)
    figures = json.loads(out.read_text())["parts"]["own_part"]["figures"]
    assert list(figures) == [f"figure {number} (s)" for number in range(len(figures))] and figures
    wait_until(lambda: has_ended(int((tmp_path / "pid").read_text())), timeout=20)
