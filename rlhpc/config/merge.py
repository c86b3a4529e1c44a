"""The layers of a configuration, put on top of each other: each key is checked, and its source remembered."""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhpc.config.keys import Schema, element_of, fields_of, words_of
from rlhpc.config.typed import untouched
from rlhpc.config.yaml_loader import UniqueKeys
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plain import read_yaml
from rlhpc.runtime.shown import cut, first_line, shown

#: Says which kind of run has a key that this configuration may not have; empty if none.
Whose = Callable[[str], str]


class Layers:
    """A configuration that grows layer by layer.

    Args:
        schema: Its keys.
        whose: Makes the complaint about a key of another kind of configuration.

    Attributes:
        cfg: The configuration so far.
        sources: Key → the file or override that set it last.
    """

    def __init__(self, schema: Schema, whose: Whose = lambda key: "") -> None:
        self.schema, self._whose = schema, whose
        self.cfg: DictConfig = untouched(schema.root)
        self.sources: dict[str, str] = {}

    def copy(self) -> Layers:
        """A copy that grows independently."""
        other = copy.copy(self)
        other.cfg, other.sources = self.cfg.copy(), dict(self.sources)
        return other

    def add(self, content: Any, source: str, *, lenient: bool = False) -> None:
        """Puts a file's content, or an override's, on top.

        Args:
            content: Nested mappings.
            source: Where it is from, for messages.
            lenient: Leave out unknown keys: an earlier version wrote the file, with the keys of all kinds of run.

        Raises:
            ConfigError: An unknown key, or a value of another type.
        """
        if lenient:
            content = _known(content, self.schema.root)
        self._check(content, self.schema.root, "", source)
        for path, value in self._leaves(content):
            self.sources[path] = source
            name = self.schema.type_name(path)
            if isinstance(value, bool) and name in ("int", "float"):
                raise ConfigError(f"{source}: {path} is {shown(value)}; it must be {name}")
            if isinstance(value, bool) and name.startswith("str"):
                value = "on" if value else "off"  # words that YAML takes for booleans where they are not in quotes
            try:
                if (cls := element_of(self.schema.kind(path))) is not None:
                    value = [_structured(item, cls, f"{path}[{index}]", source) for index, item in enumerate(value)]
                if path in self.schema.open and isinstance(value, dict):
                    # A later file replaces such a mapping as a whole, because its keys are the user's own.
                    OmegaConf.update(self.cfg, path, value, merge=False)
                else:
                    OmegaConf.update(self.cfg, path, value, merge=isinstance(value, dict))
            except OmegaConfBaseException as error:
                raise ConfigError(f"{source}: {path} is {shown(value)}; it must be {name} ({reason(error)})") from None

    def override(self, text: str) -> None:
        """Puts `a.b=c` on top.

        Raises:
            ConfigError: It does not have this form, or is not allowed.
        """
        self.add(self._nested(text), f"override {shown(text)}")

    def _nested(self, text: str) -> dict[str, Any]:
        """`a.b=c` as a nested mapping.

        Within a mapping whose keys are the user's own (`env.train.kwargs.x=1`), it is that mapping with one entry changed.
        """
        key, value = parse_override(text)
        parent = next((path for path in self.schema.open if key.startswith(f"{path}.")), None)
        if parent is None:
            return _nest(key.split("."), value)
        own = key.removeprefix(f"{parent}.")
        if not all(part.strip() for part in own.split(".")):
            raise ConfigError(f"override {shown(text)}: {cut(key)} has an empty part; write {parent}.name=value")
        node = OmegaConf.select(self.cfg, parent)
        entries = typing.cast(dict[str, Any], OmegaConf.to_container(node) if node else {})
        if parent == "cluster.component_placement":
            entries = _placed(entries, own, value)
        elif parent == "sweep.grid":
            entries[own] = value  # its keys are dotted themselves
        else:
            *path, last = own.split(".")
            at = entries
            for part in path:
                if not isinstance(at.get(part), dict):
                    at[part] = {}
                at = at[part]
            at[last] = value
        return _nest(parent.split("."), entries)

    def _check(self, content: Any, cls: type, prefix: str, source: str) -> None:
        """Refuses unknown keys, naming the nearest valid one, and wrong shapes."""
        known = fields_of(cls)
        if not isinstance(content, dict):
            raise ConfigError(
                f"{source}: {prefix.rstrip('.')} is {shown(content)}; it is a section with the keys {', '.join(known)}"
            )
        for key, value in content.items():
            path = f"{prefix}{key}"
            if key not in known:
                if whose := self._whose(path):
                    raise ConfigError(f"{source}: {path} {whose}")
                hint = self.schema.nearest(str(key), known, prefix)
                raise ConfigError(f"{source}: unknown key {cut(path)}; {hint}allowed here: {', '.join(known)}")
            kind = known[key]
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                self._check(value, kind, f"{path}.", source)
            elif (element := element_of(kind)) is not None:
                if not isinstance(value, list):
                    raise ConfigError(f"{source}: {path} is {shown(value)}; it is a list")
                for index, item in enumerate(value):
                    self._check(item, element, f"{path}[{index}].", source)
            elif isinstance(value, dict) and kind is not Any and typing.get_origin(kind) is not dict:
                raise ConfigError(f"{source}: {path} is {shown(value)}; it must be {self.schema.type_name(path)}")

    def _leaves(self, content: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
        for key, value in content.items():
            if isinstance(value, dict) and value and f"{prefix}{key}" not in self.schema.open:
                yield from self._leaves(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value


def parse_override(text: str) -> tuple[str, Any]:
    """Splits `key=value`; the value is YAML.

    Raises:
        ConfigError: It is not of this form.
    """
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"override {shown(text)}: write key=value, for example runner.max_steps=20")
    try:
        return key, read_yaml(raw, UniqueKeys) if raw.strip() else None
    except ValueError as error:
        raise ConfigError(f"override {cut(key)}=…: the value is {error}") from None
    except yaml.YAMLError:
        raise ConfigError(f"override {shown(text)}: the value {shown(raw)} is not valid YAML; quote it") from None


def reason(error: OmegaConfBaseException) -> str:
    """OmegaConf's complaint, in one line."""
    return cut(first_line(error), 200)


def _known(content: Any, cls: Any) -> Any:
    """The part of a mapping for which a dataclass has fields."""
    if not isinstance(content, dict) or not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        return content
    fields = fields_of(cls)
    kept = {}
    for key, value in content.items():
        if key in fields:
            element = element_of(fields[key])
            listed = element is not None and isinstance(value, list)
            kept[key] = [_known(item, element) for item in value] if listed else _known(value, fields[key])
    return kept


def _structured(item: dict[str, Any], cls: type, where: str, source: str) -> DictConfig:
    """One element of a list of sections, typed."""
    section = untouched(cls)
    fields = fields_of(cls)
    for key, value in item.items():
        try:
            OmegaConf.update(section, key, value, merge=dataclasses.is_dataclass(fields[key]))
        except OmegaConfBaseException as error:
            rule = words_of(fields[key])
            raise ConfigError(
                f"{source}: {where}.{key} is {shown(value)}; it must be {rule} ({reason(error)})"
            ) from None
    return section


def _nest(keys: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return typing.cast(dict[str, Any], value)


def _placed(placement: dict[str, Any], components: str, value: Any) -> dict[str, Any]:
    """A placement with some components moved: `env=1` takes env out of `actor,rollout,env: 0`."""
    moved = {name.strip() for name in components.split(",")}
    kept = {}
    for names, place in placement.items():
        if left := [name.strip() for name in str(names).split(",") if name.strip() not in moved]:
            kept[",".join(left)] = place
    return {**kept, components: value}
