"""Registries of named classes and functions: built-in and registered names, entry points, and `module:attribute` paths."""

from __future__ import annotations

import functools
import importlib
import operator
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from typing import Any, Generic, TypeVar

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.similar_names import similar_names
from rlhpc.runtime.text import short_repr

ItemT = TypeVar("ItemT", bound=Callable[..., Any])
CallableT = TypeVar("CallableT", bound=Callable[..., Any])


def import_attribute(path: str, key: str) -> Any:
    """Imports an attribute of any type from its path `module:attribute`.

    Raises:
        ConfigError: The attribute cannot be imported; the message has the reason.
    """
    module, _, attribute = path.partition(":")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{key} is {short_repr(path)}, which cannot be imported: {error}{_import_remedy(module, error)}"
        ) from None


def _import_remedy(module: str, error: Exception) -> str:
    """Returns a remedy for a module that cannot be imported because its folder is not on the import path.

    Searches the working directory and the folders of the command's configuration files; returns "" if the module is not there.
    """
    name = module.partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or error.name != name:
        return ""
    files = [Path(os.path.abspath(argument)) for argument in sys.argv[1:] if argument.endswith((".yaml", ".yml"))]
    for folder in (Path.cwd(), *(file.parent for file in files)):
        if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
            return f"; it is in {folder}: export PYTHONPATH={shlex.quote(str(folder))}"
    return ""


def load_attribute(path: str, key: str) -> Any:
    """Imports a class or a function from its path `module:attribute`.

    Raises:
        ConfigError: The attribute cannot be imported, or is not callable; the message has the reason.
    """
    attribute = import_attribute(path, key)
    if not callable(attribute):
        raise ConfigError(f"{key} is {path!r}, which is a {type(attribute).__name__}, no class and no function")
    return attribute


def require_package(module: str, import_purpose: str, extra_name: str = "llm") -> Any:
    """Imports a module of an optional package.

    Args:
        module: Name of the module.
        import_purpose: Feature and required package, for messages: "videos need PyAV".
        extra_name: Extra of rlhpc that installs the package.

    Raises:
        ConfigError: The module cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{import_purpose} ({error}): pip install 'rlhpc[{extra_name}]'") from error


def list_entry_points(group: str) -> dict[str, EntryPoint]:
    """Returns the entry points of a group in all installed packages, by name in lower case."""
    entry_points_by_name: dict[str, EntryPoint] = {}
    packages: set[str] = set()
    for folder in dict.fromkeys(sys.path):  # the first package hides later ones of the same name, as for an import
        for package, entry_points in _list_installed(*_read_folder_and_mtime(folder)):
            if package not in packages:
                packages.add(package)
                entry_points_by_name |= {
                    entry_point.name.lower(): entry_point for entry_point in entry_points if entry_point.group == group
                }
    return entry_points_by_name


def _read_folder_and_mtime(folder: str) -> tuple[str, int]:
    """Returns a folder and the time at which its content last changed."""
    try:
        return folder, os.stat(folder or ".").st_mtime_ns
    except OSError:
        return folder, 0


@functools.lru_cache(maxsize=256)
def _list_installed(folder: str, modified_ns: int) -> list[tuple[str, list[EntryPoint]]]:
    """Returns name and entry points of each package in a folder; cached, because reading hundreds of packages takes long."""
    return [(_read_package_name(package), list(package.entry_points)) for package in distributions(path=[folder])]


def _read_package_name(package: Distribution) -> str:
    """Returns a package's name, if possible from the name of its folder, because reading the metadata takes longer."""
    return str(getattr(package, "_normalized_name", None) or package.metadata["Name"])


def nearest(name: str, known_names: Iterable[str]) -> str:
    """Returns `; did you mean 'gae'?` with the closest name, or `;` if no name is close."""
    return f"; {suggest_name(name, known_names)}".rstrip()


def suggest_name(name: str, known_names: Iterable[str]) -> str:
    """Returns `did you mean 'gae'? ` with the closest name, or "" if no name is close."""
    close_names = similar_names(name, known_names)
    return f"did you mean {close_names[0]!r}? " if close_names else ""


class Registry(Generic[ItemT]):
    """Registry of classes or functions of one kind, by name; case does not matter.

    Args:
        kind: Noun for messages, such as "advantage estimator".
        key: Configuration key that has such a name.
        group: Entry point group in which other packages may offer further objects.
        built_in_paths: Name → `module:attribute`, which is imported when it is needed.
        form: Form of an import path, for messages: `module:function` or `module:Class`.
    """

    def __init__(
        self,
        kind: str,
        key: str,
        group: str,
        built_in_paths: Mapping[str, str] | None = None,
        form: str = "module:Class",
    ) -> None:
        self.kind, self.key, self.group, self.form = kind, key, group, form
        self.built_in = dict(built_in_paths or {})
        self._items: dict[str, ItemT] = {}

    def register(self, *names: str) -> Callable[[CallableT], CallableT]:
        """Returns a decorator that registers a class or function under the given names.

        Raises:
            ConfigError: A name is already used.
        """
        duplicates = [name for name in names if name.lower() in {**self.built_in, **self._items}]
        if duplicates:
            raise ConfigError(f"{self.kind} {duplicates[0]!r} is registered twice")

        def add(item: CallableT) -> CallableT:
            self._items |= dict.fromkeys((name.lower() for name in names), item)  # type: ignore[arg-type]
            return item

        return add

    def names(self) -> list[str]:
        """Returns all names, including those of entry points."""
        return sorted({*self._items, *self.built_in, *list_entry_points(self.group)})

    def choices(self) -> list[str]:
        """Returns the choices that a message lists: the names, built-in ones first, and the form of an import path."""
        return [*dict.fromkeys([*self.built_in, *self.names()]), self.form]

    def path(self, name: str) -> str | None:
        """Returns the import path of a built-in name or of an entry point; returns a name that is an import path unchanged.

        Returns None for an unknown name.
        """
        path = self.built_in.get(name.lower(), name)
        if path == name and (entry_point := list_entry_points(self.group).get(name.lower())) is not None:
            path = f"{entry_point.module}:{entry_point.attr}"
        return path if ":" in path else None

    def find(self, name: str, key: str = "") -> ItemT:
        """Returns the object with this name, and imports it if necessary.

        Args:
            name: Name in the configuration.
            key: Configuration key that has the name; by default the registry's key.

        Raises:
            ConfigError: The name is unknown (the message gives the nearest and all allowed names), or cannot be imported.
        """
        key, lower_name = key or self.key, str(name).lower()
        if lower_name in self._items:
            return self._items[lower_name]
        path = self.path(str(name))
        if path is None:
            raise ConfigError(
                f"{key} is {name!r}, which is unknown{nearest(lower_name, self.names())} "
                f"allowed: {', '.join(self.names())}, or {self.form}"
            )
        item: ItemT = load_attribute(path, key)
        return item
