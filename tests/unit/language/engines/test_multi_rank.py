"""Engine group: the other ranks repeat the leader's calls, and a rank that samples other tokens stops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from rlhpc.language.engines.base import Completion, Request, RolloutBackend, SamplingParams
from rlhpc.language.engines.multi_rank import Commands, EngineDivergenceError, FollowerEngine, Leader


class Engine:
    """Engine that finishes a request a step, with the token of its constructor, and records its calls."""

    capacity, can_drop, can_score, can_compute = 4, True, True, True
    context, chunk, choices = 100, 32, 6

    def __init__(self, token: int = 7) -> None:
        self.token, self.version = token, 3
        self.calls: list[Any] = []
        self.ids: list[int] = []

    def _completion(self, number: int, reason: str = "stop") -> Completion:
        return Completion(number, [self.token], [0.0], [self.version], reason)

    def add(self, requests: Iterable[Request]) -> None:
        self.ids += [request.id for request in requests]

    def step(self) -> list[Completion]:
        self.calls.append("step")
        return [self._completion(self.ids.pop(0))] if self.ids else []

    def unfinished(self) -> int:
        return len(self.ids)

    def abort(self) -> list[Completion]:
        aborted = [self._completion(number, "abort") for number in self.ids]
        self.ids.clear()
        return aborted

    def drop(self, ids: Iterable[int]) -> None:
        self.ids = [number for number in self.ids if number not in [*ids]]

    def sampled_tokens(self, ids: Iterable[int]) -> dict[int, list[int]]:
        return {number: [self.token] for number in ids}

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._completion(request.id) for request in requests]

    def score(self, token_ids: Sequence[int], policy: int = 0) -> list[float]:
        self.calls.append(("score", list(token_ids), policy))
        return [0.5] * (len(token_ids) - 1)

    def update_weights(self, version: int, named_tensors: Iterable[Any]) -> None:
        self.version = version

    def offload(self) -> None:
        self.calls.append("offload")

    def reload(self) -> None:
        self.calls.append("reload")

    def close(self) -> None:
        self.calls.append("close")


class Link:
    """Link of the ranks in this process."""

    rank, size, ident = 1, 2, "engine"

    def __init__(self) -> None:
        self.messages: list[Commands] = []
        self.failures: list[BaseException] = []

    def broadcast(self, commands: Commands) -> None:
        self.messages.append(commands)

    def receive(self) -> Commands:
        return self.messages.pop(0)

    def handle_failure(self, error: BaseException) -> None:
        self.failures.append(error)


def request_of(number: int) -> Request:
    return Request(number, (1, 2), SamplingParams())


def lead(link: Any, engine: Any) -> Leader:
    """Runs each kind of call on the leader, and releases the followers."""
    leader = Leader(engine, link)
    leader.add([request_of(1), request_of(2), request_of(3)])
    assert [completion.id for completion in leader.step()] == [1]
    leader.drop([2])
    assert leader.unfinished() == 1 and leader.sampled_tokens([3]) == {3: [7]}
    assert [completion.finish_reason for completion in leader.abort()] == ["abort"]
    assert [completion.id for completion in leader.generate([request_of(4)])] == [4]
    assert leader.score([1, 2, 3], 1) == [0.5, 0.5]
    leader.offload()
    leader.reload()
    leader.update_weights(9, [])
    assert leader.version == 9
    leader.end()
    return leader


#: Features of updates, which each rank's engine takes by itself, and what a class says of all its engines.
OF_THE_RANK = {"version", "takes_partial_updates", "takes_shards", "forkable", "preload", "awaiting"}


def test_the_leader_has_the_features_of_its_engine() -> None:
    engine = Engine()
    leader = Leader(engine, Link())  # type: ignore[arg-type]
    features = RolloutBackend.__annotations__.keys() - OF_THE_RANK
    assert {name: getattr(leader, name) for name in features} == {name: getattr(engine, name) for name in features}


def test_a_follower_repeats_the_calls_of_the_leader() -> None:
    link, engine, follower_engine, updates = Link(), Engine(), Engine(), list[int]()
    leader = lead(link, engine)
    FollowerEngine(follower_engine, link, lambda: updates.append(9)).follow()  # type: ignore[arg-type]
    assert follower_engine.calls == engine.calls == ["step", ("score", [1, 2, 3], 1), "offload", "reload"]
    assert follower_engine.ids == engine.ids == [] and updates == [9]
    leader.close()
    assert engine.calls[-1] == "close" and link.messages == [] and link.failures == []


def test_a_follower_that_samples_other_tokens_stops() -> None:
    link = Link()
    lead(link, Engine())
    with pytest.raises(EngineDivergenceError, match="rank 1 of engine has drawn other tokens"):
        FollowerEngine(Engine(token=8), link, list).follow()  # type: ignore[arg-type]
    assert link.failures == []


def test_a_failed_step_is_reported_to_the_link_before_it_is_raised() -> None:
    class Failing(Engine):
        def step(self) -> list[Completion]:
            raise RuntimeError("connection closed by peer")

    link = Link()
    leader = Leader(Failing(), link)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="connection closed"):
        leader.step()
    with pytest.raises(RuntimeError, match="connection closed"):
        FollowerEngine(Failing(), link, list).follow()  # type: ignore[arg-type]
    assert [str(error) for error in link.failures] == ["connection closed by peer"] * 2
