"""Env ranks of unequal speed: a rollout rank answers who has asked, and what is learned is the same, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.embodied.test_layouts import Runs
from tests.integration.embodied.uneven import DECISIONS

LAYOUT = (
    "runner.max_steps=3", "runner.save_interval=-1", f"algorithm.rollout_steps={DECISIONS}", "env.train.num_envs=6",
    "actor.global_batch_size=48", "env.train.env_type=tests.integration.embodied.uneven:Held",
    "env.eval.env_type=gymnasium", "rollout.pipeline_stage_num=2",
)  # fmt: skip


@pytest.mark.parametrize("rollouts", ["'0'", "'0:0-1'"], ids=["one rank acts", "two act"])
def test_who_is_fast_does_not_wait_for_who_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollouts: str
) -> None:
    layout = (*LAYOUT, f"cluster.component_placement={{'actor': '0', 'rollout': {rollouts}, 'env': '0:0-2'}}")
    runs = Runs(tmp_path)
    runs.finish("together", *layout)
    monkeypatch.setenv("RLHPC_TEST_HELD", str(tmp_path))
    runs.finish("apart", *layout, "runner.enable_decoupled_mode=true")
    assert runs.rows("apart") == runs.rows("together")
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1", "2"}, "the others have stood still"
