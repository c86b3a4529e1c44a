"""Loggers by name, what they get, and what happens where they fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.loggers import check_loggers
from rlhpc.metrics.loggers.swanlab import _remove_empty
from rlhpc.runtime.errors import ConfigError
from tests.unit.metrics.loggers.own_loggers import OWN, Lines, fragment, write


def test_an_own_logger_goes_on_where_it_was(paths: RunPaths) -> None:
    write(paths, 1, 5, None, ["jsonl", OWN], title="mine")
    write(paths, 3, 7, 2, ["jsonl", OWN], title="mine")
    lines = (paths.root / "mine.txt").read_text().splitlines()
    assert lines == ["1 10", "2 20", "3 30", "4 40", "5 50", "6 62", "7 72"]
    assert json.loads(paths.loggers.read_text()) == {OWN: {"id": "run-7", "starts": 2}}
    write(paths, 1, 1, None, ["jsonl", OWN])  # a fresh start is another run
    assert json.loads(paths.loggers.read_text()) == {OWN: {"id": "run-7", "starts": 1}}


def test_what_is_no_logger() -> None:
    for names, kwargs, says in (
        (["tensorbord"], {}, "did you mean 'tensorboard'"),
        (["nosuch:Logger"], {}, "cannot be imported"),
        (["json:JSONDecoder"], {}, "not a class with the methods open, log, commit and close"),
        ([OWN], {OWN: {"titel": "x"}}, r"titel is 'x'; did you mean 'title'\? .*allowed: title"),
        (["jsonl"], {"wandbb": {}}, "runner.logger.kwargs: 'wandbb' is not a logger; did you mean 'wandb'"),
        (["jsonl"], {"tensorboard": 3}, "write a mapping"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_loggers(names, kwargs)
    check_loggers(["jsonl", "tensorboard", OWN], {"wandb": {"project": "p"}})


def test_an_entry_point_is_a_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "own_logger-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-logger\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[rlhpc.loggers]\nlines = own_logger:Logger\n")
    (tmp_path / "own_logger.py").write_text(f"from {Lines.__module__} import Lines as Logger\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check_loggers(["Lines"], {"lines": {"title": "x"}})


def test_starts_that_left_no_record_are_removed(tmp_path: Path) -> None:
    contents = {
        "empty": b"", "header": b"HEADER!", "torn": b"HEADER!" + fragment(1, b"start")[:-1],
        "whole": b"HEADER!" + fragment(1, b"start"), "killed": b"HEADER!" + fragment(1, b"start") + b"torn",
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / f"run-{name}/files").mkdir(parents=True)
        (tmp_path / f"run-{name}/run-id.swanlab").write_bytes(content)
    (tmp_path / "debug").mkdir()
    _remove_empty(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["debug", "run-killed", "run-whole"]
