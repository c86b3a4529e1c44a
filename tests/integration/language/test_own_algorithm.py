"""An algorithm of one's own, with columns that the rollout ranks and a scorer make: one file and its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

from test_reasoning import TWO_ACTORS, LanguageRun

pytestmark = pytest.mark.long(together=True)

STEPWISE = ("algorithm.name=own_algorithms:Stepwise", "runner.max_steps=6", "reward.terms=[{name: 'lm_rewards:picky'}]")


def test_its_columns_reach_its_loss_and_it_learns_what_they_say(tmp_path: Path) -> None:
    run = LanguageRun(tmp_path / "own", *STEPWISE)
    run.train()
    even = [row["train/even"] for row in run.rows()]
    assert even[-1] > even[0] + 0.15

    # Resumed it is the same run; and with two actors, small micro-batches, and its columns made late.
    again = LanguageRun(tmp_path / "again", *STEPWISE)
    again.train("runner.max_steps=2")
    again.train("runner.resume_dir=auto")
    assert again.rows() == run.rows()
    mine, theirs = again.weights(6), run.weights(6)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    other = LanguageRun(tmp_path / "other", *STEPWISE, TWO_ACTORS, "actor.max_tokens_per_micro_batch=64")
    other.train("runner.max_steps=1")
    for name in ("train/even", "train/loss", "train/grad_norm"):
        assert other.rows()[0][name] == pytest.approx(run.rows()[0][name], abs=1e-5)
    turns = LanguageRun(tmp_path / "turns", *STEPWISE, "actor.offload_in_rollout=true")
    turns.train("runner.max_steps=2")
    assert turns.rows()[1]["train/even"] == pytest.approx(even[1], abs=1e-3)


def test_what_does_not_fit_is_one_message(tmp_path: Path) -> None:
    run = LanguageRun(tmp_path / "bad", *STEPWISE)
    said = run.train("algorithm.kwargs={bonas: 2}", code=2)
    assert "algorithm.kwargs.bonas is 2; did you mean 'bonus'?" in said and "allowed: bonus" in said
    assert "Traceback" not in said and not run.root.exists()
    said = run.train("algorithm.name=own_algorithms:Forgetful", code=1)
    assert (
        "rollout_columns gave ['process_rewards'] of {1} values; wanted: ['process_rewards'], one value for each of"
        in said
    )
