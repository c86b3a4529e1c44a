"""What messages show of a value: one that is long is cut in its middle, so that a message can be read."""

from __future__ import annotations

import re
from typing import Any

from rlhpc.runtime.environment_values import masked

_LONGEST = 120
_LONGEST_WORD = 500
_LONGEST_MESSAGE = 3500


def shown(value: Any) -> str:
    """Its `repr`, at most some 120 characters."""
    return cut(repr(value))


def cut(text: str, longest: int = _LONGEST) -> str:
    """The text, or its begin, its end and how long it is. What came from the environment is masked before it is cut."""
    text = masked(text)
    if len(text) <= longest:
        return text
    return f"{text[: longest - 40]}…{text[-10:]} ({len(text)} characters)"


def readable(message: str) -> str:
    """A message in which neither a word nor the whole is endless: not all who repeat what was given know `shown`."""
    return cut(re.sub(rf"\S{{{_LONGEST_WORD},}}", lambda word: cut(word[0]), masked(message)), _LONGEST_MESSAGE)
