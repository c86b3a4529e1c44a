"""A run's logs are read by start; a rule line stands between two of them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from rlhpc.cli import main
from rlhpc.jobs.attempt_logs import mark_start
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.status import print_logs

WRITTEN = {1: "Traceback of the first\n", 2: "without an end of line", 3: "third\n"}


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run that was started three times."""
    paths = RunPaths(tmp_path / "run")
    folder = paths.segment_logs(0)
    folder.mkdir(parents=True)
    for number, text in WRITTEN.items():
        (folder / "driver.err").open("a").write(f"driver {number}\n")
        mark_start(folder)
        (folder / "actor-0.err").open("a").write(text)
    (folder / "actor-1.err").write_text("joined late\n")
    return paths


def printed(paths: RunPaths, **options: str) -> list[str]:
    out = io.StringIO()
    print_logs(paths, "actor", 0, out=out, **options)
    return [line.removeprefix("[actor-0] ") for line in out.getvalue().splitlines()]


def test_the_last_start_is_shown(paths: RunPaths) -> None:
    assert printed(paths) == ["third"]
    for number, text in WRITTEN.items():
        assert printed(paths, start=str(number)) == [text.rstrip("\n")]
    assert printed(paths, start="4") == []
    rules = [line for line in printed(paths, start="all") if line.startswith("---- start ")]
    assert [line.split()[2] for line in rules] == ["2,", "3,"]
    mark_start(paths.segment_logs(0))  # a fourth start, of which this rank has no part
    assert printed(paths) == []


def test_a_first_start_has_no_rule(tmp_path: Path) -> None:
    (tmp_path / "driver.out").write_text("checks\n")
    mark_start(tmp_path)
    mark_start(tmp_path)
    assert (tmp_path / "driver.out").read_text() == "checks\n"


@pytest.mark.parametrize("start", ["0", "-1", "first", "1.5"])
def test_a_start_that_is_none_is_refused(start: str, paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(paths.root), f"--start={start}"]) == 2
    assert "allowed: 1, 2, …, last or all" in capsys.readouterr().err
