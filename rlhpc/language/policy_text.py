"""Parsers of text that a policy wrote: JSON, arguments of tool calls, and text that a tokenizer can encode.

A policy may write any text, which must not end the run. Each parser therefore returns a value or raises `ValueError`, never
`RecursionError`. The module needs only the standard library and Python 3.8, because `main.py` also imports it.
"""

from __future__ import annotations

import json
import math
from typing import Any

#: Maximum nesting depth of a tool call's arguments, and of a client's request.
MAX_DEPTH, MAX_REQUEST_DEPTH = 64, 256


def parse_json(json_text: str | bytes, max_depth: int = MAX_DEPTH) -> Any:
    """Parses JSON.

    All texts in the value can be encoded (`valid_text`) and all numbers are finite, so that it can be written as JSON again.

    Raises:
        ValueError: The text is not JSON, has a number that is not finite, or is nested deeper than `max_depth`.
    """
    return repair_json(load_json(json_text), max_depth)


def load_json(json_text: str | bytes) -> Any:
    """Loads JSON without repairs (`repair_json`). Raises `ValueError` if the text is not JSON."""
    try:
        return json.loads(json_text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_json_at(json_text: str, value_start: int) -> tuple[Any, int]:
    """Parses the JSON value at an index of a text; returns the value and the index of its end. Raises as `parse_json`.

    Raises:
        ValueError: The text is not valid JSON, or is nested too deeply.
    """
    try:
        value, value_end = _DECODER.raw_decode(json_text, value_start)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return repair_json(value, MAX_DEPTH), value_end


def parse_arguments(arguments_text: Any) -> dict[str, Any]:
    """Returns the arguments of a tool call as an object; wraps other values as `{"arguments": …}`."""
    if isinstance(arguments_text, (str, bytes)):
        try:
            arguments = parse_json(arguments_text or "{}")
        except ValueError:
            arguments = valid_text(
                arguments_text if isinstance(arguments_text, str) else arguments_text.decode(errors="replace")
            )
    else:
        arguments = arguments_text
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


def valid_text(text: str) -> str:
    """Returns a text that UTF-8 can encode, with a question mark in place of each lone surrogate."""
    return text.encode("utf-8", "replace").decode()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def repair_json(json_value: Any, depth: int) -> Any:
    """Returns a JSON value in which all texts can be encoded (`valid_text`).

    Raises:
        ValueError: A number is not finite, or the value is nested deeper than `depth`.
    """
    if isinstance(json_value, str):
        return valid_text(json_value)
    if isinstance(json_value, float) and not math.isfinite(json_value):
        raise ValueError("a number is not finite")
    if not isinstance(json_value, (dict, list)):
        return json_value
    if not depth:
        raise ValueError("it is nested too deeply")
    if isinstance(json_value, list):
        return [repair_json(element, depth - 1) for element in json_value]
    return {valid_text(name): repair_json(element, depth - 1) for name, element in json_value.items()}
