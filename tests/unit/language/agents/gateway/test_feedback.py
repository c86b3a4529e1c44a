"""Delayed rewards of completions: those that come early, twice, late, or for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rlhpc.language.agents.gateway import feedback as feedback_module
from rlhpc.language.agents.gateway.feedback import Feedback, awaited_turns
from rlhpc.language.agents.turn_tree import AgentTurn, RequestError


def turn(*names: str, received: bool = True) -> AgentTurn:
    """Returns a turn whose completion has these ids."""
    return AgentTurn(None, [1], [2], [-0.5], [0], "stop", received=received, names=list(names))


def on_loop(test: Callable[[], Awaitable[None]]) -> None:
    """Runs a test on an event loop."""

    async def run() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(run())


def test_an_episode_is_done_when_its_last_reward_has_come() -> None:
    async def test() -> None:
        turns = {"a": turn("a", "a2"), "b": turn("b")}
        feedback, done = Feedback(list), list[float | None]()
        feedback.expect(turns, 60, done.append)
        feedback.take({"id": "a2", "reward": 0.5})  # any id of the completion
        assert done == [] and turns["a"].reward == turns["a"].feedback == 0.5
        feedback.take({"id": "b", "reward": 1})
        assert done == [1.5]

    on_loop(test)


def test_a_reward_may_come_before_the_episode_ends() -> None:
    async def test() -> None:
        open_turns = [turn("a"), turn("b")]
        feedback, done = Feedback(lambda: open_turns), list[float | None]()
        feedback.take({"id": "a", "reward": 2})
        feedback.expect({"a": open_turns[0], "b": open_turns[1]}, 60, done.append)
        assert done == []
        feedback.take({"id": "b", "reward": 1})
        assert done == [3.0]
        feedback.expect({"a": open_turns[0]}, 60, done.append)
        assert done == [3.0, 2.0]  # all were there

    on_loop(test)


def test_a_repeated_reward_counts_once_and_another_one_is_refused() -> None:
    async def test() -> None:
        turns = {"a": turn("a"), "b": turn("b")}
        feedback, done = Feedback(list), list[float | None]()
        feedback.expect(turns, 60, done.append)
        for _ in range(2):
            feedback.take({"id": "a", "reward": 1})
        with pytest.raises(RequestError, match="a has its reward already: 1"):
            feedback.take({"id": "a", "reward": 2})
        feedback.take({"id": "b", "reward": 1})
        assert done == [2.0]

    on_loop(test)


def test_nobody_awaits_a_reward() -> None:
    with pytest.raises(RequestError, match="no completion x awaits a reward here"):
        Feedback(lambda: [turn("a")]).take({"id": "x", "reward": 1})


def test_what_does_not_come_in_time_is_given_up() -> None:
    async def test() -> None:
        feedback, done = Feedback(list), asyncio.get_running_loop().create_future()
        feedback.expect({"a": turn("a")}, 0.01, done.set_result)
        assert await done is None
        with pytest.raises(RequestError):
            feedback.take({"id": "a", "reward": 1})

    on_loop(test)


def test_what_is_forgotten_is_never_reported() -> None:
    async def test() -> None:
        feedback, done = Feedback(list), list[float | None]()
        feedback.expect({"a": turn("a")}, 0.01, done.append)
        feedback.forget()
        await asyncio.sleep(0.05)
        assert done == []

    on_loop(test)


def test_only_so_many_rewards_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback_module, "_MAX_REWARDS", 2)
    turns = [turn(name) for name in "abc"]
    feedback = Feedback(lambda: turns)
    for name in "abc":
        feedback.take({"id": name, "reward": 1})
    feedback.take({"id": "a", "reward": 5})  # the first is forgotten
    with pytest.raises(RequestError, match="has its reward already"):
        feedback.take({"id": "c", "reward": 5})


def test_only_the_scorers_key_gives_rewards() -> None:
    feedback = Feedback(list)
    feedback.check(feedback.key)
    for key in ("", "rk-of-an-episode", "\udcff"):
        with pytest.raises(RequestError, match="this key gives no rewards"):
            feedback.check(key)


def test_the_turns_that_wait_are_named_by_their_completions() -> None:
    turns = [turn("a", "a2"), turn("b"), turn("lost", received=False), turn()]
    assert awaited_turns(turns, True) == {"b": turns[1]}  # the last that was received
    assert awaited_turns(turns, ["a2", "b"]) == {"a2": turns[0], "b": turns[1]}
    assert awaited_turns(turns, False) == {}
    for later in (["lost"], ["x"]):
        with pytest.raises(RequestError, match="`later` is about a completion that nobody received"):
            awaited_turns(turns, later)
    with pytest.raises(RequestError):
        awaited_turns([], True)
