"""Engine of several policies: which engine samples, and which weights go to which."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

from rlhpc.language.engines.base import Completion, Request, SamplingParams
from rlhpc.language.engines.common import WeightUpdateError
from rlhpc.language.engines.multi_policy import MultiPolicyEngine


class Engine:
    """An engine that answers with the number of its policy, and records its weights."""

    def __init__(self, name: str) -> None:
        self.name, self.version, self.closed, self.offloaded = name, 0, False, False
        self.capacity, self.context, self.vocabulary = {"a": (8, 100, 50), "b": (4, 200, 50)}[name]
        self.requests: list[Request] = []
        self.weights: dict[str, Any] = {}

    def add(self, requests: Sequence[Request]) -> None:
        self.requests += requests

    def _done(self, requests: Iterable[Request], reason: str = "stop") -> list[Completion]:
        return [Completion(one.id, [ord(self.name)], [0.0], [self.version], reason) for one in requests]

    def step(self) -> list[Completion]:
        return self._done([self.requests.pop(0)])

    def unfinished(self) -> int:
        return len(self.requests)

    def abort(self) -> list[Completion]:
        done, self.requests = self._done(self.requests, "abort"), []
        return done

    def drop(self, ids: Collection[int]) -> None:
        self.requests = [one for one in self.requests if one.id not in ids]

    def sampled_tokens(self, ids: Collection[int]) -> dict[int, list[int]]:
        return {one.id: [ord(self.name)] for one in self.requests if one.id in ids}

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self._done(requests)

    def update_weights(self, version: int, named: Iterable[tuple[str, Any]], *, complete: bool) -> None:
        assert not complete
        self.weights |= dict(named)
        self.version = version

    def needs(self) -> set[str]:
        return {"shared", "adapter"}

    def held(self, name: str) -> Any:
        return self.weights.get(name)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        return [float(ord(self.name))] * len(token_ids)

    def offload(self) -> None:
        self.offloaded = True

    def reload(self) -> None:
        self.offloaded = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def built() -> list[Engine]:
    """Returns the list of the engines that were built."""
    return []


@pytest.fixture
def engine(built: list[Engine]) -> MultiPolicyEngine:
    """Returns an engine of two policies."""

    def build(name: str) -> Engine:
        built.append(Engine(name))
        return built[-1]

    return MultiPolicyEngine(("a", "b"), build)


def request(number: int, policy: int) -> Request:
    """Returns a request for a policy."""
    return Request(number, (1, 2), SamplingParams(policy=policy), number)


REQUESTS = [request(1, 1), request(2, 0), request(3, 1)]


def test_limits_are_those_that_hold_for_all(engine: MultiPolicyEngine) -> None:
    assert (engine.capacity, engine.context, engine.vocabulary) == (4, 100, 50)


def test_each_request_goes_to_the_engine_of_its_policy(engine: MultiPolicyEngine, built: list[Engine]) -> None:
    engine.add(REQUESTS)
    assert [[one.id for one in each.requests] for each in built] == [[2], [1, 3]]
    assert engine.unfinished() == 3
    assert engine.sampled_tokens([1, 2]) == {1: [ord("b")], 2: [ord("a")]}
    assert [done.id for done in engine.step()] == [2, 1]  # one of each engine
    engine.add([request(4, 0)])
    engine.drop([4])
    assert [(done.id, done.finish_reason) for done in engine.abort()] == [(3, "abort")]
    assert engine.unfinished() == 0 and engine.step() == []


def test_completions_come_in_the_order_of_the_requests(engine: MultiPolicyEngine) -> None:
    done = engine.generate(REQUESTS)
    assert [(one.id, one.token_ids) for one in done] == [(1, [ord("b")]), (2, [ord("a")]), (3, [ord("b")])]
    assert engine.score([5, 6], 1) == [ord("b")] * 2


def test_shared_weights_go_to_all_and_others_to_their_policy(engine: MultiPolicyEngine, built: list[Engine]) -> None:
    update: Any = [("a/adapter", 1), ("shared", 2), ("b/adapter", 3)]
    engine.update_weights(7, update)
    assert [each.weights for each in built] == [{"adapter": 1, "shared": 2}, {"adapter": 3, "shared": 2}]
    assert engine.version == 7 and [each.version for each in built] == [7, 7]
    assert engine.held("shared") == 2 and engine.held("b/adapter") == 3


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ([("shared", 1), ("a/adapter", 1)], "left out adapter of policy b"),
        ([("shared", 1), ("c/adapter", 1)], "is of policy 'c'; there are: a, b"),
        ([("shared", 1), ("shared", 1)], "brought 'shared' twice"),
        ([("a/adapter", 1), ("a/adapter", 1)], "brought 'a/adapter' twice"),
    ],
)
def test_after_an_update_that_failed_nothing_is_sampled_until_the_next(
    engine: MultiPolicyEngine, update: Any, message: str
) -> None:
    engine.add(REQUESTS)
    with pytest.raises(WeightUpdateError, match=message):
        engine.update_weights(1, update)
    with pytest.raises(
        WeightUpdateError, match="the update to version 1 of the policies' weights did not arrive whole"
    ):
        engine.step()
    complete: Any = [("shared", 1), ("a/adapter", 1), ("b/adapter", 1)]
    engine.update_weights(2, complete)
    assert engine.step()


def test_a_part_of_an_update_may_leave_weights_out(engine: MultiPolicyEngine) -> None:
    part: Any = [("a/adapter", 1)]
    engine.update_weights(1, part, complete=False)
    assert engine.held("a/adapter") == 1


def test_all_engines_are_offloaded_reloaded_and_closed(engine: MultiPolicyEngine, built: list[Engine]) -> None:
    engine.offload()
    assert all(each.offloaded for each in built)
    engine.reload()
    assert not any(each.offloaded for each in built)
    engine.close()
    assert all(each.closed for each in built)


def test_engines_that_were_built_are_closed_where_one_cannot_be() -> None:
    built: list[Engine] = []

    def build(name: str) -> Engine:
        if built:
            raise MemoryError
        built.append(Engine(name))
        return built[-1]

    with pytest.raises(MemoryError):
        MultiPolicyEngine(("a", "b"), build)
    assert built[0].closed
