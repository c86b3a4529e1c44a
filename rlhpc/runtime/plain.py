"""JSON and YAML of files that anybody may have made: what is too large or too deep is a fault of the file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_DEEPEST = 100
_MOST_BRACKETS = 900
"""Open at a time; they may stand in texts, too."""
_MOST_NODES = 200_000
_MOST_CHARACTERS = 1 << 21
"""Of YAML, which is read at about half a megabyte a second."""


def read_json(text: str | bytes) -> Any:
    """Its content.

    Raises:
        ValueError: It is no JSON, or nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_yaml_file(path: Path, loader: Any = None) -> Any:
    """The content of a file, of which no more is read than a configuration may have: it may be a checkpoint, or a device.

    Raises:
        OSError: It cannot be read.
        ValueError, yaml.YAMLError: As `read_yaml`.
    """
    with path.open("rb") as file:
        text = file.read(_MOST_CHARACTERS + 1)
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"it has more than {_MOST_CHARACTERS} characters; no configuration has so many")
    return read_yaml(text, loader)


def read_yaml(text: str | bytes, loader: Any = None) -> Any:
    """Its content, as builtin values.

    Args:
        text: UTF-8.
        loader: Class of PyYAML; must be a SafeLoader, which is the default.

    Raises:
        ValueError: It is no text, too long, nested too deep, or more than it seems: an alias stands for all that it names,
            so a short file may hold billions of values.
        yaml.YAMLError: It is no YAML.
    """
    import yaml

    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters; a configuration has at most {_MOST_CHARACTERS}")
    if _nesting(text if isinstance(text, bytes) else text.encode(errors="replace")) > _MOST_BRACKETS:
        raise ValueError(
            f"nested too deeply (more than {_DEEPEST} levels)"
        )  # PyYAML takes quadratic time until it says so
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    try:
        content = yaml.load(text, Loader=loader or yaml.SafeLoader)
        _count(content, 0, 0)
    except RecursionError:
        raise ValueError(f"nested too deeply (more than {_DEEPEST} levels)") from None
    return content


def _nesting(text: bytes) -> int:
    """Most brackets that are open at a time."""
    depth = deepest = 0
    for sign in re.findall(rb"[\[\]{}]", text):
        depth = depth + 1 if sign in b"[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _count(value: Any, seen: int, depth: int) -> int:
    """Values in it, as often as they are named."""
    seen += 1
    if seen > _MOST_NODES:
        raise ValueError(f"it has more than {_MOST_NODES} values, counted as often as aliases name them")
    if depth > _DEEPEST:
        raise RecursionError
    if isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            seen = _count(part, seen, depth + 1)
    return seen
