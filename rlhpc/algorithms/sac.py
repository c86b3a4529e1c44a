"""Pieces of soft actor-critic (Haarnoja et al. 2018; as CleanRL)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def squashed_gaussian(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """tanh(mean + std·noise) in (−1, 1) and its log-probability `[..., ]`, summed over the last axis.

    The correction log(1 − tanh²u) is computed as 2·(log 2 − u − softplus(−2u)), which does not overflow.
    """
    u = mean + log_std.exp() * noise
    gaussian = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    correction = 2 * (math.log(2) - u - functional.softplus(-2 * u))
    return torch.tanh(u), (gaussian - correction).sum(-1)


def target_entropy(action_dim: int) -> float:
    """−dim(A)."""
    return -float(action_dim)


def q_target(
    rewards: Tensor,
    terminations: Tensor,
    next_q1: Tensor,
    next_q2: Tensor,
    next_logprobs: Tensor,
    gamma: float,
    alpha: float,
) -> Tensor:
    """r + γ·(1 − terminated)·(min(Q1, Q2) − α·logp): a truncated transition still bootstraps."""
    soft = torch.min(next_q1, next_q2) - alpha * next_logprobs
    return rewards + gamma * (~terminations.bool()).to(rewards.dtype) * soft
