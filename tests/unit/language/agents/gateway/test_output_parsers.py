"""Parsers of replies: reasoning, answer and tool calls, whole and while they are streamed."""

from __future__ import annotations

import json

import pytest

from tests.extras import need_extra

need_extra("llm")

from rlhpc.language.agents.gateway.output_parsers import Parsers
from rlhpc.runtime.errors import ConfigError
from tests.integration.language.gateway_things import chat_tokenizer

_CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": _CITY}}]


def test_what_is_reasoning_what_an_answer_and_what_a_call() -> None:
    tokenizer = chat_tokenizer()
    parsers = Parsers(tokenizer, "hermes", "think")
    for text, tools, reasoning, content, calls in (
        ("<think>a b</think>\n\nc", None, "a b", "c", []), ("a b</think>c", None, "a b", "c", []),
        ("c", WEATHER, None, "c", []),
        ('x <tool_call>\n{"name": "weather", "arguments": {"city": "R"}}\n</tool_call>', WEATHER, None, "x",
         [("weather", {"city": "R"})]),
        ('<tool_call>{"name": "weather"}</tool_call>', None, None, '<tool_call>{"name": "weather"}</tool_call>', []),
        ("<tool_call>{broken}</tool_call>", WEATHER, None, "<tool_call>{broken}</tool_call>", []),
    ):  # fmt: skip
        found = parsers.read([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id], tools)
        assert (found.reasoning, found.content) == (reasoning, content)
        assert [(name, json.loads(said)) for name, said in found.calls] == calls


@pytest.mark.long
def test_parsers_of_vllm_by_name() -> None:
    need_extra("vllm")
    tokenizer = chat_tokenizer()
    parsers = Parsers(tokenizer, "pythonic", "deepseek_r1")
    ids = tokenizer.encode('so</think>[weather(city="Rome")]', add_special_tokens=False)
    found = parsers.read([*ids, tokenizer.eos_token_id], WEATHER)
    assert found.reasoning == "so"
    assert [(name, json.loads(said)) for name, said in found.calls] == [("weather", {"city": "Rome"})]
    ids = tokenizer.encode("so</think>It rains.", add_special_tokens=False)
    found = parsers.read([*ids, tokenizer.eos_token_id], WEATHER)
    assert (found.reasoning, found.content, found.calls) == ("so", "It rains.", [])
    for tools, reasoning, key in (("nobody", None, "agent.tool_parser"), (None, "nobody", "agent.reasoning_parser")):
        with pytest.raises(ConfigError, match=key):
            Parsers(tokenizer, tools, reasoning)


def test_special_tokens_are_no_part_of_a_text_and_a_stop_text_may_have_one() -> None:
    tokenizer = chat_tokenizer()
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    ids = [
        *tokenizer.encode("so a", add_special_tokens=False),
        start,
        *tokenizer.encode("b c", add_special_tokens=False),
    ]
    for stop, text, match in (
        ((), "so ab c", None), (("im",), "so ab c", None), (("<|im_start|>",), "so a", "<|im_start|>"),
        ((" a<|im_start|>",), "so", " a<|im_start|>"), (("ab",), "so ", "ab"), (("c", "o"), "s", "o"),
    ):  # fmt: skip
        parsers = Parsers(tokenizer, "hermes", "think")
        reply = parsers.read(ids, [], stop)
        assert (reply.content, reply.stop) == (text, match), stop
        partial = parsers.partial([], [], stop)
        assert partial is not None
        for end in range(len(ids)):
            assert text.startswith(partial.split(ids[:end])[1]) or "<" in (match or ""), stop
