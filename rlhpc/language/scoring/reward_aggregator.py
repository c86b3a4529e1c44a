"""Reward aggregation: the weighted sum of reward terms from the reward pool and from scoring groups that rate answers."""

from __future__ import annotations

import abc
import collections
import queue
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rlhpc.language.config.run import LanguageConfig
from rlhpc.language.rewards import RewardPool, Sample, make_reward
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.scoring.groups import rating_names, scoring_groups, with_groups
from rlhpc.language.scoring.registry import make_scorer
from rlhpc.runtime.channel import Channel
from rlhpc.runtime.trace_recorder import record, recorder

if TYPE_CHECKING:
    import torch

    from rlhpc.language.scoring.registry import Rater

Ratings = list[tuple[Any, float | None]]


class RewardScorer(Protocol):
    """Interface of the rewards of a rollout."""

    def submit(self, sample_id: Hashable, sample: Sample, problem: Hashable, size: int) -> None:
        """Queues an answer to a problem with `size` answers; `poll` returns the answer's score with `sample_id`."""

    def poll(self) -> list[tuple[Any, Scored]]:
        """Returns the new scores as (sample id, score), in any order."""

    def drain(self) -> None:
        """Drops all pending answers."""

    def close(self) -> None:
        """Releases the resources of the rewards."""


class RatingRequests(abc.ABC):
    """Rating requests for a term of the reward. When all answers to a problem have arrived, they are rated together in the
    order of their ids, so that the ratings do not depend on the order of arrival.
    """

    def __init__(self) -> None:
        self._pending_samples: dict[Hashable, dict[Any, Sample]] = collections.defaultdict(dict)

    def submit(self, sample_id: Any, sample: Sample, problem: Hashable, size: int) -> None:
        """Adds an answer; requests the ratings when all `size` answers to the problem have arrived."""
        samples = self._pending_samples[problem]
        samples[sample_id] = sample
        if len(samples) == size:
            del self._pending_samples[problem]
            self._request_ratings(dict(sorted(samples.items())))

    @abc.abstractmethod
    def _request_ratings(self, samples: dict[Any, Sample]) -> None:
        """Requests the ratings of all answers to a problem."""

    @abc.abstractmethod
    def poll(self) -> Ratings:
        """Returns the new ratings as (sample id, rating); the rating is None if the answer could not be rated."""

    def drain(self) -> None:
        """Drops pending requests."""
        self._pending_samples.clear()

    def close(self) -> None:  # noqa: B027 (most start nothing)
        """Releases resources."""


class LocalRatingRequests(RatingRequests):
    """Rating requests to a rater in this process."""

    def __init__(self, rater: Rater) -> None:
        super().__init__()
        self.rater = rater
        self._ratings: Ratings = []

    def _request_ratings(self, samples: dict[Any, Sample]) -> None:
        self._ratings += zip(samples, self.rater.rate(list(samples.values())), strict=True)

    def poll(self) -> Ratings:
        """Implements `RatingRequests.poll`."""
        ratings, self._ratings = self._ratings, []
        return ratings

    def drain(self) -> None:
        """Implements `RatingRequests.drain`."""
        super().drain()
        self._ratings.clear()

    def close(self) -> None:
        """Implements `RatingRequests.close`."""
        self.rater.close()


class GroupRatingRequests(RatingRequests):
    """Rating requests to a scoring group, which are distributed over the group's ranks in rotation.

    Args:
        requests: Request channel of the group.
        receive_answer: Function that returns the next message with ratings, or raises `queue.Empty`.
        rank: Rank of this process.
        num_ranks: Number of ranks of the group.
    """

    def __init__(self, requests: Channel, receive_answer: Callable[[], Any], rank: int, num_ranks: int) -> None:
        super().__init__()
        self._requests, self._answers, self._rank, self._ranks = requests, receive_answer, rank, num_ranks
        self._num_requests = self._round = 0

    def _request_ratings(self, samples: dict[Any, Sample]) -> None:
        message = {
            "rollout": self._rank,
            "round": self._round,
            "ids": list(samples),
            "samples": list(samples.values()),
        }
        self._requests.entrust(message, key=str(self._num_requests % self._ranks))
        self._num_requests += 1

    def poll(self) -> Ratings:
        """Implements `RatingRequests.poll`."""
        ratings: Ratings = []
        while True:
            try:
                answer = self._answers()
            except queue.Empty:
                return ratings
            if answer["round"] == self._round:
                ratings += zip(answer["ids"], answer["values"], strict=True)

    def drain(self) -> None:
        """Implements `RatingRequests.drain`. Ratings of earlier requests are dropped on arrival."""
        super().drain()
        self._round += 1


def terms_of_pool(cfg: LanguageConfig) -> list[Any]:
    """Returns the terms of the reward that the reward pool computes."""
    rated_names = rating_names(cfg)
    return [term for term in cfg.reward.terms if term.name not in rated_names]


class RewardAggregator:
    """Weighted sum of all terms of the reward.

    Args:
        cfg: The configuration.
        requests_by_term: Rating requests by term; `connect` can set them later.
    """

    def __init__(self, cfg: LanguageConfig, requests_by_term: Mapping[str, RatingRequests] | None = None) -> None:
        self.failed_reward = cfg.reward.failed
        self._requests_by_term: Mapping[str, RatingRequests] = requests_by_term or {}
        self._group_terms = frozenset(rating_names(cfg))
        self._terms = [(term.name, term.weight) for term in cfg.reward.terms]
        pool_terms = terms_of_pool(cfg)
        self._pool: RewardPool | None = (
            make_reward(cfg.reward, pool_terms) if pool_terms or not self._group_terms else None
        )
        self._pool_scores: dict[Any, Scored] = {}
        #: Times at which the samples were submitted, for traces.
        self._submitted_ns: dict[Any, int] = {}
        self._group_ratings: dict[Any, dict[str, float | None]] = collections.defaultdict(dict)

    def connect(self, requests_by_term: Mapping[str, RatingRequests]) -> None:
        """Sets the rating requests by term, and drops pending answers."""
        self.drain()
        self._requests_by_term = requests_by_term

    def submit(self, sample_id: Hashable, sample: Sample, problem: Hashable, size: int) -> None:
        """Implements `RewardScorer.submit`."""
        if recorder.is_on:
            self._submitted_ns[sample_id] = time.monotonic_ns()
        if self._pool is None:
            self._pool_scores[sample_id] = Scored(0.0)
        else:
            self._pool.submit(sample_id, sample)
        for rating_requests in self._requests_by_term.values():
            rating_requests.submit(sample_id, sample, problem, size)

    def poll(self) -> list[tuple[Any, Scored]]:
        """Implements `RewardScorer.poll`."""
        scores = self._poll()
        for sample_id, _ in scores if self._submitted_ns else ():
            if (started_ns := self._submitted_ns.pop(sample_id, None)) is not None:
                record("reward", "judge", started_ns, time.monotonic_ns(), None, f"rewards/{sample_id}")
        return scores

    def _poll(self) -> list[tuple[Any, Scored]]:
        scores = [] if self._pool is None else self._pool.poll()
        if not self._group_terms:
            return scores
        self._pool_scores.update(scores)
        updated_ids = [sample_id for sample_id, _ in scores]
        for name, rating_requests in self._requests_by_term.items():
            for sample_id, answer_rating in rating_requests.poll():
                self._group_ratings[sample_id][name] = answer_rating
                updated_ids.append(sample_id)
        return [(sample_id, self._sum(sample_id)) for sample_id in self._complete_ids(updated_ids)]

    def _complete_ids(self, sample_ids: Iterable[Any]) -> list[Any]:
        return [
            sample_id
            for sample_id in dict.fromkeys(sample_ids)
            if sample_id in self._pool_scores and len(self._group_ratings[sample_id]) == len(self._group_terms)
        ]

    def _sum(self, sample_id: Any) -> Scored:
        """Returns the weighted sum of an answer's terms; `reward.failed` if a term failed or is missing."""
        score, ratings = self._pool_scores.pop(sample_id), self._group_ratings.pop(sample_id)
        term_values = {
            **score.terms,
            **{
                name: self.failed_reward if answer_rating is None else answer_rating
                for name, answer_rating in ratings.items()
            },
        }
        missing_names = [name for name, answer_rating in ratings.items() if answer_rating is None]
        # In the order of the configuration, because the first term decides whether an answer is right.
        ordered_terms = {
            name: term_values[name] for name in [*dict.fromkeys(n for n, _ in self._terms)] if name in term_values
        } | term_values
        if score.failed or missing_names:
            reasons_text = "; ".join(
                [*([score.reason] if score.reason else []), *(f"{name} did not rate it" for name in missing_names)]
            )
            return Scored(self.failed_reward, ordered_terms, True, reasons_text)
        return Scored(
            score.total + sum(weight * term_values[name] for name, weight in self._terms if name in self._group_terms),
            ordered_terms,
        )

    def waits_for(self) -> dict[str, int]:
        """Returns the number of answers that the reward pool has scored and a group has not rated, by group."""
        pending_counts = collections.Counter[str]()
        for sample_id in self._pool_scores:
            pending_counts.update(name for name in self._group_terms if name not in self._group_ratings[sample_id])
        return dict(pending_counts)

    def drain(self) -> None:
        """Implements `RewardScorer.drain`."""
        if self._pool is not None:
            self._pool.drain()
        for rating_requests in self._requests_by_term.values():
            rating_requests.drain()
        self._pool_scores.clear()
        self._group_ratings.clear()
        self._submitted_ns.clear()

    def close(self) -> None:
        """Implements `RewardScorer.close`."""
        for rating_requests in self._requests_by_term.values():
            rating_requests.close()
        if self._pool is not None:
            self._pool.close()


def make_local_aggregator(cfg: LanguageConfig, device: torch.device) -> RewardAggregator:
    """Builds the reward with all terms in this process, for evaluations. The models of different groups rate one after
    another.

    Raises:
        ConfigError: A reward or a model is not available.
    """
    rated_names = rating_names(cfg)
    if not rated_names:
        return RewardAggregator(cfg)
    group_config = with_groups(cfg)
    groups = scoring_groups(group_config)
    return RewardAggregator(
        cfg, {name: LocalRatingRequests(make_scorer(group_config, device, groups[name])) for name in rated_names}
    )
