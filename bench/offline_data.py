"""Dataset of mixed quality for offline learning: a controller swings up and balances Pendulum-v1.

In each of 60 episodes a share of the actions, from 20 % to 90 %, is random. The file is reproducible.

    python -m bench.offline_data pendulum.h5
"""

from __future__ import annotations

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np

from rlhpc.embodied.data.trajectories import TrajectoryWriter

EPISODES = 60


def compute_torque(obs: np.ndarray) -> float:
    """Returns the torque that raises the pendulum's energy to that of the upright position and holds it there."""
    cosine, sine, speed = obs.tolist()
    if cosine > 0.9:
        return float(np.clip(-(12 * np.arctan2(sine, cosine) + 3 * speed), -2, 2))
    energy = speed**2 / 6 + 5 * (cosine - 1)
    return 2.0 if (energy < 0) == (speed > 0) else -2.0


def write_dataset(path: Path) -> list[float]:
    """Writes the file; returns the episodes' returns."""
    env, random, returns = gym.make("Pendulum-v1"), np.random.default_rng(0), []
    with TrajectoryWriter(path, env_id="Pendulum-v1", source_type="scripted") as writer:
        for episode in range(EPISODES):
            random_probability = 0.2 + 0.7 * episode / (EPISODES - 1)
            obs, actions, rewards, is_over = [env.reset(seed=episode)[0]], [], [], False
            while not is_over:
                choice = random.uniform(-2, 2) if random.random() < random_probability else compute_torque(obs[-1])
                actions.append(np.array([choice], np.float32))
                observation, reward, terminated, truncated, _ = env.step(actions[-1])
                obs.append(observation)
                rewards.append(float(reward))
                is_over = terminated or truncated
            limits = np.arange(len(actions)) == len(actions) - 1
            writer.add({"obs": np.array(obs), "actions": np.array(actions), "rewards": np.array(rewards, np.float32),
                        "terminations": np.zeros(len(actions), bool), "truncations": limits, "seed": episode})  # fmt: skip
            returns.append(sum(rewards))
    return returns


if __name__ == "__main__":
    episode_returns = write_dataset(Path(sys.argv[1]))
    low, high = min(episode_returns), max(episode_returns)
    print(f"{len(episode_returns)} episodes, returns from {low:.0f} to {high:.0f}, mean {np.mean(episode_returns):.0f}")
