"""Reward functions of responses, and the pool of processes that computes rewards."""

from rlhpc.language.rewards.base import Reward, Sample
from rlhpc.language.rewards.pool import RewardPool, Scored, Term, make_reward
from rlhpc.language.rewards.registry import register_reward

__all__ = ["Reward", "RewardPool", "Sample", "Scored", "Term", "make_reward", "register_reward"]
