"""`bench.gpu` keeps what a part found before it failed or was ended, and says what it skipped."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as bench
from bench.gpu.part import Report
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


def test_a_failed_part_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_part(name: str, device: str, cards: int, deadline: float, keep: Any) -> None:
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

    def run_part(name: str, device: str, cards: int, deadline: float, keep: Any) -> None:
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


@pytest.mark.parametrize("seconds", [0.3, 1.0, 2.0, 3.5])
def test_a_killed_measurement_leaves_valid_figures_and_no_process(part: Path, tmp_path: Path, seconds: float) -> None:
    """Wherever it is: what was measured until then is in the file, which is whole."""
    part.write_text(
        "import os, time\n"
        "def measure(report):\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "    for number in range(100000):\n"
        "        report.figure(f'figure {number}', number, 's')\n"
        "        time.sleep(0.001)\n"
    )
    out = tmp_path / "figures.json"
    program = (
        "import bench.gpu, sys\n"
        f"bench.gpu.__path__.append({str(tmp_path)!r})\n"
        "from bench.gpu import __main__ as main\n"
        "main.PARTS.clear(); main.PARTS['own_part'] = 100\n"
        f"main.main(['--device', 'cpu', '--budget', '60', '--out', {str(out)!r}])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=bench.ROOT, stdout=subprocess.DEVNULL)
    wait_until(out.exists, timeout=60)
    time.sleep(seconds)
    process.kill()
    process.wait()
    figures = json.loads(out.read_text())["parts"]["own_part"]["figures"]
    assert list(figures) == [f"figure {number} (s)" for number in range(len(figures))] and figures
    wait_until(lambda: has_ended(int((tmp_path / "pid").read_text())), timeout=20)
