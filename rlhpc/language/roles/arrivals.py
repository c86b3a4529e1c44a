"""What has come to an actor of each prompt: the group of answers, and the columns that other groups make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlhpc.language.roles.groups import Group


class Arrivals:
    """Groups and their columns, by step and position, in whatever order they come.

    Args:
        makers: The groups of processes that each send one column.
    """

    def __init__(self, makers: frozenset[str]) -> None:
        self._makers = sorted(makers)
        self._groups: dict[tuple[int, int], Group] = {}
        self._columns: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def take(self, message: Mapping[str, Any], step: int) -> None:
        """Takes in a message; one about a step before `step` is dropped."""
        place = message["step"], message["position"]
        if place[0] < step:
            return
        if "maker" in message:
            values = torch.from_numpy(np.array(message["values"]))
            self._columns.setdefault(place, {})[message["maker"]] = values
        else:
            self._groups[place] = Group.unpack(dict(message))

    def missing(self, step: int, positions: Sequence[int]) -> dict[str, list[int]]:
        """Positions of which something has not come, by who makes it; the groups of answers are by ""."""
        found = {"": [p for p in positions if (step, p) not in self._groups]}
        found |= {m: [p for p in positions if m not in self._columns.get((step, p), {})] for m in self._makers}
        return {maker: lacking for maker, lacking in found.items() if lacking}

    def whole(self, step: int, position: int) -> tuple[Group, Mapping[str, torch.Tensor]]:
        """Gives away what has come of a position: the group, and its columns by maker."""
        return self._groups.pop((step, position)), self._columns.pop((step, position), {})

    def clear(self) -> None:
        """Forgets everything."""
        self._groups.clear()
        self._columns.clear()
