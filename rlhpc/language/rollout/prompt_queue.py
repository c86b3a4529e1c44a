"""The prompts of a step: one ordered queue, from which rollout ranks take what they can hold, and what has come of them.

What a prompt's tokens are depends on seed, step, position and weights, not on who draws them; so ranks may be slow, be lost
or come later, and a step is the same. The driver keeps the queue. A rank is done with a prompt once the actor's process
has the whole group of its answers; what it had taken and was not done with goes back when it ends. Where steps overlap, a rank
that is told to leave hands it back with what there is of the answers (`PartialGroup`), and another goes on from there.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from rlhpc.language.rollout.pending_group import PartialGroup
from rlhpc.language.training.prompt_dispatch import DELIVERED, WORK
from rlhpc.runtime.channel import Channel, QueueEmpty, Taken
from rlhpc.runtime.errors import DeadlineExceeded

#: How often a rank looks again whether prompts have come back that somebody else had taken.
_AGAIN_S = 0.25


@dataclass(frozen=True)
class Delivery:
    """What the driver is told of a prompt whose answers an actor has.

    Attributes:
        step, position: Of the prompt.
        rank: Who drew the answers.
        facts: See `facts_of`.
        failure: Why an episode of it failed, or could not be judged; "" if none.
    """

    step: int
    position: int
    rank: int
    facts: dict[str, float]
    failure: str = ""


class PromptTracker:
    """The driver's side: gives out the prompts of each step once, and counts what was delivered.

    Args:
        prompts: Of a step.
    """

    def __init__(self, prompts: int) -> None:
        self._prompts = prompts
        self._channels: tuple[Channel, Channel] | None = None
        self._given = 0
        self._delivered: dict[int, dict[int, Delivery]] = {}
        self.failure = ""  # the last one there was

    def open(self, step: int) -> None:
        """Begins behind a step: nothing of later ones is given out or delivered."""
        self._channels = Channel.create(WORK), Channel.create(DELIVERED)
        self._given, self._delivered = step, {}

    def give(self, last: int) -> None:
        """Gives out the prompts of all steps up to `last` that were not given out before."""
        for step in range(self._given + 1, last + 1):
            for position in range(self._prompts):
                self._ends[0].put(position, key=str(step))
        self._given = max(self._given, last)

    @property
    def _ends(self) -> tuple[Channel, Channel]:
        assert self._channels is not None
        return self._channels

    def whole(self, step: int, wait_s: float) -> bool:
        """Whether all answers of a step were delivered; waits at most so long for the last ones."""
        deadline = time.monotonic() + wait_s
        while len(self._delivered.get(step, ())) < self._prompts:
            left = deadline - time.monotonic()
            try:
                delivery: Delivery = self._ends[1].get(timeout=left) if left > 0 else self._ends[1].get_nowait()
            except (QueueEmpty, DeadlineExceeded):
                return False
            # A rank that was lost just after it had delivered may have left its prompt to another.
            self._delivered.setdefault(delivery.step, {}).setdefault(delivery.position, delivery)
        return True

    def returned(self, step: int) -> bool:
        """Whether prompts of a step lie in the queue."""
        return not self._ends[0].empty(key=str(step))

    def missing(self, step: int) -> list[int]:
        """Prompts of a step, by position, whose answers were not delivered."""
        return sorted({*range(self._prompts)} - self._delivered.get(step, {}).keys())

    def close(self, step: int) -> dict[str, float]:
        """The sums of the facts of a step's answers, all of which were delivered, in the order of the prompts."""
        delivered = self._delivered.pop(step)
        self.failure = next(
            (one.failure for _, one in sorted(delivered.items(), reverse=True) if one.failure), self.failure
        )
        return summed({position: delivery.facts for position, delivery in delivered.items()})


class PromptLeases:
    """A rollout rank's side: what it has taken, and whether it may take more.

    Args:
        prompts: Of a step.
        rank: Of this process.
        work, delivered: The driver's channels.
    """

    def __init__(self, prompts: int, rank: int, work: Channel, delivered: Channel) -> None:
        self._prompts, self._rank, self._work, self._delivered = prompts, rank, work, delivered
        self._held: dict[tuple[int, int], Taken] = {}
        self._looked: dict[int, float] = {}
        self.ranks = 1

    def begin(self, step: int, ranks: int) -> None:
        """A step is asked for, of so many ranks."""
        self.ranks = ranks
        self._looked = {known: at for known, at in self._looked.items() if known > step}

    def held(self, step: int) -> int:
        """Prompts of a step that were taken and not delivered."""
        return sum(known == step for known, _ in self._held)

    def exhausted(self, step: int) -> bool:
        """Whether there was nothing left to take of a step, when last looked."""
        return step in self._looked

    def take(self, step: int) -> int | PartialGroup | None:
        """Takes a prompt of a step, by its position, or one that another rank has begun; None if this rank has its share, or
        nothing is left."""
        if self.held(step) >= math.ceil(self._prompts / self.ranks):
            return None
        now = time.monotonic()
        if now - self._looked.get(step, -math.inf) < _AGAIN_S:
            return None
        try:
            taken = self._work.take_nowait(key=str(step))
        except QueueEmpty:
            self._looked[step] = now
            return None
        self._looked.pop(step, None)
        item: int | PartialGroup = taken.item
        self._held[step, item.position if isinstance(item, PartialGroup) else item] = taken
        return item

    def hand_back(self, step: int, begun: PartialGroup) -> None:
        """Gives a prompt back with what there is of it. If this rank ends meanwhile, it may come back twice: the driver counts
        it once, and so does the actor."""
        self._work.entrust(begun, key=str(step))
        self._work.done(self._held.pop((step, begun.position)))

    def deliver(self, step: int, position: int, facts: dict[str, float], failure: str = "") -> None:
        """Says that an actor has the answers to a prompt."""
        self._delivered.put(Delivery(step, position, self._rank, facts, failure))
        self._work.done(self._held.pop((step, position)))


def summed(facts: dict[int, dict[str, float]]) -> dict[str, float]:
    """Sums and maxima over positions, in their order: the order of arrival must not show in the last digit."""
    sums: dict[str, float] = {}
    for _, found in sorted(facts.items()):
        for name, value in found.items():
            known = sums.get(name, 0.0)
            sums[name] = max(known, value) if name.startswith("max_") else known + value
    return sums
