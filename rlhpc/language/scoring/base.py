"""What a group is that rates answers: a term of the reward for which a process of one's own, or an accelerator, is needed.

(One that says something of tokens is a `rlhpc.Scorer`; see `rlhpc.language.algorithm.base`.)
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhpc.language.rewards.base import Sample

if TYPE_CHECKING:
    import torch

    from rlhpc.language.config import GrpoConfig
    from rlhpc.language.scoring.group import ScoringGroup


class Rater(abc.ABC):
    """Rates answers; one object per rank of a group, which keeps nothing of what it has rated.

    Args:
        cfg: The configuration.
        device: Where the rank computes.
        group: The group's part of it: its model and so on.
    """

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup) -> None:
        self.cfg, self.device, self.group = cfg, device, group

    @abc.abstractmethod
    def rate(self, samples: Sequence[Sample]) -> Sequence[float | None]:
        """Rates the answers to one problem.

        Args:
            samples: All of them, always in the same order.

        Returns:
            One number for each, in that order; None where it could not be rated: that one gets `reward.failed`.
        """

    def counts(self) -> dict[str, float]:
        """What is worth counting since the last call. The sum over the ranks becomes the metric `<group>/<name>`, or
        `time/<group>_<name>` for a name that begins with `time/`: those need not be the same in a run that was interrupted."""
        return {}

    def close(self) -> None:  # noqa: B027 (most start nothing)
        """Ends what it started."""
