"""Rollout ranks come and go, and the run is the same: what a lost one had under way, others take."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from test_reasoning import LanguageRun, json_of

from tests import warm

pytestmark = pytest.mark.long(together=True)

STEPS = 12
SHORT = (
    f"runner.max_steps={STEPS}", "runner.save_interval=-1", "cluster.component_placement={actor: '0', rollout: '0:0-2'}",
    "rollout.max_batch_size=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> LanguageRun:
    run = LanguageRun(tmp_path_factory.mktemp("replicas") / "undisturbed", *SHORT)
    run.train()
    return run


class Disturbed(LanguageRun):
    """A run that is looked at, and disturbed, while it trains.

    Args:
        folder: Of its own.
        pause_s: How long judging an answer takes, until the run is told to `hurry`.
        restarts: How often ranks are started again.
        settings: Of the run.
    """

    def __init__(
        self, folder: Path, pause_s: float = 0.0, restarts: int = 20, settings: tuple[str, ...] = SHORT
    ) -> None:
        super().__init__(folder, *settings)
        self.pause = folder / "pause"
        self.pause.write_text(str(pause_s))
        self.environment |= {"RLHPC_MAX_RESTARTS": str(restarts), "RLHPC_TEST_PAUSE": str(self.pause)}
        command = [sys.executable, "-m", "rlhpc.cli", "train", str(self.config), *self.overrides]
        with self.log.open("w") as log:
            self.process = warm.Popen(command, env=self.environment, cwd=folder, stdout=log, stderr=log)

    @property
    def log(self) -> Path:
        return self.folder / "said.txt"

    def said(self) -> str:
        return self.log.read_text()

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 200
        while not condition():
            assert time.monotonic() < end and self.process.poll() is None, self.said()
            time.sleep(0.01)

    def step(self) -> int:
        return int(json_of(self.root / "status.json").get("step", 0))

    def members(self) -> dict[str, int]:
        registry = self.root / "registry"
        now = registry / (registry / "current").read_text() / "members"
        return {path.stem: json_of(path)["pid"] for path in now.glob("[!.]*.json")}

    def hurry(self) -> None:
        self.pause.unlink()

    def end(self) -> str:
        assert self.process.wait(250) == 0, self.said()
        return self.said()

    def join(self, *more: str) -> subprocess.Popen[str]:
        """A helper, from outside of the run's own processes."""
        command = [sys.executable, "-m", "rlhpc.cli", "join", str(self.root), *more]
        return warm.Popen(
            command, env=self.environment, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def same(one: LanguageRun, other: LanguageRun) -> None:
    """No prompt is lost, none is trained on twice, and every number is the same to the last bit."""
    mine, theirs = one.rows(), other.rows()
    assert [row["rollout/samples"] for row in mine] == [64.0 * step for step in range(1, STEPS + 1)]
    assert mine == theirs
    weights, expected = one.weights(STEPS), other.weights(STEPS)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_lost_rank_costs_its_own_sequences(undisturbed: LanguageRun, tmp_path: Path) -> None:
    """No other process is started again, no step is made anew, and every number is that of the run nobody disturbed."""
    run = Disturbed(tmp_path / "disturbed", pause_s=0.4)
    run.until(lambda: run.step() >= 2)
    before = run.members()
    os.kill(before["rollout-1"], signal.SIGKILL)
    run.until(lambda: "rollout[1] takes part from the next step on" in run.said())
    after = run.members()
    run.hurry()
    said = run.end()
    assert "rollout[1] ended; the others have made its prompts" in said and "start again from" not in said, said
    assert {name for name in before if before[name] != after[name]} == {"rollout-1"}
    same(run, undisturbed)


def test_a_helper_joins_works_and_leaves(undisturbed: LanguageRun, tmp_path: Path) -> None:
    """What it leaves behind, others do, and no number changes."""
    run = Disturbed(tmp_path / "helped", pause_s=0.4, restarts=0)
    run.until(lambda: run.step() >= 1)
    helper = run.join()
    run.until(lambda: "rollout[3] takes part from the next step on" in run.said())
    run.pause.write_text("0.05")
    joined = run.step()
    run.until(lambda: run.step() >= joined + 2)
    helper.send_signal(signal.SIGTERM)
    out, err = helper.communicate(timeout=60)
    assert helper.returncode == 0 and "rollout-3 joins run" in err and "its job is being ended (SIGTERM)" in err, (
        out + err
    )
    run.hurry()
    said = run.end()
    told = "rollout[3] left (its job is being ended (SIGTERM)); the others have made its prompts"
    assert told in said and "starts again" not in said and "goes on without rank" not in said, said
    stay = run.rlhpc("status", str(run.root))
    assert "rollout-3" in stay and "its job is being ended (SIGTERM)" in stay
    same(run, undisturbed)


def test_a_helper_stays_to_the_end(tmp_path: Path) -> None:
    run = Disturbed(tmp_path / "helped", pause_s=0.4, restarts=0)
    run.until(lambda: run.step() >= 1)
    helper = run.join()
    run.until(lambda: "rollout[3] takes part from the next step on" in run.said())
    run.hurry()
    run.end()
    out, err = helper.communicate(timeout=60)
    assert helper.returncode == 0 and "rollout-3 ended: " in err, out + err


def test_who_may_not_join_is_told(undisturbed: LanguageRun, tmp_path: Path) -> None:
    over = undisturbed.rlhpc("join", str(undisturbed.root), code=2)
    assert "no driver of this run is at work" in over
    run = Disturbed(tmp_path / "asked", pause_s=0.2)
    run.until(lambda: run.step() >= 1)
    assert "no rank can join group 'actor' of this run" in run.rlhpc("join", str(run.root), "--group", "actor", code=2)
    assert "--patience is -1" in run.rlhpc("join", str(run.root), "--patience", "-1", code=2)
    (file,) = (run.folder.parent / "models").rglob("config.json")
    whole = file.read_text()
    file.write_text(json.dumps({**json.loads(whole), "rms_norm_eps": 0.01}))  # as on a node with files of its own
    said = run.rlhpc("join", str(run.root))
    file.write_text(whole)
    other = "(actor.model.model_path) or the problems of data.train are others than those that the run was started with"
    assert "rollout-3 ended: the run goes on without it: on " in said and said.count(other) == 1, said
    run.until(lambda: other in run.said())
    before = run.step()
    run.until(lambda: run.step() > before)
    run.process.send_signal(signal.SIGINT)
    run.process.wait(120)
    assert "rollout[3] takes part" not in run.said() and "Traceback" not in run.said()


def test_a_slurm_that_hangs_keeps_nobody(tmp_path: Path) -> None:
    """A run that would have helpers, and whose Slurm answers nothing at all, trains and ends."""
    run = LanguageRun(
        tmp_path / "hung", "runner.max_steps=3", "cluster.elastic=[{min: 1, max: 2, partition: preempt, look_s: 5}]"
    )
    asked = run.folder / "asked"
    for name in ("squeue", "sbatch", "scancel"):
        path = run.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho $$ >> {asked}\nexec sleep 60\n")
        path.chmod(0o755)
    run.environment["PATH"] = f"{run.folder / 'bin'}:{run.environment['PATH']}"
    run.train()
    assert [row["step"] for row in run.rows()] == [1, 2, 3]
    assert not [pid for pid in map(int, asked.read_text().split()) if psutil.pid_exists(pid)], (
        "nor is anything left of it"
    )
