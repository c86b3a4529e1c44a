"""Proof that what acts is what was trained: what was handed over beside what was taken in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.delta import Elements
from rlhpc.weights.version_digest import digest, digests

if TYPE_CHECKING:
    from rlhpc.weights.base import NamedUpdates, Update
    from rlhpc.weights.version_digest import Receipt
import contextlib
import time


class Cost:
    """Seconds of the processor, of this process, since somebody last asked."""

    def __init__(self) -> None:
        self._proof, self._since, self._at_it = 0.0, time.process_time(), False

    @contextlib.contextmanager
    def proving(self, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
        """Counts what the block takes; within another such block, nothing twice.

        Args:
            clock: Of this thread, which digests alone; `time.process_time` where torch's threads help.
        """
        if self._at_it:
            yield
            return
        self._at_it, start = True, clock()
        try:
            yield
        finally:
            self._at_it = False
            self._proof += clock() - start

    def pop(self) -> dict[str, float]:
        """proof_s and, for all that the process did, cpu_s."""
        now = time.process_time()
        found = {"proof_s": self._proof, "cpu_s": now - self._since}
        self._proof, self._since = 0.0, now
        return found


#: Of this process.
COST = Cost()


#: Names in a message.
_SHOWN = 4


class WeightsDiffer(RlhpcError):
    """What was taken in is not what was handed over. Nobody may act with it."""


class Proof:
    """Follows an update to where it is taken in.

    Args:
        update: As a `WeightSync` gave it.
        source: Who sent it, for messages.
        look: Whether what passes is looked at; not where all that is held afterwards is.
    """

    def __init__(self, update: Update, source: str = "the sender", *, look: bool = True) -> None:
        self._update, self._source, self._look = update, source, look
        self._seen: dict[str, int] = {}
        self._twice: list[str] = []

    def tensors(self) -> NamedUpdates:
        """The update's tensors, each looked at as it passes."""
        version = self._update.version
        for name, what in self._update.tensors:
            if name in self._seen:
                self._twice.append(name)
            self._seen[name] = 0
            if self._look and not isinstance(what, Elements):
                with COST.proving():
                    self._seen[name] = digest(what, version)
            yield name, what

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, for who asked for tensors alone."""
        for name, what in self.tensors():
            assert not isinstance(what, Elements), "whole updates were asked for"
            yield name, what

    @COST.proving()
    def check(self, held: Callable[[str], torch.Tensor | None] | None = None) -> None:
        """Compares, once all is taken in.

        Args:
            held: The tensor of a name as it is held now; None where it is held in another form or dtype: what passed counts
                then.

        Raises:
            WeightsDiffer: Names tensors that are others, or did not come, or came twice.
        """
        receipt = self._update.receipt()
        if receipt is None:  # a strategy of the user's own, which gives none
            return
        other = self._others(receipt, held)
        lacking = [name for name in receipt.digests if name not in self._seen] if self._update.complete else []
        if receipt.version != self._update.version:
            raise WeightsDiffer(
                f"weights of version {self._update.version} came with the receipt of version {receipt.version} from "
                f"{self._source}: nobody acts with them"
            )
        for names, what in (
            (other, "are others than"),
            (lacking, "did not come from"),
            (self._twice, "came twice from"),
        ):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                raise WeightsDiffer(
                    f"weights of version {receipt.version}: {', '.join(names[:_SHOWN])}{more} {what} "
                    f"{'those that ' if names is other else ''}{self._source}{' handed over' if names is other else ''}: "
                    "nobody acts with them"
                )

    def _others(self, receipt: Receipt, held: Callable[[str], torch.Tensor | None] | None) -> list[str]:
        """Names of tensors that are others than the receipt says: as they are held or, if that is unseen, as they passed."""
        there = [] if held is None else [(name, held(name)) for name in receipt.digests]
        found = digests([(name, tensor) for name, tensor in there if tensor is not None], self._update.version)
        if found == receipt.digests:
            return []
        passed = {name: seen for name, seen in self._seen.items() if seen}  # of elements nothing is known
        return [name for name, given in receipt.digests.items() if found.get(name, passed.get(name, given)) != given]
