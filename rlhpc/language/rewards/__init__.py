"""Rewards of texts: reward functions by name, and the pool of processes that computes them."""

from rlhpc.language.rewards.base import Reward, Sample
from rlhpc.language.rewards.pool import RewardPool, Scored, Term, make_reward
from rlhpc.language.rewards.registry import register_reward

__all__ = ["Reward", "RewardPool", "Sample", "Scored", "Term", "make_reward", "register_reward"]
