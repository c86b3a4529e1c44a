"""Translation rules for foreign configurations: each rule reads foreign keys, and the outcome of each key is recorded."""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import format_names, short_repr

#: Result of a rule for a key that keeps rlhpc's default.
UNSET = object()


class ForeignConfig:
    """Foreign configuration during its translation, with a record of the keys that were read and of the omitted keys.

    Attributes:
        leaves: Dotted key → value. Keys that the configuration omits have the foreign project's default, if one exists.
        defaults: Dotted key → the foreign project's default.
        configured_keys: Keys that the configuration sets.
        reasons: Omitted key → (reason, True if training differs because of the omission).
        missing_feature: Omitted key → pattern of the capability that rlhpc lacks (`UnsupportedKeys.missing_feature`).
    """

    def __init__(self, leaves: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.defaults = dict(defaults or {})
        self.leaves = {**self.defaults, **leaves}
        self.configured_keys = set(leaves)
        self.reasons: dict[str, tuple[str, bool]] = {}
        self.missing_feature: dict[str, str] = {}
        self.read_keys: set[str] = set()

    def __call__(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key; for a missing key or null, the foreign project's default, otherwise `default`."""
        if key in self.leaves:
            self.read_keys.add(key)
        value = self.leaves.get(key)
        return self.defaults.get(key, default) if is_null(value) else value

    def integer(self, key: str, default: int = 0) -> int:
        """Returns the value of a key as an integer.

        Raises:
            ConfigError: The value is not an integer.
        """
        number = self.number(key, default)
        if not number.is_integer():
            raise _type_error(key, self.leaves.get(key), "an integer")
        return int(number)

    def peek(self, key: str, default: int = 0) -> int:
        """Returns the value of a key as `integer` does, without a record that the rule has read the key.

        Raises:
            ConfigError: The value is not an integer.
        """
        recorded = set(self.read_keys)
        try:
            return self.integer(key, default)
        finally:
            self.read_keys = recorded

    def number(self, key: str, default: float = 0.0) -> float:
        """Returns the value of a key as a finite number.

        Raises:
            ConfigError: The value is not a finite number.
        """
        value = self(key, default)
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise _type_error(key, value, "a number")
        return number

    def flag(self, key: str, default: bool = False) -> bool:
        """Returns the value of a key as a boolean.

        Raises:
            ConfigError: The value is not a boolean.
        """
        value = self(key, default)
        if not isinstance(value, bool):
            raise _type_error(key, value, "true or false")
        return value

    def text(self, key: str, default: str = "") -> str:
        """Returns the value of a key as a text in lower case.

        Raises:
            ConfigError: The value is a list or a mapping.
        """
        value = self(key, default)
        if isinstance(value, (list, dict)):
            raise _type_error(key, value, "a word")
        return str(value).lower()

    def texts(self, key: str) -> list[str]:
        """Returns the value of a key as a list of texts; a text is a list of one, a missing value is an empty list.

        Raises:
            ConfigError: The value is a mapping or a number.
        """
        value = self(key, [])
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            raise _type_error(key, value, "a list of words")
        return [str(word) for word in value]

    def section(self, prefix: str) -> dict[str, Any]:
        """Returns all values below a key, by their dotted keys relative to it."""
        values = {key: value for key, value in self.leaves.items() if key.startswith(f"{prefix}.")}
        self.read_keys |= set(values)
        return {key[len(prefix) + 1 :]: value for key, value in values.items()}

    def omit(self, key: str, reason: str, changes_training: bool = True, missing_feature: str = "") -> Any:
        """Records the reason for omitting a key. Returns `UNSET`, so that a rule can return the result of this call.

        Args:
            key: Foreign key; of several, separated by spaces, the first one that the configuration sets. A difference that
                exists without the first one, too, has a last one that each configuration sets.
            reason: Reason for its complete or partial omission.
            changes_training: True if training differs because of it.
            missing_feature: As `UnsupportedKeys.missing_feature`.
        """
        configured_key = next((name for name in key.split() if name in self.configured_keys), None)
        if configured_key is not None:
            self.reasons[configured_key] = (reason, changes_training)
            if missing_feature:
                self.missing_feature[configured_key] = missing_feature
        return UNSET


Rule = Callable[[ForeignConfig], Any]


#: Pairs of a key of rlhpc, and a foreign key or a rule.
Rows = list[tuple[str, str | Rule]]


def is_null(value: Any) -> bool:
    """Returns whether a value is null, also as Hydra's `None` in YAML."""
    return value is None or (isinstance(value, str) and value in ("None", "null"))


def _type_error(key: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{key} is {short_repr(value)}; it must be {expected}")


@dataclass(frozen=True)
class UnsupportedKeys:
    """Foreign keys without a counterpart.

    Attributes:
        keys: Patterns, separated by spaces. `{a,b}` stands for the one or the other name.
        reason: Reason why no counterpart exists.
        harmless: Values that can be omitted without a change of training; True if this holds for all values. A pattern of such
            an entry lists its keys, because a key of a later version may have any effect; only `any_name` permits a `*`.
        missing_feature: Regular expression of the capability that rlhpc lacks, if that is the reason. A test checks that no
            key, option or registered name of rlhpc matches it, so that a reason does not outlive the gap that it names.
        any_name: True if the reason holds for every key that a pattern matches, also for those of a later version: the part
            that would read them does not exist in such a run, or concerns no training.
    """

    keys: str
    reason: str
    harmless: Any = ()
    missing_feature: str = ""
    any_name: bool = False

    @property
    def patterns(self) -> Sequence[str]:
        """Patterns of the keys, without braces."""
        return _expand_patterns(self.keys)

    def matches(self, key: str) -> bool:
        """Returns whether one of the patterns matches a key."""
        return any(fnmatch.fnmatchcase(key, pattern) for pattern in self.patterns)

    def is_harmless(self, value: Any) -> bool:
        """Returns whether a value can be omitted without a change of training. A boolean is not a number: the reset state 0 is
        not the absence of one.
        """
        return self.harmless is True or any(
            value == harmless and isinstance(value, bool) == isinstance(harmless, bool) for harmless in self.harmless
        )


@functools.cache
def _expand_patterns(keys: str) -> Sequence[str]:
    patterns = keys.split()
    while any("{" in pattern for pattern in patterns):
        patterns = [expanded for pattern in patterns for expanded in _expand_braces(pattern)]
    return tuple(patterns)


def _expand_braces(pattern: str) -> list[str]:
    """Returns a pattern with each of the names in its first braces; braces within braces do not occur."""
    before, brace, after = pattern.partition("{")
    names, _, after = after.partition("}")
    return [f"{before}{name}{after}" for name in names.split(",")] if brace else [pattern]


@dataclass(frozen=True)
class OptionalRow:
    """Row of a key that a task type may lack.

    Attributes:
        key: Key of rlhpc.
        rule: Rule, or the foreign key whose value is copied.
        otherwise: The foreign keys without a counterpart, if the task type lacks the key.
    """

    key: str
    rule: str | Rule
    otherwise: UnsupportedKeys


@dataclass(frozen=True)
class Requirement:
    """Condition of a translation: without it the run would be another one, and the file is refused.

    Attributes:
        key: Foreign key that decides.
        missing: Function `(leaves) -> str` that returns what rlhpc lacks, or "" if the condition holds.
        missing_feature: As `UnsupportedKeys.missing_feature`, for the test of the reason.
    """

    key: str
    missing: Callable[[Mapping[str, Any]], str]
    missing_feature: str = ""


def allow_only(key: str, allowed: Sequence[Any], missing: str, missing_feature: str = "") -> Requirement:
    """Returns the requirement that a key is absent, null or one of the allowed values; case does not matter."""
    allowed_words = [str(value).lower() for value in allowed]

    def reason(leaves: Mapping[str, Any]) -> str:
        value = leaves.get(key)
        if is_null(value) or str(value).lower() in allowed_words:
            return ""
        return f"{missing}; translated: {', '.join(map(str, allowed))}" if allowed else missing

    return Requirement(key, reason, missing_feature)


@dataclass(frozen=True)
class RunKind:
    """Kind of foreign run, and the tables of its translation.

    Attributes:
        title: Function `(leaves) -> str` that returns the kind in words.
        task_type: Task type of rlhpc.
        applies: Function `(leaves) -> bool` that returns whether a configuration is of this kind.
        rows: Rules; a row of a key that the rows of all kinds have, too, stands in its place.
        unsupported: Keys without a counterpart.
        defaults: Function `(leaves) -> defaults` that returns the foreign project's defaults.
        requirements: Conditions; a configuration that breaks one is refused.
        optional: Rows of keys that the task type may lack.
    """

    title: Callable[[Mapping[str, Any]], str]
    task_type: str
    applies: Callable[[Mapping[str, Any]], bool]
    rows: Callable[[Mapping[str, Any]], Rows]
    unsupported: Callable[[Mapping[str, Any]], Sequence[UnsupportedKeys]]
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    requirements: Sequence[Requirement] = ()
    optional: Sequence[OptionalRow] = ()

    def rows_of(self, leaves: Mapping[str, Any], keys: Container[str]) -> Rows:
        """Returns the rows, with the optional ones whose key the task type has."""
        return [*self.rows(leaves), *((row.key, row.rule) for row in self.optional if row.key in keys)]

    def unsupported_of(self, leaves: Mapping[str, Any], keys: Container[str]) -> list[UnsupportedKeys]:
        """Returns the keys without a counterpart, with those of optional rows whose key the task type lacks."""
        return [*(row.otherwise for row in self.optional if row.key not in keys), *self.unsupported(leaves)]


@dataclass
class Translation:
    """Translated configuration.

    Attributes:
        task_type: Task type, in words.
        ours: Key of rlhpc → value, in the order of the file.
        origin: Key of rlhpc → foreign keys from which its value was computed.
        defaults: Key of rlhpc → missing foreign keys from whose defaults its value was computed.
        omitted: Foreign key → (reason for a complete or partial omission, True if training differs because of it).
        missing_feature: Omitted foreign key → pattern of the capability that rlhpc lacks (`UnsupportedKeys.missing_feature`).
        foreign: Foreign key → value, for all foreign keys.
        training: Whether the configuration trains a model; other configurations are for `rlhpc eval`.
    """

    task_type: str
    ours: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, list[str]] = field(default_factory=dict)
    defaults: dict[str, list[str]] = field(default_factory=dict)
    omitted: dict[str, tuple[str, bool]] = field(default_factory=dict)
    missing_feature: dict[str, str] = field(default_factory=dict)
    foreign: dict[str, Any] = field(default_factory=dict)
    training: bool = True

    @property
    def used(self) -> list[str]:
        """Foreign keys that contribute to the result."""
        contributing = {key for ours in self.ours for key in self.origin.get(ours, ())}
        return [key for key in self.foreign if key in contributing]

    def check_known_keys(self, source: str, project: str) -> None:
        """Refuses a configuration with keys that no table has, such as those of a later version: they may select anything.

        Raises:
            ConfigError: There are such keys; the message names them.
        """
        if unknown := [key for key, (reason, _) in self.omitted.items() if reason == _UNKNOWN]:
            raise ConfigError(
                f"{source}: the importer does not know {format_names(unknown, _MAX_NAMED)}, which a later version of "
                f"{project} may read: remove what your run does without, or leave them out with --ignore-unknown"
            )


def apply_rules(
    task_type: str,
    leaves: Mapping[str, Any],
    rules: Rows,
    unsupported: Sequence[UnsupportedKeys],
    defaults: Mapping[str, Any] | None = None,
    keys: Container[str] | None = None,
) -> Translation:
    """Translates a configuration by a table.

    Args:
        task_type: Task type, in words.
        leaves: The foreign configuration.
        rules: Rows of a key of rlhpc, and a rule or a foreign key whose value is copied. A row without a key of rlhpc only
            records omitted foreign keys.
        unsupported: Keys without a counterpart; the first matching pattern gives the reason.
        defaults: Values that the foreign project uses for omitted keys.
        keys: Keys of the task type; rows of other keys are passed over. None applies all rows.

    Raises:
        ConfigError: A value has another type than the foreign project's.
    """
    config, translation = ForeignConfig(leaves, defaults), Translation(task_type, foreign=dict(leaves))
    unused_keys: set[str] = set()
    for rlhpc_key, rule in rules:
        if rlhpc_key and keys is not None and rlhpc_key not in keys:
            continue
        config.read_keys = set()
        config_value = config.leaves.get(rule, UNSET) if isinstance(rule, str) else _apply(rule, config)
        keys_read = [rule] if isinstance(rule, str) else [key for key in config.leaves if key in config.read_keys]
        if config_value is UNSET or (config_value is None and isinstance(rule, str)):
            unused_keys.update(keys_read)
            translation.ours.pop(rlhpc_key, None)  # a later row of a key replaces an earlier one
            continue
        translation.ours[rlhpc_key] = config_value
        translation.origin[rlhpc_key] = [key for key in keys_read if key in leaves]
        translation.defaults[rlhpc_key] = [key for key in keys_read if key in config.leaves and key not in leaves]
    used_keys = set(translation.used)
    for key, config_value in leaves.items():
        if key in config.reasons:
            translation.omitted[key] = config.reasons[key]
            if key in config.missing_feature:
                translation.missing_feature[key] = config.missing_feature[key]
        elif key in unused_keys and key not in used_keys:
            translation.omitted[key] = ("with this value, what rlhpc does anyway", False)
        elif key not in used_keys:
            entry = _find_unsupported(key, unsupported)
            translation.omitted[key] = (entry.reason, not entry.is_harmless(config_value))
            if entry.missing_feature:
                translation.missing_feature[key] = entry.missing_feature
    return translation


def _apply(rule: Rule, config: ForeignConfig) -> Any:
    """Returns the result of a rule.

    Raises:
        ConfigError: A value that it reads has a wrong type.
    """
    try:
        return rule(config)
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        values = ", ".join(
            f"{key} is {short_repr(config.leaves[key])}" for key in config.leaves if key in config.read_keys
        )
        raise ConfigError(f"{values}: one of these values has a wrong type ({error})") from None


def _find_unsupported(key: str, unsupported: Sequence[UnsupportedKeys]) -> UnsupportedKeys:
    """Returns the first entry whose patterns match a key; an entry that says so if no pattern matches."""
    for entry in unsupported:
        if entry.matches(key):
            return entry
    return UnsupportedKeys(key, _UNKNOWN)


#: Largest number of unknown keys that a message names.
_MAX_NAMED = 5
#: Reason of a key that no table has.
_UNKNOWN = "the importer does not know this key"
