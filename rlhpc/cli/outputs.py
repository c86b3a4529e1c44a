"""Paths that a command is told to write to: checked before it does work that would otherwise be lost."""

from __future__ import annotations

from pathlib import Path

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.writable import unwritable


def check_file(option: str, path: Path) -> Path:
    """A file that a command will write.

    Raises:
        ConfigError: It is a folder, or none could be made there.
    """
    if path.is_dir():
        raise ConfigError(f"{option} is {path}, a folder; name a file in it")
    return _check(option, path, path.parent)


def check_folder(option: str, path: Path) -> Path:
    """A folder that a command will make or fill.

    Raises:
        ConfigError: It is a file, or nothing could be made there.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{option} is {path}, a file; name a folder")
    return _check(option, path, path)


def _check(option: str, path: Path, folder: Path) -> Path:
    if reason := unwritable(folder):
        raise ConfigError(f"{option} is {path}; {reason}; choose another place")
    return path
