"""Messages for full filesystems: the filesystem, its usage, and a remedy."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from rlhpc.runtime.errors import StorageError, UserError

#: Errors of writes that fail until the disk has free space.
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: How to continue after a failure; the next command depends on how the run was started.
GO_ON = "the command that started it (rlhpc train: with runner.resume_dir=auto)"


def is_full(error: BaseException | None) -> bool:
    """Returns whether a write failed because the disk or quota is full, or the file has reached its maximum size."""
    return isinstance(error, OSError) and error.errno in _FULL_ERRNOS


def mount_of(path: str | Path) -> Path:
    """Returns the mount point of the filesystem that contains `path`; the path need not exist."""
    existing_path = Path(os.path.abspath(path))
    while not existing_path.exists() and existing_path != existing_path.parent:
        existing_path = existing_path.parent
    existing_path = existing_path.resolve()
    while not existing_path.is_mount() and existing_path != existing_path.parent:
        existing_path = existing_path.parent
    return existing_path


def advice(error: OSError, path: str | Path) -> str:
    """Returns a sentence with the filesystem of `path` and a remedy for the error."""
    if error.errno == errno.EFBIG:
        return "The limit on the size of a file is reached: raise it (ulimit -f)"
    mount = mount_of(path)
    if error.errno == errno.EROFS:
        return f"The filesystem at {mount} is read-only: choose another folder (runner.run_dir)"
    if not is_full(error):
        return "Check that the folder is writable"
    free_text = ""
    with contextlib.suppress(OSError):
        fs_stats = os.statvfs(mount)
        free_bytes, total_bytes = fs_stats.f_bavail * fs_stats.f_frsize, fs_stats.f_blocks * fs_stats.f_frsize
        free_text = f", {free_bytes / 2**20:.1f} of {total_bytes / 2**20:.0f} MiB are free"
        if fs_stats.f_files and not fs_stats.f_favail:
            free_text += " and no file can be added"
    if error.errno == errno.EDQUOT:
        return f"Your quota on the filesystem at {mount} is used up: make room there"
    return f"The filesystem at {mount} is full{free_text}: make room there"


def unwritten_page_error(error: OSError, path: str | Path) -> StorageError:
    """Returns the error for a page, table or picture that could not be written."""
    failed_path = error.filename or path
    return StorageError(f"{failed_path}: could not be written: {error.strerror or error}. {advice(error, failed_path)}")


def storage_error(error: OSError, path: str | Path, label: str) -> StorageError:
    """Returns the error for a failed write, with the command that continues the run.

    Args:
        error: The system's error.
        path: Path of the file, used if the error does not name the file.
        label: Name of the data; the message begins with it.
    """
    target = error.filename or path
    return StorageError(
        f"{label} could not be written: {target}: {error.strerror or error}. {advice(error, target)}, then continue from the "
        f"last checkpoint with: {GO_ON}"
    )


def explain_error(error: BaseException, operation: str, *, allows_unknown_path: bool = True) -> BaseException:
    """Returns a `StorageError` with the file or filesystem if `error` or its cause means that the disk is full, else `error`.

    Args:
        error: Any exception.
        operation: Name of the failed operation; the message begins with it.
        allows_unknown_path: Return a `StorageError` even if neither the file nor the filesystem is known.
    """
    error_cause: BaseException | None = error
    while error_cause is not None and not isinstance(error_cause, UserError):
        if isinstance(error_cause, OSError) and error_cause.errno in _FULL_ERRNOS:
            path = error_cause.filename or first_full_filesystem(
                _find_probable_folders()
            )  # the error of a failed write does not always name the file
            if path is None and not allows_unknown_path:
                return error
            if path is None:
                remedy_text = advice(error_cause, ".") if error_cause.errno == errno.EFBIG else "Make room"
                return StorageError(f"{operation}: {error_cause.strerror}. {remedy_text}, then continue with: {GO_ON}")
            return storage_error(error_cause, path, f"what {operation} wrote")
        error_cause = error_cause.__cause__ or error_cause.__context__
    return error


def _find_probable_folders() -> list[str]:
    """Returns folders to which this process was probably writing."""
    folders = ["."]
    with contextlib.suppress(OSError):
        folders.append(os.path.dirname(os.readlink("/proc/self/fd/2")) or "/")
    return [*folders, tempfile.gettempdir(), "/tmp", "/dev/shm"]


def first_full_filesystem(folders: Iterable[str | Path]) -> Path | None:
    """Returns the first folder on a filesystem without free space for ordinary users; None if all have free space."""
    for folder in folders:
        with contextlib.suppress(OSError):
            fs_stats = os.statvfs(mount_of(folder))
            if fs_stats.f_blocks and (fs_stats.f_bavail < 4 or (fs_stats.f_files and not fs_stats.f_favail)):
                return Path(folder)
    return None


class _LenientFile(io.FileIO):
    """Log file that ignores write errors: a line that does not fit on the disk is lost, and the process continues."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def log_stream(fd: int) -> TextIO:
    """Opens a line-buffered text stream on a log's descriptor. Its writes raise no error if the disk is full."""
    return io.TextIOWrapper(
        io.BufferedWriter(_LenientFile(fd, "w", closefd=False)), errors="backslashreplace", line_buffering=True
    )
