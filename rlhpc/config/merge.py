"""Merging of configuration layers: checks each key, and records its source."""

from __future__ import annotations

import copy
import re
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhpc.config.schema import (
    Schema,
    element_of,
    fields_of,
    is_section,
    nearest_key,
    typed_value,
    with_variables,
    words_of,
)
from rlhpc.config.typed import default_section
from rlhpc.config.yaml_files import Scalar, WrittenScalars
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_yaml
from rlhpc.runtime.text import cut, first_line, short_repr

#: Index of a list's element in a dotted key: `[2]`; it may also be written `.2`.
_LIST_INDEX = re.compile(r"\[(\d+)\]")


class ForeignKeys(Protocol):
    """Keys of other task types, for messages about keys that a task type does not have."""

    def explain_foreign_key(self, key: str) -> str:
        """Returns the message about a key of another task type; "" if no task type has the key."""

    def foreign_names(self, section: str) -> Collection[str]:
        """Returns the names that only other task types allow in a section; "" is the top."""


class ConfigLayers:
    """Configuration that is merged layer by layer.

    Args:
        schema: Keys of the configuration.
        foreign_keys: Keys of other task types.
        null_numbers: Key → number that null stands for.

    Attributes:
        cfg: The configuration so far.
        sources: Key → the file or override that set it last.
        element_keys: Key of a list of sections → the keys set in each element.
    """

    def __init__(
        self,
        schema: Schema,
        foreign_keys: ForeignKeys | None = None,
        null_numbers: Mapping[str, int] | None = None,
    ) -> None:
        self.schema, self._foreign_keys, self._null_numbers = schema, foreign_keys, null_numbers or {}
        self.cfg: DictConfig = default_section(schema.root)
        self.sources: dict[str, str] = {}
        self.element_keys: dict[str, list[set[str]]] = {}

    def copy(self) -> ConfigLayers:
        """Returns a copy to which layers can be added independently."""
        layers_copy = copy.copy(self)
        layers_copy.cfg, layers_copy.sources, layers_copy.element_keys = (
            self.cfg.copy(),
            dict(self.sources),
            dict(self.element_keys),
        )
        return layers_copy

    def add(self, content: Any, source: str, *, lenient: bool = False, variables: bool = True) -> None:
        """Merges the content of a file or an override on top.

        Args:
            content: Nested mappings.
            source: Source of the content, for messages.
            lenient: Ignore unknown keys, for a file that an earlier version wrote with the keys of all task types.
            variables: Let paths name environment variables, `$NAME`.

        Raises:
            ConfigError: An unknown key, or a value of a different type.
        """
        try:
            content = typed_value(content, self.schema.root)
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from None
        if variables:
            content = with_variables(content, self.schema.root)
        if lenient:
            content = _select_known(content, self.schema.root)
        self._check_content(content, self.schema.root, "", source)
        for path, node, value in self._iter_leaves(content):
            self.sources[path] = source
            if value is None:
                value = self._null_numbers.get(path)
            name = self.schema.type_name(path)
            if isinstance(value, bool) and name in ("int", "float"):
                raise ConfigError(f"{source}: {path} is {short_repr(value)}; it must be {name}")
            try:
                if (cls := element_of(self.schema.type_of(path))) is not None:
                    self.element_keys[path] = [{*element} if isinstance(element, dict) else set() for element in value]
                    value = [
                        _build_list_item(element, cls, f"{path}[{index}]", source)
                        for index, element in enumerate(value)
                    ]
                # A later file replaces a complete mapping whose keys the user chooses.
                is_merged = isinstance(value, dict) and path not in self.schema.open
                OmegaConf.update(self.cfg, node, value, merge=is_merged)
            except OmegaConfBaseException as error:
                value_text, reason_text = ("null", "") if value is None else (short_repr(value), f" ({reason(error)})")
                raise ConfigError(f"{source}: {path} is {value_text}; it must be {name}{reason_text}") from None

    def override(self, text: str) -> None:
        """Merges an override `a.b=c` into the layers.

        Raises:
            ConfigError: `text` does not have this form, or the key or value is not allowed.
        """
        key, override_value = parse_override(text)
        self.set(key, override_value, f"override {short_repr(text)}")

    def set(self, key: str, value: Any, source: str) -> None:
        """Sets a value at a dotted key, on top of the layers so far.

        Raises:
            ConfigError: The key or value is not allowed.
        """
        self.add(self._nest_key_value(key, value, source), source)

    def _nest_key_value(self, key: str, override_value: Any, source: str) -> dict[str, Any]:
        """Returns a nested mapping with the value at the key.

        Within a mapping whose keys the user chooses (`env.train.kwargs.x=1`), returns that mapping with one entry changed;
        within a list of sections (`reward.terms.0.weight=1`, `reward.terms[0].weight=1`), the list with one element changed.
        """
        parent = next((path for path in self.schema.open if key.startswith(f"{path}.")), None)
        if parent is None:
            key_parts = _LIST_INDEX.sub(r".\1", key).split(".")
            for depth, index_text in enumerate(key_parts):
                list_key = ".".join(key_parts[:depth])
                if index_text.isdecimal() and element_of(self.schema.type_of(list_key)) is not None:
                    items = self._replace_in_list(
                        list_key, int(index_text), key_parts[depth + 1 :], override_value, source
                    )
                    return _nest(key_parts[:depth], items)
            return _nest(key.split("."), override_value)
        subkey = key.removeprefix(f"{parent}.")
        if not all(key_part.strip() for key_part in subkey.split(".")):
            raise ConfigError(f"{source}: {cut(key)} has an empty part; write {parent}.name=value")
        node = OmegaConf.select(self.cfg, parent)
        components = typing.cast(dict[str, Any], OmegaConf.to_container(node) if node else {})
        if parent == "cluster.component_placement":
            components = _move_components(components, subkey, override_value)
        elif parent == "sweep.grid":
            components[subkey] = override_value  # its keys contain dots
        else:
            _set_nested(components, subkey.split("."), override_value)
        return _nest(parent.split("."), components)

    def _replace_in_list(
        self, list_key: str, index: int, subkey_parts: Sequence[str], new_value: Any, source: str
    ) -> list[Any]:
        """Returns the elements of a list of sections, as far as they are set, with one value of one element changed.

        Raises:
            ConfigError: The list has no element with this index.
        """
        element_keys = self.element_keys.get(list_key, [])
        if index >= len(element_keys):
            raise ConfigError(
                f"{source}: {list_key} has no element {index}; it has {len(element_keys)}, counted from 0; set the complete "
                f"list with '{list_key}=[{{…}}, …]'"
            )
        complete_items: Any = OmegaConf.to_container(OmegaConf.select(self.cfg, list_key))
        items = [
            {key: item_value for key, item_value in item.items() if key in keys}
            for item, keys in zip(complete_items, element_keys, strict=True)
        ]
        if not subkey_parts:
            return [*items[:index], new_value, *items[index + 1 :]]
        _set_nested(items[index], subkey_parts, new_value)
        return items

    def _check_content(self, layer_content: Any, cls: type, prefix: str, source: str) -> None:
        """Refuses unknown keys, with a hint at the most similar key, and values whose form does not fit their key."""
        fields = fields_of(cls)
        if not isinstance(layer_content, dict):
            raise ConfigError(
                f"{source}: {prefix.rstrip('.')} is {short_repr(layer_content)}; it is a section with the keys "
                f"{', '.join(fields)}"
            )
        for key, key_value in layer_content.items():
            path = f"{prefix}{key}"
            if key not in fields:
                if self._foreign_keys and (foreign_reason := self._foreign_keys.explain_foreign_key(path)):
                    raise ConfigError(f"{source}: {path} {foreign_reason}")
                hint = self._hint_at_key(str(key), fields, prefix)
                raise ConfigError(f"{source}: unknown key {cut(path)}; {hint}allowed here: {', '.join(fields)}")
            field_type = fields[key]
            if is_section(field_type):
                self._check_content(key_value, field_type, f"{path}.", source)
            elif (element := element_of(field_type)) is not None:
                if not isinstance(key_value, list):
                    raise ConfigError(f"{source}: {path} is {short_repr(key_value)}; it is a list")
                for index, list_item in enumerate(key_value):
                    self._check_content(list_item, element, f"{path}[{index}].", source)
            elif isinstance(key_value, dict) and field_type is not Any and typing.get_origin(field_type) is not dict:
                raise ConfigError(
                    f"{source}: {path} is {short_repr(key_value)}; it must be {self.schema.type_name(path)}"
                )

    def _hint_at_key(self, key: str, fields: Collection[str], prefix: str) -> str:
        """Returns a hint with the key most similar to an unknown one, and with the task types of that key if it is theirs."""
        foreign_names = self._foreign_keys.foreign_names(prefix.rstrip(".")) if self._foreign_keys else ()
        similar_key = nearest_key(key, prefix, fields, self.schema.keys, foreign_names)
        if similar_key is None:
            return ""
        hint = f"did you mean {similar_key}? "
        if self._foreign_keys and similar_key not in self.schema:
            hint += f"it {self._foreign_keys.explain_foreign_key(similar_key)}; "
        return hint

    def _iter_leaves(
        self, content: dict[str, Any], parent_path: str = "", node: str = ""
    ) -> Iterable[tuple[str, str, Any]]:
        """Yields each value with its dotted key and its OmegaConf path, in which a name that contains dots is in brackets."""
        for key, key_value in content.items():
            path = f"{parent_path}.{key}" if parent_path else str(key)
            node_path = f"{node}[{key}]" if "." in str(key) else f"{node}.{key}" if node else str(key)
            if isinstance(key_value, dict) and key_value and path not in self.schema.open:
                yield from self._iter_leaves(key_value, path, node_path)
            else:
                yield path, node_path, key_value


def parse_override(override_text: str) -> tuple[str, Any]:
    """Splits `key=value`; the value is YAML, and its scalars keep their text.

    Raises:
        ConfigError: `override_text` does not have this form, or the value is not valid YAML.
    """
    key, equals, raw_value = override_text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"override {short_repr(override_text)}: write key=value, for example runner.max_steps=20")
    try:
        return key, _parse_override_value(raw_value.strip()) if raw_value.strip() else None
    except ValueError as error:
        raise ConfigError(f"override {cut(key)}=…: the value is {error}") from None
    except yaml.YAMLError:
        raise ConfigError(
            f"override {short_repr(override_text)}: the value {short_repr(raw_value)} is not valid YAML; quote it"
        ) from None


def _parse_override_value(value_text: str) -> Any:
    """Reads an override's value. A plain scalar is taken literally to the end of the text: YAML comments and line breaks have
    no meaning in it.
    """
    parsed_value, node = read_yaml(value_text, WrittenScalars), yaml.compose(value_text, WrittenScalars)
    if node is not None and (not isinstance(node, yaml.ScalarNode) or node.style is not None or value_text[0] in "!&"):
        return parsed_value
    if isinstance(parsed_value, Scalar):
        return Scalar(parsed_value.value, value_text)
    return None if parsed_value is None and node is not None and node.value else value_text


def reason(error: OmegaConfBaseException) -> str:
    """Returns the first line of OmegaConf's error message, shortened."""
    return cut(first_line(error), 200)


def _select_known(nested_content: Any, cls: Any) -> Any:
    """Returns the part of a mapping for which a dataclass has fields."""
    if isinstance(nested_content, list):
        return [_select_known(list_item, element_of(cls)) for list_item in nested_content]
    if not isinstance(nested_content, dict) or not is_section(cls):
        return nested_content
    fields = fields_of(cls)
    return {
        key: _select_known(nested_content, fields[key])
        for key, nested_content in nested_content.items()
        if key in fields
    }


def _build_list_item(list_item: dict[str, Any], cls: type, path: str, source: str) -> DictConfig:
    """Returns an element of a list of sections as a typed OmegaConf node."""
    section = default_section(cls)
    fields = fields_of(cls)
    for key, value in list_item.items():
        try:
            OmegaConf.update(section, key, value, merge=is_section(fields[key]))
        except OmegaConfBaseException as error:
            type_text = words_of(fields[key])
            raise ConfigError(
                f"{source}: {path}.{key} is {short_repr(value)}; it must be {type_text} ({reason(error)})"
            ) from None
    return section


def _set_nested(mapping: dict[str, Any], key_parts: Sequence[str], value: Any) -> None:
    """Sets a value in a nested mapping; what is no mapping on the way to it is replaced by one."""
    *sections, name = key_parts
    for section in sections:
        if not isinstance(mapping.get(section), dict):
            mapping[section] = {}
        mapping = mapping[section]
    mapping[name] = value


def _nest(key_parts: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(key_parts):
        value = {key: value}
    return typing.cast(dict[str, Any], value)


def _move_components(placement: dict[str, Any], components: str, ranks_text: Any) -> dict[str, Any]:
    """Returns a placement with some components moved: `env=1` removes env from `actor,rollout,env: 0`."""
    moved_names = {name.strip() for name in components.split(",")}
    new_placement = {}
    for component_names, ranks in placement.items():
        if remaining_names := [
            name.strip() for name in str(component_names).split(",") if name.strip() not in moved_names
        ]:
            new_placement[",".join(remaining_names)] = ranks
    return {**new_placement, components: ranks_text}
