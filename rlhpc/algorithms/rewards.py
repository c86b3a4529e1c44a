"""What shapes rewards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhpc.algorithms.advantages import varied
from rlhpc.runtime.errors import ConfigError


def overlong_penalty(*, lengths: Tensor, max_length: int, buffer: int, **_: Any) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13), `[B]`.

    0 up to `max_length − buffer`, then linear down to −1 at `max_length` and beyond.
    """
    if buffer < 1:
        raise ConfigError(f"overlong: buffer is {buffer}; it must be at least 1")
    over = lengths.to(torch.get_default_dtype()) - (max_length - buffer)
    return -(over / buffer).clamp(0, 1)


def varied_groups(scores: Tensor, group_ids: Tensor) -> Tensor:
    """`[B]` bool, False for rows of a group whose rewards are all equal: DAPO drops and refills those (Yu et al. 2025)."""
    groups, index = torch.unique(group_ids, return_inverse=True)
    return varied(scores, index, len(groups))
