"""Names of a package that are imported when they are first used, so that who imports the package pays for none of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    Args:
        package: Its `__name__`.
        homes: Module → the names that come from there.
    """
    home_of = {name: module for module, names in homes.items() for name in names}
    known = vars(sys.modules[package])

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        known[name] = value = getattr(importlib.import_module(home_of[name]), name)
        return value

    def names() -> list[str]:
        return sorted({*known, *home_of})

    return find, names
