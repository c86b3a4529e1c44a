"""Values that come out of a sandbox: builtin ones only, whatever the program made them from."""

from __future__ import annotations

import collections
import datetime
from collections.abc import Hashable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

_DEEPEST = 64
_LARGEST_EXPONENT = 10_000
_MOST_ALIKE = 32
"""Members of a set with one hash. More are there to make it slow."""


def decode(value: Any, depth: int = 0) -> Any:
    """Inverse of the harness's encoding.

    Raises:
        ValueError: It is not what the harness writes. A program can write in its place.
    """
    if depth > _DEEPEST:
        raise ValueError("nested too deep")
    if value is None or isinstance(value, (bool, str)):
        return value
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(f"no value: a {type(value).__name__}")
    ((kind, inner),) = value.items()
    try:
        return _decoded(kind, inner, depth + 1)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"no value of kind {kind!r}: {error}") from None


def _decoded(kind: str, inner: Any, depth: int) -> Any:
    match kind:
        case "i":
            return int(inner, 16)
        case "f":
            return float.fromhex(inner)
        case "c":
            return complex(float.fromhex(inner[0]), float.fromhex(inner[1]))
        case "b":
            return bytes.fromhex(inner)
        case "l":
            return [decode(item, depth) for item in inner]
        case "g":
            return iter([decode(item, depth) for item in inner])
        case "t":
            return tuple(decode(item, depth) for item in inner)
        case "s":
            return set(_spread([decode(item, depth) for item in inner]))
        case "d":
            pairs = [(decode(key, depth), decode(item, depth)) for key, item in inner]
            _spread([key for key, _ in pairs])
            return dict(pairs)
        case "q":
            return Fraction(int(inner[0], 16), int(inner[1], 16))
        case "n":
            number = Decimal(inner)
            if number.is_finite() and abs(number.adjusted()) > _LARGEST_EXPONENT:
                raise ValueError(f"an exponent of {number.adjusted()}")  # rounding it would make all its digits
            return number
        case "m" if inner[0] == "timedelta":
            days, seconds, microseconds = (int(part) for part in inner[1])
            return datetime.timedelta(days, seconds, microseconds)
        case "m":
            moments: dict[str, Any] = {
                kind.__name__: kind.fromisoformat for kind in (datetime.date, datetime.datetime, datetime.time)
            }
            return moments[inner[0]](str(inner[1]))
    raise ValueError(f"no value of kind {kind!r}")


def _spread(members: list[Hashable]) -> Iterable[Hashable]:
    """Refuses what would take quadratic time in a hash table."""
    alike = collections.Counter(map(hash, members))
    if len(members) > _MOST_ALIKE and max(alike.values()) > _MOST_ALIKE:
        raise ValueError("a set of members that share their hash")
    return members
