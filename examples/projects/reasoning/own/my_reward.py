"""Reward of this project: the letters of a prompt, in alphabetical order."""

from rlhpc.language.rewards import Sample


def letters_in_order(sample: Sample) -> float:
    """Returns the share of the letters that stand in their place; 1 is right."""
    if len(sample.response) != len(sample.answer):
        return 0.0
    return sum(a == b for a, b in zip(sample.response, sample.answer, strict=True)) / len(sample.answer)
