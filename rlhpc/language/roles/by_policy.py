"""Samples of several policies (`agent.policies`): micro-batches of one each, and metrics of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from rlhpc.language.policies import Policies
from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.cutting import Parts

#: How metrics of one policy begin.
POLICY = "policy/"
#: Of these, what is not a mean over its tokens.
_COUNTS = ("tokens", "grad_norm")


def by_policy(policies: Policies, batch: TokenBatch, cut: Callable[[TokenBatch], Parts]) -> Parts:
    """Cuts each policy's samples by themselves. All ranks have equally many of each: some train nothing."""
    of, found = policies.of(batch.role), Parts()
    for policy in range(len(policies.names)):
        mine = torch.nonzero(of == policy).flatten()
        found += [(mine[samples], part) for samples, part in cut(batch.select(mine))]
    return found


def told_apart(
    policies: Policies, batches: Sequence[TokenBatch], parts: Sequence[Mapping[str, torch.Tensor]]
) -> list[dict[str, torch.Tensor]]:
    """What was measured of micro-batches, each of one policy, for all and again for its own; and its tokens."""
    found = []
    for batch, part in zip(batches, parts, strict=True):
        own = policies.names[int(policies.of(batch.role)[0])]
        measured = {**part, "tokens": batch.mask.sum()}
        each = {
            f"{POLICY}{name}/{metric}": value if name == own else torch.zeros(())
            for name in policies.names
            for metric, value in measured.items()
        }
        found.append({**part, **each})
    return found


def per_token(policies: Policies, metrics: dict[str, float]) -> dict[str, float]:
    """Makes means over all tokens that are trained on means over a policy's own."""
    for name in policies.names:
        own = f"{POLICY}{name}/"
        scale = metrics["tokens"] / max(metrics[f"{own}tokens"], 1.0)
        metrics |= {
            key: value * scale
            for key, value in metrics.items()
            if key.startswith(own) and key.removeprefix(own) not in _COUNTS
        }
    return metrics
