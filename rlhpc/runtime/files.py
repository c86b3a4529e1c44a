"""File access: files named by users, durable writes, and bounded reads of JSON and YAML."""

from __future__ import annotations

import difflib
import errno
import json
import math
import os
import re
import secrets
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

from rlhpc.runtime.errors import ConfigError


def expand_home(path: str | Path) -> Path:
    """Returns a path with the home folder in place of `~` or `~user`.

    Raises:
        ConfigError: The user does not exist, or the locale's encoding cannot represent the path.
    """
    check_encoding(str(path))
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: there is no home folder for {Path(path).parts[0]}; write the whole path") from None


def check_encoding(text: str) -> None:
    """Refuses a text that the encoding of this process's locale cannot represent.

    Raises:
        ConfigError: The message has the encoding and a remedy.
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
    """Returns the files to which a key `data.….path` refers.

    The path is a file, a folder of files that end in one of `suffixes`, or a pattern.

    Raises:
        ConfigError: No file matches; the message names the nearest existing path.
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
        search_root = Path(location.anchor or ".")
        files = sorted(file for file in search_root.glob(str(location.relative_to(location.anchor))) if file.is_file())
        if not files:
            raise ConfigError(f"{key}.path is {path!r}; no file fits this pattern (from {Path.cwd()})")
        return files
    raise ConfigError(f"{key}.path is {path!r}; there is no such file or folder{_suggest_path(location)}")


def _suggest_path(path: Path) -> str:
    siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
    similar_names = difflib.get_close_matches(path.name, siblings, 1)
    if similar_names:
        return f"; did you mean {str(path.with_name(similar_names[0]))!r}?"
    return "" if path.is_absolute() else f" (from {Path.cwd()})"


def fsync_folder(folder: Path) -> None:
    """Makes the file names in a folder durable; a rename is on the disk only after this call."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_file(path: Path) -> None:
    """Makes the content of a file durable, even if another process wrote it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Writes a new file and fsyncs it. The write is not atomic, so use it for files in a staging folder."""
    with path.open("wb") as file:
        _write(file, data)


def _write(file: IO[bytes], data: bytes, *, sync: bool = True) -> None:
    file.write(data)
    file.flush()
    if sync:
        os.fsync(file.fileno())


def _open_new(path: Path, mode: int) -> int:
    """Creates a file and returns its descriptor; fails if the path exists, even as a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def replace_durably(path: Path, data: bytes, *, mode: int = 0o666, sync: bool = True, parents: bool = True) -> None:
    """Replaces a file atomically: readers see the old file or the new one, even after a power failure.

    Args:
        path: Path of the file.
        data: Complete new content.
        mode: Permissions of the new file, before the umask.
        parents: Create a missing parent folder. False if a removed folder must not be created again.
        sync: Wait until the data is on the disk. False for data that is not needed after a crash.

    Raises:
        OSError: The write failed, for example on a full disk; the old file is unchanged.
    """
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    fd = _open_new(temporary, mode)
    try:
        with os.fdopen(fd, "wb") as file:  # some filesystems report a full disk only when the block closes the file
            _write(file, data, sync=sync)
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # the error of a failed write does not name the file
        raise
    if sync:
        fsync_folder(path.parent)


def follow_umask(folder: Path) -> None:
    """Changes the mode of files below `folder` from 0600 to the mode that follows from the umask.

    Libraries that write to a temporary file and rename it, such as safetensors, leave mode 0600 with any umask.
    """
    intended_mode = 0o666 & ~_umask()
    for path in folder.rglob("*"):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600 != intended_mode:
            path.chmod(intended_mode)


def _umask() -> int:
    """Returns the umask from /proc. `os.umask` would have to change it temporarily, which affects files of other threads."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077  # a kernel before 4.7: keep the current mode


def create_exclusively(path: Path, data: bytes, *, mode: int = 0o666) -> bool:
    """Creates a file with its complete content atomically; returns False if the path exists already.

    If `link` fails because the path exists, the number of links of the new file decides: on NFS, a request that is sent again
    fails because of the link that the first request has created.

    Raises:
        OSError: The write failed; the file was not created.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    fd = _open_new(temporary, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            _write(file, data)
        try:
            os.link(temporary, path)
        except FileExistsError:
            fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)  # makes NFS query the server
            try:
                return os.fstat(fd).st_nlink > 1
            finally:
                os.close(fd)
        except OSError:  # a filesystem without hard links
            return _create_in_place(path, data, mode)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _create_in_place(path: Path, data: bytes, mode: int) -> bool:
    try:
        fd = _open_new(path, mode)
    except FileExistsError:
        return False
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    return True


_MAX_BYTES = 256 << 20
_MAX_DEPTH = 100
_MAX_DIGITS = 300
_MAX_BRACKETS = 900
"""Maximum number of brackets that are open at a time, including brackets inside strings."""
_MAX_VALUES = 200_000
_MAX_CHARACTERS = 1 << 21
"""Maximum length of a YAML text in characters; PyYAML reads about half a megabyte per second."""


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Refuses a pipe, which could block forever, and a device, which may have no end.

    Raises:
        OSError: The path is no regular file, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(descriptor, "rb")


def read_file(path: Path, max_bytes: int = _MAX_BYTES) -> bytes:
    """Returns the content of a regular file.

    Raises:
        OSError: The path is no regular file, is larger than `max_bytes`, or cannot be read.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes >> 20} MB", str(path))
        return file.read()


def read_json(text: str | bytes) -> Any:
    """Parses a JSON text.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or has an integer with more than 300 digits.
    """
    try:
        return json.loads(text, parse_int=_parse_integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _parse_integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite number; booleans are not numbers here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: Any) -> bool:
    """Returns whether a value is an integer from 0 to 2^63 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def read_yaml_file(path: Path, loader: Any = None) -> Any:
    """Parses a YAML file. Reads at most the maximum size of a configuration, because the path may name a large checkpoint.

    Raises:
        OSError: The file cannot be read.
        ValueError, yaml.YAMLError: As for `read_yaml`.
    """
    with open_file(path) as file:
        yaml_text = file.read(_MAX_CHARACTERS + 1)
    if len(yaml_text) > _MAX_CHARACTERS:
        raise ValueError(f"it has more than {_MAX_CHARACTERS} characters; no configuration has so many")
    return read_yaml(yaml_text, loader)


def read_yaml(text: str | bytes, loader: Any = None) -> Any:
    """Parses a YAML text into builtin values.

    Args:
        text: YAML text; bytes in UTF-8.
        loader: PyYAML's loader class; must be a SafeLoader, which is the default.

    Raises:
        ValueError: The text is not UTF-8, is too long, is nested too deeply, or has too many values. Aliases count as the
            values they refer to, so that a short text may have billions of values.
        yaml.YAMLError: The text is not YAML.
    """
    import yaml

    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters; a configuration has at most {_MAX_CHARACTERS}")
    if _max_nesting(text if isinstance(text, bytes) else text.encode(errors="replace")) > _MAX_BRACKETS:
        raise ValueError(
            f"nested too deeply (more than {_MAX_DEPTH} levels)"
        )  # PyYAML would need quadratic time for such a text
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    try:
        parsed = yaml.load(text, Loader=loader or yaml.SafeLoader)
        _count(parsed, 0, 0)
    except RecursionError:
        raise ValueError(f"nested too deeply (more than {_MAX_DEPTH} levels)") from None
    return parsed


def _max_nesting(text: bytes) -> int:
    """Returns the maximum number of brackets that are open at a time."""
    depth = deepest = 0
    for sign in re.findall(rb"[\[\]{}]", text):
        depth = depth + 1 if sign in b"[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _count(value: Any, num_values: int, depth: int) -> int:
    """Returns `num_values` plus the number of values in `value`. A value counts once for each alias of it.

    Raises:
        ValueError: There are too many values.
        RecursionError: The values are nested too deeply.
    """
    num_values += 1
    if num_values > _MAX_VALUES:
        raise ValueError(f"it has more than {_MAX_VALUES} values, counted as often as aliases name them")
    if depth > _MAX_DEPTH:
        raise RecursionError
    if isinstance(value, (dict, list)):
        for child in value.values() if isinstance(value, dict) else value:
            num_values = _count(child, num_values, depth + 1)
    return num_values


_MIN_FREE_BYTES = 1 << 20


def unwritable(folder: str | os.PathLike[str]) -> str:
    """Returns the reason why files cannot be created in a folder, which need not exist yet; "" if they can."""
    existing = os.path.abspath(folder)
    try:
        while not os.path.lexists(existing):
            existing = os.path.dirname(existing)
        if not stat.S_ISDIR(os.stat(existing).st_mode):
            return f"{existing} is a file, not a folder"
        statistics = os.statvfs(existing)
        longest = max(map(len, os.fsencode(os.path.relpath(os.path.abspath(folder), existing)).split(b"/")))
        if longest > statistics.f_namemax:
            return f"a name in it has {longest} bytes; {existing} takes {statistics.f_namemax}"
    except OSError as error:
        return f"it cannot be looked at: {error.strerror}"
    if statistics.f_flag & os.ST_RDONLY:
        return f"{existing} is on a read-only filesystem"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable for you"
    no_inode = statistics.f_files > 0 and statistics.f_favail == 0
    if no_inode or statistics.f_bavail * statistics.f_frsize < _MIN_FREE_BYTES:
        return f"the filesystem of {existing} is full"
    return ""
