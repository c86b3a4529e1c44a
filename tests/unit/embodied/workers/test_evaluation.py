"""Evaluations tell how far they are, and one whose episodes never end says so instead of going on for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rlhpc.embodied.evaluation import episodes as evaluation
from rlhpc.embodied.evaluation.episodes import evaluate_policy
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import RlhpcError

ROOT = Path(__file__).resolve().parents[4]


class Counts(gymnasium.Env[Any, Any]):
    """Ends after `length` steps, or never."""

    observation_space = Box(-1.0, 1.0, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, length: int = 0) -> None:
        self.length, self.at = length, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        return np.zeros(1, np.float32), 1.0, self.at == self.length, False, {}


gymnasium.register("Counts-v0", Counts)


class Still:
    """A policy that does nothing."""

    def predict_action_batch(self, obs: Any, mode: str) -> tuple[torch.Tensor, dict[str, Any]]:
        return torch.zeros(len(obs), 1, 1, dtype=torch.long), {}


def section(*words: str) -> Any:
    overrides = ["env.train.env_id=Counts-v0", "env.eval.num_envs=2", *words]
    return load_config(ROOT / "configs/quickstart.yaml", overrides, training=False, check=False).env.eval


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    result = evaluate_policy(
        Still(), section("env.train.kwargs={length: 5}"), seed=1, episodes=4, on_progress=lambda *at: told.append(at)
    )
    assert result["return_mean"] == 5.0 and result["episodes"] == 4
    assert told[0] == (0, 2) and told[4] == (2, 10) and told[-1] == (4, 20)


def test_an_episode_that_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_MAX_WITHOUT_LIMIT", 50)
    with pytest.raises(
        RlhpcError, match=r"not ended after 50 .* no time limit; 0 of 3 .* env.eval.max_episode_steps=N"
    ):
        evaluate_policy(Still(), section(), seed=1, episodes=3)
    limited = evaluate_policy(Still(), section("env.eval.max_episode_steps=80"), seed=1, episodes=3)
    assert limited["length_mean"] == 80  # with a limit it may take longer than that
    long = evaluate_policy(Still(), section("env.train.kwargs={length: 40}"), seed=1, episodes=8)
    assert long["episodes"] == 8  # each episode counts anew
