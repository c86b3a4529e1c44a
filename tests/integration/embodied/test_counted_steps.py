"""What a run says of its steps and successes, against the episodes that it plays."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest

from tests.integration.embodied.test_layouts import Runs

MODULE = "tests.integration.embodied.test_counted_steps"
#: Episodes of five steps, which succeed in the third and no longer at their end.
LENGTH, SLOTS, DECISIONS = 5, 4, 6


class Passing(gymnasium.Env):
    """Succeeds for a moment."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.zeros(2, np.float32), 1.0, False, False, {"success": self.count == 3}


gymnasium.register("Passing-v0", entry_point=Passing, max_episode_steps=LENGTH)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_steps_are_those_that_were_executed_and_success_says_when(tmp_path: Path, chunk: int) -> None:
    """Of a chunk that outlasts its episode the rest is not executed: of 3 actions in 5 steps, 5 of 6 are."""
    runs = Runs(tmp_path)
    runs.finish(
        "counted", f"env.train.env_id={MODULE}:Passing-v0", f"env.train.num_envs={SLOTS}", "runner.max_steps=2",
        f"algorithm.rollout_steps={DECISIONS}", f"actor.model.num_action_chunks={chunk}", "actor.global_batch_size=8",
        "runner.save_interval=2", "runner.val_check_interval=2", "env.eval.num_episodes=2", "env.eval.num_envs=2",
        f"env.eval.env_id={MODULE}:Passing-v0",
    )  # fmt: skip
    rows = runs.rows("counted")
    per_episode = -(-LENGTH // chunk)  # decisions
    executed = 0
    for row in rows:
        decisions = np.arange((int(row["step"]) - 1) * DECISIONS, int(row["step"]) * DECISIONS)
        last = decisions % per_episode == per_episode - 1
        executed += SLOTS * int(np.where(last, LENGTH - (per_episode - 1) * chunk, chunk).sum())
        assert row["rollout/env_steps"] == executed
        assert row["train/success_once"] == row["rollout/success_once"] == 1.0
    assert rows[-1]["eval/success_once"] == 1.0 and rows[-1]["eval/success_at_end"] == 0.0
    assert not any("success_rate" in name for row in rows for name in row)
