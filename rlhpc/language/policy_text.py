"""Parsers of text that a policy wrote: JSON, arguments of tool calls, and text that a tokenizer can encode.

A policy may write anything, and pays for it by the reward alone: a reader here returns a value or raises `ValueError`, never
`RecursionError` or the like. The standard library and Python 3.8 are enough, as for `main.py`, which reads it as well.
"""

from __future__ import annotations

import json
import math
from typing import Any

#: Deepest nesting of a call's arguments, and of a client's whole request.
MAX_DEPTH, MAX_REQUEST_DEPTH = 64, 256


def parse_json(text: str | bytes, max_depth: int = MAX_DEPTH) -> Any:
    """Parses JSON.

    Every text inside can be encoded (`valid_text`), every number is finite, so that the value can be written as JSON again.

    Raises:
        ValueError: It is no JSON, has a number that is not finite, or is nested deeper than `max_depth`.
    """
    return repaired(load_json(text), max_depth)


def load_json(text: str | bytes) -> Any:
    """Loads JSON without repairs (`repaired`). Raises `ValueError` for other text."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """Parses the JSON that begins at an index of a text; returns the value and its end. Raises as `parse_json`."""
    try:
        parsed, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return repaired(parsed, MAX_DEPTH), end


def parse_arguments(text: Any) -> dict[str, Any]:
    """Returns the arguments of a tool call as an object: other values are wrapped as `{"arguments": …}`."""
    if isinstance(text, (str, bytes)):
        try:
            parsed = parse_json(text or "{}")
        except ValueError:
            parsed = valid_text(text if isinstance(text, str) else text.decode(errors="replace"))
    else:
        parsed = text
    if parsed is None:
        return {}
    return parsed if isinstance(parsed, dict) else {"arguments": parsed}


def valid_text(text: str) -> str:
    """Returns a text that UTF-8 can hold: each lone surrogate becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def repaired(value: Any, depth: int) -> Any:
    """Returns a value with texts that can be encoded (`valid_text`).

    Raises:
        ValueError: A number is not finite, or the value is nested deeper than `depth`.
    """
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")
    if not isinstance(value, (dict, list)):
        return value
    if not depth:
        raise ValueError("it is nested too deeply")
    if isinstance(value, list):
        return [repaired(element, depth - 1) for element in value]
    return {valid_text(name): repaired(element, depth - 1) for name, element in value.items()}
