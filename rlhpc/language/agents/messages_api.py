"""Anthropic's Messages in terms of chat completions: what such a client asks, and what it gets."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from rlhpc.language.agents.messages import Message, Refused
from rlhpc.language.agents.policy_text import parse_arguments
from rlhpc.language.agents.sessions import OVER, Answer, stop_reason

_REASONS = {"stop": "end_turn", "length": "max_tokens"}


def conversation_of(body: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """The messages and tools of a request, as chat completions have them.

    Raises:
        Refused: It has something else.
    """
    found: list[Message] = []
    if body.get("system"):
        found.append({"role": "system", "content": _text(body["system"])})
    for message in body["messages"]:
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
            raise Refused("messages must be objects with role user or assistant, and content")
        found += _assistant(message) if message["role"] == "assistant" else _user(message)
    if body.get("tool_choice", {}).get("type") == "none":
        return found, None
    return found, [_tool(tool) for tool in body.get("tools", [])] or None


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _assistant(message: Mapping[str, Any]) -> list[Message]:
    found: Message = {"role": "assistant", "content": ""}
    for block in _blocks(message.get("content")):
        kind = block.get("type")
        if kind == "text":
            found["content"] += _field(block, "text")
        elif kind == "thinking":
            found["reasoning_content"] = found.get("reasoning_content", "") + _field(block, "thinking")
        elif kind == "tool_use":
            function = {"name": _field(block, "name"), "arguments": block.get("input") or {}}
            call = {"id": _field(block, "id"), "type": "function", "function": function}
            found.setdefault("tool_calls", []).append(call)
        else:
            raise Refused(f"an assistant's message has a block of type {kind}; allowed: text, thinking, tool_use")
    return [found]


def _user(message: Mapping[str, Any]) -> list[Message]:
    """Results of tools are messages of their own; what the user says beside them comes behind."""
    results, said = list[Message](), list[Any]()
    for block in _blocks(message.get("content")):
        kind = block.get("type")
        if kind == "tool_result":
            found = [_shown(part) for part in _blocks(block.get("content") or "")]
            results.append({"role": "tool", "tool_call_id": _field(block, "tool_use_id"), "content": found})
        else:
            said.append(_shown(block))
    return [*results, *([{"role": "user", "content": said}] if said or not results else [])]


def _shown(block: Mapping[str, Any]) -> Any:
    """A block that is a text or a picture, which chat completions take as it stands."""
    if block.get("type") not in ("text", "image"):
        raise Refused(
            f"a user's message or a result of a tool has a block of type {block.get('type')}; this model reads text, pictures "
            "if it looks at them, and results of tools"
        )
    return block


def _blocks(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise Refused("a message's content must be a text, or a list of blocks")
    return content


def _text(content: Any) -> str:
    found = _blocks(content)
    if any(block.get("type") != "text" for block in found):
        raise Refused("system must be a text, or blocks of type text")
    return "".join(_field(block, "text") for block in found)


def _field(block: Mapping[str, Any], name: str) -> str:
    """A text of a block."""
    value = block.get(name, "")
    if not isinstance(value, str):
        raise Refused(f"{name} of a block of type {block.get('type')} must be a text")
    return value


def message_reply(answer: Answer, model: str) -> dict[str, Any]:
    """The answer to `/v1/messages`."""
    message, content = answer.message, list[dict[str, Any]]()
    if message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", []):
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        content.append({**block, "input": parse_arguments(function["arguments"])})
    reason = _REASONS[stop_reason(answer.turn.finish_reason)]
    stop = None if answer.reply is None or message.get("tool_calls") else answer.reply.stop
    reason = "tool_use" if message.get("tool_calls") else reason if stop is None else "stop_sequence"
    return {
        "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model, "content": content,
        "stop_reason": reason, "stop_sequence": stop,
        "usage": {"input_tokens": len(answer.prompt_ids), "output_tokens": len(answer.turn.token_ids)},
    }  # fmt: skip


def message_error(why: Refused) -> dict[str, Any]:
    """Why there is no answer."""
    kinds = {401: "authentication_error", 429: "rate_limit_error", 503: "api_error"}
    said = f"prompt is too long: {why}" if why.code == OVER else str(why)
    return {"type": "error", "error": {"type": kinds.get(why.status, "invalid_request_error"), "message": said}}
