"""Runs of which some processes compute on stand-ins for accelerators (`near.py`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import TinyRun

from rlhpc.checkpoint.state import load_tensors

ROOT = Path(__file__).parents[3]
Start = Callable[..., TinyRun]


@pytest.fixture
def start(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Runs the overrides `RUN` of the test's module, and further ones, to the end.

    `policy` is the address of the stand-in on which the policy computes; without one, the run has none. A rank named in `lose`
    is killed once the checkpoint of step `after` is complete.
    """
    path = [str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))

    def run(name: str, *overrides: str, policy: str | None = None, lose: str = "", after: int = 1) -> TinyRun:
        if policy is not None:
            (folder := tmp_path / f"device-{name}").mkdir()
            monkeypatch.setenv("RLHPC_TEST_LANE", str(folder))
            monkeypatch.setenv("RLHPC_TEST_LANE_OF_POLICY", policy)
        made = TinyRun(tmp_path / name, *request.module.RUN, *overrides)
        if lose:
            monkeypatch.setenv("RLHPC_MAX_RESTARTS", "2")
            made.lose(lose, after)
        else:
            made.train()
        return made

    return run


@pytest.fixture
def check_same() -> Callable[[TinyRun, TinyRun], None]:
    """Compares numbers and weights of two runs, to the last bit."""

    def check(one: TinyRun, other: TinyRun) -> None:
        rows = [[{k: v for k, v in row.items() if k != "env/on_device"} for row in run.rows()] for run in (one, other)]
        assert rows[0] == rows[1]
        last = one.rows()[-1]["step"]
        mine, theirs = (load_tensors(run.checkpoint(last) / "model.safetensors") for run in (one, other))
        assert mine.keys() == theirs.keys() and all((mine[name] == theirs[name]).all() for name in theirs)

    return check
