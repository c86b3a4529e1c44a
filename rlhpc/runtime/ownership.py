"""Ownership of folders: checks that a run's secrets are in private folders of this user, which are not links."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from rlhpc.runtime.errors import OwnershipError

_OTHERS_ACCESS = 0o077
_OTHERS_WRITE = 0o022


def make_private(folder: Path, *, parents: bool = False) -> None:
    """Creates a folder that is private to this user (0700), or accepts an existing folder.

    If others may read an existing folder, closes it to them. Refuses a folder to which others may write.

    Raises:
        OwnershipError: The folder belongs to another user, is a link, or others may write to it.
        OSError: The folder cannot be created.
    """
    if parents:
        folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    require_private(folder, tighten=True)


def require_private(folder: Path, *, tighten: bool = False) -> None:
    """Refuses a folder unless it belongs to this user, is closed to others and is not a link.

    Args:
        folder: The folder to check.
        tighten: Close a folder that others may read, instead of refusing it.

    Raises:
        OwnershipError: The message has the fault and a remedy.
        FileNotFoundError: The folder does not exist.
    """
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
        file_type = f"a link to {os.readlink(folder)}" if stat.S_ISLNK(status.st_mode) else "no folder"
        raise OwnershipError(f"{folder} is {file_type}; rlhpc makes it itself and uses no other: remove it")
    if not _is_own(folder, status):
        raise OwnershipError(f"{folder} belongs to {owner(status)}, not to {current_user()}: it is not used. {_REMEDY}")
    if status.st_mode & _OTHERS_WRITE:
        raise OwnershipError(
            f"{folder} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}), so what is in it cannot be "
            f"trusted: remove it, or, if nobody else was there, close it: chmod 700 {folder}"
        )
    if status.st_mode & _OTHERS_ACCESS:
        if tighten:
            folder.chmod(0o700)
            status = folder.lstat()
        if status.st_mode & _OTHERS_ACCESS:
            raise OwnershipError(
                f"{folder} is open to others (mode {stat.S_IMODE(status.st_mode):04o}) and must not be: chmod 700 {folder}; "
                f"where that changes nothing, the filesystem keeps no permissions. {_REMEDY}"
            )


def require_own_run_folder(folder: Path) -> None:
    """Refuses a run folder of another user. The parent folder may belong to any user, and the path may be this user's link.

    Raises:
        OwnershipError: The message names the owner and a remedy.
        OSError: The folder cannot be examined.
    """
    try:
        link_status, status = folder.lstat(), folder.stat()
    except FileNotFoundError:
        if folder.is_symlink():
            raise OwnershipError(f"run folder {folder} is a link to nothing: remove it") from None
        return
    if stat.S_ISLNK(link_status.st_mode) and link_status.st_uid not in (os.geteuid(), 0):
        raise OwnershipError(
            f"run folder {folder} is a link that {owner(link_status)} made: it is not followed. {_REMEDY}"
        )
    if not stat.S_ISDIR(status.st_mode):
        raise OwnershipError(f"run folder {folder} is no folder: remove it, or choose another runner.name")
    if not _is_own(folder, status):
        raise OwnershipError(
            f"run folder {folder} belongs to {owner(status)}, not to {current_user()}, who could exchange what is in it. "
            f"{_REMEDY}"
        )
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise OwnershipError(
            f"run folder {folder} can be written by everybody (mode {stat.S_IMODE(status.st_mode):04o}): chmod o-w {folder}"
        )


_REMEDY = "Choose another runner.name or runner.run_dir"


def _is_own(folder: Path, status: os.stat_result) -> bool:
    """Returns whether this user has created the folder.

    Some network and container mounts show the same owner for all files. There this function creates a temporary file and
    compares its owner with the folder's owner.
    """
    if status.st_uid == os.geteuid():
        return True
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as probe_file:
        return os.fstat(probe_file.fileno()).st_uid == status.st_uid
    return False


def owner(status: os.stat_result) -> str:
    """Returns the owner's user name, if it is known on this host, and user id."""
    return _format_user(status.st_uid)


def current_user() -> str:
    return _format_user(os.geteuid())


def _format_user(uid: int) -> str:
    import pwd

    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    return f"user {uid}"
