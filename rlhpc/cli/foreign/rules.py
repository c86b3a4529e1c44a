"""Translation rules of a foreign configuration: they read its keys, and record the outcome for each."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Result of a rule for a key that keeps rlhpc's default.
UNSET = object()


class Reading:
    """Foreign configuration during its translation: it records which keys were read, and the reasons for omitted keys.

    Attributes:
        leaves: Dotted key → value; for a key that the configuration omits, the foreign project's default, if it has one.
        defaults: Dotted key → the foreign project's default.
        written: The keys that the configuration has.
        reasons: Key → (reason why it is omitted, True if training differs because of it).
    """

    def __init__(self, leaves: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.defaults = dict(defaults or {})
        self.leaves = {**self.defaults, **leaves}
        self.written = set(leaves)
        self.reasons: dict[str, tuple[str, bool]] = {}
        self.read_keys: set[str] = set()

    def __call__(self, key: str, default: Any = None) -> Any:
        """Returns a value; if the key is missing or null, the foreign project's default, or else `default`."""
        if key in self.leaves:
            self.read_keys.add(key)
        value = self.leaves.get(key)
        return self.defaults.get(key, default) if value is None or value == "None" else value

    def below(self, prefix: str) -> dict[str, Any]:
        """Returns all values below a key, by the remainders of their names."""
        values = {key: value for key, value in self.leaves.items() if key.startswith(f"{prefix}.")}
        self.read_keys |= set(values)
        return {key[len(prefix) + 1 :]: value for key, value in values.items()}

    def omit(self, key: str, reason: str, changes_training: bool = True) -> Any:
        """Records why a key is omitted; returns `UNSET`, so that a rule can end with it."""
        if key in self.written:
            self.reasons[key] = (reason, changes_training)
        return UNSET


Rule = Callable[[Reading], Any]


#: (our key, their key or a rule).
Rows = list[tuple[str, str | Rule]]


@dataclass(frozen=True)
class UnsupportedKeys:
    """Foreign keys without a counterpart.

    Attributes:
        keys: Patterns, separated by spaces.
        reason: Why they have none.
        harmless: Values whose omission changes nothing; or True if the key never changes the training.
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
        origin: Key of rlhpc → the foreign keys that it was computed from.
        defaults: Key of rlhpc → omitted foreign keys whose defaults it was computed from.
        omitted: Foreign key → (reason why it, or a part of it, is omitted; True if training differs because of it).
        foreign: Foreign key → value, all of them.
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
        rules: (key of rlhpc, foreign key whose value is copied, or a rule). A row without a key of rlhpc only records
            why foreign keys are omitted.
        unsupported: Keys without a counterpart; the first pattern that fits gives the reason.
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
            translation.omitted[key] = _reason(key, config_value, unsupported)
    return translation


def _reason(key: str, value: Any, unsupported: Sequence[UnsupportedKeys]) -> tuple[str, bool]:
    for entry in unsupported:
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in entry.keys.split()):
            return entry.reason, not (entry.harmless is True or value in list(entry.harmless))
    return "the importer does not know this key", True
