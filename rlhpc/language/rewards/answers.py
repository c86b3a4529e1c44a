"""Where in a response its answer stands."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rlhpc.runtime.errors import ConfigError

_NUMBER = re.compile(r"(?<![\w.])-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")
_TEX_BRACE = re.compile(
    r"\\.|[{}]", re.DOTALL
)  # a backslash escapes the next character, so "\\\\}" is a row's end and a brace


def squeeze(text: str) -> str:
    """The text without white space at its ends, and with one space for each stretch of it inside."""
    return " ".join(text.split())


def boxed(text: str) -> str | None:
    """What the last `\\boxed{...}` holds; braces inside are counted."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    opened = text.find("{", start)
    if opened < 0 or text[start:opened].strip() not in ("\\boxed", "\\fbox"):
        words = text[start:].removeprefix("\\boxed").removeprefix("\\fbox").split()
        return words[0].strip("$.,") if words else None  # \boxed 5
    depth = 0
    for token in _TEX_BRACE.finditer(text, opened):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return text[opened + 1 : token.start()].strip()
    return None


def hashed(text: str) -> str | None:
    """What follows the last `####` on its line."""
    _, found, rest = text.rpartition("####")
    answer = rest.split("\n", 1)[0].strip() if found else ""
    return answer or None


def tagged(text: str) -> str | None:
    """What the last `<answer>...</answer>` holds."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end].strip() if 0 <= start < end else None


def last_number(text: str) -> str | None:
    """The last number."""
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def whole(text: str) -> str | None:
    """The whole response."""
    return text.strip() or None


WAYS: dict[str, Callable[[str], str | None]] = {
    "boxed": boxed, "####": hashed, "tag": tagged, "last_number": last_number, "whole": whole,
}  # fmt: skip


def check_ways(ways: Sequence[str], what: str) -> tuple[str, ...]:
    """Checks the names of ways.

    Raises:
        ConfigError: One is unknown.
    """
    unknown = [way for way in ways if way not in WAYS]
    if unknown or isinstance(ways, str):
        found = ways if isinstance(ways, str) else unknown[0]
        raise ConfigError(f"reward.terms: {what} has {found!r}; allowed: a list of {', '.join(WAYS)}")
    return tuple(ways)


def extract(text: str, ways: Sequence[str]) -> str | None:
    """What is found by the first of the ways that finds anything."""
    return next((found for way in ways if (found := WAYS[way](text)) is not None), None)
