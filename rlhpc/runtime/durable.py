"""The one way to replace files of a run: completely or not at all, with the content on disk before the name."""

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
    """Make the bytes of `path` durable, no matter who wrote them."""
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
        parents: Create a missing folder; False where a folder that somebody removed must not come back.
        sync: False lets the system choose when it reaches the disk: for data of no value after a crash.

    Raises:
        OSError: The filesystem refused, or took only a part (full, quota, read-only); the old file is unchanged.
    """
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    # O_EXCL: nobody else's file, and no link, is ever written into
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(
            fd, "wb"
        ) as file:  # leaving the block closes the file: some filesystems say only then that they are full
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a failed write does not say which file it was
        raise
    if sync:
        fsync_folder(path.parent)


def follow_umask(folder: Path) -> None:
    """Gives files below `folder` that only their owner can read the mode that the umask intends for files.

    Libraries that write to a temporary file and rename it (safetensors does) leave 0600 whatever the umask is.
    """
    wanted = 0o666 & ~_umask()
    for path in folder.rglob("*"):
        about = path.lstat()
        if stat.S_ISREG(about.st_mode) and stat.S_IMODE(about.st_mode) == 0o600 != wanted:
            path.chmod(wanted)


def _umask() -> int:
    """The umask, read from /proc: to set it for a moment, as `os.umask` must, would race with other threads' files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077  # a kernel before 4.7: leave what there is


def create_exclusively(path: Path, data: bytes, *, mode: int = 0o666) -> bool:
    """Creates a file with all of its content at once; returns False where there is one of that name already.

    The answer of `link` is not believed where it says so: on NFS a request that is sent again meets the link that the first
    one made. The number of names of the new file tells.

    Raises:
        OSError: The filesystem refused; there is no new file.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)  # opening it asks the server
            try:
                return os.fstat(fd).st_nlink > 1
            finally:
                os.close(fd)
        except OSError:  # no hard links here
            return _create_in_place(path, data, mode)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _create_in_place(path: Path, data: bytes, mode: int) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        return False
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    return True
