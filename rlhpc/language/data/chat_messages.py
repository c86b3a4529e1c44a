"""Chat messages of data files: conversion to the form of chat templates, and detection of parts that a template omits.

RL prompts, demonstrations and preferences use the same reader. The reader drops no part of a message: it refuses unsupported
parts. `find_omitted_parts` detects parts that a template does not render.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhpc.language.data.images import MARK
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_json

#: Chat message. `role` and `content` are strings; `tool_calls` is a list of `{type, function: {name, arguments: {…}}, …}`.
Message = dict[str, Any]

#: Keys that link a tool call to its result or name the tool; templates need not render them.
_LINK_KEYS = frozenset({"tool_call_id", "name"})
#: Keys that templates omit from earlier turns on purpose: the model does not read its earlier reasoning.
_REASONING_KEYS = frozenset({"reasoning_content", "reasoning", "thinking"})
_MARKER_ARGUMENT = "kept_argument"
_TEXT_PARTS = ("text", "input_text", "output_text")


def read_messages(raw_messages: Any, *, is_sparse: bool = False, has_pictures: bool = False) -> list[Message]:
    """Reads a conversation.

    A null or empty key counts as absent, because Parquet gives every message of a column the same keys. Text parts are
    concatenated. Arguments of tool calls are converted to objects.

    Args:
        raw_messages: List of messages as read from a file.
        is_sparse: Whether null also means absent inside nested values, such as the arguments of calls (Parquet, `datasets`).
        has_pictures: Whether the row has an image column, so that parts of type `image` are allowed as placeholders.

    Raises:
        ConfigError: The value is not a conversation; the message names the invalid chat message.
    """
    if not isinstance(raw_messages, Sequence) or isinstance(raw_messages, (str, bytes)) or not raw_messages:
        raise ConfigError("it is not a list of messages")
    messages = []
    for message_number, message in enumerate(raw_messages):
        try:
            messages.append(_read_message(message, is_sparse, has_pictures))
        except ConfigError as error:
            raise ConfigError(f"message {message_number}{_format_role(message)} {error}") from None
    if not any(message["content"].strip() or _find_extra_keys(message) for message in messages):
        raise ConfigError("no message says anything")
    return messages


def read_tools(raw_tools: Any, *, is_sparse: bool = False) -> tuple[dict[str, Any], ...]:
    """Reads the tool definitions of a row: a list, a list as JSON text, or null.

    Raises:
        ConfigError: The value is not a list of tool definitions.
    """
    if isinstance(raw_tools, str):
        try:
            raw_tools = read_json(raw_tools) if raw_tools.strip() else None
        except ValueError as error:
            raise ConfigError(f"the text is not JSON: {error}") from None
    if raw_tools is None:
        return ()
    raw_tools = _drop_nulls(raw_tools) if is_sparse else raw_tools
    if (
        not isinstance(raw_tools, Sequence)
        or isinstance(raw_tools, str)
        or not all(isinstance(tool_schema, Mapping) for tool_schema in raw_tools)
    ):
        raise ConfigError(
            'tools are a list of definitions {"type": "function", "function": {"name": …, "parameters": …}}'
        )
    for tool_number, tool in enumerate(raw_tools):
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ConfigError(f"tool {tool_number} has no name")
    return tuple(dict(tool) for tool in raw_tools)


def last_turn(messages: Sequence[Message]) -> tuple[list[Message], Message | None]:
    """Splits off a final assistant message; returns the earlier messages and the final assistant message, or None."""
    if messages and messages[-1]["role"] == "assistant":
        return list(messages[:-1]), messages[-1]
    return list(messages), None


def is_plain(message: Message) -> bool:
    """Returns whether a message has no keys besides role and content."""
    return not _find_extra_keys(message)


def message_text(turn: Message) -> str:
    """Converts a message to text: its content, or JSON if the message has other keys."""
    shown_fields = {
        key: field_value for key, field_value in turn.items() if key != "role" and field_value not in ("", [], None)
    }
    return str(turn["content"]) if is_plain(turn) else json.dumps(shown_fields, ensure_ascii=False)


def require_plain(messages: Sequence[Message], tools: Sequence[Any]) -> None:
    """Checks that messages can be written without a chat template.

    Raises:
        ConfigError: A message has keys besides role and content, or there are tools.
    """
    for message_number, message in enumerate(messages):
        if extra_keys := _find_extra_keys(message):
            raise ConfigError(
                f"message {message_number} ({message['role']}) has {', '.join(extra_keys)}, which bare text cannot hold"
            )
    if tools:
        raise ConfigError("there are tools, which bare text cannot hold")


def find_omitted_parts(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    render: Callable[[Sequence[Message], Sequence[dict[str, Any]]], str],
) -> tuple[list[str], list[str]]:
    """Finds the parts of a conversation that a chat template omits, by rendering it with and without them.

    Args:
        messages: The conversation; a final assistant turn is the turn to train on.
        tools: Tool definitions.
        render: Renders messages and tools with the template; raises ConfigError if the template rejects them.

    Returns:
        Descriptions of the omitted parts, and the reasoning keys that the template omits from earlier turns but renders
        for the last turn.

    Raises:
        ConfigError: The template rejects the conversation itself.
    """
    rendering = render(messages, tools)
    message_parts = [
        message_part
        for message_number, message in enumerate(messages)
        for message_part in _list_required_parts(message_number, message)
    ]
    marked_messages: list[Message] = [_copy_message(message) for message in messages]
    for marker_number, (message_number, path) in enumerate(message_parts):
        _insert_marker(marked_messages[message_number], path, _make_marker(marker_number))
    try:
        marked_rendering = render(marked_messages, tools)
    except ConfigError:  # the template rejects the marked values: each part is removed in turn
        marked_rendering = ""
    missing_parts, old_reasoning = [], []
    for marker_number, (message_number, path) in enumerate(message_parts):
        if _make_marker(marker_number) in marked_rendering or _is_rendered(
            messages, tools, message_number, path, render, rendering
        ):
            continue
        is_earlier_reasoning = message_number < len(messages) - 1 and path[0] in _REASONING_KEYS
        if is_earlier_reasoning and _is_rendered(messages[: message_number + 1], tools, message_number, path, render):
            old_reasoning.append(str(path[0]))
        else:
            missing_parts.append(
                f"{'.'.join(map(str, path))} of message {message_number} ({messages[message_number]['role']})"
            )
    if tools and _try_render(messages, (), render) == rendering:
        missing_parts.append("the tools")
    return missing_parts, sorted(set(old_reasoning))


Path = tuple[str | int, ...]


def _read_message(message: Any, is_sparse: bool, has_pictures: bool) -> Message:
    if not isinstance(message, Mapping):
        raise ConfigError(f"is a {type(message).__name__}, not an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ConfigError("has no role")
    chat_message: Message = {"role": role, "content": ""}
    for key, field_value in message.items():
        if key in ("role", "content") or field_value is None or field_value in ("", [], {}, ()):
            continue
        if key == "tool_calls":
            chat_message[key] = _read_calls(field_value, is_sparse)
        else:
            chat_message[str(key)] = _drop_nulls(field_value) if is_sparse else field_value
    message_content = message.get("content")
    if message_content is None:
        if role != "tool" and not (role == "assistant" and _find_extra_keys(chat_message)):
            raise ConfigError("has no content")
    elif isinstance(message_content, str):
        chat_message["content"] = message_content
    else:
        chat_message["content"] = _read_parts(message_content, has_pictures)
    return chat_message


def _read_parts(message_content: Any, has_pictures: bool) -> str:
    if not isinstance(message_content, Sequence) or isinstance(message_content, bytes):
        raise ConfigError(
            f"has a content that is a {type(message_content).__name__}; allowed: a text, or a list of parts"
        )
    part_texts = []
    for content_part in message_content:
        if isinstance(content_part, str):
            part_texts.append(content_part)
            continue
        if not isinstance(content_part, Mapping):
            raise ConfigError(f"has a part that is a {type(content_part).__name__}; allowed: {{type: text, text: …}}")
        fields = {key: field_value for key, field_value in content_part.items() if field_value is not None}
        part_type = fields.get("type")
        if part_type in _TEXT_PARTS and isinstance(fields.get("text"), str) and set(fields) <= {"type", "text"}:
            part_texts.append(fields["text"])
        elif part_type == "image" and set(fields) == {"type"} and has_pictures:
            part_texts.append(MARK)
        elif part_type == "image" and set(fields) == {"type"}:
            raise ConfigError("has a part of type image, and no column of pictures is named (images_key)")
        else:
            raise ConfigError(
                f"has a part of type {part_type} with {', '.join(sorted(map(str, fields)))}; allowed: "
                "{type: text, text: …}, and {type: image} for a picture in the column images_key"
            )
    return "".join(part_texts)


def _read_calls(raw_calls: Any, is_sparse: bool) -> list[dict[str, Any]]:
    if isinstance(raw_calls, str):
        try:
            raw_calls = read_json(raw_calls)
        except ValueError:
            raise ConfigError("has tool_calls that are a text, and no JSON") from None
    if not isinstance(raw_calls, Sequence) or not all(isinstance(call, Mapping) for call in raw_calls):
        raise ConfigError("has tool_calls that are not a list of objects")
    calls = []
    for call in raw_calls:
        call_fields = {str(key): field_value for key, field_value in call.items() if field_value is not None}
        function = call_fields.get("function")
        if function is None:  # some data sets have {name, arguments} without `function`
            function = {key: call_fields.pop(key) for key in ("name", "arguments") if key in call_fields}
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ConfigError("has a tool call without a function that has a name")
        unknown_keys = sorted({*map(str, function)} - {"name", "arguments"}) + sorted(
            {*call_fields} - {"id", "type", "function", "index"}
        )
        unknown_keys = [key for key in unknown_keys if function.get(key, call_fields.get(key)) is not None]
        if unknown_keys:
            raise ConfigError(
                f"has a tool call with {', '.join(unknown_keys)}; allowed: id, type, function {{name, arguments}}"
            )
        if call_fields.get("type", "function") != "function":
            raise ConfigError(f"has a tool call of type {call_fields['type']}; allowed: function")
        arguments = _read_arguments(function.get("arguments"), is_sparse)
        id_field = {"id": call_fields["id"]} if "id" in call_fields else {}
        calls.append({**id_field, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _read_arguments(raw_arguments: Any, is_sparse: bool) -> dict[str, Any]:
    if isinstance(raw_arguments, str):
        try:
            raw_arguments = read_json(raw_arguments) if raw_arguments.strip() else {}
        except ValueError:
            raise ConfigError(f"has a tool call whose arguments are no JSON: {raw_arguments[:60]!r}") from None
    if raw_arguments is None:
        return {}
    if isinstance(raw_arguments, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in raw_arguments):
        raw_arguments = dict(raw_arguments)  # Arrow represents maps as lists of pairs
    if not isinstance(raw_arguments, Mapping):
        raise ConfigError(f"has a tool call whose arguments are a {type(raw_arguments).__name__}, not an object")
    return dict(_drop_nulls(raw_arguments) if is_sparse else raw_arguments)


def _drop_nulls(json_value: Any) -> Any:
    if isinstance(json_value, Mapping):
        return {str(key): _drop_nulls(child) for key, child in json_value.items() if child is not None}
    return [_drop_nulls(child) for child in json_value] if isinstance(json_value, list) else json_value


def _find_extra_keys(message: Message) -> list[str]:
    return [key for key in message if key not in ("role", "content")]


def _format_role(message: Any) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    return f" ({role})" if isinstance(role, str) and role else ""


def _list_required_parts(message_number: int, message: Message) -> list[tuple[int, Path]]:
    """Returns the parts of a message that a template must render, as (message number, path).

    Parts are the content, the name and arguments of each tool call, and every other key except labels.
    """
    paths: list[Path] = [("content",)] if message["content"].strip() else []
    for key in _find_extra_keys(message):
        if key == "tool_calls":
            for call in range(len(message[key])):
                paths += [(key, call, "function", "name"), (key, call, "function", "arguments")]
        elif not (key in _LINK_KEYS and (message["role"] == "tool" or key == "tool_call_id")):
            paths.append((key,))
    return [(message_number, path) for path in paths]


def _make_marker(marker_number: int) -> str:
    return f"KEPT{marker_number}X7F3A"


def _copy_message(message: Message) -> Message:
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


def _find_parent(message: Message, path: Path) -> Any:
    parent_object: Any = message
    for path_key in path[:-1]:
        parent_object = parent_object[path_key]
    return parent_object


def _insert_marker(message: Message, path: Path, marker_text: str) -> None:
    parent, key = _find_parent(message, path), path[-1]
    if key == "arguments":
        parent[key][_MARKER_ARGUMENT] = marker_text
    else:
        parent[key] = f"{parent[key]}{marker_text}" if isinstance(parent[key], str) else marker_text


def _is_rendered(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    marker_number: int,
    path: Path,
    render: Callable[[Sequence[Message], Sequence[dict[str, Any]]], str],
    removed_text: str | None = None,
) -> bool:
    """Returns whether the rendered text changes when a part of a message is removed."""
    changed_messages = [_copy_message(message) for message in messages]
    parent, key = _find_parent(changed_messages[marker_number], path), path[-1]
    if key == "arguments":
        if not parent[key]:
            return True  # a call without arguments has nothing to omit
        parent[key] = {}
    elif key == "content" or path[0] == "tool_calls":
        parent[key] = ""
    else:
        del parent[key]
    original_text = _try_render(messages, tools, render) if removed_text is None else removed_text
    return _try_render(changed_messages, tools, render) != original_text


def _try_render(messages: Any, tools: Any, render: Callable[[Any, Any], str]) -> str | None:
    try:
        return render(messages, tools)
    except ConfigError:
        return None
