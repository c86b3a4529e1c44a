"""YAML loaders and the dumper of configurations. Scalars keep their text until the type of their key is known."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from rlhpc.runtime import env_references
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import cut, short_repr

_MERGE = "tag:yaml.org,2002:merge"


class UniqueKeys(yaml.SafeLoader):
    """YAML loader that refuses repeated keys, reads `1e-3` as a number, and reads `02:00:00`, `1:0` and dates as texts."""


_NUMBERS_AND_DATES = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
UniqueKeys.yaml_implicit_resolvers = {
    first_character: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS_AND_DATES]
    for first_character, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class ConfigDumper(yaml.SafeDumper):
    """YAML dumper that quotes each text that `UniqueKeys` would read as another type."""


def dump_yaml(yaml_content: Any, *, sort_keys: bool = True) -> str:
    """Formats plain values as YAML that `UniqueKeys` reads back."""
    yaml_text: str = yaml.dump(
        yaml_content, Dumper=ConfigDumper, default_flow_style=False, allow_unicode=True, sort_keys=sort_keys
    )
    return yaml_text


for _class in (UniqueKeys, ConfigDumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:int",
        re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$"),
        list("-+0123456789"),
    )
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
            r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+0123456789."),
    )


def _construct_mapping(loader: UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    """Builds a mapping; its own keys override those that `<<` merges into it, as in YAML 1.1."""
    anchor_values: dict[Any, Any] | None = None
    local_keys: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        if key_node.tag == _MERGE:
            if anchor_values is not None:
                raise yaml.constructor.ConstructorError(None, None, "key '<<' is given twice", key_node.start_mark)
            anchor_values = _merge_anchor(loader, value_node)
            continue
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, (list, dict)):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
        if key in local_keys:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        local_keys[key] = loader.construct_object(value_node, deep=True)
    return {**(anchor_values or {}), **local_keys}


def _merge_anchor(loader: UniqueKeys, node: yaml.Node) -> dict[Any, Any]:
    """Merges the value of `<<`: a mapping, or a list of mappings of which the first has precedence."""
    anchor_values: dict[Any, Any] = {}
    for anchor_node in reversed(node.value) if isinstance(node, yaml.SequenceNode) else (node,):
        if not isinstance(anchor_node, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(
                None,
                None,
                "'<<' merges a mapping (*name), or a list of mappings ([*one, *other])",
                anchor_node.start_mark,
            )
        anchor_values.update(loader.construct_object(anchor_node, deep=True))
    return anchor_values


UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


@dataclass(frozen=True, slots=True)
class Scalar:
    """Number or boolean as it is written; the type of its key decides between value and text.

    Attributes:
        value: Its value in YAML.
        text: Its text.
    """

    value: Any
    text: str

    def __repr__(self) -> str:
        return repr(self.value)


class WrittenScalars(UniqueKeys):
    """`UniqueKeys` loader that reads numbers and booleans without quotes as `Scalar`."""


def _construct_scalar(loader: WrittenScalars, node: yaml.ScalarNode) -> Any:
    scalar = yaml.SafeLoader.yaml_constructors[node.tag](loader, node)
    return Scalar(scalar, node.value) if node.style is None else scalar


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:bool"):
    WrittenScalars.add_constructor(_tag, _construct_scalar)


def scalar_values(yaml_content: Any) -> Any:
    """Replaces each scalar in mappings and lists by its value."""
    if isinstance(yaml_content, Scalar):
        return yaml_content.value
    if isinstance(yaml_content, dict):
        return {scalar_values(key): scalar_values(yaml_value) for key, yaml_value in yaml_content.items()}
    return [scalar_values(element) for element in yaml_content] if isinstance(yaml_content, list) else yaml_content


def plain_value(yaml_value: Any, key: str) -> Any:
    """Returns a value as mappings, lists, texts, numbers, booleans and None.

    Paths become texts, tuples become lists, and numbers of NumPy or PyTorch become Python numbers. References of an OmegaConf
    node to environment variables are not resolved.

    Args:
        yaml_value: Value of a configuration key, or a mapping of sections.
        key: The key, for messages.

    Raises:
        ConfigError: A value has a different type; the message names its key.
    """
    yaml_value = env_references.to_plain(yaml_value)
    if getattr(yaml_value, "shape", None) == () and hasattr(yaml_value, "item"):
        yaml_value = yaml_value.item()  # a scalar of NumPy or PyTorch
    if yaml_value is None or isinstance(yaml_value, (bool, int, float, str)):
        return yaml_value
    if isinstance(yaml_value, Mapping):
        if invalid_names := [name for name in yaml_value if not isinstance(name, (str, int))]:
            raise ConfigError(f"{key}: {short_repr(invalid_names[0])} is not a key; keys are texts")
        return {name: plain_value(value, f"{key}.{name}") for name, value in yaml_value.items()}
    if isinstance(yaml_value, (list, tuple)):
        return [plain_value(value, f"{key}[{index}]") for index, value in enumerate(yaml_value)]
    if isinstance(yaml_value, os.PathLike):
        return os.fspath(yaml_value)
    raise ConfigError(
        f"{cut(key)} is of type {type(yaml_value).__name__}; a configuration has texts, numbers, booleans, lists and mappings"
    )
