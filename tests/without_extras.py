"""The environment of the package and its tests alone, in one that has more; a plugin of pytest (`-p tests.without_extras`).

Packages that neither rlhpc nor its extra `dev` needs are not found, as if they were not installed.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from tests import extras

_allowed = extras.required_by({"rlhpc", "pip", "uv", *extras.packages_of(""), *extras.packages_of("dev")})
_hidden = {
    module
    for module, packages in importlib.metadata.packages_distributions().items()
    if not _allowed & {extras.normalized(package) for package in packages}
}
_find_distributions = importlib.machinery.PathFinder.find_distributions


class _Hidden(importlib.machinery.PathFinder):
    """Says of hidden packages that they are not there."""

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if fullname.partition(".")[0] in _hidden:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

    @classmethod
    def find_distributions(cls, *_: Any, **__: Any) -> Iterator[importlib.metadata.Distribution]:
        return iter(())


def _find_allowed(*arguments: Any, **options: Any) -> Iterator[importlib.metadata.Distribution]:
    found = _find_distributions(*arguments, **options)
    return (one for one in found if extras.normalized(one.metadata["Name"]) in _allowed)


sys.meta_path.insert(0, _Hidden)
importlib.machinery.PathFinder.find_distributions = _find_allowed  # type: ignore[method-assign,assignment]
