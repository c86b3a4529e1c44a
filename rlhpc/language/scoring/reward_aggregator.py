"""The whole reward of an answer: what the judges beside this process say of it, and what groups do that rate answers."""

from __future__ import annotations

import abc
import collections
import queue
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rlhpc.language.config.run import LanguageConfig
from rlhpc.language.rewards import RewardPool, Sample, make_reward
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.scoring.groups import rating_names, scoring_groups, with_groups
from rlhpc.language.scoring.registry import make_scorer
from rlhpc.runtime.channel import Channel

if TYPE_CHECKING:
    import torch

    from rlhpc.language.scoring.registry import Rater

Ratings = list[tuple[Any, float | None]]


class Judges(Protocol):
    """Says of answers what they are worth."""

    def submit(self, sample_id: Hashable, sample: Sample, problem: Hashable, size: int) -> None:
        """Queues an answer, one of `size` to a problem; `poll` gives its verdict back under `sample_id`."""

    def poll(self) -> list[tuple[Any, Scored]]:
        """Verdicts since the last call, in any order."""

    def drain(self) -> None:
        """Forgets all answers under way."""

    def close(self) -> None:
        """Ends what it started."""


class Asker(abc.ABC):
    """Asks for one term of the reward. Answers to one problem are rated together, once all are there, in the order of their
    ids: so what they get does not depend on which came when, not in the last digit either."""

    def __init__(self) -> None:
        self._open: dict[Hashable, dict[Any, Sample]] = collections.defaultdict(dict)

    def submit(self, sample_id: Any, sample: Sample, problem: Hashable, size: int) -> None:
        """Asks for the rating of an answer, once all `size` answers to its problem are there."""
        found = self._open[problem]
        found[sample_id] = sample
        if len(found) == size:
            del self._open[problem]
            self._ask(dict(sorted(found.items())))

    @abc.abstractmethod
    def _ask(self, samples: dict[Any, Sample]) -> None:
        """Asks for the ratings of all answers to a problem."""

    @abc.abstractmethod
    def poll(self) -> Ratings:
        """What has been rated; None for an answer that could not be."""

    def drain(self) -> None:
        """Forgets what was asked."""
        self._open.clear()

    def close(self) -> None:  # noqa: B027 (most start nothing)
        """Ends what it started."""


class AskingHere(Asker):
    """A rater in this process."""

    def __init__(self, rater: Rater) -> None:
        super().__init__()
        self.rater = rater
        self._rated: Ratings = []

    def _ask(self, samples: dict[Any, Sample]) -> None:
        self._rated += zip(samples, self.rater.rate(list(samples.values())), strict=True)

    def poll(self) -> Ratings:
        """See `Asker.poll`."""
        rated, self._rated = self._rated, []
        return rated

    def drain(self) -> None:
        """See `Asker.drain`."""
        super().drain()
        self._rated.clear()

    def close(self) -> None:
        """See `Asker.close`."""
        self.rater.close()


class AskingGroup(Asker):
    """A group of raters, whose ranks are asked in turn.

    Args:
        asked: The group's channel.
        answers: Gives what they have said, one message at a time; raises `queue.Empty`.
        rank: Of the process that asks.
        ranks: Of the group.
    """

    def __init__(self, asked: Channel, answers: Callable[[], Any], rank: int, ranks: int) -> None:
        super().__init__()
        self._asked, self._answers, self._rank, self._ranks = asked, answers, rank, ranks
        self._count = self._round = 0

    def _ask(self, samples: dict[Any, Sample]) -> None:
        message = {
            "rollout": self._rank, "round": self._round, "ids": list(samples), "samples": list(samples.values()),
        }  # fmt: skip
        self._asked.entrust(message, key=str(self._count % self._ranks))
        self._count += 1

    def poll(self) -> Ratings:
        """See `Asker.poll`."""
        found: Ratings = []
        while True:
            try:
                answer = self._answers()
            except queue.Empty:
                return found
            if answer["round"] == self._round:
                found += zip(answer["ids"], answer["values"], strict=True)

    def drain(self) -> None:
        """See `Asker.drain`: answers to what was asked before are dropped when they come."""
        super().drain()
        self._round += 1


def own_terms(cfg: LanguageConfig) -> list[Any]:
    """Returns the terms of the reward that no group rates."""
    rating = rating_names(cfg)
    return [term for term in cfg.reward.terms if term.name not in rating]


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
        terms = own_terms(cfg)
        self._pool: RewardPool | None = make_reward(cfg.reward, terms) if terms or not self._asked else None
        self._own: dict[Any, Scored] = {}
        self._given: dict[Any, dict[str, float | None]] = collections.defaultdict(dict)

    def connect(self, askers: Mapping[str, Asker]) -> None:
        """Who is asked from now on; what was under way is forgotten."""
        self.drain()
        self._askers = askers

    def submit(self, sample_id: Hashable, sample: Sample, problem: Hashable, size: int) -> None:
        """See `Judges.submit`."""
        if self._pool is None:
            self._own[sample_id] = Scored(0.0)
        else:
            self._pool.submit(sample_id, sample)
        for asker in self._askers.values():
            asker.submit(sample_id, sample, problem, size)

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
