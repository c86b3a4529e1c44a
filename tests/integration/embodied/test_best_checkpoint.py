"""The best checkpoint of runs in simulators, and their end when evaluations get no better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.embodied.test_layouts import Runs

TASK = "tests.integration.embodied.test_counted_steps:Passing-v0"  # every episode has the same return


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_ends_when_its_return_does_not_grow(tmp_path: Path, ahead: int) -> None:
    runs = Runs(tmp_path)
    runs.finish(
        "best", f"env.train.env_id={TASK}", f"env.eval.env_id={TASK}", "env.train.num_envs=4", "algorithm.rollout_steps=6",
        "actor.global_batch_size=8", "env.eval.num_episodes=2", "env.eval.num_envs=2", "runner.max_steps=12",
        f"algorithm.max_staleness={ahead}", "runner.save_interval=1", "runner.keep_checkpoints=1",
        "runner.val_check_interval=2", "runner.keep_best=eval/return_mean", "runner.patience=2",
    )  # fmt: skip
    assert runs.rows("best")[-1]["step"] == 6  # evaluations at 2, 4 and 6
    run = tmp_path / "best"
    checkpoints = run / "checkpoints"
    assert {path.name for path in checkpoints.glob("global_step_*")} == {"global_step_2", "global_step_6"}
    assert (checkpoints / "best").resolve().name == "global_step_2"
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["stop_reason"]) == ("finished", "patience")
    assert (status["best_step"], status["best_metric"], status["best_value"]) == (2, "eval/return_mean", 5.0)
