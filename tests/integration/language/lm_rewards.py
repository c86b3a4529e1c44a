"""Rewards of the language-model tests, named in their configurations as `lm_rewards:…`."""

from __future__ import annotations

from rlhpc.language.rewards import Sample


def ones(sample: Sample) -> float:
    """Share of the letter 1 in six characters: an untrained model can improve on it at once."""
    return sample.response.count("1") / 6


def picky(sample: Sample) -> float:
    """Right or wrong, and mostly wrong."""
    return float(sample.response.startswith("1"))
