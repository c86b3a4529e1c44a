"""What a configuration names by its import path."""

from __future__ import annotations

import importlib
from typing import Any

from rlhpc.runtime.errors import ConfigError


def load_attribute(path: str, key: str) -> Any:
    """`module:attribute`, a class or a function.

    Raises:
        ConfigError: It cannot be imported, or cannot be called; says why.
    """
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{key} is {path!r}, which cannot be imported: {error}") from None
    if not callable(found):
        raise ConfigError(f"{key} is {path!r}, which is a {type(found).__name__}, no class and no function")
    return found
