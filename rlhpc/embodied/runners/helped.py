"""The driver's side of ranks that join the env group: they play the last decisions of each step, or whole steps.

A run that is ahead of its actors has a few steps played at a time. Steps are trained on in order, whoever plays them, and none
is begun with weights older than `algorithm.max_staleness` allows; so further ranks change the pace and nothing else. Where
each step is shared, it takes as long as if the ranks had been there from the start; where it cannot be cut, they play some of
the steps in place of the others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rlhpc.embodied.roles.parts import PLAYED, PartLedger, Played
from rlhpc.embodied.roles.slots import SlotMap
from rlhpc.runtime.channel import Channel, QueueEmpty
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.runtime.worker_group import WorkerGroup

#: How often it looks who has gone while it waits for parts.
_HELPER_POLL_S = 0.1


class Helped:
    """The ranks that have joined, and what they play.

    Args:
        env, actor: Launched groups.
        slots: Of the run.
        decisions: `algorithm.rollout_steps`.
        ahead: `algorithm.max_staleness`.
        at_random: Whether actions of a step are drawn at random.
        timeout: Seconds that a step may take.

    Attributes:
        ranks: Those that take part.
    """

    def __init__(
        self,
        env: WorkerGroup,
        actor: WorkerGroup,
        slots: SlotMap,
        decisions: int,
        ahead: int,
        at_random: Callable[[int], bool],
        timeout: float,
    ) -> None:
        self._ahead = ahead
        self._env, self._actor, self._slots, self._timeout = env, actor, slots, timeout
        self._at_random = at_random
        self.ledger = PartLedger(slots.env_ranks, decisions)
        self.ranks: list[int] = []
        #: Parts of a step, and how many steps' shares a rank may have at a time.
        self._parts, self._deep = slots.env_ranks, 1
        #: Version of the weights that each was sent last.
        self._has: dict[int, int] = {}
        self._left: list[int] = []

    def open(self) -> None:
        """Begins anew: nothing is under way, and nobody takes part."""
        self._played = Channel.create(PLAYED)
        self.ledger.clear()
        self._left += self._has
        self.ranks, self._has = [], {}

    def open_rank(self, rank: int, spaces: tuple[Any, Any], begun: int) -> Any:
        """Has a rank build simulators and policy; returns a handle."""
        return self._env.execute_on(rank).open_replica(self._slots, spaces, begun)

    def welcome(self, rank: int) -> None:
        """A rank that has built all takes part from now on."""
        self._env.execute_on(rank).connect_replica().wait(self._timeout)
        self.ranks.append(rank)

    def look(self) -> None:
        """Takes in what ranks say, and what those that have gone had not delivered is left for others."""
        there = set(self._env.present)
        while True:  # who said something before it went is heard: that was confirmed
            try:
                self.ledger.accept(self._played.get_nowait())
            except QueueEmpty:
                break
        for rank in [rank for rank in self.ranks if rank not in there]:
            self.ranks.remove(rank)
            self.ledger.lose(rank)
            if self._has.pop(rank, None) is not None:
                self._left.append(rank)

    @property
    def steps(self) -> list[int]:
        """Steps that these ranks play."""
        return self.ledger.steps

    def would_take(self) -> bool:
        """Whether enough of them have nothing to do for a whole step to be theirs.

        While they play it, the others play as many steps more as there may be ahead, and then wait: few ranks that play a step
        one unit after the other would hold up the run.
        """
        units = self._slots.env_ranks
        idle = sum(self.ledger.held(rank) == 0 for rank in self.ranks)
        enough = len(self.ranks) * (self._ahead + 1) >= units
        return bool(self.ranks) and enough and not self.ledger.waiting and idle >= min(units, len(self.ranks))

    def give(self, step: int, decisions: int | None = None, pieces: int = 1) -> None:
        """A step is theirs, or the last decisions of one; see `PartLedger.give`. Of shared steps they have as many at a time
        as the others."""
        self.ledger.give(step, decisions, pieces)
        self._parts, self._deep = self._slots.env_ranks * pieces, 1 if decisions is None else self._ahead + 1

    def ask(self, version: int) -> None:
        """Has them play what nobody plays, with these weights, which the actor has."""
        if not self.ledger.waiting or not self.ranks:
            if self._left:
                self._actor.lend_weights(version, self._env.name, [], self._left)
                self._left = []
            return
        most = -(-self._parts // len(self.ranks)) * self._deep
        chosen = []
        while self.ledger.waiting:
            rank = min(self.ranks, key=lambda rank: (self.ledger.held(rank), rank))
            if self.ledger.held(rank) >= most:
                break
            asked = self.ledger.ask(rank, version)
            assert asked is not None
            chosen.append((rank, asked))
        without = sorted({rank for rank, _ in chosen if self._has.get(rank, -1) < version})
        if without or self._left:
            self._actor.lend_weights(version, self._env.name, without, self._left)
            self._has |= dict.fromkeys(without, version)
            self._left = []
        for rank, asked in chosen:
            self._env.execute_on(rank).play(asked, self._at_random(asked.step))

    def make(self, step: int, version: int) -> list[list[Played]] | None:
        """Waits until a step that is theirs has been played.

        Returns:
            Its parts; None if all have gone, and the step is to be made otherwise.

        Raises:
            DeadlineExceeded: It took too long; says who plays.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            self.look()
            if self.ledger.whole(step):
                return self.ledger.close(step)
            if not self.ranks:
                self.ledger.give_up(step)
                return None
            self.ask(version)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"step {step} was not played within runner.step_timeout_s ({self._timeout:g} s) by "
                    f"{', '.join(f'{self._env.name}[{rank}]' for rank in self.ranks)}"
                )
            try:
                self.ledger.accept(self._played.get(timeout=_HELPER_POLL_S))
            except DeadlineExceeded:
                continue

    def useless(self) -> list[int]:
        """Parts that actors may have and need not keep; each is told once."""
        return self.ledger.pop_useless()

    def taken_from(self, units: Sequence[Sequence[Played]]) -> Counter[int]:
        """Transitions of a step's parts by rank, in decisions of slots."""
        found: Counter[int] = Counter()
        for number, unit in enumerate(units):
            for part in unit:
                found[part.rank] += part.decisions * len(self._slots.unit_share(number))
        return found
