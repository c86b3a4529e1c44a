"""The gateway and the tree of turns: what anybody's client asks becomes samples of the very tokens that were drawn."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

from rlhpc.language.agents.gateway import sessions
from rlhpc.language.agents.gateway.sessions import GatewaySession
from tests.integration.language.gateway_things import Scripted, Served, chat_tokenizer, exact, message_of


@pytest.fixture
def served() -> Iterator[Served]:
    number = iter(range(1, 10_000))
    found = Served(Scripted(lambda prompt: f"Reply  number {next(number)} , with odd   blanks.", context=600))
    yield found
    found.close()


def linear(served: Served, session: GatewaySession, turns: int) -> list[Any]:
    """A conversation of so many turns."""
    messages: list[Any] = [{"role": "system", "content": "S"}, {"role": "user", "content": "u1"}]
    for turn in range(turns):
        messages += [message_of(served.chat(session, messages)), {"role": "user", "content": f"u{turn + 2}"}]
    return messages


def drifts(session: GatewaySession) -> int:
    """Turns whose prompt would be other tokens, were its text encoded again."""
    tokenizer, found = chat_tokenizer(), 0
    for turn in session.tree.turns:
        if turn.parent is not None:
            prompt = session.tree.ids(turn.parent) + turn.context
            found += tokenizer.encode(tokenizer.decode(prompt), add_special_tokens=False) != prompt
    return found


def test_turns_that_go_on_are_one_sample_though_their_text_drifts(served: Served) -> None:
    session = served.open()
    linear(served, session, 3)
    (sample,) = exact(session)
    assert sample.turns == 3 and drifts(session) == 2
    text = chat_tokenizer().decode([*sample.prompt_ids, *sample.token_ids])
    assert text.count("Reply  number") == 3 and text.count("<|im_end|>") == 7, (
        "the template's parts are there once each"
    )
    # What the engine read is what the samples say, prompt by prompt.
    asked = [list(request.prompt_ids) for request in served.engine.requests]
    whole = [*sample.prompt_ids, *sample.token_ids]
    assert all(whole[: len(prompt)] == prompt for prompt in asked)


def test_what_does_not_go_on_begins_a_branch(served: Served) -> None:
    session = served.open()
    messages = linear(served, session, 3)
    served.chat(session, [messages[0], {"role": "user", "content": "Summary of what was"}])  # compaction
    assert len(exact(session)) == 2
    served.chat(session, [*messages[:3], {"role": "user", "content": "another u2"}])  # a turn taken back
    samples = exact(session)
    assert len(samples) == 3
    # The first turn is read by two of them, and trained in one.
    shared = [s for s in samples if s.turns >= 2]
    first = [sum(m for m, t in zip(s.loss_mask, s.turn_ids, strict=True) if t == 0) for s in shared]
    assert sorted(map(bool, first)) == [False, True]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:  # sub-agents, at a time
        list(pool.map(lambda k: served.chat(session, [{"role": "user", "content": f"sub {k}"}]), range(3)))
    assert len(exact(session)) == 6


def test_a_cut_reply_gets_its_end_from_the_template(served: Served) -> None:
    session = served.open(most=4)
    linear(served, session, 2)
    (sample,) = exact(session)
    end = chat_tokenizer().eos_token_id
    cut = sample.token_ids[4]
    assert session.tree.turns[0].finish_reason == "length" and cut == end and not sample.loss_mask[4]


def test_reasoning_that_a_client_drops_begins_a_branch() -> None:
    served = Served(Scripted(lambda prompt: "<think>so  and so</think>\nAn answer."))
    try:
        kept, dropped = served.open(1), served.open(2)
        messages = [{"role": "user", "content": "u"}]
        for session in (kept, dropped):
            reply = message_of(served.chat(session, messages))
            assert reply["reasoning_content"] == "so  and so" and reply["content"] == "An answer."
            if session is dropped:
                del reply["reasoning_content"]
            served.chat(session, [*messages, reply, {"role": "user", "content": "v"}])
        assert len(exact(kept)) == 1 and len(exact(dropped)) == 2
    finally:
        served.close()


def test_a_retry_gets_the_first_draw(served: Served) -> None:
    session = served.open()
    messages = [{"role": "user", "content": "u"}]
    first = served.chat(session, messages)
    again = served.chat(session, messages, headers={"x-stainless-retry-count": "1"})
    assert message_of(again) == message_of(first) and len(session.tree.turns) == 1
    other = served.chat(session, messages)  # no retry: another draw of the same prompt, by other random numbers
    assert message_of(other) != message_of(first) and len(exact(session)) == 2
    seeds = [request.seed for request in served.engine.requests]
    assert len(set(seeds)) == 2 and session.counts["retried"] == 1


def test_a_client_that_hangs_up_gets_its_reply_when_it_asks_again_and_else_it_is_not_trained_on(served: Served) -> None:
    session = served.open()
    served.held.set()
    bodies = [json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}) for text in ("a", "b")]
    for body in bodies:
        connection = http.client.HTTPConnection(served.gateway.url.removeprefix("http://"), timeout=10)
        connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {session.key}"})
        while len(served.engine.requests) + served.gateway.engine_queue.qsize() <= bodies.index(body):
            time.sleep(0.005)
        connection.close()
    time.sleep(0.1)  # the gateway hears of it
    served.held.clear()
    while len(session.tree.turns) < 2:
        time.sleep(0.005)
    served.chat(session, [{"role": "user", "content": "a"}], headers={"x-stainless-retry-count": "1"})
    assert len(session.tree.turns) == 2
    (sample,) = exact(session)
    assert "a" in chat_tokenizer().decode(sample.prompt_ids)
    assert session.tree.counts()["not_received"] == len(session.tree.turns[1].token_ids) or (
        session.tree.counts()["not_received"] == len(session.tree.turns[0].token_ids)
    )


def test_tokens_in_tokens_out(served: Served) -> None:
    session = served.open()
    prompt = chat_tokenizer().encode("<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    for turn in range(3):
        body = {
            "model": "policy",
            "token_ids": prompt,
            "sampling_params": {"max_tokens": 50, "temperature": 0.3, "logprobs": 1},
        }
        status, found = served.post(session.key, "/inference/v1/generate", body)
        choice = found["choices"][0]
        assert status == 200 and len(choice["token_ids"]) == len(choice["logprobs"]["content"])
        assert choice["logprobs"]["content"][0]["token"] == f"token_id:{choice['token_ids'][0]}"
        prompt = [*prompt, *choice["token_ids"], 5 + turn]
    (sample,) = exact(session)
    assert sample.turns == 3
    assert {request.sampling.temperature for request in served.engine.requests} == {1.0}, "the run's sampling wins"
    _, models = served.post(session.key, "/v1/models", None)
    assert models["data"][0]["max_model_len"] == 600


def test_token_ids_log_probs_and_streams(served: Served) -> None:
    session = served.open()
    messages = [{"role": "user", "content": "u"}]
    reply = served.chat(session, messages, return_token_ids=True, logprobs=True)
    turn = session.tree.turns[0]
    assert reply["prompt_token_ids"] == turn.context and reply["choices"][0]["token_ids"] == turn.token_ids
    assert [part["logprob"] for part in reply["choices"][0]["logprobs"]["content"]] == turn.logprobs
    chunks = served.chat(session, messages, stream=True, stream_options={"include_usage": True})
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == "Reply  number 2 , with odd   blanks."
    assert chunks[-1]["usage"]["completion_tokens"] == len(session.tree.turns[1].token_ids)
    assert len(exact(session)) == 2


def test_streams_come_as_they_are_written_and_go_on_as_one_sample() -> None:
    """Whether it is reasoning, an answer or a call; and what a client makes of the pieces is what the reply was."""
    said = '<think>so  and\nso</think>\nI  multiply: ×7. <tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'
    served = Served(Scripted(lambda prompt: said, delay=60))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    try:
        session, messages = served.open(), [{"role": "user", "content": "u"}]
        whole = message_of(served.chat(session, messages, tools=tools))
        for asked in ({"tools": tools}, {}, {"tools": tools, "logprobs": True}):
            chunks = served.chat(session, messages, stream=True, **asked)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            pieces = [delta["content"] for delta in deltas if delta.get("content")]
            parts = [delta["reasoning_content"] for delta in deltas if delta.get("reasoning_content")]
            assert "".join(parts) == whole["reasoning_content"] == "so  and\nso"
            assert "".join(pieces) == (whole["content"] if asked else said.partition("</think>\n")[2])
            assert (len(pieces) > 1 and len(parts) > 1) == ("logprobs" not in asked), "log-probs come with the whole"
            assert all("<tool_call>" not in piece for piece in pieces) or not asked
            reply = {"role": "assistant", "content": "".join(pieces), "reasoning_content": "".join(parts)}
            calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
            assert [call["function"] for call in calls] == (
                [c["function"] for c in whole["tool_calls"]] if asked else []
            )
            if calls:
                answered = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "7"}
                served.chat(session, [*messages, {**reply, "tool_calls": calls}, answered], tools=tools)
        assert len(exact(session)) == 4, "the whole one, and those that were streamed, each with what went on from it"
        body = {"model": "m", "max_tokens": 99, "messages": messages, "stream": True,
                "tools": [{"name": "f", "input_schema": {"type": "object"}}]}  # fmt: skip
        _, events = served.post(session.key, "/v1/messages", body)
        kinds = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
        assert kinds == ["thinking", "text", "tool_use"] and len(events) > 11
        text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
        assert text == whole["content"] and [e["index"] for e in events if e["type"] == "content_block_stop"] == [
            0,
            1,
            2,
        ]
        assert events[0]["message"]["usage"]["input_tokens"] > 0 and events[-1]["type"] == "message_stop"
    finally:
        served.close()


def test_what_nobody_waits_for_any_more_is_not_drawn(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a client that has gone for good, and of an episode that has ended; the others go on."""
    monkeypatch.setattr(sessions, "RETRY_WAIT_S", 0.3)
    gone, ended, goes_on = served.open(1), served.open(2), served.open(3)
    served.engine.delay = 10**6
    body = {"model": "policy", "messages": [{"role": "user", "content": "u"}]}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        late = pool.submit(served.post, ended.key, "/v1/chat/completions", body)
        connection = http.client.HTTPConnection(served.gateway.url.removeprefix("http://"), timeout=10)
        for stream in (False, True):
            connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": stream}),
                               {"Authorization": f"Bearer {gone.key}"})  # fmt: skip
            while len(served.engine.requests) < 2 + stream:
                time.sleep(0.005)
            connection.close()
        while len(served.engine.dropped) < 2:
            time.sleep(0.005)
        served.end(ended)
        assert late.result()[0] == 401
        while len(served.engine.dropped) < 3:
            time.sleep(0.005)
    assert gone.counts["given_up"] == 2 and served.engine.unfinished() == 0
    served.engine.delay = 0
    served.chat(goes_on, body["messages"])
    assert (len(gone.tree.turns), len(ended.tree.turns), len(goes_on.tree.turns)) == (0, 0, 1)


def test_keys(served: Served) -> None:
    one, other = served.open(1), served.open(2)
    assert re.fullmatch(r"rk-[\w-]{32}", one.key) and one.key != other.key
    body = {"model": "policy", "messages": [{"role": "user", "content": "u"}]}
    for key in ("", "wrong", one.key[:-1]):
        status, found = served.post(key, "/v1/chat/completions", body)
        assert status == 401 and one.key not in json.dumps(found)
    served.chat(one, body["messages"])
    assert (len(one.tree.turns), len(other.tree.turns)) == (1, 0)
    served.held.set()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        late = pool.submit(served.post, one.key, "/v1/chat/completions", body)
        while served.gateway.engine_queue.empty() and len(served.engine.requests) < 2:
            time.sleep(0.005)
        served.end(one)
        served.held.clear()
        assert late.result()[0] == 401
    assert len(one.tree.turns) == 1, "what is drawn after the end is not part of the episode"
    assert served.post(one.key, "/v1/chat/completions", body)[0] == 401
    for path in ("/pause", "/resume", "/update_weights", "/v1/reward"):
        assert served.post(other.key, path, {})[0] == 404


def test_a_client_with_one_key_for_all_its_episodes_says_which(served: Served) -> None:
    one, other, ended = served.open(1), served.open(2), served.open(3)
    key, body = served.gateway.keys.process, {"messages": [{"role": "user", "content": "u"}]}

    def status(of: str, name: str) -> int:
        found, said = served.post(of, "/v1/chat/completions", body, **({"X-Session-ID": name} if name else {}))
        assert not any(secret in json.dumps(said) for secret in (one.key, one.name, other.name, key))
        return found

    served.end(ended)
    assert [status(key, name) for name in (one.name, other.name, "trace-1", "")] == [200, 200, 401, 401]
    assert (len(one.tree.turns), len(other.tree.turns)) == (1, 1)
    # A name that its client has made up is an episode's from its first use with that one's key, and no other's.
    assert [status(one.key, "trace-1"), status(other.key, "trace-1"), status(key, "trace-1")] == [200, 403, 200]
    assert len(one.tree.turns) == 3
    # Another's, one's that has ended, another gateway's.
    assert [status(one.key, other.name), status(one.key, ended.name), status(key, ended.name)] == [403, 403, 401]
    assert [status(f"rp-{key[4:]}", one.name), status(one.key[:-1], one.name), status(one.name, one.name)] == [401] * 3
    served.end(one)
    assert [status(key, one.name), status(key, "trace-1"), status(other.key, one.name)] == [401, 401, 403]
    assert status(other.key, "trace-1") == 200, "nobody's any more"
    assert (len(one.tree.turns), len(other.tree.turns)) == (3, 2)
    assert [status(other.key, f"t{number}") for number in range(64)] == [200] * 63 + [403], "and no end of them"
    served.end(other)
    time.sleep(0.05)
    assert not served.gateway.keys.sessions() and not served.gateway.keys._session_by_name


def test_what_cannot_be_had_is_said(served: Served) -> None:
    session = served.open(turns=3)
    user = [{"role": "user", "content": "u"}]
    for body, said in (
        ({"messages": []}, "at least one"), ({"messages": "u"}, "must be a list"), ({"messages": user, "n": 2}, "n must be 1"),
        ({"messages": user, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": user, "logit_bias": {"1": 2}}, "logit_bias"), ({"messages": user, "max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "x y z " * 400}]}, "leaves no room"),
    ):  # fmt: skip
        status, found = served.post(session.key, "/v1/chat/completions", body)
        assert status == 400 and said in found["error"]["message"]
    linear(served, session, 3)
    status, found = served.post(session.key, "/v1/chat/completions", {"messages": user})
    assert status == 400 and found["error"]["code"] == "context_length_exceeded" and "agent.max_turns" in str(found)
    assert len(session.tree.turns) == 3
