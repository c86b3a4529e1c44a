"""PPO whose environments play on while the actors train: policies lag by one version at most, and seeds decide as ever."""

from __future__ import annotations

import pytest
from test_resume import assert_identical
from tiny_run import TinyRun, kill_tree, wait_until

AHEAD = ("algorithm.max_staleness=1", "runner.max_steps=12", "runner.save_interval=4", "runner.keep_checkpoints=0")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """An uninterrupted run."""
    run = TinyRun(tmp_path_factory.mktemp("ahead"), *AHEAD)
    run.train()
    return run


def test_who_acted_is_one_version_behind_except_after_a_checkpoint(reference):
    """All wait for each other before one is written, every fourth step."""
    assert [row["step"] - 1 - row["rollout/version"] for row in reference.rows()] == [0, 1, 1, 1] * 3


def test_killed_and_resumed_is_bit_identical(reference, tmp_path):
    run = TinyRun(tmp_path, *AHEAD)
    process = run.start()
    wait_until(lambda: run.checkpoint(4).exists())
    kill_tree(process)
    run.train("runner.resume_dir=auto")
    assert_identical(run, reference, 12)


def test_environments_that_are_killed_start_again_alone(reference, tmp_path, monkeypatch):
    """What they had played ahead is dropped and played again."""
    monkeypatch.setenv("RLHPC_MAX_RESTARTS", "2")
    run = TinyRun(tmp_path, *AHEAD)
    said = run.lose("env-0", after=4)
    assert "start again from global_step_" in said and "all other ranks stay" in said
    assert_identical(run, reference, 12)


@pytest.mark.parametrize("proximal", ["recomputed", "interpolated"])
def test_decoupled_ppo_clips_around_the_policy_of_before_the_update(tmp_path, proximal):
    """Where the weights that act are those of before the update its weight is 1; a version behind it is not."""
    loss = ("algorithm.loss_type=decoupled_ppo", f"algorithm.proximal_policy={proximal}")
    run = TinyRun(tmp_path, *AHEAD, "runner.max_steps=4", *loss)
    run.train()
    first, *later = [row["train/behave_weight"] for row in run.rows()]
    assert first == pytest.approx(1, abs=1e-5) and all(abs(weight - 1) > 1e-5 for weight in later)
