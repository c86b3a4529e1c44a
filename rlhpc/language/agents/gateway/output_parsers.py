"""Reply parsers: reasoning, answer and tool calls.

`think` and `hermes` are defined here. Any other name selects vLLM's parser of that name (`--reasoning-parser`,
`--tool-call-parser`), which requires vLLM.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhpc.language.data.tokenizer import cut_at_stop, special_tokens, strip_end_tokens
from rlhpc.language.policy_text import parse_json_at
from rlhpc.runtime.errors import ConfigError

_THINK_TAG, _THINK_END, _CALL_TAG = "<think>", "</think>", "<tool_call>"
#: Character that a tokenizer's decoder returns for an incomplete UTF-8 sequence.
_REPLACEMENT_CHARACTER = "�"


class IncrementalParser:
    """Incremental parser of a streamed reply.

    Args:
        tokenizer: Tokenizer of the model.
        starts_in_reasoning: Whether the prompt ends with an opening reasoning tag.
        has_reasoning: Whether to separate reasoning from the answer.
        has_calls: Whether to separate tool calls from the answer.
        stop: Texts that end the reply and are not part of it.
        hidden_tokens: Special tokens to remove from the reply.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        starts_in_reasoning: bool,
        has_reasoning: bool,
        has_calls: bool,
        stop: Sequence[str] = (),
        hidden_tokens: Collection[int] = (),
    ) -> None:
        self._tokenizer, self._starts_in_reasoning, self._has_reasoning, self._calls = (
            tokenizer,
            starts_in_reasoning,
            has_reasoning,
            has_calls,
        )
        self._stop, self._hidden_tokens = tuple(stop), hidden_tokens
        self._text, self._prefix_offset, self._read_offset = "", 0, 0

    def split(self, ids: Sequence[int]) -> tuple[str, str]:
        """Returns the parts of the reasoning and of the answer that later tokens cannot change.

        Args:
            ids: All tokens so far.
        """
        self._read_tokens([token for token in ids if token not in self._hidden_tokens])
        reasoning, answer_text = "", self._text
        for stop_text in self._stop:
            answer_text = _cut_before_tag(answer_text, stop_text)
        if self._has_reasoning:
            answer = answer_text.lstrip()
            if (
                not self._starts_in_reasoning
                and _THINK_TAG.startswith(answer[: len(_THINK_TAG)])
                and len(answer) < len(_THINK_TAG)
            ):
                return "", ""
            if self._starts_in_reasoning or answer.startswith(_THINK_TAG):
                reasoning, closing_tag, answer_text = answer.removeprefix(_THINK_TAG).partition(_THINK_END)
                reasoning = (reasoning if closing_tag else _cut_before_tag(reasoning, _THINK_END)).strip("\n")
                answer_text = answer_text.lstrip()
        if self._calls:  # the answer before tool calls has no surrounding white space
            answer_text = _cut_before_tag(answer_text, _CALL_TAG).strip()
        return reasoning, answer_text

    def _read_tokens(self, ids: list[int]) -> None:
        """Appends the text of new tokens, unless it ends with an incomplete character. Decodes new tokens together with the
        preceding tokens, because a token's text can depend on them.
        """
        decoded_prefix = self._decode(ids[self._prefix_offset : self._read_offset])
        text = self._decode(ids[self._prefix_offset :])
        if len(text) > len(decoded_prefix) and not text.endswith(_REPLACEMENT_CHARACTER):
            self._text += text[len(decoded_prefix) :]
            self._prefix_offset, self._read_offset = self._read_offset, len(ids)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def _cut_before_tag(partial_text: str, tag: str) -> str:
    """Returns the text before a tag; omits an incomplete tag at the end of the text."""
    tag_start = partial_text.find(tag)
    if tag_start >= 0:
        return partial_text[:tag_start]
    for prefix_length in range(min(len(tag) - 1, len(partial_text)), 0, -1):
        if partial_text.endswith(tag[:prefix_length]):
            return partial_text[:-prefix_length]
    return partial_text


log = logging.getLogger(__name__)
#: Number of tokens at the end of a prompt that are searched for `<think>`.
_OPENING_TOKENS = 12
_CALL_START, _CALL_END = re.compile(r"<tool_call>\s*(?=\{)"), re.compile(r"\s*</tool_call>")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_THINK = re.compile(r"^\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


@dataclass
class Reply:
    """Parsed reply of a turn.

    Attributes:
        content: Answer.
        reasoning: Reasoning before the answer; None for a reply without reasoning.
        calls: Tool calls as (name, arguments as JSON).
        stop: Stop text that ended the reply, which is not part of `content`; None if no stop text did.
    """

    content: str
    reasoning: str | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    stop: str | None = None

    def message(self) -> dict[str, Any]:
        """Returns the reply as a message in OpenAI's format."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{secrets.token_hex(8)}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for name, arguments in self.calls
            ]
        return message


def think(text: str, starts_in_reasoning: bool = False) -> tuple[str | None, str]:
    """Splits a reply into the reasoning, between `<think>` and `</think>`, and the text after it. The reasoning is None if
    the reply has no tags. If only the end tag is missing, all text after the start tag is reasoning.

    Args:
        text: The reply.
        starts_in_reasoning: Whether the prompt ends with `<think>`.
    """
    think_match = _THINK.match(text)
    if think_match is not None:
        return think_match[1].strip("\n"), text[think_match.end() :]
    answer = text.lstrip()
    if starts_in_reasoning or answer.startswith("<think>"):
        return answer.removeprefix("<think>").strip("\n"), ""
    return None, text


def hermes(text: str, tools: Any) -> tuple[str, list[tuple[str, str]]]:
    """Splits a reply into the answer and tool calls of the form `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
    Returns the answer and the calls as (name, arguments as JSON). Other content between the tags remains in the answer.
    """
    calls, answer, search_start = list[tuple[str, str]](), "", 0
    for opening_tag in _CALL_START.finditer(text):
        if opening_tag.start() < search_start:  # inside a call
            continue
        try:
            call, call_end = parse_json_at(text, opening_tag.end())
        except ValueError:
            continue
        closing_tag = _CALL_END.match(text, call_end)
        if closing_tag is None or "name" not in call:
            continue
        arguments = call.get("arguments", {})
        calls.append((str(call["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments)))
        answer, search_start = answer + text[search_start : opening_tag.start()], closing_tag.end()
    return ((answer + text[search_start:]).strip() if calls else text), calls


class Parsers:
    """Parsers of replies.

    Args:
        tokenizer: Tokenizer of the model.
        tools: `agent.tool_parser`.
        reasoning: `agent.reasoning_parser`.

    Raises:
        ConfigError: A name is unknown.
    """

    def __init__(self, tokenizer: Any, tools: str | None, reasoning: str | None) -> None:
        self._tokenizer = tokenizer
        self._reasoning_parser: Callable[[str, bool], tuple[str | None, str]] | None = None
        self._tool_parser: Callable[[str, Any], tuple[str, list[tuple[str, str]]]] | None = None
        if reasoning is not None:
            self._reasoning_parser = (
                think if reasoning == "think" else _load_vllm_reasoning_parser(reasoning, tokenizer)
            )
        if tools is not None:
            self._tool_parser = hermes if tools == "hermes" else _load_vllm_tool_parser(tools, tokenizer)
        #: Special tokens that no parser reads. Empty with vLLM's parsers, which may read any token.
        self._hidden_tokens = frozenset[int]()
        if self._reasoning_parser in (None, think) and self._tool_parser in (None, hermes):
            self._hidden_tokens = frozenset(
                token for token in special_tokens(tokenizer) if self._decode([token]).strip() not in _TAGS
            )

    def read(self, token_ids: list[int], tools: Any, stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> Reply:
        """Parses a turn's text up to the first stop text. Parses tool calls only if the request has tools."""
        answer_text, stop_text = self._text(strip_end_tokens(token_ids, self._tokenizer), stop)
        reasoning, calls = None, list[tuple[str, str]]()
        if self._reasoning_parser is not None:
            reasoning, answer_text = self._reasoning_parser(answer_text, self._ends_with_reasoning_tag(prompt))
        if self._tool_parser is not None and tools:
            answer_text, calls = self._tool_parser(answer_text, tools)
            answer_text = answer_text.strip()  # as in `IncrementalParser`, which must strip before the calls are known
        return Reply(answer_text, reasoning, calls, stop_text)

    def _text(self, ids: list[int], stop: Sequence[str]) -> tuple[str, str | None]:
        """Returns the text without hidden tokens up to the first stop text; and that stop text, or None."""
        answer_text, stop_text = cut_at_stop(
            self._tokenizer, [token for token in ids if token not in self._hidden_tokens], stop
        )
        if stop_text is not None or not stop:
            return answer_text, stop_text
        full_text, stop_text = cut_at_stop(self._tokenizer, ids, stop)
        if stop_text is None:
            return answer_text, None
        # The stop text contains a hidden special token.
        num_visible_ids = len(ids)
        while len(self._decode(ids[:num_visible_ids])) > len(full_text):
            num_visible_ids -= 1
        remaining_text = full_text[len(self._decode(ids[:num_visible_ids])) :]
        return self._decode(
            [token for token in ids[:num_visible_ids] if token not in self._hidden_tokens]
        ) + remaining_text, stop_text

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _ends_with_reasoning_tag(self, prompt: Sequence[int]) -> bool:
        """Returns whether a prompt ends with an opening reasoning tag."""
        return self._decode(prompt[-_OPENING_TOKENS:]).rstrip().endswith("<think>")

    def partial(self, prompt: list[int], tools: Any, stop: Sequence[str] = ()) -> IncrementalParser | None:
        """Returns an incremental parser of a reply; None if a parser supports only complete replies.

        Args:
            prompt: Tokens of the prompt.
            tools: Tools as the client sent them.
            stop: Texts that end the reply.
        """
        calls = self._tool_parser is not None and bool(tools)
        if self._reasoning_parser not in (None, think) or (calls and self._tool_parser is not hermes):
            return None
        has_reasoning = self._reasoning_parser is not None
        starts_in_reasoning = has_reasoning and self._ends_with_reasoning_tag(prompt)
        return IncrementalParser(
            self._tokenizer,
            starts_in_reasoning=starts_in_reasoning,
            has_reasoning=has_reasoning,
            has_calls=calls,
            stop=stop,
            hidden_tokens=self._hidden_tokens,
        )


def _load_vllm_reasoning_parser(name: str, tokenizer: Any) -> Callable[[str, bool], tuple[str | None, str]]:
    try:
        from vllm.reasoning import ReasoningParserManager
    except ImportError:
        raise ConfigError(f"agent.reasoning_parser is {name!r}; without vllm: think, or null") from None
    try:
        parser = ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
    except (KeyError, RuntimeError) as error:
        raise ConfigError(f"agent.reasoning_parser is {name!r}, which vLLM does not have: {error}") from None

    def read(text: str, starts_in_reasoning: bool) -> tuple[str | None, str]:
        del starts_in_reasoning  # vLLM's parsers know the templates of their models
        try:
            reasoning, answer_text = parser.extract_reasoning(text, _make_vllm_request())
        except Exception as error:
            log.warning("vLLM's reasoning parser %s cannot read a reply, which stays text: %r", name, error)
            return None, text
        return reasoning, answer_text or ""

    return read


def _load_vllm_tool_parser(name: str, tokenizer: Any) -> Callable[[str, Any], tuple[str, list[tuple[str, str]]]]:
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError:
        raise ConfigError(f"agent.tool_parser is {name!r}; without vllm: hermes, or null") from None
    try:
        parser_class = ToolParserManager.get_tool_parser(name)
        parser_class(tokenizer)  # raises if the vocabulary lacks tokens that the parser requires
    except (KeyError, RuntimeError, ValueError) as error:
        raise ConfigError(f"agent.tool_parser is {name!r}, which cannot be used: {error}") from None

    def read(text: str, tools: Any) -> tuple[str, list[tuple[str, str]]]:
        request = _make_vllm_request(tools)
        parser = parser_class(tokenizer, request.tools)
        try:
            extraction = parser.extract_tool_calls(text, request)
        except Exception as error:
            log.warning("vLLM's tool parser %s cannot read a reply, which stays text: %r", name, error)
            return text, []
        if not extraction.tools_called:
            return text, []
        return extraction.content or "", [
            (call.function.name, call.function.arguments) for call in extraction.tool_calls
        ]

    return read


def _make_vllm_request(tools: Any = None) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(
        messages=[{"role": "user", "content": ""}], model="policy", tools=tools or None, seed=None
    )
