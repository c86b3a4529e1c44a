"""File access: files named by users, durable writes, and bounded reads of JSON and YAML."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import math
import os
import re
import secrets
import shutil
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.similar_names import similar_names


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
        locale_text = " ".join(
            f"{name}={os.environ[name]}" for name in ("LC_ALL", "LC_CTYPE", "LANG") if name in os.environ
        )
        readable = text.encode(encoding, "surrogateescape" if encoding == "utf-8" else "replace")
        raise ConfigError(
            f"{readable.decode('utf-8', 'replace')!r}: the encoding of this process is {encoding} "
            f"({locale_text or 'no locale'}), which cannot represent it; "
            "set PYTHONUTF8=1, or a UTF-8 locale such as LC_ALL=C.UTF-8"
        ) from None


def find_files(path: str | None, suffixes: Sequence[str], key: str) -> list[Path]:
    """Returns the files to which a key or an option refers.

    The path is a file, a folder of files that end in one of `suffixes`, or a pattern.

    Raises:
        ConfigError: No file matches; the message names the nearest existing path.
    """
    if not path:
        raise ConfigError(f"{key} is not set; the source reads a file ({', '.join(suffixes)}), a folder or a pattern")
    location = expand_home(path)
    if location.is_file():
        return [location]
    if location.is_dir():
        files = sorted(file for file in location.iterdir() if file.name.endswith(tuple(suffixes)))
        if not files:
            raise ConfigError(f"{key} is {path!r}, a folder without files that end in {', '.join(suffixes)}")
        return files
    if any(glob_character in path for glob_character in "*?["):
        search_root = Path(location.anchor or ".")
        files = sorted(file for file in search_root.glob(str(location.relative_to(location.anchor))) if file.is_file())
        if not files:
            raise ConfigError(f"{key} is {path!r}; no file fits this pattern (from {Path.cwd()})")
        return files
    raise ConfigError(f"{key} is {path!r}; there is no such file or folder{_suggest_absolute_path(location)}")


def _suggest_absolute_path(path: Path) -> str:
    siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
    matches = similar_names(path.name, siblings, 1)
    if matches:
        return f"; did you mean {str(path.with_name(matches[0]))!r}?"
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


def write_durably(path: Path, file_bytes: bytes) -> None:
    """Writes a new file and fsyncs it. The write is not atomic, so use it for files in a staging folder."""
    with path.open("wb") as file:
        _write(file, file_bytes)


def _write(file: IO[bytes], file_bytes: bytes, *, is_durable: bool = True) -> None:
    file.write(file_bytes)
    file.flush()
    if is_durable:
        os.fsync(file.fileno())


@dataclass(frozen=True)
class ServerStatus:
    """Status of a file on the filesystem's server, which may differ from this host's cache."""

    inode: int
    num_links: int
    size: int
    mtime_ns: int


_AT_EMPTY_PATH, _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS = 0x1000, 0x2000, 0x7FF


def server_status(path: Path) -> ServerStatus:
    """Returns the status of a file after a query of the server; NFS and others may answer `stat` from a cache for a minute.

    Raises:
        OSError: The file is missing, or the server does not answer.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # NFS looks the name up again
    try:
        buffer = _query_server(fd)
        if buffer is None:
            status = os.fstat(fd)
            return ServerStatus(status.st_ino, status.st_nlink, status.st_size, status.st_mtime_ns)
    finally:
        os.close(fd)
    num_links = struct.unpack_from("I", buffer, 16)[0]
    inode, num_bytes = struct.unpack_from("QQ", buffer, 32)
    mtime_s, mtime_ns = struct.unpack_from("qI", buffer, 112)
    return ServerStatus(inode, num_links, num_bytes, mtime_s * 10**9 + mtime_ns)


def _query_server(fd: int) -> bytes | None:
    """Returns struct statx, by AT_STATX_FORCE_SYNC; None on an old kernel, or where a container forbids the call."""
    import ctypes

    statx = _load_statx()
    buffer = ctypes.create_string_buffer(256)
    if statx is None:
        return None
    if statx(fd, b"", _AT_EMPTY_PATH | _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS, buffer) == 0:
        return buffer.raw
    error = ctypes.get_errno()
    if error in (errno.ENOSYS, errno.EINVAL, errno.EPERM):
        return None
    raise OSError(error, os.strerror(error))


@functools.cache
def _load_statx() -> Any:
    """Returns the C library's statx, which Python's `os` does not have yet; None if the library lacks it too."""
    import ctypes

    return getattr(ctypes.CDLL(None, use_errno=True), "statx", None)


def _open_new(path: Path, mode_bits: int) -> int:
    """Creates a file and returns its descriptor; fails if the path exists, even as a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode_bits)


_MAX_TEMPORARY_NAMES = 16


def _open_temporary(path: Path, mode_bits: int) -> tuple[int, Path]:
    """Creates a file next to `path` under a random name; returns its descriptor and its path.

    If the name exists, the reply to an earlier attempt of the client was lost: the file is removed, and another name is used.
    """
    for _ in range(_MAX_TEMPORARY_NAMES - 1):
        temporary_path = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            return _open_new(temporary_path, mode_bits), temporary_path
        except FileExistsError:
            temporary_path.unlink(missing_ok=True)
    temporary_path = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    return _open_new(temporary_path, mode_bits), temporary_path


#: Number of processes that may replace a folder faster than this one.
_MAX_ATTEMPTS = 10
#: Seconds to wait for a name that this host has looked for before: the host may remember that the name was missing.
MISSING_NAME_S = 5.0


def repeat_look(pause_s: float, timeout_s: float) -> Iterator[None]:
    """Yields before each look at a file that another process changes; the last look begins after `timeout_s`.

    A look that began earlier proves nothing: on a busy host, or with a filesystem that stalls, it may end much later.

    Args:
        pause_s: Seconds between two looks.
        timeout_s: Seconds for which this host may remember that a name was missing (`MISSING_NAME_S`), or of a lease.
    """
    deadline, is_last = time.monotonic() + timeout_s, False
    while not is_last:
        is_last = time.monotonic() > deadline
        yield
        if not is_last:
            time.sleep(pause_s)


def rename(source: Path, target: Path) -> Path:
    """Renames a file or folder like `os.rename`, which replaces an existing file; returns `target`.

    On NFS, the reply to a successful rename may be lost. The client then sends the request again, and the second one fails
    because `source` is gone. This function compares the inode of `target` with that of `source` before it
    reports that error.

    Raises:
        OSError: The rename failed; `source` still has its name, or did not exist before.
    """
    status = os.lstat(source)
    try:
        source.rename(target)
    except (FileNotFoundError, FileExistsError):
        for _ in repeat_look(0.05, MISSING_NAME_S):
            if _is_file(target, status):
                return target
            if _is_on_server(source) or not target.parent.is_dir():
                break
        raise
    return target


def move_aside(path: Path, private_path: Path) -> bool:
    """Renames a file or folder to a name that no other process uses; returns False if another process has removed it.

    The rename fails with the same error if `path` is gone and if the reply to a successful rename was lost, and this host may
    remember that `private_path` was missing. An attempt to create that name, as another type of file, asks the server.

    Args:
        path: Path of the file or folder; it may be missing.
        private_path: New path, with a random name.

    Raises:
        OSError: The rename failed, and `path` has its name.
    """
    try:
        file_type = stat.S_IFMT(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False
    try:
        os.rename(path, private_path)
        return True
    except (FileNotFoundError, FileExistsError):
        pass
    is_folder = file_type == stat.S_IFDIR
    with contextlib.suppress(OSError):  # it exists, or the filesystem is full
        private_path.touch(exist_ok=False) if is_folder else private_path.mkdir()
    for _ in repeat_look(0.05, MISSING_NAME_S):
        with contextlib.suppress(FileNotFoundError):
            is_moved = stat.S_IFMT(os.lstat(private_path).st_mode) == file_type
            break
    else:
        return False
    if not is_moved:
        with contextlib.suppress(FileNotFoundError):
            private_path.unlink() if is_folder else private_path.rmdir()
    return is_moved


def _is_on_server(path: Path) -> bool:
    try:
        server_status(path)
    except OSError:
        return False
    return True


def _is_file(path: Path, status: os.stat_result) -> bool:
    """Returns whether a path is the file with this status."""
    try:
        return os.path.samestat(os.lstat(path), status) or (
            not path.is_symlink() and server_status(path).inode == status.st_ino
        )
    except OSError:
        return False


def create_folder(path: Path, *, mode_bits: int = 0o777) -> None:
    """Creates a folder whose random name no other process uses, so that an empty folder of that name is this folder.

    On NFS, the reply to a successful request may be lost, and the second request fails because the folder exists.

    Raises:
        OSError: The folder could not be created, or a folder with files has this name.
    """
    try:
        path.mkdir(mode=mode_bits)
    except FileExistsError:
        if path.is_symlink() or not path.is_dir() or os.listdir(path):
            raise


def remove_tree(folder: Path) -> bool:
    """Removes a folder with its content; returns whether it is gone.

    Raises no error. On NFS, a file that a process of this host has open stays as `.nfs…` until it is closed, and its folder
    stays with it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    return not os.path.lexists(folder)


def replace_folder(staging_folder: Path, target: Path, replaced_folder: Path) -> None:
    """Renames `staging_folder` to `target`; removes a folder that has this name, under the name `replaced_folder`.

    A rename cannot replace a folder that is not empty. If another process replaces `target` at the same time, the last one
    wins, and neither fails.

    Raises:
        OSError: `staging_folder` could not be renamed; the folder that was there before has its name again.
    """
    for num_attempts in itertools.count(1):
        try:
            move_aside(target, replaced_folder)
            rename(staging_folder, target)
            break
        except BaseException as error:
            has_lost = isinstance(error, OSError) and is_taken(error) and num_attempts < _MAX_ATTEMPTS
            with contextlib.suppress(OSError):  # another process has given the name to its folder, or there was none
                rename(replaced_folder, target)
            if target.exists():
                remove_tree(replaced_folder)
            if not has_lost:
                raise
    fsync_folder(target.parent)
    remove_tree(replaced_folder)


def is_taken(error: OSError) -> bool:
    """Returns whether a folder could not be renamed because a folder with content has the new name."""
    return error.errno in (errno.ENOTEMPTY, errno.EEXIST)


def replace_durably(
    path: Path, file_bytes: bytes, *, mode: int = 0o666, sync: bool = True, parents: bool = True
) -> None:
    """Replaces a file atomically: readers see the old file or the new one, even after a power failure.

    Args:
        path: Path of the file.
        file_bytes: Complete new content.
        mode: Permissions of the new file, before the umask.
        parents: Create a missing parent folder. False if a removed folder must not be created again.
        sync: Wait until the data is on the disk. False for data that is not needed after a crash.

    Raises:
        OSError: The write failed, for example on a full disk; the old file is unchanged.
    """
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary_path = _open_temporary(path, mode)
    try:
        with os.fdopen(fd, "wb") as file:  # some filesystems report a full disk only when the block closes the file
            _write(file, file_bytes, is_durable=sync)
        rename(temporary_path, path)
    except BaseException as error:
        temporary_path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # the error of a failed write does not name the file
        raise
    if sync:
        fsync_folder(path.parent)


#: Number of threads that query the status of files, and minimum number of files for which threads are started.
_STAT_THREADS, _MIN_THREADED_FILES = 16, 64


def stat_files(paths: Iterable[Path]) -> dict[Path, os.stat_result]:
    """Returns the status of each path that exists, by one query each; of a symbolic link the status of its target.

    On a network filesystem a query takes about a millisecond, so several threads query the paths of large checkpoints.
    """
    paths = list(paths)

    def query(path: Path) -> os.stat_result | None:
        try:
            return path.stat()
        except FileNotFoundError:
            return None

    if len(paths) < _MIN_THREADED_FILES:
        statuses = [query(path) for path in paths]
    else:
        from concurrent.futures import ThreadPoolExecutor  # few commands need it, and all of them import this module

        with ThreadPoolExecutor(_STAT_THREADS, thread_name_prefix="status") as pool:
            statuses = list(pool.map(query, paths))
    return {path: status for path, status in zip(paths, statuses, strict=True) if status is not None}


def follow_umask(folder: Path, statuses: Mapping[Path, os.stat_result] | None = None) -> None:
    """Changes the mode of files below `folder` from 0600 to the mode that follows from the umask.

    Libraries that write to a temporary file and rename it, such as safetensors, leave mode 0600 with any umask.

    Args:
        folder: The folder.
        statuses: Status of its files, if known (`stat_files`); by default it is queried.
    """
    intended_mode = 0o666 & ~_read_umask()
    for path, status in (stat_files(folder.rglob("*")) if statuses is None else statuses).items():
        is_private = stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600 != intended_mode
        if is_private and not path.is_symlink():
            path.chmod(intended_mode)


def _read_umask() -> int:
    """Returns the umask from /proc. `os.umask` would have to change it temporarily, which affects files of other threads."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077  # a kernel before 4.7: keep the current mode


def create_exclusively(path: Path, file_bytes: bytes, *, mode: int = 0o666) -> bool:
    """Creates a file with its complete content atomically; returns False if the path exists already.

    If `link` fails because the path exists, the number of links of the new file decides: on NFS, a request that is sent again
    fails because of the link that the first request has created.

    Raises:
        OSError: The write failed; the file was not created.
    """
    fd, temporary_path = _open_temporary(path, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            _write(file, file_bytes)
        try:
            os.link(temporary_path, path)
        except FileExistsError:
            return server_status(temporary_path).num_links > 1
        except OSError:  # a filesystem without hard links
            return _create_in_place(path, file_bytes, mode)
        return True
    finally:
        temporary_path.unlink(missing_ok=True)


def _create_in_place(path: Path, file_bytes: bytes, mode_bits: int) -> bool:
    try:
        fd = _open_new(path, mode_bits)
    except FileExistsError:
        return False
    with os.fdopen(fd, "wb") as file:
        file.write(file_bytes)
    return True


def remove_if(path: Path, is_expected: Callable[[Path], bool]) -> bool:
    """Removes a file if it is the expected one; returns whether this call has removed it.

    Another process may put its own file in the place of a file that was looked at. The file therefore gets a private name
    before the look that decides. If it is another process's file, it gets its name back after two system calls. A file that
    a third process creates in that time is kept.

    Args:
        path: Path of the file; it may be missing.
        is_expected: Returns whether the file at a path is the one to remove; called with `path`, then with the other name.

    Raises:
        OSError: The file cannot be renamed or removed.
    """
    if not (os.path.lexists(path) and is_expected(path)):
        return False
    renamed_path = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    if not move_aside(path, renamed_path):
        return False
    is_removed = False
    try:
        is_removed = is_expected(renamed_path)
    finally:
        if not is_removed:
            _restore(renamed_path, path)
        renamed_path.unlink(missing_ok=True)
    return is_removed


def _restore(renamed_path: Path, path: Path) -> None:
    """Restores the former name of a file; does not replace a file that has this name now."""
    try:
        os.link(renamed_path, path)
    except OSError as error:
        if not isinstance(error, FileExistsError):  # a filesystem without hard links
            _create_in_place(path, read_file(renamed_path), stat.S_IMODE(renamed_path.stat().st_mode))


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
        OSError: The path is not a regular file, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(descriptor, "rb")


def read_file(path: Path, max_bytes: int = _MAX_BYTES) -> bytes:
    """Returns the content of a regular file. Opens the file again if another host replaced it during the read (ESTALE on NFS).

    Raises:
        OSError: The path is not a regular file, is larger than `max_bytes`, or cannot be read.
    """
    for _ in range(_MAX_STALE_READS - 1):
        try:
            return _read_file(path, max_bytes)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return _read_file(path, max_bytes)


_MAX_STALE_READS = 10


def _read_file(path: Path, max_bytes: int) -> bytes:
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes >> 20} MB", str(path))
        return file.read()


def read_json(json_text: str | bytes) -> Any:
    """Parses a JSON text.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or has an integer with more than 300 digits.
    """
    try:
        return json.loads(json_text, parse_int=_parse_integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _parse_integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def is_number(json_value: Any) -> bool:
    """Returns whether a value is a finite number; booleans are not numbers here."""
    return isinstance(json_value, (int, float)) and not isinstance(json_value, bool) and math.isfinite(json_value)


def is_count(json_value: Any) -> bool:
    """Returns whether a value is an integer from 0 to 2^63 - 1."""
    return isinstance(json_value, int) and not isinstance(json_value, bool) and 0 <= json_value < 1 << 63


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


def read_yaml(yaml_text: str | bytes, loader: Any = None) -> Any:
    """Parses a YAML text into builtin values.

    Args:
        yaml_text: YAML text; bytes in UTF-8.
        loader: PyYAML's loader class; must be a SafeLoader, which is the default.

    Raises:
        ValueError: The text is not UTF-8, is too long, is nested too deeply, or has too many values. Aliases count as the
            values they refer to, so that a short text may have billions of values.
        yaml.YAMLError: The text is not YAML.
    """
    import yaml

    if len(yaml_text) > _MAX_CHARACTERS:
        raise ValueError(f"it has {len(yaml_text)} characters; a configuration has at most {_MAX_CHARACTERS}")
    if (
        _measure_nesting(yaml_text if isinstance(yaml_text, bytes) else yaml_text.encode(errors="replace"))
        > _MAX_BRACKETS
    ):
        raise ValueError(
            f"nested too deeply (more than {_MAX_DEPTH} levels)"
        )  # PyYAML would need quadratic time for such a text
    if isinstance(yaml_text, bytes):
        try:
            yaml_text = yaml_text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    try:
        content = yaml.load(yaml_text, Loader=loader or yaml.SafeLoader)
        _count(content, 0, 0)
    except RecursionError:
        raise ValueError(f"nested too deeply (more than {_MAX_DEPTH} levels)") from None
    return content


def _measure_nesting(yaml_bytes: bytes) -> int:
    """Returns the maximum number of brackets that are open at a time."""
    depth = deepest = 0
    for bracket in re.findall(rb"[\[\]{}]", yaml_bytes):
        depth = depth + 1 if bracket in b"[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _count(data: Any, num_values: int, depth: int) -> int:
    """Returns `num_values` plus the number of values in `data`. A value counts once for each alias of it.

    Raises:
        ValueError: There are too many values.
        RecursionError: The values are nested too deeply.
    """
    num_values += 1
    if num_values > _MAX_VALUES:
        raise ValueError(f"it has more than {_MAX_VALUES} values, counted as often as aliases name them")
    if depth > _MAX_DEPTH:
        raise RecursionError
    if isinstance(data, (dict, list)):
        for child in data.values() if isinstance(data, dict) else data:
            num_values = _count(child, num_values, depth + 1)
    return num_values


_MIN_FREE_BYTES = 1 << 20


def unwritable(folder: str | os.PathLike[str]) -> str:
    """Returns the reason why files cannot be created in a folder, which need not exist yet; "" if they can."""
    existing_folder = os.path.abspath(folder)
    try:
        while not os.path.lexists(existing_folder):
            existing_folder = os.path.dirname(existing_folder)
        if not stat.S_ISDIR(os.stat(existing_folder).st_mode):
            return f"{existing_folder} is a file, not a folder"
        statistics = os.statvfs(existing_folder)
        max_name_length = max(
            map(len, os.fsencode(os.path.relpath(os.path.abspath(folder), existing_folder)).split(b"/"))
        )
        if max_name_length > statistics.f_namemax:
            return f"a name in it has {max_name_length} bytes; {existing_folder} takes {statistics.f_namemax}"
    except OSError as error:
        return f"it cannot be looked at: {error.strerror}"
    if statistics.f_flag & os.ST_RDONLY:
        return f"{existing_folder} is on a read-only filesystem"
    if not os.access(existing_folder, os.W_OK | os.X_OK):
        return f"{existing_folder} is not writable for you"
    no_inode = statistics.f_files > 0 and statistics.f_favail == 0
    if no_inode or statistics.f_bavail * statistics.f_frsize < _MIN_FREE_BYTES:
        return f"the filesystem of {existing_folder} is full"
    return ""
