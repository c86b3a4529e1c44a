"""Runs in which the answers to a prompt share it, against runs in which each has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

from test_reasoning import LanguageRun

pytestmark = pytest.mark.long(together=True)

#: A prompt of about 45 tokens, a reference, recomputed log-probs, a critic and two optimizer steps.
STEP = (
    "data.max_prompt_tokens=56", "algorithm.kl_coef=0.05", "algorithm.adv_type=gae",
    "algorithm.gae_lambda=0.9", "critic.optim.lr=1e-3", "actor.global_batch_size=32", "runner.max_steps=3",
    "algorithm.recompute_logprobs=true",
)  # fmt: skip
LONG = "data.train.system_prompt='Answer with the number alone, please'"


def run_of(folder: Path, *overrides: str, ranks: str = "0") -> LanguageRun:
    places = f"cluster.component_placement={{actor: '{ranks}', critic: '{ranks}', rollout: '0'}}"
    return LanguageRun(folder, *STEP, LONG, places, *overrides)


@pytest.mark.parametrize("ranks", ["0", "0:0-1"])
def test_shared_prompts_train_as_prompts_of_each_answer(tmp_path: Path, ranks: str) -> None:
    flat = run_of(tmp_path / "flat", "actor.share_prefixes=false", "critic.share_prefixes=false")
    shared = run_of(tmp_path / "shared", "actor.max_tokens_per_micro_batch=128", ranks=ranks)
    for run in (flat, shared):
        run.train()
    for expected, found in zip(flat.rows(), shared.rows(), strict=True):
        names = {name for name in expected if name.startswith(("train/", "critic/", "rollout/"))}
        assert names <= found.keys()
        for name in names:
            if not name.startswith("train/mismatch"):  # which are 0 but for rounding
                assert found[name] == pytest.approx(expected[name], rel=5e-4, abs=2e-6), name
        assert found["train/mismatch_abs"] < 1e-5


def test_a_resumed_run_is_the_same_run_bit_for_bit(tmp_path: Path) -> None:
    whole, resumed = (run_of(tmp_path / name) for name in ("whole", "resumed"))
    whole.train()
    resumed.train("runner.max_steps=2")
    resumed.train("runner.resume_dir=auto")
    assert resumed.rows() == whole.rows()
    mine, theirs = resumed.weights(3), whole.weights(3)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
