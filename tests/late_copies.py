"""Copies as a device makes them: nothing is there before it was waited for, and what is sent must not change until then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class LateCopies:
    """Copies when it is waited for.

    Attributes:
        under_way: How many copies have begun and were not waited for.
        most: The most of them at a time.
    """

    def __init__(self) -> None:
        self.under_way = self.most = 0

    def begin(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for target, _ in pairs:
            target.fill_(0xAA)

        def wait() -> None:
            for target, source in pairs:
                target.copy_(source)
            self.under_way -= 1

        return wait
