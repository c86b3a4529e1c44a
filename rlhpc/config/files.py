"""Configuration files: search by name, and reading of a file with the files that it includes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhpc import share
from rlhpc.config.schema import typed_value
from rlhpc.config.yaml_files import Scalar, UniqueKeys, WrittenScalars, dump_yaml, plain_value
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, read_yaml, read_yaml_file
from rlhpc.runtime.similar_names import similar_names
from rlhpc.runtime.text import cut, short_repr
from rlhpc.runtime.trust import Trust, without_variables

_MAX_DEPTH = 10
#: A configuration file, or the content of one.
ConfigSource = str | Path | Mapping[str, Any]


def find_config(path: str | Path) -> Path:
    """Returns the file itself or, if it does not exist, the file of that name that comes with rlhpc
    (`configs/quickstart.yaml`).

    Raises:
        ConfigError: The path is not valid, for example because it is empty or too long.
    """
    if not str(path).strip():
        raise ConfigError(
            "no configuration file: its path is empty; give a .yaml file, such as configs/quickstart.yaml"
        )
    location = expand_home(path)
    shipped_path = share.path(*location.parts)
    try:
        return (
            shipped_path
            if not location.exists() and not location.is_absolute() and shipped_path.is_file()
            else location
        )
    except OSError as error:
        raise ConfigError(f"no configuration file {cut(str(path))}: {error.strerror}") from None


def source_name(config: ConfigSource) -> str:
    """Returns the name of a configuration in messages: its file, or `configuration` for a mapping."""
    return "configuration" if isinstance(config, Mapping) else str(find_config(config))


def read_files(config: ConfigSource, trust: Trust | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Reads a file and, before it, the files that it names under `defaults:`.

    Scalars keep their text.

    Args:
        config: YAML file, or a mapping with its content. The `defaults` of a mapping are relative to the working directory.
        trust: Code that the file may name, if it came with a checkpoint.

    Raises:
        ConfigError: A file cannot be read, is not a mapping of sections, or files include each other; the message names the
            including file.

    Returns:
        Pairs of source and content.
    """
    if isinstance(config, Mapping):
        name = source_name(config)
        return _resolve_defaults(name, _reread(config, name), Path.cwd(), (), trust)
    return _read_with_defaults(find_config(config), (), trust)


def _reread(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the content of a mapping as if it had been read from a file."""
    yaml_text = dump_yaml(plain_value(config, name))
    try:
        return dict(read_yaml(yaml_text, WrittenScalars))
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{name}: {error}") from None


def _read_with_defaults(path: Path, chain: tuple[Path, ...], trust: Trust | None) -> list[tuple[str, dict[str, Any]]]:
    if path in chain or len(chain) > _MAX_DEPTH:
        raise ConfigError(f"{path}: `defaults` go round in a circle: {' → '.join(p.name for p in (*chain, path))}")
    file_content = _read_mapping(path, f"{chain[-1]}: defaults: " if chain else "")
    return _resolve_defaults(str(path), file_content, path.parent, (*chain, path), trust)


def _resolve_defaults(
    path: str, file_content: dict[str, Any], folder: Path, chain: tuple[Path, ...], trust: Trust | None
) -> list[tuple[str, dict[str, Any]]]:
    """Returns (path, content) of each file named under `defaults`, and last of the configuration that names them.

    Args:
        path: Path of the configuration, for messages.
        file_content: Content of the configuration; `defaults` is removed from it.
        folder: Folder to which relative names refer.
        chain: Files that led here through their `defaults`.
        trust: Limits for a configuration that comes with a checkpoint; None if there are no limits.
    """
    if trust is not None and not trust.everything:
        file_content = without_variables(file_content, trust, path)
        if "defaults" in file_content:
            raise ConfigError(f"{path}: defaults: a configuration that comes with a checkpoint names no other files")
    defaults = typed_value(file_content.pop("defaults", None), list[str]) or []
    if isinstance(defaults, str) or not isinstance(defaults, list):
        raise ConfigError(f"{path}: defaults is {short_repr(defaults)}; give a list of files")
    if invalid_names := [name for name in defaults if not isinstance(name, str)]:
        raise ConfigError(
            f"{path}: defaults has {short_repr(invalid_names[0])}; give a list of files, as paths relative to this one"
        )
    included_files = [
        file for name in defaults for file in _read_with_defaults((folder / str(name)).resolve(), chain, trust)
    ]
    return [*included_files, (path, file_content)]


def _read_mapping(path: Path, includer: str) -> dict[str, Any]:
    """Reads the mapping in one file; messages about an included file begin with `includer`."""
    try:
        if path.is_dir():
            raise ConfigError(f"{includer}{path} is a folder; give a .yaml file in it")
        if not path.exists():
            matches = similar_names(path.name, [p.name for p in path.parent.glob("*.yaml")], 1, 0.4)
            hint = f"; did you mean {path.parent / matches[0]}?" if matches else ""
            raise ConfigError(f"{includer}no configuration file {path}{hint}")
    except OSError as error:
        raise ConfigError(f"{includer}{cut(str(path))}: cannot be read: {error.strerror}") from None
    file_content = read_content(path, includer, WrittenScalars)
    if file_content is None:
        raise ConfigError(f"{path} is empty; see configs/quickstart.yaml for a start")
    if not isinstance(file_content, dict):
        value = file_content.value if isinstance(file_content, Scalar) else file_content
        raise ConfigError(
            f"{path}: found a {type(value).__name__} at the top; a configuration is a mapping of sections"
        )
    return file_content


def read_content(path: Path, includer: str = "", loader: type[UniqueKeys] = UniqueKeys) -> Any:
    """Reads a YAML file.

    Args:
        path: The file.
        includer: Beginning of the message if the file cannot be opened.
        loader: `WrittenScalars` keeps the text of numbers and booleans.

    Raises:
        ConfigError: The file cannot be read, or is not YAML; the message names the position.
    """
    try:
        return read_yaml_file(path, loader)
    except yaml.MarkedYAMLError as error:
        error_mark = error.problem_mark
        error_position = f", line {error_mark.line + 1}, column {error_mark.column + 1}" if error_mark else ""
        raise ConfigError(f"{path}{error_position}: not valid YAML: {error.problem or error}") from None
    except OSError as error:
        raise ConfigError(f"{includer}{cut(str(path))}: cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
