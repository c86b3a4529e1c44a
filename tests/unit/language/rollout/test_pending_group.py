"""Life of a prompt group: each transition, random orders of events, and the drawing in the documentation."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.language.agents.episodes import Episode, Outcome
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.engines.base import Completion
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.rollout.pending_group import (
    TRANSITIONS,
    Action,
    Deliver,
    GroupState,
    PartialGroup,
    PendingGroup,
    PendingGroups,
    RequestScore,
    Requeue,
    ResumeSampling,
    ScoredGroup,
    StartSampling,
)

ARCHITECTURE = Path(__file__).parents[4] / "docs" / "explanation" / "architecture.md"
SIZE = 2


def draw_group(step: int, position: int, attempt: int) -> PendingGroup:
    return PendingGroup(step, position, attempt, Prompt(0, ()), (1, 2))


def episode(request: int, *, later: bool = False, reason: str = "stop") -> Episode:
    """An episode of three tokens that are trained on."""
    tokens = {"token_ids": [5, 6, 7], "logprobs": [0.0] * 3, "versions": [0] * 3, "loss_mask": [True] * 3}
    return Episode(request, (1, 2), finish_reason=reason, outcome=Outcome(has_delayed_reward=later), **tokens)  # type: ignore[arg-type]


@dataclass
class Rules:
    """Rules that replace the prompts, and drop the ready groups, whose answers are listed."""

    refilled: list[tuple[int, int, int]] = field(default_factory=list)
    too_old: list[tuple[int, int, int]] = field(default_factory=list)

    def has_too_few_members(self, slot: PendingGroup) -> bool:
        return slot.group_id in self.too_old

    def score_group(self, slot: PendingGroup, *, may_refill: bool) -> ScoredGroup | None:
        if may_refill and slot.group_id in self.refilled:
            return None
        return ScoredGroup(slot.episodes, [*slot.scores.values()], np.ones(SIZE, np.float32), [True] * SIZE, True, "")


def pending(rules: Rules | None = None, *, max_refills: int = 2, max_delayed: int = 1) -> PendingGroups:
    return PendingGroups(SIZE, max_refills, max_delayed, draw_group, rules or Rules())


def started(actions: list[Action]) -> tuple[PendingGroup, tuple[int, ...]]:
    """The group and the requests of the only action, which starts its sampling."""
    (action,) = actions
    assert isinstance(action, StartSampling | ResumeSampling)
    assert action.group.state is GroupState.SAMPLING
    return action.group, action.requests


def finish(groups: PendingGroups, requests: tuple[int, ...]) -> list[Action]:
    """Ends and scores all members."""
    actions = [action for request in requests for action in groups.on_episode(episode(request))]
    assert all(isinstance(action, RequestScore) for action in actions)
    return [action for request in requests for action in groups.on_score(request, Scored(1.0))]


def test_a_group_is_sampled_scored_and_delivered() -> None:
    groups = pending()
    group, requests = started(groups.on_prompt(3, 1))
    assert (group.step_position, requests, len(groups)) == ((3, 1), (1, 2), 1)
    first = groups.on_episode(episode(2))
    assert first == [RequestScore(group, group.episodes[1])] and group.state is GroupState.SAMPLING
    assert groups.on_score(2, Scored(0.5)) == [], "a score may come while another member is sampled"
    groups.on_episode(episode(1))
    assert group.state is GroupState.SCORING
    (delivered,) = groups.on_score(1, Scored(1.0))
    assert isinstance(delivered, Deliver) and delivered.group is group and group.state is GroupState.DELIVERED
    assert len(groups) == 0 and {m: scored.total for m, scored in group.scores.items()} == {1: 0.5, 0: 1.0}


def test_a_refilled_position_gets_another_prompt_and_the_tokens_are_counted() -> None:
    groups = pending(Rules(refilled=[(3, 1, 0), (3, 1, 1), (3, 1, 2)]))
    first, requests = started(groups.on_prompt(3, 1))
    second, requests = started(finish(groups, requests))
    assert first.state is GroupState.REFILLED
    assert (second.step_position, second.attempt, second.num_refills, second.dropped_tokens) == (
        (3, 1),
        1,
        1,
        {"refilled": 6},
    )
    third, requests = started(finish(groups, requests))
    assert (third.attempt, third.num_refills, third.dropped_tokens) == (2, 2, {"refilled": 12})
    (delivered,) = finish(groups, requests)
    assert isinstance(delivered, Deliver), "the number of refills is limited"
    assert started(groups.on_prompt(3, 1))[0].attempt == 0, "the attempts at the position start over"


def test_a_group_that_waits_for_rewards_steps_aside_and_takes_the_next_position() -> None:
    groups = pending()
    group, (one, two) = started(groups.on_prompt(1, 0))
    late = episode(one, later=True)
    assert groups.on_episode(late) == [] and groups.num_awaited_rewards == 1
    score, other = groups.on_episode(episode(two))
    assert isinstance(score, RequestScore) and isinstance(other, StartSampling)
    assert group.state is GroupState.DELAYED and (other.group.step_position, other.group.attempt) == ((1, 0), 1)
    groups.on_score(two, Scored(1.0))
    paid = episode(one)
    assert groups.on_delayed_reward(late, paid) == [RequestScore(group, paid)] and group.episodes[0] is paid
    assert groups.on_delayed_reward(late, paid) == [], "no group waits for it any more"
    assert groups.on_score(one, Scored(1.0)) == [] and group.state is GroupState.READY
    (delivered,) = groups.on_prompt(2, 3)
    assert isinstance(delivered, Deliver) and delivered.group is group
    assert group.step_position == (2, 3) and group.group_id == (1, 0, 0) and len(groups) == 1


def test_at_the_limit_a_group_keeps_its_position_until_another_is_ready() -> None:
    groups = pending(max_delayed=1)
    aside, requests = started(groups.on_prompt(1, 0))
    late = {request: episode(request, later=True) for request in requests}
    groups.on_episode(late[1])
    _, requests = started(groups.on_episode(late[2]))
    waiting = [episode(request, later=True) for request in requests]
    assert [groups.on_episode(one) for one in waiting] == [[], []], "no further group may be set aside"
    for request in (1, 2):
        groups.on_delayed_reward(late[request], episode(request))
    groups.on_score(1, Scored(1.0))
    (delivered,) = groups.on_score(2, Scored(1.0))
    assert isinstance(delivered, Deliver) and delivered.group is aside, "they change places"
    assert len(groups) == 0 and groups.num_awaited_rewards == 2


def test_a_ready_group_that_is_too_old_is_dropped_and_counted() -> None:
    groups = pending(Rules(too_old=[(1, 0, 0)]))
    old, (one, two) = started(groups.on_prompt(1, 0))
    late = episode(two, later=True)
    groups.on_episode(episode(one))
    groups.on_episode(late)
    groups.on_delayed_reward(late, episode(two))
    groups.on_score(one, Scored(1.0))
    groups.on_score(two, Scored(1.0))
    fresh, _ = started(groups.on_prompt(5, 0))
    assert old.state is GroupState.REFILLED
    assert (fresh.step_position, fresh.num_refills, fresh.dropped_tokens) == ((5, 0), 0, {"refilled": 6})


def test_who_leaves_requeues_its_groups_and_another_rank_resumes_them() -> None:
    groups = pending()
    sampling, (one, two) = started(groups.on_prompt(2, 0))
    scoring, requests = started(groups.on_prompt(2, 1))
    groups.on_episode(episode(one))
    for request in requests:
        groups.on_episode(episode(request))
    actions = groups.on_leave({two: episode(two, reason="abort")})
    assert [type(action) for action in actions] == [Requeue, Requeue] and len(groups) == 0
    assert {sampling.state, scoring.state} == {GroupState.REQUEUED}
    assert isinstance(actions[0], Requeue)
    partial = actions[0].partial
    assert [answer.finish_reason for answer in partial.answers] == ["stop", "abort"]
    other = pending()
    resumed, requests = started(other.on_partial(2, partial))
    assert resumed.step_position == (2, 0) and [other.num_resumed_tokens(request) for request in requests] == [3, 3]
    (delivered,) = finish(other, requests)
    assert isinstance(delivered, Deliver) and delivered.group is resumed


def test_a_resumed_group_that_is_refilled_continues_the_attempts() -> None:
    groups = pending(Rules(refilled=[(1, 0, 1)]))
    partial = PartialGroup(0, 1, [Completion(0, [], [], [], "abort"), Completion(1, [5], [0.0], [0], "abort")])
    group, requests = started(groups.on_partial(1, partial))
    assert (group.attempt, group.num_refills, group.resumed_tokens) == (1, 1, {1: 1})
    other, _ = started(finish(groups, requests))
    assert (other.attempt, other.num_refills) == (2, 2)


@pytest.mark.parametrize("state", GroupState)
def test_only_the_transitions_of_the_table_are_possible(state: GroupState) -> None:
    for following in GroupState:
        group = draw_group(1, 0, 0)
        group.state = state
        if following in TRANSITIONS[state]:
            group.move_to(following)
            assert group.state is following
        else:
            with pytest.raises(RuntimeError, match=f"a group that is {state} cannot be {following}"):
                group.move_to(following)


class RandomRules(Rules):
    """Rules that decide at random."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def has_too_few_members(self, slot: PendingGroup) -> bool:
        return self._random.random() < 0.3

    def score_group(self, slot: PendingGroup, *, may_refill: bool) -> ScoredGroup | None:
        return None if may_refill and self._random.random() < 0.3 else super().score_group(slot, may_refill=may_refill)


class Rank:
    """A rollout rank whose engine, judges and clients work in random order, and which may be told to leave."""

    def __init__(
        self, random: Random, queue: list[tuple[int, int | PartialGroup]], delivered: Counter[tuple[int, int]]
    ) -> None:
        self._random = random
        self._queue = queue
        self._delivered = delivered
        self.groups = PendingGroups(SIZE, 2, random.randrange(3), draw_group, RandomRules(random))
        self.engine: list[int] = []
        self.judges: list[int] = []
        self.unpaid: list[Episode] = []
        self.transitions: list[PendingGroup] = []

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartSampling(_, requests) | ResumeSampling(_, requests):
                    self.engine += requests
                case RequestScore(_, ended):
                    self.judges.append(ended.id)
                case Deliver(group, _):
                    self._delivered[group.step_position] += 1
                case Requeue(group, partial):
                    self._queue.insert(0, (group.step, partial))

    def events(self) -> list[str]:
        """What may happen next."""
        can = {"lease": self._queue, "end": self.engine, "score": self.judges, "pay": self.unpaid}
        return [name for name, items in can.items() if items]

    def happens(self, event: str) -> None:
        pick = self._random.randrange
        if event == "lease":
            step, item = self._queue.pop(0)
            partial = isinstance(item, PartialGroup)
            self.carry_out(self.groups.on_partial(step, item) if partial else self.groups.on_prompt(step, item))
        elif event == "end":
            ended = episode(self.engine.pop(pick(len(self.engine))), later=self._random.random() < 0.3)
            self.unpaid += [ended] if ended.has_delayed_reward else []
            self.carry_out(self.groups.on_episode(ended))
        elif event == "score":
            self.carry_out(self.groups.on_score(self.judges.pop(pick(len(self.judges))), Scored(1.0)))
        else:
            before = self.unpaid.pop(pick(len(self.unpaid)))
            self.carry_out(self.groups.on_delayed_reward(before, episode(before.id)))

    def leave(self) -> None:
        self.carry_out(self.groups.on_leave({request: episode(request, reason="abort") for request in self.engine}))


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12), st.integers(0, 2))
def test_each_position_is_delivered_exactly_once(random: Random, prompts: int, leaves: int) -> None:
    delivered: Counter[tuple[int, int]] = Counter()
    queue: list[tuple[int, int | PartialGroup]] = [(1 + number // 4, number % 4) for number in range(prompts)]
    positions = {(step, position) for step, position in queue}
    for _ in range(leaves):
        rank = Rank(random, queue, delivered)
        for _ in range(random.randrange(40)):
            if events := rank.events():
                rank.happens(random.choice(events))
        rank.leave()
        assert len(rank.groups) == 0
    rank = Rank(random, queue, delivered)
    while events := rank.events():
        rank.happens(random.choice(events))
    assert delivered == dict.fromkeys(positions, 1)
    assert len(rank.groups) == rank.groups.num_awaited_rewards == 0


def test_the_drawing_in_the_documentation_has_the_transitions_of_the_table() -> None:
    text = ARCHITECTURE.read_text()
    (drawing,) = re.findall(r"```mermaid\nstateDiagram-v2\n(.*?)```", text, re.DOTALL)
    drawn = re.findall(r"^ *(\S+) --> (\S+?):? .*$|^ *(\S+) --> (\S+)$", drawing, re.MULTILINE)
    arrows = {(one or three, two or four) for one, two, three, four in drawn}
    expected = {(str(state), str(following)) for state, states in TRANSITIONS.items() for following in states}
    expected |= {("[*]", "queued"), *((str(state), "[*]") for state, states in TRANSITIONS.items() if not states)}
    assert arrows == expected
    assert {*TRANSITIONS} == {*GroupState}
