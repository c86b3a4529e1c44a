"""Checks of configuration keys against the ranges and choices in their annotations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from rlhpc.config.schema import ConfigKey
from rlhpc.config.typed import mapping, select
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
from rlhpc.runtime.plugins import suggest_name

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
    "normalize_words",
    "null_numbers",
]

#: Function that builds the error for a key and the rule that its value breaks.
Fail = Callable[[str, str], ConfigError]


def check_choice(key: str, user_value: str, choices: Iterable[str], fail: Fail) -> None:
    """Refuses a value that is not an allowed word; case does not matter.

    Raises:
        ConfigError: The value is not allowed; the message names the most similar word and all allowed words.
    """
    check_name(key, user_value.lower(), choices, fail)


def check_name(key: str, user_value: str, allowed_names: Iterable[str], fail: Fail) -> None:
    """Refuses a user-chosen name that is not allowed; case matters.

    Raises:
        ConfigError: The name is not allowed; the message names the most similar name and all allowed names.
    """
    allowed_names = list(allowed_names)
    if user_value not in allowed_names:
        raise fail(key, f"{suggest_name(user_value, allowed_names)}allowed: {', '.join(allowed_names)}")


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


def null_numbers(keys_by_path: Mapping[str, ConfigKey]) -> dict[str, int]:
    """Returns the number for which null stands, by key."""
    return {
        path: int(key.range.also[0])
        for path, key in keys_by_path.items()
        if key.range is not None and key.range.also is not None
    }


def check_ranges(cfg: object, keys_by_path: Mapping[str, ConfigKey], fail: Fail) -> None:
    """Refuses numbers outside their ranges; null is allowed if the schema allows it.

    Raises:
        ConfigError: Names the first number outside its range.
    """
    for key in keys_by_path.values():
        if key.range is None:
            continue
        for path, user_value in values_at(cfg, key.path):
            for number_or_null in user_value if OmegaConf.is_list(user_value) else (user_value,):
                if number_or_null is not None and number_or_null not in key.range:
                    raise fail(path, key.range.rule())


def normalize_words(cfg: object, keys_by_path: Mapping[str, ConfigKey]) -> None:
    """Puts words from a fixed list, and names from a registry, into lower case; user-chosen names and unknown words stay.

    The case of these words does not matter, and only this function knows it: readers compare with lower-case words.
    """
    for key in keys_by_path.values():
        if key.choices or key.registry:
            for path, user_value in values_at(cfg, key.path):
                choice_words = [*user_value] if OmegaConf.is_list(user_value) else user_value
                if choice_words != (known_words := _to_known_case(choice_words, key)):
                    OmegaConf.update(mapping(cfg), path, known_words, merge=False)


def _to_known_case(user_value: Any, key: ConfigKey) -> Any:
    if isinstance(user_value, list):
        return [_to_known_case(word, key) for word in user_value]
    lowercase_value = user_value.lower() if isinstance(user_value, str) else user_value
    is_known = (
        lowercase_value != user_value and ":" not in lowercase_value and lowercase_value in (key.choices or key.names())
    )
    return lowercase_value if is_known else user_value


def check_choices(cfg: object, keys_by_path: Mapping[str, ConfigKey], fail: Fail) -> None:
    """Refuses a word that is not among the choices of its key.

    Raises:
        ConfigError: Names the first such word.
    """
    for key in keys_by_path.values():
        if key.choices:
            for path, user_value in values_at(cfg, key.path):
                if user_value is not None:
                    check_choice(path, str(user_value), key.choices, fail)


def values_at(cfg: object, key: str) -> Iterator[tuple[str, Any]]:
    """Yields the full key and the value at a key; for `list[].name`, one pair for each element of the list."""
    section, separator, name = key.partition("[].")
    if not separator:
        yield key, select(cfg, key)
        return
    for index, element in enumerate(select(cfg, section) or ()):
        yield f"{section}[{index}].{name}", select(element, name)


def parse_steps(steps_text: str, first: int = 1) -> frozenset[int] | None:
    """Parses numbers such as `10-12` or `3,7-9`; returns None if the text is malformed, or an interval is empty or huge.

    Args:
        steps_text: Numbers and intervals, separated by commas; may be empty.
        first: Smallest number allowed.
    """
    steps: set[int] = set()
    for interval_text in (
        (interval_text.strip() for interval_text in steps_text.split(",")) if steps_text.strip() else ()
    ):
        low_text, dash, high_text = interval_text.partition("-")
        if not (low_text.isascii() and low_text.isdecimal()) or (
            dash and not (high_text.isascii() and high_text.isdecimal())
        ):
            return None
        first_step, last_step = int(low_text[:12]), int((high_text if dash else low_text)[:12])
        if not first <= first_step <= last_step or last_step - first_step >= 100_000:
            return None
        steps.update(range(first_step, last_step + 1))
    return frozenset(steps)


def format_steps(steps: Iterable[int]) -> str:
    """Formats numbers as `parse_steps` reads them: {7, 1, 2, 3} → `1-3,7`."""
    intervals: list[list[int]] = []
    for step in sorted(steps):
        if intervals and step <= intervals[-1][1] + 1:
            intervals[-1][1] = step
        else:
            intervals.append([step, step])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in intervals)
