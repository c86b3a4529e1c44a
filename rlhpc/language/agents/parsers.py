"""What of a reply is reasoning, what an answer, and what calls of tools.

`think` and `hermes` are here; any other is vLLM's of that name (`--reasoning-parser`, `--tool-call-parser`), where it is
installed.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlhpc.language.agents.partial import Partial
from rlhpc.runtime.errors import ConfigError

#: Tokens at the end of a prompt among which `<think>` would be.
_BEGUN = 12
_HERMES = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_THINK = re.compile(r"^\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


@dataclass
class Reply:
    """What the model wrote in a turn.

    Attributes:
        content: The answer.
        reasoning: What came before it; None if there was nothing of the kind.
        calls: Of tools: name, and the arguments as JSON.
    """

    content: str
    reasoning: str | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """As OpenAI's clients get it."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [
                {
                    "id": f"call_{secrets.token_hex(8)}",
                    "type": "function",
                    "function": {"name": name, "arguments": said},
                }
                for name, said in self.calls
            ]
        return found


def think(text: str) -> tuple[str | None, str]:
    """Reasoning, between `<think>` and `</think>`, and what follows. The template may have written the first of the two."""
    found = _THINK.match(text)
    return (None, text) if found is None else (found[1].strip("\n"), text[found.end() :])


def hermes(text: str, tools: Any) -> tuple[str, list[tuple[str, str]]]:
    """What is beside the calls, and the calls: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Something else between
    the tags stays text."""
    calls = list[tuple[str, str]]()

    def take(found: re.Match[str]) -> str:
        try:
            said = json.loads(found[1])
            name, arguments = said["name"], said.get("arguments", {})
        except (ValueError, KeyError, TypeError):
            return found[0]
        calls.append((str(name), arguments if isinstance(arguments, str) else json.dumps(arguments)))
        return ""

    rest = _HERMES.sub(take, text)
    return (rest.strip() if calls else text), calls


class Parsers:
    """How replies are read.

    Args:
        tokenizer: Of the model.
        tools: `agent.tool_parser`.
        reasoning: `agent.reasoning_parser`.

    Raises:
        ConfigError: There is no parser of that name.
    """

    def __init__(self, tokenizer: Any, tools: str | None, reasoning: str | None) -> None:
        self._tokenizer = tokenizer
        self._reasoning: Callable[[str], tuple[str | None, str]] | None = None
        self._tools: Callable[[str, Any], tuple[str, list[tuple[str, str]]]] | None = None
        if reasoning is not None:
            self._reasoning = think if reasoning == "think" else _of_vllm_reasoning(reasoning, tokenizer)
        if tools is not None:
            self._tools = hermes if tools == "hermes" else _of_vllm_tools(tools, tokenizer)

    def read(self, token_ids: list[int], tools: Any) -> Reply:
        """What a turn says; calls are looked for where there are tools."""
        if token_ids and token_ids[-1] in self._ends():
            token_ids = token_ids[:-1]
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        reasoning, calls = None, list[tuple[str, str]]()
        if self._reasoning is not None:
            reasoning, text = self._reasoning(text)
        if self._tools is not None and tools:
            text, calls = self._tools(text, tools)
        return Reply(text, reasoning, calls)

    def partly(self, prompt: list[int], tools: Any) -> Partial | None:
        """Reads a reply while it is written; None where that is not known of these parsers.

        Args:
            prompt: What the model reads.
            tools: As the client sent them.
        """
        calls = self._tools is not None and bool(tools)
        if self._reasoning not in (None, think) or (calls and self._tools is not hermes):
            return None
        end = self._tokenizer.decode(prompt[-_BEGUN:], skip_special_tokens=False).rstrip()
        thinks = self._reasoning is not None
        return Partial(self._tokenizer, opened=thinks and end.endswith("<think>"), thinks=thinks, calls=calls)

    def _ends(self) -> tuple[int | None, ...]:
        # The end of a turn and that of a text: models are trained with either.
        return self._tokenizer.eos_token_id, self._tokenizer.pad_token_id


def _of_vllm_reasoning(name: str, tokenizer: Any) -> Callable[[str], tuple[str | None, str]]:
    try:
        from vllm.reasoning import ReasoningParserManager
    except ImportError:
        raise ConfigError(f"agent.reasoning_parser is {name!r}; without vllm: think, or null") from None
    try:
        parser = ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
    except (KeyError, RuntimeError) as error:
        raise ConfigError(f"agent.reasoning_parser is {name!r}, which vLLM does not have: {error}") from None

    def read(text: str) -> tuple[str | None, str]:
        reasoning, content = parser.extract_reasoning(text, _request())
        return reasoning, content or ""

    return read


def _of_vllm_tools(name: str, tokenizer: Any) -> Callable[[str, Any], tuple[str, list[tuple[str, str]]]]:
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError:
        raise ConfigError(f"agent.tool_parser is {name!r}; without vllm: hermes, or null") from None
    try:
        kind = ToolParserManager.get_tool_parser(name)
        kind(tokenizer)  # it may want tokens that this vocabulary lacks
    except (KeyError, RuntimeError, ValueError) as error:
        raise ConfigError(f"agent.tool_parser is {name!r}, which cannot be used: {error}") from None

    def read(text: str, tools: Any) -> tuple[str, list[tuple[str, str]]]:
        request = _request(tools)
        found = kind(tokenizer, request.tools).extract_tool_calls(text, request)
        if not found.tools_called:
            return text, []
        return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]

    return read


def _request(tools: Any = None) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(
        messages=[{"role": "user", "content": ""}], model="policy", tools=tools or None, seed=None
    )
