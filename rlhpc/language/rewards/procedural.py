"""The scorers of the procedural tasks."""

from __future__ import annotations

from collections.abc import Sequence

from rlhpc.language.rewards.answers import check_ways, extract
from rlhpc.language.rewards.base import Sample


class ReasoningGymReward:
    """What the task's own scorer says, from 0 to 1. For problems of source `reasoning_gym`.

    Args:
        extract: Where the answer is looked for, in this order: `tag` (`<answer>…</answer>`), `boxed`, `####`,
            `last_number`, `whole`.
    """

    preload = ("rlhpc.language.data.reasoning",)
    memory_mb = 4096

    def __init__(self, extract: Sequence[str] = ("tag", "boxed", "####", "whole")) -> None:
        self._ways = check_ways(extract, "extract of 'reasoning_gym'")

    def __call__(self, sample: Sample) -> float:
        from rlhpc.language.data.reasoning import score

        if "entry" not in sample.meta:
            raise ValueError("the problem is not of source reasoning_gym: its meta has no entry")
        answer = extract(sample.response, self._ways)
        return 0.0 if answer is None else float(score(answer, sample.meta))
