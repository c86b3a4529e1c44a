"""API formats of clients: pictures, replies and streams in each of them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from rlhpc.language.agents.gateway.api_formats import (
    ChatStream,
    MessageStream,
    chat_error,
    chat_reply,
    conversation_of,
    generate_reply,
    message_error,
    message_reply,
)
from rlhpc.language.agents.gateway.output_parsers import Reply
from rlhpc.language.agents.gateway.sessions import OVER, StoredResponse
from rlhpc.language.agents.turn_tree import AgentTurn, RequestError, canonical, key_of
from tests.unit.language.agents.pictures import by_url, picture


def test_a_picture_is_the_same_in_each_clients_form() -> None:
    ours, theirs = picture(), {"type": "base64", "media_type": "image/png", "data": picture()}
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{ours}"}}
    image, text = {"type": "image", "source": theirs}, {"type": "text", "text": "what?"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text, image]}
    found = conversation_of({"messages": [{"role": "user", "content": [result, image, text]}]})[0]
    messages = [canonical(message) for message in found]
    assert messages == [
        canonical({"role": "tool", "tool_call_id": "1", "content": [text, shown]}),
        canonical(
            {"role": "user", "content": [{"type": "input_image", "image_url": shown["image_url"]["url"]}, "what?"]}
        ),
    ]
    assert messages[1]["content"] == [{"type": "image"}, text]
    assert messages[1]["images"] == (base64.b64decode(ours),)
    other = canonical(by_url(f"data:image/png;base64,{picture(shade=1)}"))
    assert key_of(other) != key_of(canonical(by_url(f"data:image/png;base64,{ours}")))


class Letters:
    """A tokenizer whose token n is the n-th letter."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(chr(ord("a") + token) for token in tokens)


def answer_of(reply: Reply, finish_reason: str = "stop") -> StoredResponse:
    turn = AgentTurn(None, [7, 9], [0, 1, 2], [-0.5, -0.25, -1.0], [3, 3, 4], finish_reason)
    return StoredResponse(turn, [7, 9], reply, reply.message())


PLAIN = Reply("the answer", "because")
CALLS = Reply("", None, [("add", '{"a": 1}'), ("add", '{"a": 2}')])


def data_of(events: list[str]) -> list[Any]:
    return [json.loads(line[6:]) for event in events for line in event.splitlines() if line.startswith("data: {")]


def test_a_chat_completion_has_what_the_client_asked_for() -> None:
    response = chat_reply(answer_of(PLAIN), {}, "m", Letters())
    (choice,) = response["choices"]
    assert choice["message"]["content"] == "the answer" and choice["message"]["reasoning_content"] == "because"
    assert (choice["finish_reason"], choice["logprobs"], response["model"]) == ("stop", None, "m")
    assert response["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert "token_ids" not in choice and "prompt_token_ids" not in response
    body = {"logprobs": True, "return_token_ids": True}
    response = chat_reply(answer_of(PLAIN, "length"), body, "m", Letters())
    (choice,) = response["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a", "b", "c"]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5, -0.25, -1.0]
    assert (choice["token_ids"], response["prompt_token_ids"], choice["finish_reason"]) == ([0, 1, 2], [7, 9], "length")
    body = {"logprobs": True, "return_tokens_as_token_ids": True}
    (choice,) = chat_reply(answer_of(CALLS), body, "m", Letters())["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{n}" for n in range(3)]
    assert choice["finish_reason"] == "tool_calls"


def test_a_client_that_sends_tokens_gets_tokens_and_versions() -> None:
    reply = generate_reply(answer_of(PLAIN, "abort"))
    (choice,) = reply["choices"]
    assert (choice["token_ids"], choice["finish_reason"], reply["versions"]) == ([0, 1, 2], "length", [3, 3, 4])
    assert choice["logprobs"]["content"][2]["token"] == "token_id:2"


@pytest.mark.parametrize(
    ("reply", "finish_reason", "stop_reason", "stop_sequence"),
    [
        (PLAIN, "stop", "end_turn", None),
        (PLAIN, "length", "max_tokens", None),
        (Reply("a", None, [], "###"), "stop", "stop_sequence", "###"),
        (CALLS, "stop", "tool_use", None),
    ],
)
def test_a_message_says_why_it_ended(
    reply: Reply, finish_reason: str, stop_reason: str, stop_sequence: str | None
) -> None:
    message = message_reply(answer_of(reply, finish_reason), "m")
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stop_sequence)
    assert message["usage"] == {"input_tokens": 2, "output_tokens": 3}
    kinds = [block["type"] for block in message["content"]]
    assert kinds == [*(["thinking"] if reply.reasoning else []), *(["text"] if reply.content else []),
                     *["tool_use"] * len(reply.calls)]  # fmt: skip
    assert [block["input"] for block in message["content"] if block["type"] == "tool_use"] == [
        json.loads(arguments) for _, arguments in reply.calls
    ]


@pytest.mark.parametrize("seen", [[], [("beca", "")], [("because", "the"), ("because", "the answ")]])
def test_a_streamed_completion_is_the_whole_one(seen: list[tuple[str, str]]) -> None:
    body = {"stream": True, "stream_options": {"include_usage": True}}
    stream = ChatStream(body, "m", Letters())
    assert stream.is_requested and not stream.is_sent_at_end
    events = [event for reasoning, content in seen for event in stream.new_events(2, reasoning, content)]
    assert stream.new_events(2, *(seen[-1] if seen else ("", ""))) == [], "nothing new"
    events += stream.end(answer_of(PLAIN))
    assert events[-1] == "data: [DONE]\n\n"
    *chunks, usage = data_of(events)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "because"
    assert "".join(delta.get("content", "") for delta in deltas) == "the answer"
    assert deltas[0]["role"] == "assistant" and chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 5
    assert {chunk["id"] for chunk in (*chunks, usage)} == {stream.id}


def test_a_stream_with_logprobs_or_calls_has_them_once() -> None:
    stream = ChatStream({"stream": True, "logprobs": True, "return_token_ids": True}, "m", Letters())
    assert stream.is_sent_at_end
    first, last = data_of(stream.end(answer_of(CALLS)))
    choice = first["choices"][0]
    assert [call["index"] for call in choice["delta"]["tool_calls"]] == [0, 1]
    assert choice["token_ids"] == [0, 1, 2] and first["prompt_token_ids"] == [7, 9]
    assert len(choice["logprobs"]["content"]) == 3 and last["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("seen", [[], [("beca", "")], [("because", "the"), ("because", "the answ")]])
def test_a_streamed_message_is_the_whole_one(seen: list[tuple[str, str]]) -> None:
    stream = MessageStream({"stream": True}, "m")
    assert stream.is_requested and stream.new_events(2, "", "") == []
    events = [event for reasoning, content in seen for event in stream.new_events(2, reasoning, content)]
    events += stream.end(answer_of(PLAIN))
    found = data_of(events)
    assert [event.splitlines()[0] for event in events] == [f"event: {event['type']}" for event in found]
    blocks: dict[int, str] = {}
    for event in found:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = event["content_block"]["type"] + ":"
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]] += delta[delta["type"].removesuffix("_delta")]
    assert blocks == {0: "thinking:because", 1: "text:the answer"}
    kinds = [event["type"] for event in found]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


def test_streamed_calls_have_their_arguments() -> None:
    found = data_of(MessageStream({}, "m").end(answer_of(CALLS)))
    inputs = [event["delta"]["partial_json"] for event in found if event["type"] == "content_block_delta"]
    assert [json.loads(text) for text in inputs] == [{"a": 1}, {"a": 2}]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_conversation_is_converted_with_its_tools() -> None:
    tool = {"name": "add", "input_schema": {"type": "object"}}
    assistant = [
        {"type": "thinking", "thinking": "because"}, {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
    ]  # fmt: skip
    body: dict[str, Any] = {
        "system": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}], "tools": [tool],
        "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": assistant}],
    }  # fmt: skip
    (system, user, answer), tools = conversation_of(body)
    assert system == {"role": "system", "content": "be brief"} and user["content"] == [
        {"type": "text", "text": "hello"}
    ]
    assert (answer["content"], answer["reasoning_content"]) == ("so", "because")
    assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert tools == [
        {"type": "function", "function": {"name": "add", "description": "", "parameters": tool["input_schema"]}}
    ]
    assert conversation_of({**body, "tool_choice": {"type": "none"}})[1] is None


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "system", "content": "x"}, "objects with role user or assistant"),
        ("hello", "objects with role user or assistant"),
        ({"role": "user", "content": 3}, "must be a text, or a list of blocks"),
        ({"role": "user", "content": [{"type": "audio"}]}, "has a block of type audio"),
        ({"role": "assistant", "content": [{"type": "image"}]}, "allowed: text, thinking, tool_use"),
        (
            {"role": "assistant", "content": [{"type": "text", "text": 1}]},
            "text of a block of type text must be a text",
        ),
    ],
)
def test_a_conversation_that_is_refused(message: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        conversation_of({"messages": [message]})


def test_errors_have_the_form_of_each_client() -> None:
    over = RequestError("9 tokens", 400, OVER)
    assert message_error(over)["error"] == {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens"}
    assert message_error(RequestError("slow down", 429))["error"]["type"] == "rate_limit_error"
    assert chat_error(over)["error"] == {"message": "9 tokens", "type": "invalid_request_error", "code": OVER}
    with pytest.raises(RequestError, match="system must be a text"):
        conversation_of({"system": [{"type": "image"}], "messages": []})
