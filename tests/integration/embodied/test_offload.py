"""Who trains and who plays have one accelerator in turn: never both at once, and the run is the same (`parking.py`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_run import TinyRun

from rlhpc.checkpoint.state import load_tensors

SHORT = (
    "runner.max_steps=4", "runner.save_interval=2", "runner.val_check_interval=2", "algorithm.rollout_steps=16",
    "algorithm.update_epochs=2", "actor.global_batch_size=32", "env.train.num_envs=4", "env.eval.num_envs=2",
    "algorithm.anneal_lr=false",
)  # fmt: skip
TURNS = (
    "actor.enable_offload=true", "rollout.enable_offload=true", "actor.training_backend=parking:ParkingTrainer",
    "actor.model.model_type=parking:RestingPolicy",
)  # fmt: skip


def turns(ledger: Path) -> list[str]:
    """Who held the accelerator, one after the other; `both` where two did at once."""
    held, seen = {"rollout"}, list[str]()  # it is built first, and leaves
    for line in ledger.read_text().splitlines():
        role, what = line.split()
        held = held | {role} if what == "in" else held - {role}
        seen += ["both"] if len(held) > 1 else sorted(held)
    return seen


def test_never_both_at_once_and_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With evaluations, checkpoints, and a resume in its middle."""
    plain = TinyRun(tmp_path / "plain", *SHORT)
    plain.train()
    ledger = tmp_path / "ledger"
    monkeypatch.setenv("RLHPC_TEST_LEDGER", str(ledger))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    shared = TinyRun(tmp_path / "shared", *SHORT, *TURNS)
    shared.train("runner.max_steps=2")
    shared.train("runner.resume_dir=auto")
    seen = turns(ledger)
    assert "both" not in seen
    # Of either start: four steps in all, with two evaluations.
    assert seen.count("rollout") >= 6 and seen.count("actor") >= 6
    assert shared.rows() == plain.rows()
    mine, theirs = (load_tensors(run.checkpoint(4) / "model.safetensors") for run in (shared, plain))
    assert mine.keys() == theirs.keys() and all((mine[name] == theirs[name]).all() for name in theirs)


@pytest.mark.parametrize("role", ["actor", "rollout"])
def test_who_works_ahead_does_not_leave(role: str, tmp_path: Path) -> None:
    said = TinyRun(tmp_path, f"{role}.enable_offload=true", "algorithm.max_staleness=1").train(code=2)
    assert f"{role}.enable_offload" in said and "both are at work at once" in said


@pytest.mark.long
def test_a_policy_that_dies_starts_again_in_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose turn it was is not known then."""
    monkeypatch.setenv("RLHPC_MAX_RESTARTS", "2")
    ledger = tmp_path / "ledger"
    monkeypatch.setenv("RLHPC_TEST_LEDGER", str(ledger))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    run = TinyRun(tmp_path / "run", *SHORT, *TURNS, "runner.max_steps=60")
    assert "start again from global_step_" in run.lose("rollout-0", after=2)
    assert [row["step"] for row in run.rows()] == list(range(1, 61))
