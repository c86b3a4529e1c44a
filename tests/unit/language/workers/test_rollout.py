"""Loop of a rollout rank: events of engine and judges become actions, which it carries out, until its queue is empty."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlhpc.language.agents.episodes import Episode
from rlhpc.language.algorithms.registry import make_algorithm
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.data.prompts import Prompt, PromptSampler
from rlhpc.language.engines.base import Request, SamplingParams
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.rollout.group_builder import GroupBuilder
from rlhpc.language.rollout.pending_group import PartialGroup
from rlhpc.language.rollout.prompt_queue import Delivery
from rlhpc.language.training.prompt_dispatch import PromptMap
from rlhpc.language.workers import rollout
from rlhpc.language.workers.rollout import LanguageRolloutWorker
from rlhpc.runtime.channel import LeasedItem, QueueEmpty
from rlhpc.runtime.errors import DeadlineExceeded

PROMPTS, SIZE = 3, 2


class FakeChannel:
    """A channel in this process."""

    def __init__(self) -> None:
        self.items: dict[str, deque[Any]] = {}
        self.acknowledged = 0

    def put(self, item: Any, key: str = "") -> None:
        self.items.setdefault(key, deque()).append(item)

    entrust = put

    def take_nowait(self, key: str) -> LeasedItem:
        if not self.items.get(key):
            raise QueueEmpty
        return LeasedItem(self.items[key].popleft(), 0)

    def done(self, lease: LeasedItem) -> None:
        self.acknowledged += 1


class FakeEngine:
    """An engine with an agent's episodes: each step ends the oldest request with two tokens."""

    def __init__(self) -> None:
        self.requests: deque[Request] = deque()
        self.resumed: list[int] = []

    def add(self, requests: list[Request], prompt: Prompt) -> None:
        self.requests.extend(requests)

    def resume(self, request: Request, answer: Any, prompt: Prompt) -> None:
        self.resumed.append(len(answer.token_ids))
        self.requests.append(request)

    def unfinished(self) -> int:
        return len(self.requests)

    def step(self) -> list[Episode]:
        return [answer(self.requests.popleft().id)]

    def delayed_rewards(self) -> list[tuple[Episode, Episode]]:
        return []

    def abort(self) -> list[Episode]:
        stopped = [answer(request.id, "abort") for request in self.requests]
        self.requests.clear()
        return stopped


class FakeJudges:
    """Judges that score an answer at the next poll."""

    def __init__(self, reward: Callable[[int], float]) -> None:
        self.reward = reward
        self.submitted: list[int] = []

    def submit(self, request: int, *_: Any) -> None:
        self.submitted.append(request)

    def poll(self) -> list[tuple[int, Scored]]:
        ready, self.submitted = self.submitted, []
        return [(request, Scored(self.reward(request), {"math": self.reward(request)})) for request in ready]

    def drain(self) -> None:
        self.submitted.clear()

    def waits_for(self) -> dict[str, int]:
        return {"judge": 2}


class FakeEngineRank:
    """Leader of an engine of one rank."""

    follows = False

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        yield


class FakeReceiver:
    """Weights of version 0, and no later ones."""

    version = -1

    def take(self) -> bool:
        fresh, self.version = self.version < 0, 0
        return fresh

    def forget_version(self) -> None:
        self.version = -1

    def pop_transfers(self) -> dict[str, float]:
        return {"weights/versions": 1.0}

    def pop_sync_s(self) -> float:
        return 0.0


class FakeEncoder:
    def encode(self, prompt: Prompt) -> tuple[list[int], None]:
        return [1, 2], None

    def prompt_images(self, prompt: Prompt, at: None) -> None:
        return None


def answer(request: int, reason: str = "stop") -> Episode:
    return Episode(request, (1, 2), None, [5, 6], [-0.5, -0.5], [0, 0], [True] * 2, [0, 0], finish_reason=reason)


class RolloutWorker(LanguageRolloutWorker):
    """A worker whose surroundings are fakes."""

    group_name, rank, log = "rollout", 0, logging.getLogger("rollout")  # type: ignore[misc,assignment]
    told_to_leave = False  # type: ignore[assignment]

    def __init__(self, cfg: GrpoConfig, reward: Callable[[int], float]) -> None:
        self.cfg = cfg
        self.on_leave: Callable[[], None] | None = None
        self.prompts = PromptMap(PROMPTS, SIZE, 1, 1, scoring={"teacher": 1})
        self.last_step = 9
        self.requeues_on_leave = cfg.algorithm.max_staleness > 0
        self.engine_rank = FakeEngineRank()  # type: ignore[assignment]
        self.receiver = FakeReceiver()  # type: ignore[assignment]
        self.generation = self.backend = FakeEngine()  # type: ignore[assignment]
        self.reward_scorer = FakeJudges(reward)  # type: ignore[assignment]
        self.dataset = [Prompt(number, ()) for number in range(8)]  # type: ignore[assignment]
        self.sampler = PromptSampler(8, PROMPTS, 3)
        self.encoder, self.tokenizer = FakeEncoder(), None  # type: ignore[assignment]
        self.sampling = SamplingParams(max_new_tokens=8)
        self.group_builder = GroupBuilder(cfg, make_algorithm(cfg), 0, "rollout-0")
        self._capacity, self._max_staleness = 4, cfg.algorithm.max_staleness
        self._groups, self._work, self._delivery_channel = FakeChannel(), FakeChannel(), FakeChannel()  # type: ignore[assignment]
        self._scoring = {"teacher": FakeChannel()}  # type: ignore[dict-item]

    def before_leaving(self, act: Callable[[], None] | None) -> None:  # type: ignore[override]
        self.on_leave = act


def worker(
    monkeypatch: pytest.MonkeyPatch, reward: Callable[[int], float] = lambda request: float(request % 2), **changes: int
) -> Any:
    monkeypatch.setattr(rollout, "sample_of", lambda prompt, episode, tokenizer, *, has_finished: episode)
    cfg = GrpoConfig()
    cfg.algorithm.group_size, cfg.runner.seed, cfg.runner.val_check_interval = SIZE, 3, 0
    for name, value in changes.items():
        setattr(cfg.algorithm, name, value)
    made: Any = RolloutWorker(cfg, reward)
    made.begin(0)
    for position in range(PROMPTS):
        made._work.put(position, key="1")
    return made


def test_all_prompts_of_a_step_are_delivered_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = worker(monkeypatch)
    stats = rank.generate(1, 1)
    delivered: list[Delivery] = [*rank._delivery_channel.items[""]]
    assert sorted(delivery.position for delivery in delivered) == [0, 1, 2] and rank._work.acknowledged == PROMPTS
    assert stats["tokens"] == 2 * SIZE * PROMPTS and delivered[0].metrics["samples"] == SIZE
    groups = [*rank._groups.items["0"]]
    assert [group["position"] for group in groups] == [delivery.position for delivery in delivered]
    bare = [*rank._scoring["teacher"].items["0"]]
    assert [group["position"] for group in bare] == [0, 1, 2] and not bare[0]["columns"]
    assert not rank.generation.requests and rank.on_leave is None


def test_a_group_without_information_is_replaced_by_another_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = worker(monkeypatch, lambda request: float(request > 8 and request % 2), filter_groups=True, max_refills=3)
    rank.generate(1, 1)
    facts = [delivery.metrics for delivery in rank._delivery_channel.items[""]]
    assert len(facts) == PROMPTS and sum(fact["refills"] for fact in facts) > 0
    refilled = sum(fact.get("untrained/refilled", 0.0) for fact in facts)
    assert refilled == sum(fact["refills"] for fact in facts) * 2 * SIZE


def test_who_is_told_to_leave_requeues_its_prompts_and_another_resumes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = worker(monkeypatch, max_staleness=1)
    step = rank.generation.step

    def leaves() -> list[Episode]:
        rank.told_to_leave = True
        ended: list[Episode] = step()
        return ended

    rank.generation.step = leaves
    rank.generate(1, 1)
    requeued = [item for item in rank._work.items["1"] if isinstance(item, PartialGroup)]
    assert [partial.position for partial in requeued] == [0, 1] and rank._delivery_channel.items == {}
    assert [each.finish_reason for each in requeued[0].answers] == ["stop", "abort"]
    other = worker(monkeypatch, max_staleness=1)
    other._work = rank._work
    other.begin(0)
    other.generate(1, 1)
    assert other.generation.resumed == [2, 2, 2, 2]
    assert sorted(delivery.position for delivery in other._delivery_channel.items[""]) == [0, 1, 2]
    assert sum(delivery.metrics.get("continued_tokens", 0.0) for delivery in other._delivery_channel.items[""]) == 8


def test_a_step_that_takes_too_long_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = worker(monkeypatch)
    rank.cfg.runner.step_timeout_s = 0.2
    rank.reward_scorer.poll = list
    with pytest.raises(DeadlineExceeded, match=r"step 1: 3 groups of rollout-0 .* it waits for 2 ratings of judge"):
        rank.generate(1, 1)
