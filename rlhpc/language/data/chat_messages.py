"""Chat messages of data files: conversion to the form of chat templates, and detection of parts that a template omits.

One reader serves the prompts of RL, demonstrations, and preferences. No part of a message is dropped: parts that the reader
does not support are errors, and so are parts that a template does not render (`find_unwritten`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhpc.language.data.images import MARK
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_json

#: Chat message. `role` and `content` are texts; `tool_calls` is a list of `{type, function: {name, arguments: {…}}, …}`.
Message = dict[str, Any]

#: Keys that only connect a call with its result, or name the tool that answers; templates need not render them.
_LABELS = frozenset({"tool_call_id", "name"})
#: Keys that templates omit from earlier turns on purpose, as the model never reads its old reasoning.
_REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})
_ARGUMENT = "kept_argument"
_TEXT_PARTS = ("text", "input_text", "output_text")


def read_messages(value: Any, *, sparse: bool = False, pictures: bool = False) -> list[Message]:
    """Reads a conversation.

    A key that is null or empty counts as absent, as Parquet gives every message of a column all keys. Parts of text become one
    text. Arguments of tool calls become objects.

    Args:
        value: A list of messages in the form of a file.
        sparse: Null also means absent inside arguments of calls (Parquet, `datasets`).
        pictures: The row has a column of images, for which parts of type `image` are placeholders.

    Raises:
        ConfigError: The value is not a conversation; names the invalid message.
    """
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        raise ConfigError("it is not a list of messages")
    messages = []
    for number, message in enumerate(value):
        try:
            messages.append(_read_message(message, sparse, pictures))
        except ConfigError as error:
            raise ConfigError(f"message {number}{_role(message)} {error}") from None
    if not any(message["content"].strip() or _extras(message) for message in messages):
        raise ConfigError("no message says anything")
    return messages


def read_tools(value: Any, *, sparse: bool = False) -> tuple[dict[str, Any], ...]:
    """Reads the tools of a row: a list of definitions, or that list as JSON text; null for none.

    Raises:
        ConfigError: The value has another form.
    """
    if isinstance(value, str):
        try:
            value = read_json(value) if value.strip() else None
        except ValueError as error:
            raise ConfigError(f"the text is not JSON: {error}") from None
    if value is None:
        return ()
    value = _without_nulls(value) if sparse else value
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(one, Mapping) for one in value):
        raise ConfigError(
            'tools are a list of definitions {"type": "function", "function": {"name": …, "parameters": …}}'
        )
    for number, tool in enumerate(value):
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ConfigError(f"tool {number} has no name")
    return tuple(dict(tool) for tool in value)


def last_turn(messages: Sequence[Message]) -> tuple[list[Message], Message | None]:
    """Splits a conversation into the messages before the assistant's last turn, and that turn: None if it ends otherwise."""
    if messages and messages[-1]["role"] == "assistant":
        return list(messages[:-1]), messages[-1]
    return list(messages), None


def is_plain(message: Message) -> bool:
    """Returns whether a message has only a role and a content."""
    return not _extras(message)


def written(turn: Message) -> str:
    """Returns a turn as a readable text: its content, or JSON if it has other keys."""
    content = {key: value for key, value in turn.items() if key != "role" and value not in ("", [], None)}
    return str(turn["content"]) if is_plain(turn) else json.dumps(content, ensure_ascii=False)


def require_plain(messages: Sequence[Message], tools: Sequence[Any]) -> None:
    """Rejects messages that text without a chat template cannot represent.

    Raises:
        ConfigError: A message has more than a content, or there are tools.
    """
    for number, message in enumerate(messages):
        if keys := _extras(message):
            raise ConfigError(
                f"message {number} ({message['role']}) has {', '.join(keys)}, which bare text cannot hold"
            )
    if tools:
        raise ConfigError("there are tools, which bare text cannot hold")


def find_unwritten(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    render: Callable[[Sequence[Message], Sequence[dict[str, Any]]], str],
) -> tuple[list[str], list[str]]:
    """Finds the parts of a conversation that a chat template omits, by rendering it with and without them.

    Args:
        messages: The conversation; if it ends with the assistant's turn, that turn is trained on.
        tools: Definitions of tools.
        render: The template; raises ConfigError if it rejects its input.

    Returns:
        Descriptions of the missing parts; and the keys of earlier turns that the template omits, but renders for the last one.

    Raises:
        ConfigError: The template rejects the conversation itself.
    """
    text = render(messages, tools)
    parts = [part for number, message in enumerate(messages) for part in _parts(number, message)]
    marked: list[Message] = [_copy(message) for message in messages]
    for mark, (number, path) in enumerate(parts):
        _mark(marked[number], path, _sign(mark))
    try:
        rendered = render(marked, tools)
    except ConfigError:  # it needs other values there: each part is tried alone
        rendered = ""
    missing, old = [], []
    for mark, (number, path) in enumerate(parts):
        if _sign(mark) in rendered or _differs(messages, tools, number, path, render, text):
            continue
        earlier = number < len(messages) - 1 and path[0] in _REASONING
        if earlier and _differs(messages[: number + 1], tools, number, path, render):
            old.append(str(path[0]))
        else:
            missing.append(f"{'.'.join(map(str, path))} of message {number} ({messages[number]['role']})")
    if tools and _rendered(messages, (), render) == text:
        missing.append("the tools")
    return missing, sorted(set(old))


Path = tuple[str | int, ...]


def _read_message(message: Any, sparse: bool, pictures: bool) -> Message:
    if not isinstance(message, Mapping):
        raise ConfigError(f"is a {type(message).__name__}, not an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ConfigError("has no role")
    result: Message = {"role": role, "content": ""}
    for key, value in message.items():
        if key in ("role", "content") or value is None or value in ("", [], {}, ()):
            continue
        if key == "tool_calls":
            result[key] = _read_calls(value, sparse)
        else:
            result[str(key)] = _without_nulls(value) if sparse else value
    content = message.get("content")
    if content is None:
        if role != "tool" and not (role == "assistant" and _extras(result)):
            raise ConfigError("has no content")
    elif isinstance(content, str):
        result["content"] = content
    else:
        result["content"] = _read_parts(content, pictures)
    return result


def _read_parts(content: Any, pictures: bool) -> str:
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ConfigError(f"has a content that is a {type(content).__name__}; allowed: a text, or a list of parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise ConfigError(f"has a part that is a {type(part).__name__}; allowed: {{type: text, text: …}}")
        full = {key: value for key, value in part.items() if value is not None}
        kind = full.get("type")
        if kind in _TEXT_PARTS and isinstance(full.get("text"), str) and set(full) <= {"type", "text"}:
            texts.append(full["text"])
        elif kind == "image" and set(full) == {"type"} and pictures:
            texts.append(MARK)
        elif kind == "image" and set(full) == {"type"}:
            raise ConfigError("has a part of type image, and no column of pictures is named (images_key)")
        else:
            raise ConfigError(
                f"has a part of type {kind} with {', '.join(sorted(map(str, full)))}; allowed: {{type: text, text: …}}, and "
                "{type: image} for a picture in the column images_key"
            )
    return "".join(texts)


def _read_calls(value: Any, sparse: bool) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = read_json(value)
        except ValueError:
            raise ConfigError("has tool_calls that are a text, and no JSON") from None
    if not isinstance(value, Sequence) or not all(isinstance(call, Mapping) for call in value):
        raise ConfigError("has tool_calls that are not a list of objects")
    calls = []
    for call in value:
        full = {str(key): item for key, item in call.items() if item is not None}
        function = full.get("function")
        if function is None:  # {name, arguments} without the frame, as in some data
            function = {key: full.pop(key) for key in ("name", "arguments") if key in full}
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ConfigError("has a tool call without a function that has a name")
        more = sorted({*map(str, function)} - {"name", "arguments"}) + sorted(
            {*full} - {"id", "type", "function", "index"}
        )
        more = [key for key in more if function.get(key, full.get(key)) is not None]
        if more:
            raise ConfigError(
                f"has a tool call with {', '.join(more)}; allowed: id, type, function {{name, arguments}}"
            )
        if full.get("type", "function") != "function":
            raise ConfigError(f"has a tool call of type {full['type']}; allowed: function")
        arguments = _read_arguments(function.get("arguments"), sparse)
        label = {"id": full["id"]} if "id" in full else {}
        calls.append({**label, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _read_arguments(value: Any, sparse: bool) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = read_json(value) if value.strip() else {}
        except ValueError:
            raise ConfigError(f"has a tool call whose arguments are no JSON: {value[:60]!r}") from None
    if value is None:
        return {}
    if isinstance(value, list) and all(isinstance(item, tuple) and len(item) == 2 for item in value):
        value = dict(value)  # Arrow's maps
    if not isinstance(value, Mapping):
        raise ConfigError(f"has a tool call whose arguments are a {type(value).__name__}, not an object")
    return dict(_without_nulls(value) if sparse else value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _extras(message: Message) -> list[str]:
    return [key for key in message if key not in ("role", "content")]


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    return f" ({role})" if isinstance(role, str) and role else ""


def _parts(number: int, message: Message) -> list[tuple[int, Path]]:
    """Returns the paths of a message's information: its content, names and arguments of its calls, and every other key."""
    paths: list[Path] = [("content",)] if message["content"].strip() else []
    for key in _extras(message):
        if key == "tool_calls":
            for call in range(len(message[key])):
                paths += [(key, call, "function", "name"), (key, call, "function", "arguments")]
        elif not (key in _LABELS and (message["role"] == "tool" or key == "tool_call_id")):
            paths.append((key,))
    return [(number, path) for path in paths]


def _sign(number: int) -> str:
    return f"KEPT{number}X7F3A"


def _copy(message: Message) -> Message:
    return {
        **message,
        **(
            {
                "tool_calls": [
                    {**call, "function": {**call["function"], "arguments": dict(call["function"]["arguments"])}}
                    for call in message["tool_calls"]
                ]
            }
            if "tool_calls" in message
            else {}
        ),
    }


def _holder(message: Message, path: Path) -> Any:
    value: Any = message
    for step in path[:-1]:
        value = value[step]
    return value


def _mark(message: Message, path: Path, sign: str) -> None:
    holder, key = _holder(message, path), path[-1]
    if key == "arguments":
        holder[key][_ARGUMENT] = sign
    else:
        holder[key] = f"{holder[key]}{sign}" if isinstance(holder[key], str) else sign


def _differs(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    number: int,
    path: Path,
    render: Callable[[Sequence[Message], Sequence[dict[str, Any]]], str],
    text: str | None = None,
) -> bool:
    """Returns whether a template renders another text without a part of a message."""
    changed = [_copy(message) for message in messages]
    holder, key = _holder(changed[number], path), path[-1]
    if key == "arguments":
        if not holder[key]:
            return True  # a call without arguments has nothing to omit
        holder[key] = {}
    elif key == "content" or path[0] == "tool_calls":
        holder[key] = ""
    else:
        del holder[key]
    before = _rendered(messages, tools, render) if text is None else text
    return _rendered(changed, tools, render) != before


def _rendered(messages: Any, tools: Any, render: Callable[[Any, Any], str]) -> str | None:
    try:
        return render(messages, tools)
    except ConfigError:
        return None
