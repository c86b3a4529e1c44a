"""Reader of Hydra configurations: merges the files of a `defaults:` list and resolves their references.

It supports only features of training configurations: groups with a package (`env/cube@env.train`), `_self_`, relative
references, and the arithmetic that RLinf adds. References to environment variables stay as written, in the form of
rlhpc's own configurations. (Only the search path reads variables, because it only locates files.)
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhpc.config.files import read_content
from rlhpc.config.typed import plain
from rlhpc.config.yaml_files import Scalar, WrittenScalars, scalar_values
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import cut, first_line, short_repr

_MAX_DEPTH = 10
#: OmegaConf 2.4 uses the old name for the new function, and warns about the other name.
_REGISTER = (
    "register_resolver" if "replace" in signature(OmegaConf.register_resolver).parameters else "register_new_resolver"
)
_RESOLVERS: Mapping[str, Callable[..., Any]] = {
    "multiply": lambda *numbers: math.prod(map(_to_number, numbers)),
    "add": lambda *numbers: sum(map(_to_number, numbers)),
    "subtract": lambda a, b: _to_number(a) - _to_number(b),
    "int_div": lambda a, b: _to_number(a) // _to_number(b),
    "not": lambda value: not value,
}


@dataclass
class ComposedConfig:
    """Configuration composed of several files.

    Attributes:
        leaves: Dotted key → value; a list is one value.
        files: Files in order of precedence; the last one wins.
        unresolved: Keys whose references could not be resolved, with the reason; their values are as written.
        skipped: Entries of `defaults:` that concern only Hydra.
        texts: Dotted key → text of its number or boolean.
    """

    leaves: dict[str, Any] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    unresolved: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)


def compose(path: Path) -> ComposedConfig:
    """Reads a configuration and all files that its `defaults:` name.

    Raises:
        ConfigError: A file is missing, is not YAML or not a mapping, or files include each other; or a key, a value or the
            syntax of a reference is none of OmegaConf's.
    """
    composed = ComposedConfig()
    tree = _read(path, composed, (), [])
    try:
        _resolve(tree, composed)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{path}: {key}{first_line(error)}") from None
    return composed


def _to_number(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else float(value) if "." in str(value) else int(str(value))


def _read(path: Path, composed: ComposedConfig, chain: tuple[Path, ...], search: list[Path]) -> dict[str, Any]:
    if path in chain or len(chain) > _MAX_DEPTH:
        raise ConfigError(f"{path}: `defaults` go round in a circle: {' → '.join(p.name for p in (*chain, path))}")
    content = read_content(path, loader=WrittenScalars)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: found {short_repr(content)} at the top; a configuration is a mapping of sections")
    if not chain:
        search += _search_path(content)
    defaults = scalar_values(content.pop("defaults", None)) or []
    if not isinstance(defaults, list):
        raise ConfigError(f"{path}: defaults is {short_repr(defaults)}; Hydra has a list there")
    merged_content: dict[str, Any] = {}
    has_self_entry = False
    for default in defaults:
        if default == "_self_":
            has_self_entry = True
            merged_content = _merge(merged_content, content)
            continue
        for group, package, is_optional in _parse_entry(default, path, composed):
            file = _find_group_file(group, path, search, is_optional)
            if file is None:
                continue
            subtree = _read(file, composed, (*chain, path), search)
            for name in reversed(package):
                subtree = {name: subtree}
            merged_content = _merge(merged_content, subtree)
    composed.files.append(path)
    return merged_content if has_self_entry else _merge(merged_content, content)


def _search_path(content: Mapping[str, Any]) -> list[Path]:
    """Returns the folders of `hydra.searchpath` that exist on this machine."""
    section = content.get("hydra")
    search_paths = section.get("searchpath") if isinstance(section, dict) else None
    folders = []
    for folder_text in search_paths if isinstance(search_paths, list) else ():
        name = re.sub(
            r"\$\{oc\.env:(\w+)\}", lambda m: os.environ.get(m[1], ""), str(folder_text).removeprefix("file://")
        )
        if name and Path(name).is_dir():
            folders.append(Path(name))
    return folders


def _parse_entry(entry: Any, path: Path, composed: ComposedConfig) -> list[tuple[str, list[str], bool]]:
    """Returns the file without suffix, the keys of the package, and whether the file may be missing, for each file of an entry
    of `defaults:`.
    """
    if isinstance(entry, dict) and len(entry) == 1:
        key, option = next(iter(entry.items()))
        if str(key).removeprefix("override ").lstrip("/").startswith("hydra/") or option is None:
            composed.skipped.append(f"{key}: {option}")
            return []
        if str(key).startswith("override "):
            raise ConfigError(
                f"{path}: defaults has {f'{key}: {option}'!r}; the importer replaces no choice that another entry has made: "
                f"name {option} in that entry"
            )
        group, _, package = str(key).removeprefix("optional ").lstrip("/").partition("@")
        options = option if isinstance(option, list) else [option]
        is_optional = str(key).startswith("optional ")
        return [(f"{group}/{name}", _split_package(package, group), is_optional) for name in options]
    if not isinstance(entry, str):
        raise ConfigError(
            f"{path}: defaults has {short_repr(entry)}; Hydra has a file's name or one `group: name` there"
        )
    name, _, package = entry.partition("@")
    return [(name.lstrip("/"), _split_package(package, name.rpartition("/")[0]), False)]


def _split_package(package: str, group: str) -> list[str]:
    if package == "_global_":
        return []
    return [name for name in (package or group.strip("./").replace("/", ".")).split(".") if name and name != ".."]


def _find_group_file(name: str, path: Path, search: list[Path], is_optional: bool) -> Path | None:
    """Returns the file of a group: next to the file that names the group, on the search path, or up to two folders above; None
    if an optional one is missing.
    """
    folders = [path.parent, *search, *list(path.parent.parents)[:2]]
    for folder in folders:
        if (file := (folder / f"{name.removesuffix('.yaml')}.yaml").resolve()).is_file():
            return file
    if is_optional:
        return None
    raise ConfigError(
        f"{path}: defaults: there is no file {name}.yaml, neither in {folders[0]} nor above it"
        f"{' nor in ' + ', '.join(map(str, search)) if search else ''}; copy the configuration's folder as a whole"
    )


def _merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    merged_sections = {
        key: _merge(base[key], value)
        for key, value in override.items()
        if isinstance(value, dict) and isinstance(base.get(key), dict)
    }
    return {**base, **override, **merged_sections}


def _resolve(tree: dict[str, Any], composed: ComposedConfig) -> None:
    hydra = tree.pop("hydra", None)  # its references are resolved by Hydra only
    variable_texts: list[str] = []

    def hide(text: str) -> str:
        """Returns a placeholder for a text that names an environment variable."""
        if "${oc.env:" not in text:
            return text
        variable_texts.append(text)
        return f"<variable {len(variable_texts) - 1}>"

    def restore(text: str) -> str:
        return re.sub(r"<variable (\d+)>", lambda mark: variable_texts[int(mark[1])], text)

    composed.texts = {
        ".".join(map(str, names)): leaf.text for names, leaf in _iter_leaves(tree) if isinstance(leaf, Scalar)
    }
    tree, hydra = scalar_values(tree), scalar_values(hydra)
    cfg = OmegaConf.create(_map_texts(tree, hide))
    missing_resolvers = [name for name in _RESOLVERS if not OmegaConf.has_resolver(name)]
    for name in missing_resolvers:
        getattr(OmegaConf, _REGISTER)(name, _RESOLVERS[name])
    try:
        for names, leaf in _iter_leaves(tree):
            key = ".".join(map(str, names))
            try:
                value = plain(functools.reduce(lambda section, name: section[name], names, cfg))
            except (OmegaConfBaseException, ValueError, TypeError, ZeroDivisionError) as error:
                composed.unresolved[key] = cut(f"{error}".splitlines()[0], 100) if f"{error}" else type(error).__name__
                value = leaf
            composed.leaves[key] = _map_texts(value, restore)
    finally:
        for name in missing_resolvers:
            OmegaConf.clear_resolver(name)
    for names, leaf in _iter_leaves(hydra if isinstance(hydra, dict) else {}):
        composed.leaves[".".join(("hydra", *map(str, names)))] = leaf


def _iter_leaves(tree: Mapping[Any, Any], parents: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _iter_leaves(value, (*parents, name))
        else:
            yield (*parents, name), value


def _map_texts(value: Any, function: Callable[[str], str]) -> Any:
    """Applies a function to each text in nested mappings and lists."""
    if isinstance(value, dict):
        return {key: _map_texts(element, function) for key, element in value.items()}
    if isinstance(value, list):
        return [_map_texts(element, function) for element in value]
    return function(value) if isinstance(value, str) else value
