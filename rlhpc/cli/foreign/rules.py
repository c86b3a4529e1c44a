"""Translation rules of a foreign configuration: they read its keys, and record the outcome for each."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: What a rule returns for a key of ours that stays as rlhpc has it.
NOTHING = object()


class Reading:
    """A foreign configuration while it is translated: it remembers which keys were looked at, and what was said of them.

    Attributes:
        leaves: Dotted key → value; for a key that the configuration leaves out, the foreign project's default, if it has one.
        defaults: Dotted key → the foreign project's default.
        written: The keys that the configuration has.
        said: Key → (why it is left out, whether training differs for it).
    """

    def __init__(self, leaves: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.defaults = dict(defaults or {})
        self.leaves = {**self.defaults, **leaves}
        self.written = set(leaves)
        self.said: dict[str, tuple[str, bool]] = {}
        self.looked: set[str] = set()

    def __call__(self, key: str, default: Any = None) -> Any:
        """Returns a value; if the key is missing or null, the foreign project's default, or else `default`."""
        if key in self.leaves:
            self.looked.add(key)
        value = self.leaves.get(key)
        return self.defaults.get(key, default) if value is None or value == "None" else value

    def below(self, prefix: str) -> dict[str, Any]:
        """Returns all values below a key, by the remainders of their names."""
        found = {key: value for key, value in self.leaves.items() if key.startswith(f"{prefix}.")}
        self.looked |= set(found)
        return {key[len(prefix) + 1 :]: value for key, value in found.items()}

    def leave(self, key: str, why: str, differs: bool = True) -> Any:
        """Records why a key is omitted; returns `UNSET`, so that a rule can end with it."""
        if key in self.written:
            self.said[key] = (why, differs)
        return NOTHING


Rule = Callable[[Reading], Any]


#: (our key, their key or a rule).
Rows = list[tuple[str, str | Rule]]


@dataclass(frozen=True)
class Left:
    """Keys that have no counterpart.

    Attributes:
        keys: Patterns, separated by spaces.
        why: The reason.
        same: Values with which nothing is lost; or True where the key never changes what is trained.
    """

    keys: str
    why: str
    same: Any = ()


@dataclass
class Translation:
    """What a configuration was translated to.

    Attributes:
        kind: What kind of run it is, in words.
        ours: Our key → value, in the order in which they are written.
        origin: Our key → the foreign keys it was made of.
        defaults: Our key → the foreign keys that it was made of, too, by their default: the configuration leaves them out.
        left: Foreign key → (why it, or a part of it, is left out; whether training differs for it).
        theirs: Foreign key → value, all of them.
    """

    kind: str
    ours: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, list[str]] = field(default_factory=dict)
    defaults: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, tuple[str, bool]] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)

    @property
    def used(self) -> list[str]:
        """Foreign keys that contribute to the result."""
        made = {key for keys in self.origin.values() for key in keys}
        return [key for key in self.theirs if key in made]


def translated(
    kind: str,
    leaves: Mapping[str, Any],
    rules: Rows,
    unmatched: Sequence[Left],
    defaults: Mapping[str, Any] | None = None,
) -> Translation:
    """Translates a configuration by a table.

    Args:
        kind: Task type, in words.
        leaves: The foreign configuration.
        rules: (key of rlhpc, foreign key whose value is copied, or a rule). A row without a key of rlhpc only records
            why foreign keys are omitted.
        unmatched: Keys without a counterpart; the first pattern that fits gives the reason.
        defaults: Values that the foreign project uses for omitted keys.
    """
    read, translation = Reading(leaves, defaults), Translation(kind, theirs=dict(leaves))
    idle: set[str] = set()
    for ours, rule in rules:
        read.looked = set()
        value = read.leaves.get(rule, NOTHING) if isinstance(rule, str) else rule(read)
        looked = [rule] if isinstance(rule, str) else [key for key in read.leaves if key in read.looked]
        if value is NOTHING or (value is None and isinstance(rule, str)):
            for key in looked:
                idle.add(key)
            continue
        translation.ours[ours] = value
        translation.origin[ours] = [key for key in looked if key in leaves]
        translation.defaults[ours] = [key for key in looked if key in read.leaves and key not in leaves]
    used = set(translation.used)
    for key, value in leaves.items():
        if key in read.said:
            translation.left[key] = read.said[key]
        elif key in idle and key not in used:
            translation.left[key] = ("with this value, what rlhpc does anyway", False)
        elif key not in used:
            translation.left[key] = _reason(key, value, unmatched)
    return translation


def _reason(key: str, value: Any, left: Sequence[Left]) -> tuple[str, bool]:
    for entry in left:
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in entry.keys.split()):
            return entry.why, not (entry.same is True or value in list(entry.same))
    return "the importer does not know this key", True
