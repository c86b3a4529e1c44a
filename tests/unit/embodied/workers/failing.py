"""Simulators that fail, and rollouts with failed slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from rlhpc.embodied.data.batches import RolloutBatch
from rlhpc.embodied.data.trajectories import read_trajectories
from rlhpc.embodied.envs.base import Step, VectorEnv
from rlhpc.embodied.rollout.step_outcomes import Outcomes, next_values

SIZE, STEPS, GAMMA, LAMBDA = 12, 9, 0.9, 0.8


def rollout(rng: np.random.Generator, *, whole: bool, chunk: int, per_action: bool) -> dict[str, np.ndarray]:
    """Columns `[n, T, ...]` of slots whose episodes end and whose simulators fail at random; the outcome of a failed step is
    noise, as far as the interface allows it."""
    outcomes = Outcomes(
        range(SIZE),
        STEPS,
        chunk=chunk,
        has_action_rewards=per_action,
        is_single_episode=whole,
        report_nonfinite=lambda *_: None,
    )
    obs = rng.normal(size=(STEPS + 1, SIZE, 1)).astype(np.float32)
    for t in range(STEPS):
        failed = rng.random(SIZE) < 0.08
        terminated = (rng.random(SIZE) < 0.1) & ~failed
        truncated = ((rng.random(SIZE) < 0.1) & ~terminated) | failed
        infos: dict[str, Any] = {"final_obs": np.where(failed[:, None], obs[t], obs[t] + 10)}
        if failed.any():
            infos["lost"] = failed
        rewards = rng.normal(size=SIZE).astype(np.float32)
        if chunk > 1:
            last = np.where(terminated | truncated, rng.integers(0, chunk, SIZE), chunk - 1)
            mask = (np.arange(chunk) <= last[:, None]) & ~failed[:, None]
            infos["chunk"] = {"mask": mask, "rewards": rng.normal(size=(SIZE, chunk)).astype(np.float32) * mask}
        outcomes.add(t, rewards, terminated, truncated, infos)
    message = outcomes.part(slice(0, SIZE), obs[-1])
    of = (
        (lambda seen: np.repeat(seen, chunk, -1) * np.arange(1, chunk + 1, dtype=np.float32))
        if per_action
        else lambda seen: seen[..., 0]
    )
    columns = {"obs": obs[:-1].swapaxes(0, 1), "values": of(obs[:-1].swapaxes(0, 1))}
    columns["logprobs"] = rng.normal(size=(SIZE, STEPS, chunk) if chunk > 1 else (SIZE, STEPS)).astype(np.float32)
    columns["next_values"] = next_values(
        columns["values"], of(message.last_obs), message.final_slot, message.final_step,
        of(message.final_obs), message.executed,
    )  # fmt: skip
    columns["actions"] = columns["obs"]
    return columns | {name: column.copy() for name, column in message.transition_columns().items()}


def delivered(columns: dict[str, np.ndarray]) -> RolloutBatch[np.ndarray]:
    """Returns the batch that an actor receives."""
    return RolloutBatch.from_columns({**{name: column.copy() for name, column in columns.items()}, "version": 0})


class Failing(VectorEnv):
    """Two slots that count their steps; slot 0 fails in the steps of `fails`, its episodes have four steps."""

    observation_space = gymnasium.spaces.Box(-99, 99, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)

    def __init__(self, fails: Any) -> None:
        self.num_envs, self.max_episode_steps = 2, 4
        self._fails, self._t = fails, 0
        self._at = np.zeros(2, np.int64)

    def _obs(self) -> np.ndarray:
        return self._at[:, None].astype(np.float32)

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._at[:] = 0
        return self._obs(), {}

    def step(self, actions: np.ndarray) -> Step:
        self._t += 1
        failed = np.array([self._t in self._fails, False])
        self._at += 1
        done = failed | (self._at >= 4)
        infos: dict[str, Any] = {}
        if done.any():
            # Of one that failed a careless adapter says that it counts.
            infos = {"final_obs": self._obs(), "lost": failed}
            infos["episode"] = {"return": self._at.astype(float), "length": self._at.copy(), "mask": done}
            infos["episode"]["success"] = np.ones(2, bool)
        self._at[done] = 0
        return self._obs(), np.ones(2, np.float32), np.zeros(2, bool), done, infos


class Still:
    def predict_action_batch(self, obs: Any, mode: str = "eval", noise: Any = None) -> Any:
        return torch.zeros(len(obs), 1, 1), {}


def recorded(path: Path) -> list[Any]:
    return [list(each["rewards"]) for each in read_trajectories(str(path))]
