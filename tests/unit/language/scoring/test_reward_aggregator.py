"""Reward aggregation: terms of the pool and of groups, in whatever order they arrive."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.language.rewards import Sample
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.scoring import reward_aggregator
from rlhpc.language.scoring.reward_aggregator import (
    GroupRatingRequests,
    LocalRatingRequests,
    RatingRequests,
    RewardAggregator,
)


class Pool:
    """A reward pool whose scores are set by the test."""

    def __init__(self) -> None:
        self.submitted: list[Any] = []
        self.scores: list[tuple[Any, Scored]] = []
        self.calls: list[str] = []

    def submit(self, sample_id: Hashable, sample: Sample) -> None:
        self.submitted.append(sample_id)

    def poll(self) -> list[tuple[Any, Scored]]:
        scores, self.scores = self.scores, []
        return scores

    def drain(self) -> None:
        self.calls.append("drain")

    def close(self) -> None:
        self.calls.append("close")


class Ratings(RatingRequests):
    """An asker whose ratings are set by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[Any]] = []
        self.ratings: list[tuple[Any, float | None]] = []

    def _request_ratings(self, samples: dict[Any, Sample]) -> None:
        self.asked.append(list(samples))

    def poll(self) -> list[tuple[Any, float | None]]:
        ratings, self.ratings = self.ratings, []
        return ratings


def sample(text: str = "x") -> Sample:
    """Returns a sample."""
    return Sample("question", text)


TERMS = [SimpleNamespace(name=name, weight=weight) for name, weight in (("exact", 1.0), ("judge", 0.5), ("model", 2.0))]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """Returns the reward pool of the tests; groups provide the terms `judge` and `model`."""
    pool = Pool()
    monkeypatch.setattr(reward_aggregator, "rating_names", lambda cfg: cfg.rated)
    monkeypatch.setattr(reward_aggregator, "make_reward", lambda section, terms: pool)
    return pool


def judging(rated: list[str], **askers: RatingRequests) -> RewardAggregator:
    """Returns the reward; `rated` are the terms of groups."""
    cfg: Any = SimpleNamespace(reward=SimpleNamespace(failed=-1.0, terms=TERMS), rated=rated)
    return RewardAggregator(cfg, askers)


def test_answers_to_a_problem_are_rated_together_in_the_order_of_their_ids() -> None:
    for order in itertools.permutations((1, 2, 3)):
        asker = Ratings()
        for number in order:
            asker.submit(number, sample(), "problem", 3)
        assert asker.asked == [[1, 2, 3]]
    asker = Ratings()
    asker.submit(1, sample(), "a", 2)
    asker.submit(2, sample(), "b", 1)
    assert asker.asked == [[2]]
    asker.drain()
    asker.submit(3, sample(), "a", 2)
    assert asker.asked == [[2]]  # what came before was forgotten


def test_a_rater_of_this_process() -> None:
    closed: list[bool] = []
    rater: Any = SimpleNamespace(
        rate=lambda samples: [float(len(one.response)) for one in samples], close=lambda: closed.append(True)
    )
    asker = LocalRatingRequests(rater)
    asker.submit(2, sample("abc"), "p", 2)
    asker.submit(1, sample("a"), "p", 2)
    assert asker.poll() == [(1, 1.0), (2, 3.0)] and asker.poll() == []
    asker.submit(3, sample(), "q", 1)
    asker.drain()
    assert asker.poll() == []
    asker.close()
    assert closed == [True]


def test_ranks_of_a_group_are_asked_in_rotation_and_old_ratings_are_dropped() -> None:
    sent: list[tuple[str, list[Any]]] = []
    answers: queue.Queue[Any] = queue.Queue()

    def put(message: dict[str, Any], key: str = "", **options: Any) -> None:
        sent.append((key, message["ids"]))
        answers.put({"round": message["round"], "ids": message["ids"], "values": [0.5] * len(message["ids"])})

    channel: Any = SimpleNamespace(put=put, entrust=put)
    asker = GroupRatingRequests(channel, answers.get_nowait, rank=0, num_ranks=2)
    for number in range(3):
        asker.submit(number, sample(), number, 1)
    assert sent == [("0", [0]), ("1", [1]), ("0", [2])]
    assert asker.poll() == [(0, 0.5), (1, 0.5), (2, 0.5)]
    asker.submit(3, sample(), 3, 1)
    asker.drain()
    asker.submit(4, sample(), 4, 1)
    assert asker.poll() == [(4, 0.5)]


def test_without_groups_the_score_is_the_pools(pool: Pool) -> None:
    reward = judging([])
    reward.submit(1, sample(), "p", 1)
    pool.scores = [(1, Scored(0.7, {"exact": 0.7}))]
    assert pool.submitted == [1] and reward.poll() == [(1, Scored(0.7, {"exact": 0.7}))]


@pytest.mark.parametrize("order", list(itertools.permutations(("pool", "judge", "model"))))
def test_a_score_is_complete_when_all_terms_have_come(pool: Pool, order: tuple[str, ...]) -> None:
    judge, model = Ratings(), Ratings()
    reward = judging(["judge", "model"], judge=judge, model=model)
    reward.submit(1, sample(), "p", 1)
    assert judge.asked == model.asked == [[1]]
    for number, source in enumerate(order):
        if source == "pool":
            pool.scores = [(1, Scored(1.0, {"exact": 1.0}))]
        else:
            {"judge": judge, "model": model}[source].ratings = [(1, 0.5)]
        scores = reward.poll()
        assert (scores != []) == (number == 2)
    [(number, score)] = scores
    assert number == 1 and score.total == 1.0 + 0.5 * 0.5 + 2.0 * 0.5 and not score.failed
    assert list(score.terms.items()) == [("exact", 1.0), ("judge", 0.5), ("model", 0.5)]  # in the configuration's order
    assert reward.poll() == []


def test_a_term_that_did_not_rate_fails_the_answer(pool: Pool) -> None:
    judge = Ratings()
    reward = judging(["judge"], judge=judge)
    pool.scores = [(1, Scored(-1.0, {"exact": -1.0}, True, "exact raised")), (2, Scored(1.0, {"exact": 1.0}))]
    judge.ratings = [(1, None), (2, None)]
    scores = dict(reward.poll())
    assert scores[1] == Scored(-1.0, {"exact": -1.0, "judge": -1.0}, True, "exact raised; judge did not rate it")
    assert scores[2] == Scored(-1.0, {"exact": 1.0, "judge": -1.0}, True, "judge did not rate it")


def test_what_is_waited_for_is_counted_by_group(pool: Pool) -> None:
    judge, model = Ratings(), Ratings()
    reward = judging(["judge", "model"], judge=judge, model=model)
    pool.scores = [(1, Scored(1.0)), (2, Scored(1.0))]
    judge.ratings = [(1, 0.5), (3, 0.5)]
    assert reward.poll() == [] and reward.waits_for() == {"judge": 1, "model": 2}
    reward.drain()
    assert reward.waits_for() == {} and pool.calls == ["drain"]
    model.ratings = [(1, 0.5)]
    assert reward.poll() == []


def test_without_a_term_of_the_pool_there_is_no_pool(pool: Pool) -> None:
    judge = Ratings()
    reward = judging(["exact", "judge", "model"], judge=judge, exact=(exact := Ratings()), model=(model := Ratings()))
    reward.submit(1, sample(), "p", 1)
    judge.ratings, exact.ratings, model.ratings = [(1, 1.0)], [(1, 1.0)], [(1, 0.0)]
    [(_, score)] = reward.poll()
    assert pool.submitted == [] and score.total == 1.5
    reward.close()
    assert pool.calls == []


def test_other_askers_drop_what_is_under_way(pool: Pool) -> None:
    first, second = Ratings(), Ratings()
    reward = judging(["judge"], judge=first)
    reward.submit(1, sample(), "p", 2)
    reward.connect({"judge": second})
    reward.submit(2, sample(), "p", 1)
    assert first.asked == [] and second.asked == [[2]]
