"""Rows of metrics: what the episodes of a step say."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rlhpc.embodied.envs.timing import timing_row


def kept(episodes: dict[str, np.ndarray]) -> dict[str, float]:
    """Where simulators make observations on an accelerator, the share of their messages that stayed on it; and how well robots
    kept their time."""
    by_device, by_host = int(episodes["by_device"].sum()), int(episodes["by_host"].sum())
    on_device = {"env/on_device": by_device / (by_device + by_host)} if by_device + by_host else {}
    return on_device | timing_row(episodes)


def ended(episodes: dict[str, np.ndarray]) -> dict[str, float]:
    """Metrics of the episodes that ended in a step: unlike those of the window they lag behind nothing."""
    count = len(episodes["return"])
    found: dict[str, float] = {"rollout/episodes": count}
    if count:
        found["rollout/episode_return"] = float(episodes["return"].mean())
        if not np.isnan(episodes["success"]).any():
            found["rollout/success_once"] = float(episodes["success"].mean())
    return found


def joined(decisions: Counter[int], chunk: int) -> dict[str, float]:
    """Transitions of a step from ranks that have joined: all of them, and by rank.

    Args:
        decisions: By rank.
        chunk: Transitions of a decision.
    """
    if not decisions:
        return {}
    by_rank = {f"env/joined_transitions_{rank}": count * chunk for rank, count in sorted(decisions.items())}
    return {"env/joined_transitions": decisions.total() * chunk, **by_rank}
