"""The one way in which files of a run are replaced: whole or not at all, and on disk before the name is."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


def fsync_folder(folder: Path) -> None:
    """Make the names inside `folder` durable (a rename is on disk only after this)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_file(path: Path) -> None:
    """Make the bytes of `path` durable, whoever wrote them."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and fsync it. Not atomic: for files inside a staging folder."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, data: bytes, *, mode: int = 0o666, sync: bool = True, parents: bool = True) -> None:
    """Give `path` the content `data`: readers see the old file or the new one, also after a power cut.

    Args:
        path: The file.
        data: All of its content.
        mode: Permissions of the new file, less the umask.
        parents: Make its folder where it is missing; a folder that somebody removed is not to come back where it is False.
        sync: False leaves the moment at which it reaches the disk to the system: for what has no worth after a crash.

    Raises:
        OSError: The filesystem refused, or took a part only (full, quota, read-only); the old file is as it was.
    """
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    # O_EXCL: nobody else's file, and no link, is ever written into
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(
            fd, "wb"
        ) as file:  # leaving it closes the file: some filesystems only then say that they are full
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a failed write does not say of which file
        raise
    if sync:
        fsync_folder(path.parent)


def follow_umask(folder: Path) -> None:
    """Gives the files below `folder` that are their owner's alone the mode that the umask means for files.

    Libraries that write to a temporary file and rename it (safetensors does) leave 0600 whatever the umask is.
    """
    wanted = 0o666 & ~_umask()
    for path in folder.rglob("*"):
        about = path.lstat()
        if stat.S_ISREG(about.st_mode) and stat.S_IMODE(about.st_mode) == 0o600 != wanted:
            path.chmod(wanted)


def _umask() -> int:
    """Read, and not set for a moment, which would race with other threads' files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077  # a kernel before 4.7: leave what there is
