"""Rollout ranks come and go, and the run is the same: what a lost one had under way, others take."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_reasoning import LanguageRun

STEPS = 12
SHORT = (
    f"runner.max_steps={STEPS}", "runner.save_interval=-1", "cluster.component_placement={actor: '0', rollout: '0:0-2'}",
    "rollout.max_batch_size=8",
)  # fmt: skip


def json_of(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except (OSError, ValueError):
        return {}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> LanguageRun:
    run = LanguageRun(tmp_path_factory.mktemp("replicas") / "undisturbed", *SHORT)
    run.train()
    return run


class Disturbed(LanguageRun):
    """A run whose driver goes on after failures."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        super().__init__(folder, *SHORT, *overrides)
        self.environment["RLHPC_MAX_RESTARTS"] = "20"
        self.process = self.start()

    def step(self) -> int:
        return int(json_of(self.root / "status.json").get("step", 0))

    def wait_for(self, step: int) -> None:
        end = time.monotonic() + 200
        while self.step() < step:
            assert time.monotonic() < end and self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)

    def members(self) -> dict[str, int]:
        registry = self.root / "registry"
        now = registry / (registry / "current").read_text() / "members"
        return {path.stem: json_of(path)["pid"] for path in now.glob("[!.]*.json")}

    def end(self) -> str:
        out, err = self.process.communicate(timeout=250)
        assert self.process.returncode == 0, out + err
        return err


def same(one: LanguageRun, other: LanguageRun) -> None:
    assert one.rows() == other.rows()
    mine, theirs = one.weights(STEPS), other.weights(STEPS)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_lost_rank_costs_its_own_sequences(undisturbed: LanguageRun, tmp_path: Path) -> None:
    """No other process is started again, no step is made anew, and every number is that of the run nobody disturbed."""
    run = Disturbed(tmp_path / "disturbed")
    run.wait_for(2)
    before = run.members()
    os.kill(before["rollout-1"], signal.SIGKILL)
    run.wait_for(STEPS - 1)
    after = run.members()
    said = run.end()
    assert "rollout[1] ended; the others have made its prompts" in said and "start again from" not in said, said
    assert {name for name in before if before[name] != after[name]} <= {"rollout-1"}
    same(run, undisturbed)
