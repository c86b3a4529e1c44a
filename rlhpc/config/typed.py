"""Typed access to OmegaConf configurations.

At run time a configuration is an OmegaConf mapping that was checked against the dataclass of its task type; signatures name
that dataclass, so that a misspelt key is a type error. Operations that need the mapping itself are in this module.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf

Section = TypeVar("Section")


def typed(section_type: type[Section], cfg: object) -> Section:
    """Casts a configuration or a section to its dataclass for type checkers; checks nothing at run time.

    Args:
        section_type: Dataclass against which the mapping was checked.
        cfg: The OmegaConf mapping.
    """
    return cast(Section, cfg)


def default_section(section_type: type) -> DictConfig:
    """Returns a new mapping of a section, with defaults only.

    OmegaConf needs 50 ms to create the mapping of a task type, a sixth of that to copy it, and a thirtieth to unpickle it.
    """
    template, pickle_bytes = _find_template_of(section_type)
    copied_section: DictConfig = template.copy() if pickle_bytes is None else pickle.loads(pickle_bytes)
    return copied_section


@functools.lru_cache(maxsize=64)
def _find_template_of(section_type: type) -> tuple[DictConfig, bytes | None]:
    """Returns the mapping of a class and its pickle.

    The pickle is None if the class cannot be imported by its name, such as a class defined in a function.
    """
    template: DictConfig = OmegaConf.structured(section_type)
    try:
        return template, pickle.dumps(template, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        return template, None


def mapping(section: object) -> DictConfig:
    """Returns a configuration or section as its OmegaConf mapping, for access by key."""
    return cast(DictConfig, section)


def plain(section: object, *, resolve: bool = True) -> Any:
    """Returns a configuration, or a mapping or list in it, as dicts and lists. Values that are not OmegaConf nodes are
    returned unchanged.
    """
    return OmegaConf.to_container(section, resolve=resolve) if OmegaConf.is_config(section) else section


def leaves(mapping_content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested mappings by dotted key; an empty mapping is a value."""
    for key, value in mapping_content.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def alone(section: Section) -> Section:
    """Returns a resolved copy of a section without the rest of the configuration, for another process."""
    return typed(type(section), OmegaConf.create(plain(section))) if OmegaConf.is_config(section) else section


def select(cfg: object, key: str) -> Any:
    """Returns the value at a dotted key; None if the key does not exist."""
    return OmegaConf.select(mapping(cfg), key)


def with_value(section: Section, key: str, new_value: Any) -> Section:
    """Returns a read-only copy with another value at a dotted key; the original stays unchanged."""
    copied_section = mapping(section).copy()
    OmegaConf.set_readonly(copied_section, False)
    OmegaConf.update(copied_section, key, new_value, merge=False)
    OmegaConf.set_readonly(copied_section, True)
    return typed(type(section), copied_section)
