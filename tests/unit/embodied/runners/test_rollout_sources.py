"""Which steps ranks that joined are given, and who evaluates what, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.embodied.rollout.slot_map import SlotMap
from rlhpc.embodied.runners.rollout_sources import JoinedEnvRanks, RolloutSources
from rlhpc.runtime.errors import ChannelError


class Group:
    """A group whose calls are written down."""

    name = "env"

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.only: tuple[int, ...] = ()

    def execute_on(self, *ranks: int) -> Group:
        self.only = ranks
        return self

    def play(self, asked: Any, random: bool) -> None:
        self.calls.append(("play", (self.only[0], asked.step, asked.unit, asked.version, random)))

    def send_weights_to(self, version: int, group: str, ranks: list[int], gone: list[int]) -> None:
        self.calls.append(("lend", (version, ranks, gone)))


def helped(units: int, ahead: int, ranks: list[int]) -> tuple[JoinedEnvRanks, Any, Any]:
    env, actor = Group(), Group()
    slots: Any = SlotMap(units * 2, num_env_ranks=units)
    groups: Any = (env, actor)
    made = JoinedEnvRanks(*groups, slots, 8, ahead, lambda step: step == 1, 5.0)  # type: ignore[call-arg]
    made.ranks = ranks
    return made, env, actor


@pytest.mark.parametrize(
    ("units", "ahead", "ranks", "takes"),
    [(1, 1, 0, False), (1, 1, 1, True), (2, 1, 1, True), (4, 1, 1, False), (4, 1, 2, True), (4, 3, 1, True)],
)
def test_too_few_are_given_nothing(units: int, ahead: int, ranks: int, takes: bool) -> None:
    assert helped(units, ahead, list(range(units, units + ranks)))[0].can_play_step() is takes


def test_a_step_is_shared_and_each_gets_weights_once() -> None:
    made, env, actor = helped(3, 2, [3, 4])
    made.add_step(1)
    made.assign(0)
    assert actor.calls == [("lend", (0, [3, 4], []))]
    assert env.calls == [
        ("play", (3, 1, 0, 0, True)), ("play", (4, 1, 1, 0, True)), ("play", (3, 1, 2, 0, True)),
    ]  # fmt: skip
    assert not made.can_play_step(), "they are at work"
    made.ranks.append(5)
    assert not made.can_play_step(), "one alone of three is not enough for a step of three units"


def test_what_is_left_by_one_that_goes_is_asked_of_others_with_the_weights_that_they_have() -> None:
    made, env, actor = helped(2, 1, [2, 3])
    made.add_step(7)
    made.assign(5)
    made.ranks.remove(2)
    made.tracker.lose(2)
    env.calls.clear()
    actor.calls.clear()
    made.assign(5)
    assert env.calls == [("play", (3, 7, 0, 5, False))] and not actor.calls, "it has these weights"
    made.assign(6)
    assert len(env.calls) == 1, "nothing is left"


class Evaluating:
    """A rollout group of which some ranks are lost when they are asked for the results of their part."""

    name = "rollout"

    def __init__(self, lost: set[int]) -> None:
        self.lost, self.calls = lost, list[tuple[int, int, int]]()

    def execute_on(self, rank: int) -> Evaluating:
        self.rank = rank
        return self

    def evaluate(self, part: int, parts: int) -> Any:
        self.calls.append((self.rank, part, parts))
        rows = [] if self.rank in self.lost else [[{"return": float(part)}]]
        return SimpleNamespace(wait=lambda timeout: rows)


def test_each_acting_rank_evaluates_a_part_and_another_plays_that_of_a_lost_one() -> None:
    sources: Any = RolloutSources.__new__(RolloutSources)
    sources._rollout_group, sources._timeout = Evaluating({2, 4}), 5.0
    sources.slots = SimpleNamespace(acting_ranks=[0, 2, 3, 4])
    wait = sources.evaluate()
    assert sources._rollout_group.calls == [(0, 0, 4), (2, 1, 4), (3, 2, 4), (4, 3, 4)], "all at once"
    assert wait() == [[{"return": float(part)}] for part in range(4)], "in the order of the parts"
    assert sources._rollout_group.calls[4:] == [(0, 1, 4), (0, 3, 4)]
    sources._rollout_group = Evaluating({0, 2, 3, 4})
    with pytest.raises(ChannelError, match="all ranks of rollout ended during an evaluation"):
        sources.evaluate()()
