"""Bodies of requests to the endpoint, drawn by a seed: whatever a client sends, it gets an answer or a mistake of its own."""

from __future__ import annotations

import http.client
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from gateway_things import Scripted, Served, chat_tokenizer, exact, message_of

from rlhpc.language.agents.gateway.request_schema import MAX_STOP_IDS, MAX_STOP_TEXTS

USER = {"role": "user", "content": "u"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "model": "policy", "max_tokens": 40, "stop": ["zz"], "temperature": 0.5, "n": 1, "stream": False, "tools": [TOOL],
    "tool_choice": "auto", "stream_options": {"include_usage": True}, "logprobs": True, "seed": 1, "user": "me",
    "messages": [
        {"role": "system", "content": "s"}, USER,
        {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "t"}]}, USER,
    ],
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": "policy", "max_tokens": 40, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["zz"], "stream": False,
    "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
    "thinking": {"type": "disabled"}, "metadata": {"user_id": "me"},
    "messages": [
        USER,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "r", "signature": ""}, {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "t"}]},
    ],
}  # fmt: skip
GENERATE: dict[str, Any] = {
    "model": "policy", "token_ids": [5, 6, 7],
    "sampling_params": {"max_tokens": 20, "stop": ["zz"], "stop_token_ids": [9], "logprobs": 1, "skip_special_tokens": False},
}  # fmt: skip
FEEDBACK: dict[str, Any] = {"id": "chatcmpl-1", "reward": 1.0}
ROUTES = {
    "/v1/chat/completions": CHAT, "/v1/messages": MESSAGES, "/inference/v1/generate": GENERATE, "/v1/feedback": FEEDBACK,
}  # fmt: skip
#: Values of other types, of a size or a form that no key allows, and JSON that only some readers take.
ODD: list[Any] = [
    None, True, False, 0, -1, 5, 1.5, 10**30, 1e300, "", "x", "\ud800", "a\ud83d", "𝄞", "\x00", [], [5], ["x"], [[]], [None],
    {}, {"type": "text"}, {"type": "image"}, {"x": 1}, {"type": 5}, float("inf"), float("nan"), ["zz"] * 40, "y" * 3000, [-5],
    [2**70],
    [{"type": "text", "text": 5}], {"type": "tool", "name": "f"}, [{"role": "user", "content": 5}], [{"role": 5}], [{}],
    {"function": {"name": 5}}, [{"function": {"name": "f", "arguments": [1]}}], {"include_usage": "x"}, ["\udfff"],
]  # fmt: skip


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served(Scripted(lambda prompt: "An answer.", context=2000))
    yield found
    found.close()


def mutated(draw: random.Random, body: Any) -> Any:
    """A body in which one value, at any depth, is another, is missing, is nested, or has a key that nobody knows."""
    body = json.loads(json.dumps(body))
    at, parent, key = body, None, None
    while isinstance(at, (dict, list)) and at and (parent is None or draw.random() < 0.7):
        key = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
        parent, at = at, at[key]
    kind = draw.random()
    if kind < 0.1:
        del parent[key]
    elif kind < 0.15 and isinstance(parent, dict):
        parent[draw.choice(["unknown", "", "\ud800", "response_format", "functions", "top_logprobs", "logit_bias"])] = (
            draw.choice(ODD)
        )
    else:
        parent[key] = draw.choice(ODD)
    return body


def raw_bodies(draw: random.Random) -> list[bytes]:
    deep = draw.choice([300, 5_000, 100_000])
    return [
        b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff\xfe", b'{"messages": ' + b"[" * deep + b"]" * deep + b"}",
        b'{"x":' * deep + b"1" + b"}" * deep, b'{"max_tokens": 1e400}', b'{"max_tokens": ' + b"9" * 6000 + b"}",
        b'{"messages": NaN}', b'{"messages": [], "messages": 5}',
    ]  # fmt: skip


def send(served: Served, path: str, key: bytes, raw: bytes, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(served.gateway.url.removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", path, raw, {"Authorization": b"Bearer " + key, **headers})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("seed", range(3))
def test_no_body_is_a_fault_of_the_endpoint(served: Served, path: str, seed: int) -> None:
    """Each drawn body gets an answer, or one line that says what is wrong with it; each stream has an end."""
    draw, statuses = random.Random(f"{path}{seed}"), set[int]()
    bodies = [json.dumps(mutated(draw, ROUTES[path])).encode() for _ in range(150)] + raw_bodies(draw)
    for number, raw in enumerate(bodies):
        if number % 50 == 0:
            session = served.open(number, most=60)
        if path == "/v1/feedback":
            key = served.gateway.feedback.key
        else:
            key = session.key
            raw = raw.replace(b'"stream": false', b'"stream": true') if draw.random() < 0.5 else raw
        status, reply = send(served, path, key.encode(), raw)
        assert status in (200, 400, 404, 413), (status, raw[:300], reply[:300])
        statuses.add(status)
        if status != 200:
            error = json.loads(reply)["error"]
            assert error["message"] and "\n" not in error["message"], (raw[:300], error)
        elif reply.startswith((b"data:", b"event:")):
            assert b"event: error" not in reply, (raw[:300], reply[:600])
            assert reply.rstrip().endswith((b"data: [DONE]", b'"type": "message_stop"}')), (raw[:300], reply[-300:])
    assert statuses >= ({400, 404} if path == "/v1/feedback" else {200, 400}), "the drawn bodies are of both kinds"
    session = served.open(10_000)
    served.chat(session, [USER])


@pytest.mark.parametrize("path", [*ROUTES, "/v1/models"])
def test_a_key_of_any_bytes_is_no_fault_of_the_endpoint(served: Served, path: str) -> None:
    for key in (b"", b"\xff\xfe", "ключ".encode(), "é".encode("latin-1"), b"rk-" + b"x" * 3000):
        connection = http.client.HTTPConnection(served.gateway.url.removeprefix("http://"), timeout=60)
        connection.request("GET" if path == "/v1/models" else "POST", path, None if path == "/v1/models" else b"{}",
                           {"x-api-key": key, "X-Session-ID": "ключ".encode()})  # fmt: skip
        assert connection.getresponse().status == 401
        connection.close()


def test_what_the_model_would_not_draw_by_itself_is_refused(served: Served) -> None:
    session, named = served.open(), {"type": "function", "function": {"name": "f"}}
    refused: dict[str, list[dict[str, Any]]] = {
        "/v1/chat/completions": [
            {"tool_choice": "required"}, {"tool_choice": named}, {"functions": [{"name": "f"}]},
            {"function_call": {"name": "f"}},
            {"top_logprobs": 3}, {"n": 2}, {"n": True}, {"response_format": {"type": "json_object"}}, {"logit_bias": {"1": 2}},
            {"response_format": {"type": "json_schema", "json_schema": {}}}, {"presence_penalty": 0.5},
            {"frequency_penalty": -1},
            {"repetition_penalty": 1.1}, {"min_p": 0.1}, {"min_tokens": 5}, {"ignore_eos": True}, {"bad_words": ["x"]},
            {"allowed_token_ids": [1]}, {"guided_json": {}, "guided_regex": "a*"}, {"structured_outputs": {"regex": "a"}},
            {"chat_template": "x"}, {"chat_template_kwargs": {"enable_thinking": False}}, {"continue_final_message": True},
            {"add_generation_prompt": False}, {"echo": True}, {"parallel_tool_calls": False}, {"modalities": ["audio"]},
            {"audio": {"voice": "x"}}, {"prediction": {"type": "content"}}, {"prompt_logprobs": 1}, {"best_of": 3},
            {"include_stop_str_in_output": True}, {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
        ],
        "/v1/messages": [
            {"tool_choice": {"type": "any"}}, {"tool_choice": {"type": "tool", "name": "f"}}, {"tool_choice": "auto"},
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, {"mcp_servers": [{"url": "x"}]},
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, {"output_format": {"type": "json_schema"}},
            {"output_config": {"format": {"type": "json_schema"}}},
        ],
        "/inference/v1/generate": [
            {"sampling_params": {"n": 2}}, {"sampling_params": {"min_p": 0.2}}, {"sampling_params": {"logprobs": 5}},
            {"sampling_params": {"prompt_logprobs": 1}}, {"stream": True}, {"features": {"mm": 1}}, {"sampling_params": [1]},
        ],
    }  # fmt: skip
    for path, changes in refused.items():
        for change in changes:
            status, said = served.post(session.key, path, {**ROUTES[path], **change})
            assert status == 400, (path, change, said)
            assert next(iter(change)).split("_")[0] in said["error"]["message"], (change, said)
    assert not session.tree.turns
    neutral = {
        "tool_choice": "none", "top_logprobs": 0, "n": 1, "response_format": {"type": "text"}, "logit_bias": {},
        "presence_penalty": 0, "functions": None, "parallel_tool_calls": True, "temperature": 0.1, "top_p": 0.5, "seed": 3,
    }  # fmt: skip
    served.chat(session, [USER], **neutral)


def test_stop_texts_and_stop_tokens_are_few_short_and_of_this_model(served: Served) -> None:
    session = served.open()
    for stop in (["\ud800"], "\udfff", [""], "", ["x"] * (MAX_STOP_TEXTS + 1), "x" * 300, [5], 5, {"x": 1}):
        for path, key in (("/v1/chat/completions", "stop"), ("/v1/messages", "stop_sequences")):
            stop = [stop] if isinstance(stop, str) and path == "/v1/messages" else stop
            status, said = served.post(session.key, path, {**ROUTES[path], key: stop})
            assert status == 400 and key in said["error"]["message"], (stop, said)
    for ends in ([-5], [2**70], list(range(MAX_STOP_IDS + 1)), ["x"], [True], 5):
        body = {**GENERATE, "sampling_params": {"stop_token_ids": ends}}
        status, said = served.post(session.key, "/inference/v1/generate", body)
        assert status == 400 and "stop_token_ids" in said["error"]["message"], (ends, said)
    assert not session.tree.turns


def test_a_body_is_read_when_its_key_is_good(served: Served) -> None:
    """Of a stranger nothing is read, and of a reward no more than it needs."""
    for path in ROUTES:
        status, _ = send(served, path, b"wrong", b"{" * 1000)
        assert status == 401, path
    status, _ = send(served, "/v1/feedback", served.gateway.feedback.key.encode(), b" " * 5000)
    assert status == 413


def stopping(prompt: str) -> str:
    return "Thought: I look.\nAction: find[x]\nObservation: none"


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_ends_before_its_stop_text_and_its_tokens_do_not(stream: bool) -> None:
    served = Served(Scripted(stopping, delay=40 if stream else 0))
    try:
        session = served.open()
        messages: list[Any] = [USER]
        for turn in range(3):
            reply = served.chat(session, messages, stop=["\nObservation", "none"], stream=stream)
            if stream:
                text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in reply if chunk["choices"])
                message = {"role": "assistant", "content": text}
                assert reply[-1]["choices"][0]["finish_reason"] == "stop"
            else:
                message = message_of(reply)
                assert reply["choices"][0]["finish_reason"] == "stop"
            assert message["content"] == "Thought: I look.\nAction: find[x]"
            messages += [message, {"role": "user", "content": f"Observation: {turn}"}]
        (sample,) = exact(session)
        assert sample.turns == 3, "the conversation goes on from the reply that was sent"
        drawn = chat_tokenizer().decode(session.tree.turns[0].token_ids)
        assert "\nObservation" in drawn, "what is trained on is what was drawn"
        body = {
            "model": "m",
            "max_tokens": 99,
            "messages": [USER],
            "stop_sequences": ["Obs", "\nObservation"],
            "stream": stream,
        }
        status, said = served.post(session.key, "/v1/messages", body)
        assert status == 200
        if stream:
            text = "".join(event["delta"].get("text", "") for event in said if event["type"] == "content_block_delta")
            ended = next(event["delta"] for event in said if event["type"] == "message_delta")
        else:
            text, ended = said["content"][0]["text"], said
        assert text == "Thought: I look.\nAction: find[x]"
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", "\nObservation")
        _, said = served.post(session.key, "/v1/messages", {**body, "stop_sequences": ["never"], "stream": False})
        assert (said["stop_reason"], said["stop_sequence"]) == ("end_turn", None)
    finally:
        served.close()


@pytest.mark.parametrize("stop", [[], ["q"], ["so"], ["</think>", "I"], ["  "], ["tool"], ["\n\n"]])
def test_a_stream_says_what_the_reply_says(stop: list[str]) -> None:
    """Reasoning and answer, wherever a stop text cuts them."""
    texts = [
        "  blanks  first, qed",
        "<think>so  and so</think>\n\nI  say q.",
        "<think>no end",
        "a\n\nb <tool_call> c",
    ]
    for said in texts:
        served = Served(Scripted(lambda prompt, said=said: said, delay=30))
        try:
            session = served.open()
            for tools in ([], [TOOL]):
                asked = {"stop": stop, "tools": tools}
                whole = message_of(served.chat(session, [USER], **asked))
                deltas = [chunk["choices"][0]["delta"] for chunk in served.chat(session, [USER], stream=True, **asked)]
                for name in ("content", "reasoning_content"):
                    pieces = "".join(delta.get(name) or "" for delta in deltas)
                    assert pieces == (whole.get(name) or ""), (said, tools, name)
        finally:
            served.close()


def test_an_episode_that_sends_what_no_context_holds_is_refused_before_it_is_encoded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = list[int]()
    real = served.gateway._renderer._text
    monkeypatch.setattr(served.gateway._renderer, "_text", lambda *a: encoded.append(1) or real(*a))
    session, other = served.open(turns=8), served.open(1)
    long = [
        [{"role": "user", "content": "x" * 1_000_000}],
        [USER] * 3000,
        [{**USER, "content": [{"type": "text", "text": "y" * 10**6}]}],
    ]
    for messages in long:
        status, said = served.post(session.key, "/v1/chat/completions", {"messages": messages})
        assert (status, said["error"]["code"]) == (400, "context_length_exceeded") and "leave no room" in said["error"][
            "message"
        ]
    assert not encoded
    served.chat(session, [USER])
    for _ in range(5):
        assert served.post(session.key, "/v1/chat/completions", {"messages": long[1]})[0] == 400
    status, said = served.post(session.key, "/v1/chat/completions", {"messages": [USER]})
    assert status == 400 and "8 calls that were longer" in said["error"]["message"], "such calls are counted"
    served.chat(other, [USER])


def test_others_are_answered_while_a_conversation_is_encoded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    import concurrent.futures
    import threading

    entered, go_on, under_way, most = threading.Event(), threading.Event(), [0], [0]
    real = served.gateway._renderer._text

    def slow(messages: Any, tools: Any) -> str:
        if any(message["content"] == "slow" for message in messages):
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            entered.set()
            assert go_on.wait(60)
            under_way[0] -= 1
        return real(messages, tools)

    monkeypatch.setattr(served.gateway._renderer, "_text", slow)
    one, other = served.open(1), served.open(2)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        late = [pool.submit(served.chat, one, [{"role": "user", "content": "slow"}]) for _ in range(6)]
        assert entered.wait(60)
        served.chat(other, [USER])
        go_on.set()
        assert all(message_of(one.result())["content"] for one in late)
    assert most[0] == 1, "one call of an episode at a time"
