"""Checks of configuration keys against the ranges and choices in their annotations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from rlhpc.config.schema import ConfigKey
from rlhpc.config.typed import select
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.key_metadata import (
    ANY,
    ATTENTION,
    COUNT,
    DTYPES,
    ENGINE_DTYPES,
    EVALUATION,
    FRACTION,
    FREE,
    INTERVAL,
    INTERVAL_OR_0,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    RATE,
    SEED,
    Choices,
    OptionsOf,
    Range,
    Registered,
)
from rlhpc.runtime.plugins import meant

__all__ = [
    "ANY",
    "ATTENTION",
    "COUNT",
    "DTYPES",
    "ENGINE_DTYPES",
    "EVALUATION",
    "FRACTION",
    "FREE",
    "INTERVAL",
    "INTERVAL_OR_0",
    "MAX_EXACT_INTEGER",
    "NOT_NEGATIVE",
    "PART",
    "POSITIVE",
    "RATE",
    "SEED",
    "Choices",
    "Fail",
    "OptionsOf",
    "Range",
    "Registered",
    "check_choice",
    "check_choices",
    "check_name",
    "check_ranges",
    "check_rules",
    "null_numbers",
]

#: Function that builds the error for a key and the rule that its value breaks.
Fail = Callable[[str, str], ConfigError]


def check_choice(key: str, value: str, allowed: Iterable[str], fail: Fail) -> None:
    """Refuses a value that is not an allowed word; case does not matter.

    Raises:
        ConfigError: The value is not allowed; the message names the most similar word and all allowed words.
    """
    check_name(key, value.lower(), allowed, fail)


def check_name(key: str, value: str, allowed: Iterable[str], fail: Fail) -> None:
    """Refuses a user-chosen name that is not allowed; case matters.

    Raises:
        ConfigError: The name is not allowed; the message names the most similar name and all allowed names.
    """
    allowed = list(allowed)
    if value not in allowed:
        raise fail(key, f"{meant(value, allowed)}allowed: {', '.join(allowed)}")


def check_rules(rules: Iterable[tuple[object, str, str]], fail: Fail) -> None:
    """Refuses a configuration that breaks a rule.

    Args:
        rules: For each rule, True if it is broken, its key, and its text.
        fail: Function that builds the error.

    Raises:
        ConfigError: The error of the first broken rule.
    """
    for is_broken, key, rule in rules:
        if is_broken:
            raise fail(key, rule)


#: Largest integer that every reader of a configuration represents exactly, including readers that use floats.
MAX_EXACT_INTEGER = 2**53


def null_numbers(keys: Mapping[str, ConfigKey]) -> dict[str, int]:
    """Returns key → number that null means there."""
    return {
        path: int(key.range.also[0])
        for path, key in keys.items()
        if key.range is not None and key.range.also is not None
    }


def check_ranges(cfg: object, keys: Mapping[str, ConfigKey], fail: Fail) -> None:
    """Refuses numbers outside their ranges; null is allowed if the schema allows it.

    Raises:
        ConfigError: Names the first number outside its range.
    """
    for key in keys.values():
        if key.range is None:
            continue
        for path, value in values_at(cfg, key.path):
            for number in value if OmegaConf.is_list(value) else (value,):
                if number is not None and number not in key.range:
                    raise fail(path, key.range.rule())


def check_choices(cfg: object, keys: Mapping[str, ConfigKey], fail: Fail) -> None:
    """Refuses a word that is not among the choices of its key.

    Raises:
        ConfigError: Names the first such word.
    """
    for key in keys.values():
        if key.choices:
            for path, value in values_at(cfg, key.path):
                check_choice(path, str(value), key.choices, fail)


def values_at(cfg: object, key: str) -> Iterator[tuple[str, Any]]:
    """Yields the full key and the value at a key; for `list[].name`, one pair for each element of the list."""
    section, separator, name = key.partition("[].")
    if not separator:
        yield key, select(cfg, key)
        return
    for index, element in enumerate(select(cfg, section) or ()):
        yield f"{section}[{index}].{name}", select(element, name)
