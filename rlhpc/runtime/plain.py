"""JSON and YAML in files that anybody may have made: content that is too large or too deep is reported as the file's fault."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_DEEPEST = 100
_MOST_BRACKETS = 900
"""Most brackets open at a time; those inside texts count, too."""
_MOST_NODES = 200_000
_MOST_CHARACTERS = 1 << 21
"""Largest YAML text in characters; PyYAML reads about half a megabyte per second."""


def read_json(text: str | bytes) -> Any:
    """The content of a JSON text.

    Raises:
        ValueError: It is not JSON, or is nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_yaml_file(path: Path, loader: Any = None) -> Any:
    """The content of a YAML file. Reads no more of it than a configuration may have: it may be a checkpoint, or a device.

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
    """The content of a YAML text, as builtin values.

    Args:
        text: UTF-8.
        loader: PyYAML's loader class; must be a SafeLoader, which is the default.

    Raises:
        ValueError: It is not text, too long, nested too deep, or expands too far: an alias stands for everything it names,
            so a short file may hold billions of values.
        yaml.YAMLError: It is not YAML.
    """
    import yaml

    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters; a configuration has at most {_MOST_CHARACTERS}")
    if _nesting(text if isinstance(text, bytes) else text.encode(errors="replace")) > _MOST_BRACKETS:
        raise ValueError(
            f"nested too deeply (more than {_DEEPEST} levels)"
        )  # PyYAML would take quadratic time to find this out
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
    """The largest number of brackets that are open at a time."""
    depth = deepest = 0
    for sign in re.findall(rb"[\[\]{}]", text):
        depth = depth + 1 if sign in b"[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _count(value: Any, seen: int, depth: int) -> int:
    """Number of values, each counted as often as it is named."""
    seen += 1
    if seen > _MOST_NODES:
        raise ValueError(f"it has more than {_MOST_NODES} values, counted as often as aliases name them")
    if depth > _DEEPEST:
        raise RecursionError
    if isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            seen = _count(part, seen, depth + 1)
    return seen
