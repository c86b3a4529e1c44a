"""Built-in environments of tensors: they move as Gymnasium's."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from rlhpc.embodied.envs.tensor_tasks import CartPole, Pendulum

CPU = torch.device("cpu")


@pytest.mark.parametrize(("task", "env_id"), [(CartPole, "CartPole-v1"), (Pendulum, "Pendulum-v1")])
def test_a_built_in_task_moves_as_gymnasiums(task: type[Any], env_id: str) -> None:
    env, theirs = task(1, CPU), gymnasium.make(env_id).unwrapped
    observation = env.reset(torch.ones(1, dtype=torch.bool), torch.tensor([5]))
    theirs.reset(seed=0)
    theirs.state = env.state[0].double().numpy()
    rng = np.random.default_rng(0)
    for _ in range(40):
        action = rng.integers(2) if env_id == "CartPole-v1" else rng.uniform(-2, 2, 1).astype(np.float32)
        expected, reward, terminated, _, _ = theirs.step(action)
        observation, rewards, terminations, _, _ = env.step(torch.as_tensor(action)[None])
        np.testing.assert_allclose(observation[0].numpy(), expected, atol=2e-4)
        assert float(rewards[0]) == pytest.approx(float(reward), abs=2e-3) and bool(terminations[0]) == terminated
        if terminated:
            break
    assert (env_id == "CartPole-v1") == terminated
    assert env.observation_space == theirs.observation_space or env_id == "CartPole-v1"
    assert env.max_episode_steps == gymnasium.spec(env_id).max_episode_steps
