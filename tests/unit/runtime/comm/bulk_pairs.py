"""Servers and clients of bulk transfers."""

from __future__ import annotations

import numpy as np

SIZE = 3_000_017


def nothing() -> None: ...


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)
