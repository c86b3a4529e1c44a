"""Commands that share runs: what they print, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.cli import main
from tests.finished_runs import make_run


def test_a_bundle_says_what_it_has_and_reproduce_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs", "algorithm.max_staleness=1")
    assert main(["bundle", "runs/small", "-o", "a.zip", "--code", "commit", "--checkpoints", "include"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("a.zip\n") and "step 2 of 2" in shown and "checkpoints: 1 included" in shown
    assert "not the same bit for bit when repeated: algorithm.max_staleness is above 0" in shown
    assert main(["reproduce", "a.zip"]) == 0
    shown = capsys.readouterr().out
    assert "command, in the folder reproduced/small" in shown and "nothing was written or run" in shown
    assert not (tmp_path / "reproduced").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bundle", "runs/none"], "does not exist: no such run folder"),
        (["reproduce", "none.zip"], "no such file; rlhpc bundle RUN writes a bundle"),
        (["reproduce", "none.zip", "--input", "name"], "write NAME=PATH"),
        (["push", "runs/none", "me/x"], "no such folder; rlhpc convert --run RUN writes an export"),
    ],
)
def test_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("rlhpc: error") == 1 and captured.out == ""
    assert list(tmp_path.iterdir()) == []
