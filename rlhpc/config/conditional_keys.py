"""Configuration keys that are read only under a condition; otherwise their values have no effect.

Each task type has one table of conditions (`conditions`). A key that matches no row is always read.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from rlhpc.config.load import ALWAYS_SAVED
from rlhpc.config.merge import ConfigLayers
from rlhpc.config.typed import default_section, plain, select
from rlhpc.runtime.text import short_repr


@dataclass(frozen=True)
class Condition:
    """Condition under which configuration keys are read: a row of a task type's table.

    Attributes:
        keys: Dotted keys, or patterns of them (`actor.fsdp.*`).
        holds: Returns whether a run with this configuration reads the keys.
        reason: Text of the condition, for messages.
    """

    keys: tuple[str, ...]
    holds: Callable[[Any], bool]
    reason: str

    def matches(self, key: str) -> bool:
        """Returns whether a pattern of the row matches a key."""
        return any(fnmatch.fnmatchcase(key, pattern) for pattern in self.keys)


@dataclass(frozen=True)
class UnusedKey:
    """Key that the user has set and that nothing reads.

    Attributes:
        key, value: Key and value in the configuration.
        source: The file or override that set it.
        reason: Text of the condition under which the key is read.
    """

    key: str
    value: Any
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key}={short_repr(self.value)} ({self.source}): it is read {self.reason}"


def is_none_of(key: str, *excluded_values: str) -> Callable[[Any], bool]:
    """Returns a condition that the value of `key` is none of the given built-in names, regardless of case.

    The given names do not read the conditional keys. All other names may read them, because a plugin may read any key.
    """
    return lambda cfg: str(select(cfg, key)) not in excluded_values


def find_unused_keys(
    cfg: Any, sources: Mapping[str, str], table: Iterable[Condition], defaults: Mapping[str, Any]
) -> list[UnusedKey]:
    """Finds keys that were set and have no effect, in the order of the keys.

    Args:
        cfg: The configuration.
        sources: Key → file or override that set it; other keys are not checked.
        table: Rows of the task type. A key that several rows match is read if all of them hold.
        defaults: Key → its default. A key that was set to its default is not reported.
    """
    rows = list(table)
    unused = []
    for key, source in sorted(sources.items()):
        user_value = plain(select(cfg, key))
        if key in defaults and user_value == defaults[key]:
            continue
        if row := next((row for row in rows if row.matches(key) and not row.holds(cfg)), None):
            unused.append(UnusedKey(key, user_value, source, row.reason))
    return unused


def user_sources(layers: ConfigLayers, path: str, file_content: Mapping[str, Any]) -> dict[str, str]:
    """Returns the sources of the keys that the user's file or an override sets.

    Keys from other sources are omitted: files under `defaults` are templates, site files describe clusters, and a run's saved
    configuration sets every key.

    Args:
        layers: The configuration.
        path: Name of the user's file in the layers.
        file_content: Content of that file.
    """
    runner = file_content.get("runner")
    is_saved_config = isinstance(runner, Mapping) and runner.keys() >= ALWAYS_SAVED
    files = () if is_saved_config else (path,)
    return {key: source for key, source in layers.sources.items() if source in files or source.startswith("override ")}


def defaults_of(root: type, key_paths: Iterable[str]) -> dict[str, Any]:
    """Returns the defaults of a task type's configuration as plain values, without keys whose default follows another key."""
    cfg = default_section(root)
    defaults = {}
    for key in key_paths:
        section, _, name = key.rpartition(".")
        node = OmegaConf.select(cfg, section) if section else cfg
        if not OmegaConf.is_interpolation(node, name) and not OmegaConf.is_missing(node, name):
            defaults[key] = plain(node[name])
    return defaults
