"""The files of a configuration: finding them, and reading them with the files they include."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from rlhpc import share
from rlhpc.config.yaml_loader import UniqueKeys
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plain import read_yaml_file
from rlhpc.runtime.shown import cut, shown
from rlhpc.runtime.trust import Trust, without_variables

_MAX_DEPTH = 10


def find_config(path: str | Path) -> Path:
    """The file itself or, if it does not exist, the one of that name that comes with rlhpc (`configs/quickstart.yaml`).

    Raises:
        ConfigError: The path is none, for example because it is empty or too long.
    """
    if not str(path).strip():
        raise ConfigError(
            "no configuration file: its path is empty; give a .yaml file, such as configs/quickstart.yaml"
        )
    given = Path(path).expanduser()
    own = share.path(*given.parts)
    try:
        return own if not given.exists() and not given.is_absolute() and own.is_file() else given
    except OSError as error:
        raise ConfigError(f"no configuration file {cut(str(path))}: {error.strerror}") from None


def read_files(path: Path, theirs: Trust | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Reads a file and, before it, those it names under `defaults:`; as (source, content).

    Args:
        path: YAML file.
        theirs: Given if the file came with a checkpoint: which code it may name.

    Raises:
        ConfigError: A file cannot be read, is not a mapping of sections, or files include each other; says which includes it.
    """
    return _read(path, (), theirs)


def _read(path: Path, chain: tuple[Path, ...], theirs: Trust | None) -> list[tuple[str, dict[str, Any]]]:
    if path in chain or len(chain) > _MAX_DEPTH:
        raise ConfigError(f"{path}: `defaults` go round in a circle: {' → '.join(p.name for p in (*chain, path))}")
    content = _content(path, f"{chain[-1]}: defaults: " if chain else "")
    if theirs is not None and not theirs.everything:
        content = without_variables(content, theirs, str(path))
        if "defaults" in content:
            raise ConfigError(f"{path}: defaults: a configuration that comes with a checkpoint names no other files")
    defaults = content.pop("defaults", None) or []
    if isinstance(defaults, str) or not isinstance(defaults, list):
        raise ConfigError(f"{path}: defaults is {shown(defaults)}; give a list of files")
    if wrong := [name for name in defaults if not isinstance(name, str)]:
        raise ConfigError(
            f"{path}: defaults has {shown(wrong[0])}; give a list of files, as paths relative to this one"
        )
    parts = [part for name in defaults for part in _read((path.parent / str(name)).resolve(), (*chain, path), theirs)]
    return [*parts, (str(path), content)]


def _content(path: Path, includer: str) -> dict[str, Any]:
    """The mapping in one file; `includer` begins the messages about a file that another one includes."""
    try:
        if path.is_dir():
            raise ConfigError(f"{includer}{path} is a folder; give a .yaml file in it")
        if not path.exists():
            near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 1, 0.4)
            hint = f"; did you mean {path.parent / near[0]}?" if near else ""
            raise ConfigError(f"{includer}no configuration file {path}{hint}")
    except OSError as error:
        raise ConfigError(f"{includer}{cut(str(path))}: cannot be read: {error.strerror}") from None
    content = read_content(path, includer)
    if content is None:
        raise ConfigError(f"{path} is empty; see configs/quickstart.yaml for a start")
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: found a {type(content).__name__} at the top; a configuration is a mapping of sections"
        )
    return content


def read_content(path: Path, includer: str = "") -> Any:
    """What a YAML file holds.

    Args:
        path: The file.
        includer: Begins the message where the file cannot be opened.

    Raises:
        ConfigError: It cannot be read, or is not YAML; says where.
    """
    try:
        return read_yaml_file(path, UniqueKeys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {error.problem or error}") from None
    except OSError as error:
        raise ConfigError(f"{includer}{cut(str(path))}: cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
