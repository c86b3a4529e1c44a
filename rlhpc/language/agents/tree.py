"""What an episode's calls of the model were, as a tree: a turn continues another where it begins with that one's very tokens.

Each leaf is a sample: what the model reads in one pass. A turn that several leaves share is trained in one of them. So every
token that the model has drawn is in exactly one loss mask, or is left out for a reason that is counted.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhpc.language.agents.episodes import Episode
from rlhpc.language.data.pictures import Seen

if TYPE_CHECKING:
    import numpy as np


@dataclass
class Turn:
    """One call of the model.

    Attributes:
        parent: The turn whose tokens it begins with; None begins a tree of its own.
        context: What the model read beyond those: of a first turn, the whole prompt.
        token_ids, logprobs, versions: What it drew.
        experts: `Completion.experts`.
        finish_reason: `stop` or `length`.
        keys: Digests of the messages that it was asked with, and of its reply; empty where it was asked with tokens.
        received: Whether the reply has reached who asked.
        role: Who speaks, where several do.
        reward: What this turn was worth by itself, where the agent says so.
        names: Ids that its clients know it by.
        feedback: What somebody has said of it when it was done (`Feedback`); None before.
        seen: All that it was shown, by it and by the turns before.
    """

    parent: int | None
    context: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    keys: tuple[str, ...] = ()
    received: bool = False
    role: int = 0
    reward: float = 0.0
    experts: np.ndarray | None = None
    names: list[str] = field(default_factory=list)
    feedback: float | None = None
    seen: Seen | None = None


@dataclass
class Tree:
    """The turns of an episode, in the order in which they ended.

    Attributes:
        turns: All of them.
    """

    turns: list[Turn] = field(default_factory=list)

    def ids(self, turn: int) -> list[int]:
        """All tokens that a turn read and drew."""
        return [token for at in self.path(turn) for part in self._parts(at) for token in part]

    def path(self, turn: int) -> list[int]:
        """The turns from the first one to this."""
        found = [turn]
        while (parent := self.turns[found[-1]].parent) is not None:
            found.append(parent)
        return found[::-1]

    def continued_by(self, ids: Sequence[int], role: int = 0, seen: Seen | None = None) -> int | None:
        """The longest turn of a role whose tokens these begin with, and which was shown what these show up to there; of equal
        ones the last. None if there is none."""
        ids, ends, best = list(ids), dict[int, int](), None
        for at, turn in enumerate(self.turns):  # a parent comes before its children
            begin = 0 if turn.parent is None else ends.get(turn.parent)
            if begin is None or turn.role != role:
                continue
            for part in self._parts(at):
                if ids[begin : begin + len(part)] != part:
                    break
                begin += len(part)
            else:
                ends[at] = begin
                same = _places(turn.seen) == tuple(place for place in _places(seen) if place[0] < begin)
                if same and begin < len(ids) and (best is None or begin >= ends[best]):
                    best = at
        return best

    def _parts(self, at: int) -> tuple[list[int], list[int]]:
        return self.turns[at].context, self.turns[at].token_ids

    def samples(self, number: int) -> list[Episode]:
        """A sample for each leaf, in an order that does not depend on which call ended first. What the model drew and nobody
        received is not trained on, nor are there samples of such turns alone.

        Args:
            number: The episode's.
        """
        kept = set[int]()
        for at, turn in enumerate(self.turns):
            if turn.received:
                kept.update(self.path(at))
        leaves = kept - {self.turns[at].parent for at in kept}
        paths = sorted(
            (self.turns[leaf].role, self.ids(leaf), _places(self.turns[leaf].seen), self.path(leaf)) for leaf in leaves
        )
        trained, found, spoken = set[int](), list[Episode](), collections.Counter[int]()
        numbers = [spoken.update([turn.role]) or spoken[turn.role] - 1 for turn in self.turns]
        for *_, path in paths:
            found.append(self._sample(number, path, trained, numbers))
            trained.update(path)
        return found

    def _sample(self, number: int, path: Sequence[int], trained: set[int], numbers: Sequence[int]) -> Episode:
        first = self.turns[path[0]]
        sample = Episode(
            number,
            tuple(first.context),
            turns=len(path),
            finish_reason=self.turns[path[-1]].finish_reason,
            role=first.role,
            experts=self.turns[path[-1]].experts,
            seen=self.turns[path[-1]].seen,
        )
        for depth, at in enumerate(path):
            turn, between = self.turns[at], 0
            if depth:
                between = len(turn.context)
                sample.token_ids += turn.context
                sample.logprobs += [0.0] * between
                sample.versions += [sample.versions[-1]] * between
                sample.loss_mask += [False] * between
                sample.rewards += [0.0] * between
            drawn = len(turn.token_ids)
            sample.token_ids += turn.token_ids
            sample.logprobs += turn.logprobs
            sample.versions += turn.versions
            own = turn.received and at not in trained
            sample.loss_mask += [own] * drawn
            sample.rewards += [0.0] * drawn
            if own and drawn:
                sample.rewards[-1] = turn.reward
            sample.turn_ids += [numbers[at]] * (between + drawn)
        return sample

    def counts(self) -> collections.Counter[str]:
        """Turns and samples' beginnings, the tokens drawn, and those that nobody received."""
        found = collections.Counter[str]()
        for turn in self.turns:
            found["turns"] += 1
            found["branches"] += turn.parent is None
            found["drawn"] += len(turn.token_ids)
            found["not_received"] += 0 if turn.received else len(turn.token_ids)
        return found


def _places(seen: Seen | None) -> tuple[tuple[int, bytes], ...]:
    return () if seen is None else seen.places
