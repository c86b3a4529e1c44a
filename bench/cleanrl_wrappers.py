"""Wrappers of CleanRL's ppo_continuous_action.py, for both sides of a comparison (`env.train.wrappers`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

_CLIP = partial(np.clip, a_min=-10, a_max=10)


def normalize_env(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Normalises observations and rewards by their running statistics and clips them; returns are counted below that."""
    env = gym.wrappers.RecordEpisodeStatistics(env)
    env = gym.wrappers.NormalizeObservation(env)
    env = gym.wrappers.TransformObservation(env, _CLIP, env.observation_space)
    env = gym.wrappers.NormalizeReward(env, gamma=0.99)
    return gym.wrappers.TransformReward(env, _CLIP)
