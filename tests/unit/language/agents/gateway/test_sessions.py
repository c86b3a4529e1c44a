"""Sessions of a gateway: limits, retries, seeds, and keys of clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rlhpc.language.agents.gateway import sessions
from rlhpc.language.agents.gateway.sessions import (
    EpisodeLimits,
    GatewaySession,
    SessionKeys,
    StoredResponse,
    key_in,
    stop_reason,
)
from rlhpc.language.agents.turn_tree import OVER, RequestError
from rlhpc.language.engines.base import Completion, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=8)


def session(turns: int = 10, tokens: int = 100, seed: int = 1, **limits: Any) -> GatewaySession:
    """Returns a session with these limits."""
    return GatewaySession(1, SAMPLING, seed, EpisodeLimits(turns, tokens, **limits))


def on_loop(test: Callable[[], Awaitable[None]]) -> None:
    """Runs a test on an event loop."""

    async def run() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(run())


class Engine:
    """An engine that writes two tokens, and records how it was asked."""

    def __init__(self) -> None:
        self.seeds, self.sampling = list[int](), list[SamplingParams]()
        self.error: RequestError | None = None

    async def draw(
        self, session: GatewaySession, prompt: list[int], sampling: SamplingParams, seed: int, images: Any
    ) -> Completion:
        self.seeds.append(seed)
        self.sampling.append(sampling)
        if self.error:
            raise self.error
        return Completion(0, [7, 8], [-0.1, -0.2], [3, 3], "stop")


def test_turns_build_a_tree_of_tokens() -> None:
    async def test() -> None:
        episode, engine = session(), Engine()
        first = await episode.tokens([1, 2], 0, SAMPLING, engine.draw)
        second = await episode.tokens([1, 2, 7, 8, 5], 0, SAMPLING, engine.draw)
        other = await episode.tokens([4], 0, SAMPLING, engine.draw)
        assert [turn.parent for turn in episode.tree.turns] == [None, 0, None]
        assert first.turn.context == [1, 2] and second.turn.context == [5] and other.turn.context == [4]
        assert second.turn.token_ids == [7, 8] and second.turn.versions == [3, 3]

    on_loop(test)


def test_a_repeated_prompt_gets_another_seed_and_another_episode_the_same() -> None:
    async def test() -> None:
        engine, again = Engine(), Engine()
        for each in (engine, again):
            episode = session()
            for prompt in ([1], [2], [1]):
                await episode.tokens(prompt, 0, SAMPLING, each.draw)
        assert engine.seeds == again.seeds and len(set(engine.seeds)) == 3
        other = Engine()
        await session(seed=2).tokens([1], 0, SAMPLING, other.draw)
        assert other.seeds[0] not in engine.seeds

    on_loop(test)


@pytest.mark.parametrize(
    ("limits", "calls", "message"),
    [({"turns": 2}, 2, r"agent\.max_turns \(2\)"), ({"tokens": 3}, 2, r"agent\.max_tokens \(3\)")],
)
def test_an_episode_has_limits(limits: dict[str, int], calls: int, message: str) -> None:
    async def test() -> None:
        episode, engine = session(**limits), Engine()
        for number in range(calls):
            await episode.tokens([number], 0, SAMPLING, engine.draw)
        with pytest.raises(RequestError, match=message) as refusal:
            await episode.tokens([9], 0, SAMPLING, engine.draw)
        assert refusal.value.code == OVER and episode.counts["refused"] == 1

    on_loop(test)


def test_calls_that_are_longer_than_the_context_are_counted_but_cost_no_turn() -> None:
    async def test() -> None:
        episode, engine = session(turns=1), Engine()
        engine.error = RequestError("too long", code=OVER)
        for _ in range(8):
            with pytest.raises(RequestError, match="too long"):
                await episode.tokens([1], 0, SAMPLING, engine.draw)
        with pytest.raises(RequestError, match="8 calls that were longer than the context"):
            await episode.tokens([1], 0, SAMPLING, engine.draw)

    on_loop(test)


def test_only_so_many_calls_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_CONCURRENT_CALLS", 1)

    async def test() -> None:
        episode, engine, free = session(), Engine(), asyncio.Event()

        async def slow(*args: Any) -> Completion:
            await free.wait()
            return await engine.draw(*args)

        first = asyncio.ensure_future(episode.tokens([1], 0, SAMPLING, slow))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="1 calls of the episode are under way"):
            await episode.tokens([2], 0, SAMPLING, engine.draw)
        free.set()
        await first
        await episode.tokens([2], 0, SAMPLING, engine.draw)

    on_loop(test)


def test_what_comes_after_the_end_of_an_episode_is_dropped() -> None:
    async def test() -> None:
        episode, engine = session(), Engine()
        episode.closed = True
        with pytest.raises(RequestError, match="the episode has ended"):
            await episode.tokens([1], 0, SAMPLING, engine.draw)
        assert episode.tree.turns == []

    on_loop(test)


def test_a_retried_call_gets_the_same_answer_and_another_one_its_own() -> None:
    async def test() -> None:
        episode, engine = session(), Engine()

        async def work() -> StoredResponse:
            return await episode.tokens([1], 0, SAMPLING, engine.draw)

        first = await episode.answer_once(b"body", False, work)
        assert await episode.answer_once(b"body", True, work) is first and episode.counts["retried"] == 1
        assert await episode.answer_once(b"body", False, work) is not first
        assert await episode.answer_once(b"other", True, work) is not first
        assert len(engine.seeds) == 3

    on_loop(test)


def test_a_call_goes_on_for_a_while_after_its_client_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "RETRY_WAIT_S", 0.02)

    async def test() -> None:
        episode, engine, free = session(), Engine(), asyncio.Event()

        async def work() -> StoredResponse:
            await free.wait()
            return await episode.tokens([1], 0, SAMPLING, engine.draw)

        async def client(body: bytes, retried: bool) -> StoredResponse:
            return await episode.answer_once(body, retried, work)

        gone = asyncio.ensure_future(client(b"body", False))
        await asyncio.sleep(0)
        gone.cancel()
        retrying = asyncio.ensure_future(client(b"body", True))
        await asyncio.sleep(0.1)
        free.set()
        assert (await retrying).turn.token_ids == [7, 8] and episode.counts["given_up"] == 0
        free.clear()
        gone = asyncio.ensure_future(client(b"other", False))
        await asyncio.sleep(0)
        gone.cancel()
        while not episode.counts["given_up"]:
            await asyncio.sleep(0.01)

    on_loop(test)


def test_a_client_may_ask_for_less_than_the_run() -> None:
    episode = session(tokens=5)
    assert episode.sampling_of(3).max_new_tokens == 3
    assert episode.sampling_of(50).max_new_tokens == episode.sampling_of().max_new_tokens == 5
    sampling = episode.sampling_of(stop=["b", "a", "b"], stop_token_ids=[9, 1, 9])
    assert sampling.stop == ("b", "a") and sampling.stop_token_ids == (1, 9)
    assert episode.sampling_of(stop="x").stop == ("x",)


def test_roles_are_names_of_the_model_and_may_have_policies() -> None:
    async def test() -> None:
        episode, engine = session(roles=("player", "referee"), policies=(0, 1)), Engine()
        assert episode.role_of("referee") == 1
        with pytest.raises(RequestError, match=r"model is 'x'; agent\.roles has: player, referee"):
            episode.role_of("x")
        await episode.tokens([1], 1, SAMPLING, engine.draw)
        assert engine.sampling[0].policy == 1 and episode.tree.turns[0].role == 1
        assert session().role_of("anything") == 0

    on_loop(test)


@pytest.mark.parametrize(("reason", "told"), [("stop", "stop"), ("length", "length"), ("abort", "length")])
def test_clients_hear_two_reasons_of_an_end(reason: str, told: str) -> None:
    assert stop_reason(reason) == told


def test_a_session_is_found_by_its_key_and_its_names() -> None:
    keys, first, second = SessionKeys(), session(), session()
    keys.open(first)
    keys.open(second)
    assert keys.sessions() == [first, second]
    assert keys.find(first.key) is first
    assert keys.find(first.key, "mine") is first  # which is its name from now on
    assert keys.find(keys.process, "mine") is first and keys.find(keys.process, second.name) is second
    for name in ("mine", first.name):
        with pytest.raises(RequestError, match="X-Session-ID is another episode's"):
            keys.find(second.key, name)
    keys.end(first)
    for key, name in ((first.key, ""), (keys.process, "mine"), (keys.process, ""), ("unknown", "")):
        with pytest.raises(RequestError) as refusal:
            keys.find(key, name)
        assert refusal.value.status == 401
    assert keys.find(second.key, "mine") is second  # the name is free again


def test_an_episode_has_only_so_many_names() -> None:
    keys, one = SessionKeys(), session()
    keys.open(one)
    for number in range(64):
        keys.find(one.key, f"n{number}")
    keys.find(one.key, "n0")
    with pytest.raises(RequestError, match="an episode has at most 64"):
        keys.find(one.key, "n64")


@pytest.mark.parametrize(
    ("headers", "key"),
    [({"Authorization": "Bearer k"}, "k"), ({"x-api-key": "k"}, "k"), ({"Authorization": "Bearer ", "x-api-key": "k"}, "k"),
     ({}, "")],
)  # fmt: skip
def test_clients_send_their_key_in_either_header(headers: dict[str, str], key: str) -> None:
    assert key_in(headers) == key
    keys, one = SessionKeys(), session()
    one.key = "k"
    keys.open(one)
    if key:
        assert keys.find_by_headers(headers) is one
