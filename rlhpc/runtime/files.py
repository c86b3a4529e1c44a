"""Files that a user names: one, a folder of them, or a pattern."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from rlhpc.runtime.errors import ConfigError


def find_files(path: str | None, suffixes: Sequence[str], key: str) -> list[Path]:
    """The files that `data.….path` means: one file, those in a folder with the right suffix, or those that match a pattern.

    Raises:
        ConfigError: There are none; names the nearest existing path.
    """
    if not path:
        raise ConfigError(
            f"{key}.path is not set; the source reads a file ({', '.join(suffixes)}), a folder or a pattern"
        )
    given = Path(path).expanduser()
    if given.is_file():
        return [given]
    if given.is_dir():
        files = sorted(file for file in given.iterdir() if file.name.endswith(tuple(suffixes)))
        if not files:
            raise ConfigError(f"{key}.path is {path!r}, a folder without files that end in {', '.join(suffixes)}")
        return files
    if any(sign in path for sign in "*?["):
        start = Path(given.anchor or ".")
        files = sorted(file for file in start.glob(str(given.relative_to(given.anchor))) if file.is_file())
        if not files:
            raise ConfigError(f"{key}.path is {path!r}; no file fits this pattern (from {Path.cwd()})")
        return files
    raise ConfigError(f"{key}.path is {path!r}; there is no such file or folder{_nearest(given)}")


def _nearest(path: Path) -> str:
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, 1)
    if near:
        return f"; did you mean {str(path.with_name(near[0]))!r}?"
    return "" if path.is_absolute() else f" (from {Path.cwd()})"
