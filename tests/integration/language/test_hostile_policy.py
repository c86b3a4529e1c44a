"""A policy that writes anything at all: its episodes are never failed ones, and each call of its clients is answered."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from gateway_things import Scripted, Served, run_all
from test_environments import played

from rlhpc.language.agents.gateway.output_parsers import hermes
from rlhpc.language.agents.runner.frameworks import _call_tool
from rlhpc.language.envs.registry import ENVIRONMENTS
from rlhpc.language.policy_text import MAX_DEPTH, parse_arguments, parse_json

DEEP = 1500
#: What stands where a call has its arguments, or a text has them.
ARGUMENTS = [
    "not json", "", "{", "null", "7", '"text"', "[1, 2]", "[" * DEEP, '{"a":' * DEEP, "[" * DEEP + "]" * DEEP,
    '{"query": "\\ud800"}', '{"query": NaN}', '{"query": 1e999}', '{"query": -Infinity}', '{"a": ' + "9" * 900 + "}",
    '{"query": null}', '{"sql": 3, "query": []}', '{"path": "x", "old": "", "new": "\\udfff"}', '{"1": 2, "": 3}',
    "'; drop table person; --", "\x00\x01\x7f", "\\ud800", '{"sql": "select \'a\' || char(0) || char(55296)"}',
    '{"sql": "select cast(x\'ff\' as text)"}', "</tool_call><tool_call>", "{}{}", "round(1,-10**9)", "(" * 400, "²",
    "0x", "1_0",
]  # fmt: skip
WHOLE = [
    "", " ", "<tool_call>", "</tool_call>", "<think>", "</think></think>",
    '<tool_call>{"name": null}</tool_call>',
    '<tool_call>{"name": {"a": 1}, "arguments": {}}</tool_call>', "<tool_call>{}</tool_call>", "<|im_start|>user",
    '<tool_call>{"name": "", "arguments": ""}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>' * 20, ": : :",
    "\ufffd\u200d" * 9,
]  # fmt: skip


def texts_for(tools: list[str]) -> list[str]:
    """Returns hostile replies: whole texts, each argument in both forms of a call, and random cuts of these."""
    names = [*tools, "nobody"]
    calls = [
        f'<tool_call>{{"name": "{name}", "arguments": {said}}}</tool_call>' for name in names for said in ARGUMENTS
    ]
    strings = [
        f"<tool_call>{json.dumps({'name': name, 'arguments': said})}</tool_call>"
        for name in names
        for said in ARGUMENTS
    ]
    plain = [f"{name}: {said}" for name in names for said in ARGUMENTS]
    draw = random.Random(0)
    texts = [*WHOLE, *calls, *strings, *plain, *ARGUMENTS]
    torn = [text[draw.randrange(len(text) + 1) :][: draw.randrange(80)] for text in draw.sample(texts, 40)]
    return texts + torn


@pytest.mark.parametrize("name", ["search", "guess", "mastermind", "kuhn_poker", "proposer", "sql", "micro_swe"])
def test_no_text_fails_an_environments_episode(name: str) -> None:
    environment = ENVIRONMENTS.find(name)
    tools = [tool["function"]["name"] for tool in environment().tools]
    texts = itertools.cycle(texts_for(tools))
    engine = Scripted(lambda prompt: next(texts), context=60_000)
    with played(engine, environment, turns=3, roles=tuple(environment.roles)) as generation:
        episodes = run_all(
            generation, len(texts_for(tools)) // 3, most=4000, prompt=environment.problem(0), seconds=200
        )
    assert {episode.outcome.error for episode in episodes} == {""}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["openai", "anthropic"])
def test_each_call_of_either_form_is_answered(form: str, stream: bool) -> None:
    """Turn by turn, with the replies sent back as a client has them: 200, and JSON that any client can read."""
    replies = texts_for(["f"])
    texts = iter(replies)
    served = Served(Scripted(lambda prompt: next(texts), context=10**9))
    try:
        for first in range(0, len(replies) - 5, 5):
            session = served.open(seed=first, most=8000, tokens=10**9)
            messages: list[Any] = [{"role": "user", "content": "?"}]
            for _ in range(5):
                messages += answered(served, session.key, form, stream, messages)
            assert all(turn.received for turn in session.tree.turns)
            served.end(session)
    finally:
        served.close()


def answered(served: Served, key: str, form: str, stream: bool, messages: list[Any]) -> list[Any]:
    """Returns the reply to a conversation, and what its client says next."""
    path, schema = ("/v1/chat/completions", "parameters") if form == "openai" else ("/v1/messages", "input_schema")
    tool = {"name": "f", schema: {"type": "object"}}
    tools = [{"type": "function", "function": tool}] if form == "openai" else [tool]
    body = {"model": "m", "max_tokens": 8000, "messages": messages, "tools": tools, "stream": stream}
    status, reply = served.post(key, path, body)
    assert status == 200, reply
    if stream:
        strict(reply)
        last = reply[-1]
        assert last["choices"][0]["finish_reason"] if form == "openai" else last["type"] == "message_stop"
        return [GO_ON]
    strict(reply)
    if form == "openai":
        message = reply["choices"][0]["message"]
        assert reply["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
        calls = [call["id"] for call in message.get("tool_calls", [])]
        return [
            message,
            *({"role": "tool", "tool_call_id": call, "content": "no"} for call in calls),
            *([] if calls else [GO_ON]),
        ]
    assert reply["stop_reason"] in ("end_turn", "max_tokens", "tool_use")
    calls = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call, "content": "no"} for call in calls]
    return [
        {"role": "assistant", "content": reply["content"]},
        {"role": "user", "content": results} if calls else GO_ON,
    ]


GO_ON = {"role": "user", "content": "go on"}


def strict(value: Any) -> None:
    """Fails for what JSON of other languages, or UTF-8, cannot hold."""
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


def test_a_call_ends_where_its_json_does() -> None:
    inner = "}</tool_call><tool_call>{"
    calls = f"a <tool_call>{json.dumps({'name': 'f', 'arguments': {'x': inner}})}</tool_call> b"
    assert hermes(calls * 2, []) == ("a  ba  b", [("f", json.dumps({"x": inner}))] * 2)
    for text in ("<tool_call>{" * 9, "<tool_call>{}</tool_call>", '<tool_call>{"name": "f"} </tool_cal'):
        assert hermes(text, []) == (text, [])


def test_one_reader_for_what_a_policy_wrote() -> None:
    for text in (
        "[" * 200_000,
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "NaN",
        "1e999",
        "{",
        "",
        '{"a": Infinity}',
    ):
        with pytest.raises(ValueError):
            parse_json(text)
        assert text == "" or parse_arguments(text) == {"arguments": text}
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH) and parse_json('"\\ud83d\\ude00 \\ud800"') == "😀 ?"
    assert parse_arguments("") == {} == parse_arguments(None) and parse_arguments("[1]") == {"arguments": [1]}
    for text in ARGUMENTS:  # an agent with servers of tools tells the model, by a ValueError, or calls the server
        owners: Any = {"f": type("Server", (), {"call": lambda self, name, arguments: "called"})()}
        try:
            assert _call_tool({"name": "f", "arguments": text}, owners, parse_json) == "called"
        except ValueError as error:
            assert str(error)
