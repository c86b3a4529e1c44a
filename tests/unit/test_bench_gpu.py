"""`bench.gpu` keeps what a part found before it failed or was ended, and says what it skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as bench
from bench.gpu.part import Report

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
    def run_part(name: str, device: str, cards: int, deadline: float) -> dict[str, object]:
        return {"seconds": 1.0, "figures": {}, "skipped": {}, "failed": {"it": "broke"} if name == "cards" else {}}

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
    assert [line.count("one card") for line in report.file.read_text().splitlines()] == [1, 1, 1]


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
