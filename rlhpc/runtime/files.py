"""Files that a user names: one, a folder of them, or a pattern."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhpc.runtime.errors import ConfigError


def expand_home(path: str | Path) -> Path:
    """Returns a path with the home folder in place of `~` or `~user`.

    Raises:
        ConfigError: There is no such user, or the locale cannot write the path.
    """
    check_encoding(str(path))
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: there is no home folder for {Path(path).parts[0]}; write the whole path") from None


def check_encoding(text: str) -> None:
    """Refuses a text that the encoding of this process's locale cannot represent.

    Raises:
        ConfigError: Names the encoding, and how to choose another.
    """
    encoding = sys.getfilesystemencoding()
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        locale = " ".join(f"{name}={os.environ[name]}" for name in ("LC_ALL", "LC_CTYPE", "LANG") if name in os.environ)
        readable = text.encode(encoding, "surrogateescape" if encoding == "utf-8" else "replace")
        raise ConfigError(
            f"{readable.decode('utf-8', 'replace')!r}: the encoding of this process is {encoding} ({locale or 'no locale'}), "
            "which cannot represent it; set PYTHONUTF8=1, or a UTF-8 locale such as LC_ALL=C.UTF-8"
        ) from None


def find_files(path: str | None, suffixes: Sequence[str], key: str) -> list[Path]:
    """The files that `data.….path` means: one file, those in a folder with the right suffix, or those that match a pattern.

    Raises:
        ConfigError: There are none; names the nearest existing path.
    """
    if not path:
        raise ConfigError(
            f"{key}.path is not set; the source reads a file ({', '.join(suffixes)}), a folder or a pattern"
        )
    location = expand_home(path)
    if location.is_file():
        return [location]
    if location.is_dir():
        files = sorted(file for file in location.iterdir() if file.name.endswith(tuple(suffixes)))
        if not files:
            raise ConfigError(f"{key}.path is {path!r}, a folder without files that end in {', '.join(suffixes)}")
        return files
    if any(sign in path for sign in "*?["):
        start = Path(location.anchor or ".")
        files = sorted(file for file in start.glob(str(location.relative_to(location.anchor))) if file.is_file())
        if not files:
            raise ConfigError(f"{key}.path is {path!r}; no file fits this pattern (from {Path.cwd()})")
        return files
    raise ConfigError(f"{key}.path is {path!r}; there is no such file or folder{_nearest(location)}")


def _nearest(path: Path) -> str:
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, 1)
    if near:
        return f"; did you mean {str(path.with_name(near[0]))!r}?"
    return "" if path.is_absolute() else f" (from {Path.cwd()})"
