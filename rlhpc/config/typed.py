"""Where typed sections meet OmegaConf.

At run time a configuration is an OmegaConf mapping that is checked against the dataclass of its kind of run; signatures name
that dataclass, so that a misspelt key is a type error. What only the mapping can do is done here.
"""

from __future__ import annotations

import functools
import pickle
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf

Section = TypeVar("Section")


def typed(of: type[Section], cfg: object) -> Section:
    """What was read as a configuration of a kind of run, or as a section of it, under its type; looks at nothing.

    Args:
        of: The dataclass that it was checked against.
        cfg: The OmegaConf mapping.
    """
    del of
    return cast(Section, cfg)


def untouched(of: type) -> DictConfig:
    """The mapping of a section of which nothing has been set; the caller's own.

    OmegaConf takes 50 ms to make that of a kind of run, a sixth of it to copy one, and a thirtieth to read one again.
    """
    made, packed = _made(of)
    again: DictConfig = made.copy() if packed is None else pickle.loads(packed)
    return again


@functools.lru_cache(maxsize=64)
def _made(of: type) -> tuple[DictConfig, bytes | None]:
    """One of them, and packed, if the class can be found by its name: one that a function has made cannot."""
    made: DictConfig = OmegaConf.structured(of)
    try:
        return made, pickle.dumps(made, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        return made, None


def mapping(section: object) -> DictConfig:
    """A configuration or section as the mapping that it is at run time: by name, with whatever name."""
    return cast(DictConfig, section)


def plain(section: object, *, resolve: bool = True) -> Any:
    """A configuration, or a mapping or list in it, as dicts and lists; what is none of OmegaConf's is given back."""
    return OmegaConf.to_container(section, resolve=resolve) if OmegaConf.is_config(section) else section


def alone(section: Section) -> Section:
    """A section for another process: its own copy, resolved, without the rest of the configuration."""
    return typed(type(section), OmegaConf.create(plain(section))) if OmegaConf.is_config(section) else section


def select(cfg: object, key: str) -> Any:
    """What stands at a dotted key; None where there is no such key."""
    return OmegaConf.select(mapping(cfg), key)


def changed(section: Section, key: str, value: Any) -> Section:
    """A read-only copy with another value at a dotted key; whoever has the original keeps it as it is."""
    copy = mapping(section).copy()
    OmegaConf.set_readonly(copy, False)
    OmegaConf.update(copy, key, value, merge=False)
    OmegaConf.set_readonly(copy, True)
    return typed(type(section), copy)
