"""The whole reward of an answer: what the judges beside this process say of it, and what groups do that rate answers."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rlhpc.language.config import LanguageConfig
from rlhpc.language.rewards import RewardPool, Sample, make_reward
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.scoring.groups import rating_names, scoring_groups, with_groups
from rlhpc.language.scoring.registry import make_scorer
from rlhpc.runtime.channel import Channel, QueueEmpty

if TYPE_CHECKING:
    import torch

    from rlhpc.language.scoring.base import Rater

Ratings = list[tuple[Any, float | None]]


class Judges(Protocol):
    """Says of answers what they are worth."""

    def submit(self, sample_id: Hashable, sample: Sample) -> None:
        """Queues an answer; `poll` gives its verdict back under `sample_id`."""

    def poll(self) -> list[tuple[Any, Scored]]:
        """Verdicts since the last call, in any order."""

    def drain(self) -> None:
        """Forgets all answers under way."""

    def close(self) -> None:
        """Ends what it started."""


class Asker(Protocol):
    """Asks for one term of the reward."""

    def submit(self, sample_id: Any, sample: Sample) -> None:
        """Asks."""

    def poll(self) -> Ratings:
        """What has been answered; None for an answer that could not be rated."""

    def drain(self) -> None:
        """Forgets what was asked."""

    def close(self) -> None:
        """Ends what it started."""


class AskingHere:
    """A rater in this process."""

    def __init__(self, rater: Rater) -> None:
        self.rater = rater
        self._waiting: dict[Any, Sample] = {}

    def submit(self, sample_id: Any, sample: Sample) -> None:
        """See `Asker.submit`."""
        self._waiting[sample_id] = sample

    def poll(self) -> Ratings:
        """See `Asker.poll`: rates all that wait."""
        if not self._waiting:
            return []
        waiting, self._waiting = self._waiting, {}
        return list(zip(waiting, self.rater.rate(list(waiting.values())), strict=True))

    def drain(self) -> None:
        """See `Asker.drain`."""
        self._waiting.clear()

    def close(self) -> None:
        """See `Asker.close`."""
        self.rater.close()


class AskingGroup:
    """A group of raters, whose ranks are asked in turn.

    Args:
        asked: The group's channel.
        answers: The channel for what they say.
        rank: Of the process that asks, which keeps that key of `answers`.
        ranks: Of the group.
    """

    def __init__(self, asked: Channel, answers: Channel, rank: int, ranks: int) -> None:
        self._asked, self._answers, self._rank, self._ranks = asked, answers, rank, ranks
        self._count = self._round = 0

    def submit(self, sample_id: Any, sample: Sample) -> None:
        """See `Asker.submit`."""
        message = {"rollout": self._rank, "round": self._round, "id": sample_id, "sample": sample}
        self._asked.put(message, key=str(self._count % self._ranks))
        self._count += 1

    def poll(self) -> Ratings:
        """See `Asker.poll`."""
        found: Ratings = []
        while True:
            try:
                answer = self._answers.get_nowait(key=str(self._rank))
            except QueueEmpty:
                return found
            if answer["round"] == self._round:
                found += zip(answer["ids"], answer["values"], strict=True)

    def drain(self) -> None:
        """See `Asker.drain`: answers to what was asked before are dropped when they come."""
        self._round += 1

    def end(self, phase: str) -> None:
        """Tells all ranks that this process asks nothing more in a phase of the run."""
        for rank in range(self._ranks):
            self._asked.put({"rollout": self._rank, "end": phase}, key=str(rank))

    def close(self) -> None:
        """See `Asker.close`: groups end by themselves."""


class Judging:
    """The sum of all terms of the reward.

    Args:
        cfg: The configuration.
        askers: Term → who is asked for it. May be set later: see `connect`.
    """

    def __init__(self, cfg: LanguageConfig, askers: Mapping[str, Asker] | None = None) -> None:
        self.failed = cfg.reward.failed
        self._askers: Mapping[str, Asker] = askers or {}
        self._asked = frozenset(rating_names(cfg))
        self._terms = [(term.name, term.weight) for term in cfg.reward.terms]
        own = [term for term in cfg.reward.terms if term.name not in self._asked]
        self._pool: RewardPool | None = make_reward(cfg.reward, own) if own or not self._asked else None
        self._own: dict[Any, Scored] = {}
        self._given: dict[Any, dict[str, float | None]] = collections.defaultdict(dict)

    def connect(self, askers: Mapping[str, Asker]) -> None:
        """Who is asked from now on; what was under way is forgotten."""
        self.drain()
        self._askers = askers

    def submit(self, sample_id: Hashable, sample: Sample) -> None:
        """See `Judges.submit`."""
        if self._pool is None:
            self._own[sample_id] = Scored(0.0)
        else:
            self._pool.submit(sample_id, sample)
        for asker in self._askers.values():
            asker.submit(sample_id, sample)

    def poll(self) -> list[tuple[Any, Scored]]:
        """See `Judges.poll`."""
        own = [] if self._pool is None else self._pool.poll()
        if not self._asked:
            return own
        self._own.update(own)
        touched = [sample_id for sample_id, _ in own]
        for name, asker in self._askers.items():
            for sample_id, value in asker.poll():
                self._given[sample_id][name] = value
                touched.append(sample_id)
        return [(sample_id, self._sum(sample_id)) for sample_id in self._whole(touched)]

    def _whole(self, touched: Iterable[Any]) -> list[Any]:
        return [one for one in dict.fromkeys(touched) if one in self._own and len(self._given[one]) == len(self._asked)]

    def _sum(self, sample_id: Any) -> Scored:
        own, given = self._own.pop(sample_id), self._given.pop(sample_id)
        values = {**own.terms, **{name: self.failed if value is None else value for name, value in given.items()}}
        missing = [name for name, value in given.items() if value is None]
        # By the order of the configuration: the first term says whether an answer is right.
        terms = {name: values[name] for name in [*dict.fromkeys(n for n, _ in self._terms)] if name in values} | values
        if own.failed or missing:
            reason = "; ".join(
                [*([own.reason] if own.reason else []), *(f"{name} did not rate it" for name in missing)]
            )
            return Scored(self.failed, terms, True, reason)
        return Scored(own.total + sum(w * values[name] for name, w in self._terms if name in self._asked), terms)

    def waits_for(self) -> dict[str, int]:
        """Group → answers that it has not rated, of those that nothing else is missing of."""
        found = collections.Counter[str]()
        for one in self._own:
            found.update(name for name in self._asked if name not in self._given[one])
        return dict(found)

    def drain(self) -> None:
        """See `Judges.drain`."""
        if self._pool is not None:
            self._pool.drain()
        for asker in self._askers.values():
            asker.drain()
        self._own.clear()
        self._given.clear()

    def close(self) -> None:
        """See `Judges.close`."""
        for asker in self._askers.values():
            asker.close()
        if self._pool is not None:
            self._pool.close()


def judging_here(cfg: LanguageConfig, device: torch.device) -> Judging:
    """All terms in this process, for evaluations: what groups rate in training is rated here, one model after the other.

    Raises:
        ConfigError: A reward or a model cannot be had.
    """
    names = rating_names(cfg)
    if not names:
        return Judging(cfg)
    given = with_groups(cfg)
    groups = scoring_groups(given)
    return Judging(cfg, {name: AskingHere(make_scorer(given, device, groups[name])) for name in names})
