"""Where the samples of a row without padding begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """The samples of a row.

    Attributes:
        runs: (how many, how long) of each run of samples of the same length, none of them empty.
        ends: `[N + 1]` int32, on the model's device: cumulated lengths, from 0.
        longest: Tokens of the longest sample.
        group: The ranks that share the row, if there are several (`tokens.context`).
    """

    runs: tuple[tuple[int, int], ...]
    ends: Tensor
    longest: int
    group: Any = None

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Segments:
        """Those of samples of these lengths, one after the other."""
        filled = [length for length in lengths if length]
        ends = torch.tensor([0, *filled]).cumsum(0).to(device, torch.int32, non_blocking=True)
        return cls(tuple((len(list(run)), length) for length, run in groupby(filled)), ends, max(filled))
