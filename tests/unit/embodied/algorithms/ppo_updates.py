"""A policy and transitions for updates of PPO."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

TOTAL, BATCH = 48, 16
OPTIM = SimpleNamespace(
    name="adam", lr=1e-2, adam_beta1=0.9, adam_beta2=0.999, adam_eps=1e-5, weight_decay=0.0, clip_grad=0.5
)


class Tiny(nn.Module):
    """A policy over two actions."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.critic = nn.Linear(3, 2, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, work):
        return work(self)

    def default_forward(self, inputs, compute_logprobs, compute_entropy, compute_values):
        logp = torch.log_softmax(self.body(inputs["obs"]), -1)
        return {
            "logprobs": logp.gather(-1, inputs["actions"][:, None])[:, 0],
            "entropy": -(logp.exp() * logp).sum(-1),
            "values": self.critic(inputs["obs"])[:, 0],
        }
