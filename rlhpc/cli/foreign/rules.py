"""Translation rules for foreign configurations: each rule reads foreign keys, and the outcome of each key is recorded."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Result of a rule for a key that keeps rlhpc's default.
UNSET = object()


class Reading:
    """Foreign configuration during its translation, with a record of the keys that were read and of the omitted keys.

    Attributes:
        leaves: Dotted key → value. Keys that the configuration omits have the foreign project's default, if one exists.
        defaults: Dotted key → the foreign project's default.
        configured_keys: Keys that the configuration sets.
        reasons: Omitted key → (reason, True if training differs because of the omission).
    """

    def __init__(self, leaves: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.defaults = dict(defaults or {})
        self.leaves = {**self.defaults, **leaves}
        self.configured_keys = set(leaves)
        self.reasons: dict[str, tuple[str, bool]] = {}
        self.read_keys: set[str] = set()

    def __call__(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key; for a missing key or null, the foreign project's default, otherwise `default`."""
        if key in self.leaves:
            self.read_keys.add(key)
        value = self.leaves.get(key)
        return self.defaults.get(key, default) if value is None or value == "None" else value

    def below(self, prefix: str) -> dict[str, Any]:
        """Returns all values below a key, by the rest of their dotted keys."""
        values = {key: value for key, value in self.leaves.items() if key.startswith(f"{prefix}.")}
        self.read_keys |= set(values)
        return {key[len(prefix) + 1 :]: value for key, value in values.items()}

    def omit(self, key: str, reason: str, changes_training: bool = True) -> Any:
        """Records the reason for omitting a key. Returns `UNSET`, so that a rule can return the result of this call."""
        if key in self.configured_keys:
            self.reasons[key] = (reason, changes_training)
        return UNSET


Rule = Callable[[Reading], Any]


#: Pairs of a key of rlhpc, and a foreign key or a rule.
Rows = list[tuple[str, str | Rule]]


@dataclass(frozen=True)
class UnsupportedKeys:
    """Foreign keys without a counterpart.

    Attributes:
        keys: Patterns, separated by spaces.
        reason: Reason why no counterpart exists.
        harmless: Values that can be omitted without a change of training; True if this holds for all values.
    """

    keys: str
    reason: str
    harmless: Any = ()


@dataclass
class Translation:
    """Translated configuration.

    Attributes:
        task_type: Task type, in words.
        ours: Key of rlhpc → value, in the order of the file.
        origin: Key of rlhpc → foreign keys from which its value was computed.
        defaults: Key of rlhpc → missing foreign keys from whose defaults its value was computed.
        omitted: Foreign key → (reason for a complete or partial omission, True if training differs because of it).
        foreign: Foreign key → value, for all foreign keys.
    """

    task_type: str
    ours: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, list[str]] = field(default_factory=dict)
    defaults: dict[str, list[str]] = field(default_factory=dict)
    omitted: dict[str, tuple[str, bool]] = field(default_factory=dict)
    foreign: dict[str, Any] = field(default_factory=dict)

    @property
    def used(self) -> list[str]:
        """Foreign keys that contribute to the result."""
        contributing = {key for keys in self.origin.values() for key in keys}
        return [key for key in self.foreign if key in contributing]


def apply_rules(
    task_type: str,
    leaves: Mapping[str, Any],
    rules: Rows,
    unsupported: Sequence[UnsupportedKeys],
    defaults: Mapping[str, Any] | None = None,
) -> Translation:
    """Translates a configuration by a table.

    Args:
        task_type: Task type, in words.
        leaves: The foreign configuration.
        rules: Rows of a key of rlhpc, and a rule or a foreign key whose value is copied. A row without a key of rlhpc only
            records omitted foreign keys.
        unsupported: Keys without a counterpart; the first matching pattern gives the reason.
        defaults: Values that the foreign project uses for omitted keys.
    """
    read, translation = Reading(leaves, defaults), Translation(task_type, foreign=dict(leaves))
    unused_keys: set[str] = set()
    for rlhpc_key, rule in rules:
        read.read_keys = set()
        config_value = read.leaves.get(rule, UNSET) if isinstance(rule, str) else rule(read)
        keys_read = [rule] if isinstance(rule, str) else [key for key in read.leaves if key in read.read_keys]
        if config_value is UNSET or (config_value is None and isinstance(rule, str)):
            unused_keys.update(keys_read)
            continue
        translation.ours[rlhpc_key] = config_value
        translation.origin[rlhpc_key] = [key for key in keys_read if key in leaves]
        translation.defaults[rlhpc_key] = [key for key in keys_read if key in read.leaves and key not in leaves]
    used_keys = set(translation.used)
    for key, config_value in leaves.items():
        if key in read.reasons:
            translation.omitted[key] = read.reasons[key]
        elif key in unused_keys and key not in used_keys:
            translation.omitted[key] = ("with this value, what rlhpc does anyway", False)
        elif key not in used_keys:
            translation.omitted[key] = _omission_reason(key, config_value, unsupported)
    return translation


def _omission_reason(key: str, value: Any, unsupported: Sequence[UnsupportedKeys]) -> tuple[str, bool]:
    for entry in unsupported:
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in entry.keys.split()):
            return entry.reason, not (entry.harmless is True or value in list(entry.harmless))
    return "the importer does not know this key", True
