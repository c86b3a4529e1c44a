"""Whether something can be written to a place, found out without writing, before the work whose result goes there."""

from __future__ import annotations

import os
import stat

_MIN_FREE_BYTES = 1 << 20


def unwritable(folder: str | os.PathLike[str]) -> str:
    """Why no file can be made in a folder, which need not exist yet; "" if one can."""
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
