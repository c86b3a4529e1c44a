"""Parts of steps that ranks which joined play: each is taken in once, whoever comes, goes or says something late."""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlhpc.embodied.rollout.slot_map import SlotMap
from rlhpc.embodied.rollout.work_sharing import DeliveredShard, RolloutShard, ShardTracker, keys_of, shares
from rlhpc.embodied.workers.env import entropy_of, unit_map
from rlhpc.embodied.workers.off_policy import IncompleteRows


def said(asked: RolloutShard | None, rank: int, decisions: int) -> DeliveredShard:
    assert asked is not None
    return DeliveredShard(asked.number, asked.key, rank, decisions, 0, {})


def test_a_step_is_played_in_parts() -> None:
    ledger = ShardTracker(num_units=2, num_decisions=8)
    ledger.add_step(5)
    one, two = ledger.assign(3, 4), ledger.assign(4, 4)
    assert one is not None and two is not None and ledger.assign(3, 4) is None
    assert (one.step, one.unit, one.num_decisions, one.version, two.unit) == (5, 0, 8, 4, 1)
    assert ledger.accept(said(two, 4, 8)) and not ledger.is_complete(5)
    assert ledger.accept(said(one, 3, 3)), "it was told to leave"
    rest = ledger.assign(4, 4)
    assert rest is not None and (rest.unit, rest.num_decisions) == (0, 5)
    assert ledger.accept(said(rest, 4, 5)) and ledger.is_complete(5)
    assert keys_of(ledger.close(5)) == [[one.key, rest.key], [two.key]]
    assert ledger.num_delivered == {3: 3, 4: 13} and not ledger.steps and not ledger.pop_useless_keys()


def test_what_a_lost_rank_says_late_does_not_count() -> None:
    ledger = ShardTracker(num_units=1, num_decisions=4)
    ledger.add_step(1)
    first = ledger.assign(2, 0)
    ledger.lose(2)
    second = ledger.assign(3, 0)
    assert first is not None and second is not None
    assert not ledger.accept(said(first, 2, 4))
    assert ledger.accept(said(second, 3, 4))
    assert not ledger.accept(said(second, 3, 4)), "nor what is said twice"
    assert keys_of(ledger.close(1)) == [[second.key]] and ledger.num_delivered == {3: 4}
    assert set(ledger.pop_useless_keys()) >= {first.key} and not ledger.pop_useless_keys()


def test_a_step_that_is_given_up_leaves_nothing() -> None:
    ledger = ShardTracker(num_units=3, num_decisions=4)
    ledger.add_step(1)
    ledger.add_step(2)
    asked = [ledger.assign(2, 0) for _ in range(4)]
    numbers = [one.number for one in asked if one is not None]
    ledger.accept(said(asked[0], 2, 4))
    ledger.give_up(1)
    assert (
        sorted(ledger.pop_useless_keys()) == [one.key for one in asked[:3] if one is not None]
        and ledger.num_delivered[2] == 0
        and ledger.steps == [2]
    )
    assert not ledger.accept(said(asked[1], 2, 4)) and ledger.accept(said(asked[3], 2, 4))
    ledger.clear()
    assert not ledger.steps and not ledger.has_unassigned
    ledger.add_step(1)
    again = ledger.assign(2, 0)
    assert again is not None and again.number > max(numbers), "no number is used again"


@pytest.mark.parametrize("seed", range(20))
def test_at_random_every_decision_is_there_once(seed: int) -> None:
    """Ranks join, leave early, are lost before and after they have said something, and say it late."""
    draw = random.Random(seed)
    units, decisions = draw.randint(1, 4), draw.randint(1, 9)
    ledger, ranks, new = ShardTracker(units, decisions), [10], 11
    taken: dict[int, int] = {}
    actors: dict[int, deque[int]] = {}
    step, made, late = 1, 0, list[DeliveredShard]()
    ledger.add_step(step)
    while made < 30:
        event = draw.random()
        if event < 0.15:
            ranks.append(new)
            new += 1
        rank = draw.choice(ranks)
        asked = ledger.assign(rank, 0)
        if asked is not None:
            count = asked.num_decisions
            if event > 0.8:
                count = draw.randint(0, asked.num_decisions)
            actors.setdefault(asked.key, deque()).append(asked.number)
            if event > 0.6 and len(ranks) > 1:
                ranks.remove(rank)
            if 0.7 < event < 0.8 and rank not in ranks:
                late.append(said(asked, rank, count))
                ledger.lose(rank)
            elif ledger.accept(said(asked, rank, count)) and count:
                taken[asked.number] = count
            elif not count:  # nothing is sent
                actors[asked.key].pop()
            if rank not in ranks:
                ledger.lose(rank)
        if late and draw.random() < 0.3:
            assert not ledger.accept(late.pop())
        if ledger.is_complete(step):
            parts = ledger.close(step)
            assert [sum(part.num_decisions for part in unit) for unit in parts] == [decisions] * units
            for part in (part for unit in parts for part in unit):
                assert taken.pop(part.number) == part.num_decisions
                assert actors[part.key].popleft() == part.number, "what lies first under its key is this part"
            for key in ledger.pop_useless_keys():
                actors[key].clear()
            made, step = made + 1, step + 1
            ledger.add_step(step)
    assert sum(ledger.num_delivered.values()) == made * units * decisions + sum(taken.values())


@pytest.mark.parametrize("decisions", [1, 2, 10, 50, 256])
def test_a_shared_step_takes_as_little_as_it_can(decisions: int) -> None:
    for units, ranks in itertools.product((1, 2, 4, 8), (1, 2, 3, 8)):
        own, pieces, takes = shares(decisions, units, ranks)
        assert 1 <= own <= decisions and 1 <= pieces <= max(1, decisions - own)
        theirs = -(-units * pieces // ranks) * -(-(decisions - own) // pieces) if own < decisions else 0
        assert takes == pytest.approx(max(own, theirs) * (units + ranks) / (units * decisions)) and takes >= 1 - 1e-9
        if decisions >= 50:
            assert takes < 1.25
    assert shares(10, 1, 1) == (5, 1, 1.0) and shares(1, 1, 1)[0] == 1


def test_the_rest_of_a_shared_step_is_cut_into_pieces() -> None:
    ledger = ShardTracker(num_units=1, num_decisions=10)
    ledger.add_step(1, 7, 2)
    one, two = ledger.assign(3, 0), ledger.assign(4, 0)
    assert (
        one is not None
        and two is not None
        and (one.num_decisions, two.num_decisions) == (3, 4)
        and not ledger.has_unassigned
    )
    assert ledger.accept(said(two, 4, 4)) and not ledger.is_complete(1)
    assert ledger.accept(said(one, 3, 3)) and ledger.is_complete(1)


LAYOUTS = [(12, 1, 2, 3), (12, 3, 2, 2), (24, 2, 4, 1), (24, 2, 1, 4), (8, 1, 8, 2), (8, 1, 3, 2), (12, 2, 5, 3)]


@pytest.mark.parametrize(("envs", "stages", "ranks", "actors"), LAYOUTS)
def test_units_are_the_slots_of_a_step(envs: int, stages: int, ranks: int, actors: int) -> None:
    slots = SlotMap(envs, num_stages=stages, num_env_ranks=ranks, num_actor_ranks=actors)
    for actor in range(actors):
        mine = []
        for unit in slots.units_of(actor):
            part = slots.unit_for(unit, actor)
            mine += slots.unit_share(unit)[part]
            assert len(slots.unit_share(unit)) <= slots.unit
        assert mine == list(slots.actor_share(actor))
    keys = [slots.shard_key(number, actor) for number in range(5) for actor in range(actors)]
    assert len({*keys}) == len(keys) and [int(key) % actors for key in keys] == [*range(actors)] * 5


def test_a_rank_that_joins_has_slots_and_seeds_of_its_own() -> None:
    slots = SlotMap(12, num_stages=2, num_env_ranks=2, num_rollout_ranks=1, group_size=3)
    shares = [unit_map(slots, rank).env_share(0, rank) for rank in (2, 3, 4)]
    assert shares == [range(12, 18), range(18, 24), range(24, 30)]
    assert unit_map(slots, 3).rollouts_of(0, 3) == [(0, range(18, 24))]
    seeds = {tuple(entropy_of(seed, rank, begun)) for seed in (1, 2) for rank in (2, 3) for begun in (0, 7)}
    assert len(seeds) == 8


class Ranks:
    """Ranks of a group that gather at the same time, each in a thread."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=30)
        self._objects: list[object] = [None] * count

    def of(self, rank: int) -> Callable[[object], list[object]]:
        def gather(obj: object) -> list[object]:
            self._objects[rank] = obj
            self._barrier.wait()
            gathered = list(self._objects)
            self._barrier.wait()
            return gathered

        return gather


def test_transitions_of_incomplete_steps_fill_rows_and_none_is_lost() -> None:
    """Two ranks, of four slots each, of which one env rank's five are missing; rows agree, what is left waits, and one rank
    alone makes the same rows."""
    rng = np.random.default_rng(1)
    tables, ranks, alone = (
        [IncompleteRows(8, range(4)), IncompleteRows(8, range(4, 8))],
        Ranks(2),
        IncompleteRows(8, range(8)),
    )
    expected, found = list[int](), list[int]()
    for number in range(6):
        obs, there = np.arange(24).reshape(8, 3) + 100 * number, rng.random((8, 3)) < 0.6
        expected += obs[there].tolist()
        with ThreadPoolExecutor(2) as pool:
            calls = [
                pool.submit(tables[rank].regroup, {"obs": obs[part]}, there[part], ranks.of(rank))
                for rank, part in enumerate((slice(0, 4), slice(4, 8)))
            ]
            rows = [call.result()["obs"] for call in calls]
        one = alone.regroup({"obs": obs}, there, lambda rows: [rows])
        np.testing.assert_array_equal(np.concatenate(rows), one["obs"])
        found += [int(value) for row in rows for value in row.ravel()]
    assert len({*found}) == len(found) and {*found} <= {*expected} and len(expected) - len(found) < 8
