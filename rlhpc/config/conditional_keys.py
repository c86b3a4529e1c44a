"""Keys that are read under a condition alone: where it does not hold, what a configuration says there has no effect.

Each kind of run has one table of them (`Kind.conditions`); keys that are in none of its rows are always read.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from rlhpc.config.load import ALWAYS_SAVED
from rlhpc.config.merge import ConfigLayers
from rlhpc.config.typed import select, untouched
from rlhpc.runtime.text import shown


@dataclass(frozen=True)
class Condition:
    """A row of a kind's table.

    Attributes:
        keys: Dotted keys, or patterns of them (`actor.fsdp.*`).
        holds: Whether a run with this configuration reads them.
        reason: When they are read, for messages.
    """

    keys: tuple[str, ...]
    holds: Callable[[Any], bool]
    reason: str

    def names(self, key: str) -> bool:
        """Returns whether the row is about a key."""
        return any(fnmatch.fnmatchcase(key, pattern) for pattern in self.keys)


@dataclass(frozen=True)
class UnusedKey:
    """A key that the user has set, and that nothing reads.

    Attributes:
        key, value: As they stand in the configuration.
        source: The file or override that set it.
        reason: When it is read.
    """

    key: str
    value: Any
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key}={shown(self.value)} ({self.source}): it is read {self.reason}"


def is_none_of(key: str, *words: str) -> Callable[[Any], bool]:
    """Returns a condition: the key has none of these words of the package; case does not matter. Who does not read is named,
    because a name from outside may read anything."""
    return lambda cfg: str(select(cfg, key)).lower() not in words


def unused_keys(
    cfg: Any, sources: Mapping[str, str], table: Iterable[Condition], defaults: Mapping[str, Any]
) -> list[UnusedKey]:
    """Finds what was set and has no effect, in the order of the keys.

    Args:
        cfg: The configuration.
        sources: Key → who set it; other keys are not looked at.
        table: Rows of the kind of run. Where several are about a key, it is read if all hold.
        defaults: Key → its default. A key that was set to it is not told of.
    """
    rows = list(table)
    unused = []
    for key, source in sorted(sources.items()):
        value = _plain(select(cfg, key))
        if key in defaults and value == defaults[key]:
            continue
        if row := next((row for row in rows if row.names(key) and not row.holds(cfg)), None):
            unused.append(UnusedKey(key, value, source, row.reason))
    return unused


def user_sources(layers: ConfigLayers, path: str, content: Mapping[str, Any]) -> dict[str, str]:
    """Returns the keys that the user's own file and the overrides set, with the one that did. Files that it names under
    `defaults` are templates, and site files are about clusters; a file that a run has saved says every key.

    Args:
        layers: The configuration.
        path: The user's file, as the layers call it.
        content: What it says.
    """
    runner = content.get("runner")
    saved = isinstance(runner, Mapping) and runner.keys() >= ALWAYS_SAVED
    files = () if saved else (path,)
    return {key: source for key, source in layers.sources.items() if source in files or source.startswith("override ")}


def defaults_of(root: type, keys: Iterable[str]) -> dict[str, Any]:
    """Returns the defaults of a kind's configuration, as plain values; those that follow another key are left out."""
    cfg = untouched(root)
    defaults = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        node = OmegaConf.select(cfg, section) if section else cfg
        if not OmegaConf.is_interpolation(node, name) and not OmegaConf.is_missing(node, name):
            defaults[key] = _plain(node[name])
    return defaults


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
