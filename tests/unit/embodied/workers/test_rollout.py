"""Rollout worker: rows of a value pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlhpc.embodied.training.blueprint import PolicyBlueprint
from rlhpc.embodied.workers.rollout import MultiStepRolloutWorker
from rlhpc.runs.configuration import load_config


@pytest.mark.parametrize("named", [False, True])
def test_a_value_pass_has_no_more_rows_than_a_stage_has_slots(named: bool) -> None:
    """However many episodes a rollout has ended."""
    passes: list[int] = []

    def value(obs: Any) -> torch.Tensor:
        rows = obs["state"] if named else obs
        passes.append(len(rows))
        return 2 * rows[:, 0]

    worker: Any = object.__new__(MultiStepRolloutWorker)
    worker.shares, worker.device = [range(4), range(8, 15)], torch.device("cpu")
    worker.policy = SimpleNamespace(value=value)
    obs = np.arange(61, dtype=np.float32)[:, None]
    values = worker._compute_values({"state": obs} if named else obs)
    np.testing.assert_array_equal(values, 2 * obs[:, 0])
    assert max(passes) == 7 and sum(passes) == 61


@pytest.mark.parametrize("level", ["token_level", "action_level", "chunk_level"])
@pytest.mark.parametrize("model", ["mlp", "conditioned"])
def test_a_rollout_rank_and_the_trainer_use_one_level_of_logprobs(model: str, level: str) -> None:
    """Of a policy within another, too: it is the inner one that acts."""
    kwargs = {"of": "mlp"} if model == "conditioned" else {}
    words = [f"actor.model.model_type={model}", f"actor.model.kwargs={kwargs}", f"algorithm.logprob_type={level}"]
    cfg = load_config("configs/quickstart.yaml", words, check=False)
    space, actions = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)
    worker: Any = object.__new__(MultiStepRolloutWorker)
    worker.cfg, worker.device = cfg, torch.device("cpu")
    policy: Any = worker.build_policy(space, actions)
    blueprint = PolicyBlueprint(cfg.actor, (space, actions), worker.device, seed=1, look=False, levels=level)  # type: ignore[attr-defined]
    trained: Any = blueprint.build()
    for each in (policy, trained, *(getattr(p, "inner", p) for p in (policy, trained))):
        assert each.logprob_type == level
