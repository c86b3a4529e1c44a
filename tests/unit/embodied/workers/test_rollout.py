"""Rollout worker: rows of a value pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.embodied.workers.rollout import MultiStepRolloutWorker


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
    values = worker._value({"state": obs} if named else obs)
    np.testing.assert_array_equal(values, 2 * obs[:, 0])
    assert max(passes) == 7 and sum(passes) == 61
