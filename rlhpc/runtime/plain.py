"""JSON and YAML in files that anybody may have made: content that is too large or too deep is reported as the file's fault."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

_MOST_BYTES = 256 << 20
_DEEPEST = 100
_MOST_DIGITS = 300
_MOST_BRACKETS = 900
"""Most brackets open at a time; those inside texts count, too."""
_MOST_NODES = 200_000
_MOST_CHARACTERS = 1 << 21
"""Largest YAML text in characters; PyYAML reads about half a megabyte per second."""


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file for reading. A pipe would wait for a writer for ever, and a device may have no end.

    Raises:
        OSError: It is no regular file, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(descriptor, "rb")


def read_file(path: Path, max_bytes: int = _MOST_BYTES) -> bytes:
    """Returns the content of a regular file.

    Raises:
        OSError: It is no regular file, is larger than `max_bytes`, or cannot be read.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes >> 20} MB", str(path))
        return file.read()


def read_json(text: str | bytes) -> Any:
    """The content of a JSON text.

    Raises:
        ValueError: It is not JSON, is nested too deep, or has an integer that no float holds.
    """
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def is_number(value: Any) -> bool:
    """Says whether a value of a file is a finite number; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: Any) -> bool:
    """Says whether a value of a file is an integer from 0 to 2^63 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def read_yaml_file(path: Path, loader: Any = None) -> Any:
    """The content of a YAML file. Reads no more of it than a configuration may have: it may be a checkpoint, or a device.

    Raises:
        OSError: It cannot be read.
        ValueError, yaml.YAMLError: As `read_yaml`.
    """
    with open_file(path) as file:
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
