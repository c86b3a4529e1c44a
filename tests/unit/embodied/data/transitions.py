"""Transitions and buffers of several ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlhpc.embodied.data.mixture import DrawOptions, Mixture
from rlhpc.embodied.data.replay_buffer import ReplayBuffer

SLOTS = 4


def play(first: int, steps: int, slots: range, images: bool = False) -> dict[str, np.ndarray]:
    """Transitions that say who they are: number = decision · 100 + slot."""
    numbers = np.arange(first, first + steps)[None, :] * 100 + np.array(slots)[:, None]
    columns = {
        "obs": np.stack([numbers, -numbers], -1).astype(np.float32),
        "next_obs": np.stack([numbers + 0.5, -numbers], -1).astype(np.float32),
        "actions": (numbers[..., None, None] / 7).astype(np.float32),
        "rewards": numbers.astype(np.float32),
        "terminations": numbers % 3 == 0,
    }
    if images:
        columns["obs.rgb"] = (numbers[..., None, None, None] % 256).astype(np.uint8) + np.zeros((4, 5, 3), np.uint8)
    return columns


def buffers(tmp_path: Path, ranks: int = 1, capacity: int = 40) -> list[ReplayBuffer]:
    n = SLOTS // ranks
    return [ReplayBuffer(capacity, range(r * n, (r + 1) * n), SLOTS, r, tmp_path / "ring") for r in range(ranks)]


def mixtures(found: list[ReplayBuffer], demos=None, ratio=0.5, batch=16) -> list[Mixture]:
    return [
        Mixture(one, demos, DrawOptions(batch, ratio, 2), seed=3, rank=r, ranks=len(found))
        for r, one in enumerate(found)
    ]


def fill(found: list[ReplayBuffer], first: int, steps: int) -> None:
    for one in found:
        one.add(play(first, steps, one.share))


def batch(found: list[ReplayBuffer], update: int = 5, alone: bool = False, **options) -> np.ndarray:
    """A batch over all ranks: rewards (which say who the rows are), sorted, with the noise that goes with them."""
    rows = []
    for mixture in mixtures(found, **options):
        draw = mixture.draw(update, demos_only=alone)
        rows += zip(draw.columns["rewards"].tolist(), draw.noise[0, :, 0].tolist(), strict=True)
    return np.array(sorted(rows))
