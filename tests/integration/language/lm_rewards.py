"""Rewards of the language-model tests, named in their configurations as `lm_rewards:…`."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from rlhpc.language.rewards import Sample


def ones(sample: Sample) -> float:
    """Share of the letter 1 in six characters: an untrained model can improve on it at once."""
    pause = Path(os.environ.get("RLHPC_TEST_PAUSE", "/nowhere"))
    with contextlib.suppress(FileNotFoundError):  # as long as a test wants it slow
        time.sleep(float(pause.read_text()))
    return sample.response.count("1") / 6


def picky(sample: Sample) -> float:
    """Right or wrong, and mostly wrong."""
    return float(sample.response.startswith("1"))


def too_large_for_some(sample: Sample) -> float:
    """Beyond float32 where the response begins with a certain digit; else the share of the letter 1."""
    return 1e39 if sample.response.startswith("2") else sample.response.count("1") / 6


def unreachable(sample: Sample) -> float:
    """Judges nothing."""
    raise OSError("the service is down")
