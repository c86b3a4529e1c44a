"""What messages show of a value: a long one is cut in the middle, so that the message stays readable."""

from __future__ import annotations

import re
from typing import Any

from rlhpc.runtime.environment_values import masked

_LONGEST = 120
_LONGEST_WORD = 500
_LONGEST_MESSAGE = 3500


def shown(value: Any) -> str:
    """The value's `repr`, cut to about 120 characters."""
    return cut(repr(value))


def cut(text: str, longest: int = _LONGEST) -> str:
    """The text, or its beginning, end and length. Values from the environment are masked before it is cut."""
    text = masked(text)
    if len(text) <= longest:
        return text
    return f"{text[: longest - 40]}…{text[-10:]} ({len(text)} characters)"


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type where it says nothing."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def readable(message: str) -> str:
    """Cuts a message's overlong words, and the message itself: not all code that quotes what was given uses `shown`."""
    return cut(re.sub(rf"\S{{{_LONGEST_WORD},}}", lambda word: cut(word[0]), masked(message)), _LONGEST_MESSAGE)
