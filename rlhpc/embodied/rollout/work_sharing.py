"""Rollouts that ranks play which have joined: who is to play what, and what has come of it.

The slots of a step are cut into units, each as many slots as an env rank of the run has; the decisions of a unit are played in
parts. A part is one rank's: a rank that is told to leave ends it early, and another one plays the rest of the unit, in
simulators of its own, as a part that follows. A part counts once its player has said that all actors have it, and it counts
once: what a rank had not said so of when it was lost is asked of another, whatever comes of it later.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhpc.embodied.config import PlayingConfig

#: Channels: the parts themselves, kept by the actors; and what the driver is told of them.
PARTS, PLAYED = "parts", "played"
#: Decisions of a share that is worth a message.
_LEAST = 4


@dataclass(frozen=True)
class FullRollout:
    """What env and rollout ranks that the run started with are to play with one another.

    Attributes:
        number: What it is known by; a later one has a higher one.
        step: It belongs to.
        begin: Decisions of the step that come before it.
        decisions: How many.
    """

    number: int
    step: int
    begin: int
    decisions: int


@dataclass(frozen=True)
class RolloutShard:
    """A part that a rank is to play.

    Attributes:
        number: What it is known by; no two parts of a driver have the same.
        key: Under which actors have it. One is used again once a part has been taken in.
        step, unit: What it belongs to.
        decisions: How many.
        version: Oldest weights to play it with.
    """

    number: int
    key: int
    step: int
    unit: int
    decisions: int
    version: int = 0


@dataclass(frozen=True)
class DeliveredShard:
    """What the driver is told of a part that all actors have.

    Attributes:
        number, key: Of the part.
        rank: Who played it.
        decisions: How many were made: fewer than asked of a rank that leaves.
        version: Weights that acted.
        episodes: See `SimulatingWorker.interact`.
    """

    number: int
    key: int
    rank: int
    decisions: int
    version: int
    episodes: dict[str, Any]


class PartLedger:
    """The driver's account of parts.

    Args:
        units: Of a step.
        decisions: Of a unit.

    Attributes:
        delivered: Decisions of a unit's slots that were delivered and are taken in, or are to be, by rank.
        useless: Keys of parts that actors may have and that will never be taken in.
    """

    def __init__(self, units: int, decisions: int) -> None:
        self._units, self._decisions = units, decisions
        self._number = self._keys = 0
        self._free: list[int] = []
        self.delivered: Counter[int] = Counter()
        self.useless: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Forgets all that is under way. Numbers are not used again."""
        #: What nobody plays: step, unit, decisions.
        self._open: deque[tuple[int, int, int]] = deque()
        #: What somebody plays, by number.
        self._under_way: dict[int, tuple[RolloutShard, int]] = {}
        self._done: dict[int, list[list[DeliveredShard]]] = {}
        #: Decisions of slots that are yet to be delivered, by step.
        self._missing: dict[int, int] = {}

    def give(self, step: int, decisions: int | None = None, pieces: int = 1) -> None:
        """The units of a step are to be played.

        Args:
            step: The step.
            decisions: Of each unit, where others play the rest.
            pieces: Parts of a unit that may be played at the same time.
        """
        count = self._decisions if decisions is None else decisions
        self._done[step], self._missing[step] = [[] for _ in range(self._units)], count * self._units
        sizes = [count * (piece + 1) // pieces - count * piece // pieces for piece in range(pieces)]
        self._open.extend((step, unit, size) for size in sizes for unit in range(self._units))

    @property
    def steps(self) -> list[int]:
        """Steps that were given and not closed."""
        return list(self._done)

    @property
    def waiting(self) -> bool:
        """Whether there is something that nobody plays."""
        return bool(self._open)

    def held(self, rank: int) -> int:
        """How many parts a rank is to play, or plays."""
        return sum(player == rank for _, player in self._under_way.values())

    def ask(self, rank: int, version: int) -> RolloutShard | None:
        """The next part for a rank; None if nothing is left."""
        if not self._open:
            return None
        step, unit, decisions = self._open.popleft()
        self._number += 1
        if not self._free:
            self._keys += 1
            self._free.append(self._keys)
        asked = RolloutShard(self._number, self._free.pop(), step, unit, decisions, version)
        self._under_way[asked.number] = asked, rank
        return asked

    def accept(self, played: DeliveredShard) -> bool:
        """Takes in what a rank says of a part; whether it counts."""
        found = self._under_way.pop(played.number, None)
        if found is None:  # it had been asked of another by then, or its step is made otherwise
            self.useless.append(played.key)
            return False
        asked, rank = found
        if not played.decisions:
            self._free.append(played.key)
        else:
            self._done[asked.step][asked.unit].append(played)
            self.delivered[rank] += played.decisions
            self._missing[asked.step] -= played.decisions
        if played.decisions < asked.decisions:
            self._open.appendleft((asked.step, asked.unit, asked.decisions - played.decisions))
        return True

    def lose(self, rank: int) -> None:
        """A rank has gone: what it had not delivered is to be played by others."""
        mine = [asked for asked, player in self._under_way.values() if player == rank]
        for asked in reversed(mine):
            del self._under_way[asked.number]
            self.useless.append(asked.key)
            self._open.appendleft((asked.step, asked.unit, asked.decisions))

    def whole(self, step: int) -> bool:
        """Whether all of a step has been delivered."""
        return not self._missing[step]

    def close(self, step: int) -> list[list[DeliveredShard]]:
        """The parts of a step that is whole: of each unit, in the order in which they follow one another. Actors take them in
        before anything that comes later under the same keys."""
        units = self._done.pop(step)
        del self._missing[step]
        self._free += [part.key for unit in units for part in unit]
        return units

    def give_up(self, step: int) -> None:
        """The step is made otherwise: nothing of it that these ranks have played, or play, is taken in."""
        for part in (part for unit in self._done.pop(step) for part in unit):
            self.useless.append(part.key)
            self.delivered[part.rank] -= part.decisions
        del self._missing[step]
        self._open = deque(found for found in self._open if found[0] != step)
        for asked in [asked for asked, _ in self._under_way.values() if asked.step == step]:
            del self._under_way[asked.number]
            self.useless.append(asked.key)

    def pop_useless(self) -> list[int]:
        """`useless`, which is empty afterwards."""
        found, self.useless = self.useless, []
        return found


def divisible(cfg: PlayingConfig) -> bool:
    """Whether the decisions of a slot in a step may be several ranks', one after the other: transitions of off-policy runs
    stand alone, and GAE values where an episode is cut."""
    ppo: Any = cfg if hasattr(cfg.algorithm, "adv_type") else None
    return ppo is None or (ppo.algorithm.adv_type.lower() == "gae" and ppo.env.train.auto_reset)


def cuts(cfg: PlayingConfig) -> int:
    """Parts in which the decisions of a step are played, one after the other."""
    ppo: Any = cfg
    return int(ppo.algorithm.rollout_parts) if hasattr(cfg.algorithm, "adv_type") else 1


def most_sharing(decisions: int, units: int) -> int:
    """Ranks for which there is something to do in steps that are shared."""
    return units * max(1, decisions // _LEAST)


@functools.cache
def shares(decisions: int, units: int, ranks: int) -> tuple[int, int, float]:
    """How a step is shared between the ranks that the run started with, which play a unit each, and ranks that joined, which
    play the rest of all units, at the same speed.

    Args:
        decisions: Of a step.
        units: Of a step.
        ranks: That have joined.

    Returns:
        The decisions that the former play; into how many pieces the rest of each unit is cut; and how long that takes, beside
        work that can be shared to the last bit.
    """
    ways = [(decisions, decisions, 1)]
    for rest in range(1, decisions):
        for pieces in range(1, min(rest, ranks) + 1):
            theirs = -(-units * pieces // ranks) * -(-rest // pieces)
            ways.append((max(decisions - rest, theirs), decisions - rest, pieces))
    took, own, pieces = min(ways, key=lambda way: (way[0], -way[1], way[2]))
    return own, pieces, took * (units + ranks) / (units * decisions)


def keys_of(units: Sequence[Sequence[DeliveredShard]]) -> list[list[int]]:
    """The parts' keys, by unit."""
    return [[part.key for part in unit] for unit in units]
