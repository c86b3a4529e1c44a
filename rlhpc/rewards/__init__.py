"""Rewards of texts: verifiers, and what may be added to them."""

from rlhpc.rewards.base import Reward, Sample

__all__ = ["Reward", "Sample"]
