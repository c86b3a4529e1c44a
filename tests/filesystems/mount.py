"""FUSE client of a shared folder, with faults: `python mount.py BACKING MOUNT FAULTS_JSON`.

Each mount is a process with its own caches in the kernel, so two mounts of one backing folder behave like two hosts. The
process prints `ready`, and then reads changed faults from stdin, a JSON object a line, and answers `ok`.

Needs Debian's libfuse2 and package mfusepy; imports nothing of rlhpc.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import random
import secrets
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mfusepy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.filesystems.faults import Faults

#: Entry of a listing: name, mode and inode, offset.
_Entry = tuple[str, dict[str, int], int]
_STATUS = "st_atime_ns st_ctime_ns st_mtime_ns st_gid st_mode st_nlink st_size st_uid st_ino"
_STATVFS = "f_bavail f_bfree f_blocks f_bsize f_favail f_ffree f_files f_flag f_frsize f_namemax"
#: libfuse's name of an open file that was unlinked, and the name that NFS gives it.
_HIDDEN, _NFS_HIDDEN = ".fuse_hidden", ".nfs"


def _with_errno(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def wrapped(*args: Any) -> Any:
        try:
            return operation(*args)
        except mfusepy.FuseOSError:
            raise
        except OSError as error:
            raise mfusepy.FuseOSError(error.errno or errno.EIO) from None

    return wrapped


class FaultyClient(mfusepy.Operations):
    """Passes each operation on to the backing folder, with the faults in `self.faults`."""

    use_ns = True

    def __init__(self, root: str, faults: Faults) -> None:
        self.root, self.faults = root, faults
        self._random = random.Random(faults.seed)
        self._lock = threading.Lock()
        self._written: dict[int, int] = {}  # descriptor → first byte that was not sent to the server
        self._open: dict[int, str] = {}
        self._listings: dict[str, tuple[float, list[_Entry]]] = {}

    def _real(self, path: str) -> str:
        """Returns the backing file. libfuse's hidden names become those of NFS."""
        folder, name = os.path.split(path)
        if name.startswith(_HIDDEN):
            name = _NFS_HIDDEN + name.removeprefix(_HIDDEN).rjust(24, "0")
        return self.root + os.path.join(folder, name)

    def _begin(self, *, change: bool = False) -> None:
        if change and self.faults.read_only:
            raise mfusepy.FuseOSError(errno.EROFS)
        if self.faults.delay_s:
            time.sleep(self.faults.delay_s)

    def _end(self, operation: str, error: int, *paths: str) -> None:
        """Answers a done operation as a second attempt would be answered, if its reply is drawn to be lost."""
        faults = self.faults
        with self._lock:
            for path in paths if faults.own_changes_listed else ():
                self._listings.pop(os.path.dirname(path), None)
        if operation in faults.lost_operations:
            with self._lock:
                is_lost = self._random.random() < faults.lost_replies
            if is_lost:
                raise mfusepy.FuseOSError(error)

    # -- status and listings --

    @_with_errno
    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self._begin()
        status = os.fstat(fh) if fh else os.lstat(self._real(path))
        values = {name.removesuffix("_ns"): getattr(status, name) for name in _STATUS.split()}
        if self.faults.mtime_s:
            unit = int(self.faults.mtime_s * 10**9)
            values["st_mtime"] = values["st_mtime"] // unit * unit
        return values

    def access(self, path: str, amode: int) -> int:
        return 0

    @_with_errno
    def readdir(self, path: str, fh: int) -> list[_Entry]:
        self._begin()
        now = time.monotonic()
        with self._lock:
            read_at, entries = self._listings.get(path, (float("-inf"), []))
        if now - read_at >= self.faults.listing_s:
            entries = []
            for name in (".", "..", *os.listdir(self._real(path))):
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(self._real(path), name))
                    entries.append((name, {"st_mode": status.st_mode, "st_ino": status.st_ino}, 0))
            with self._lock:
                self._listings[path] = now, entries
        return entries

    @_with_errno
    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(self._real(path))
        return {name: getattr(status, name) for name in _STATVFS.split()}

    @_with_errno
    def readlink(self, path: str) -> str:
        return os.readlink(self._real(path))

    # -- files --

    @_with_errno
    def open(self, path: str, flags: int) -> int:
        is_written = flags & os.O_ACCMODE != os.O_RDONLY
        self._begin(change=is_written)
        fd = os.open(self._real(path), flags & ~(os.O_APPEND | os.O_EXCL | os.O_CREAT))
        self._open[fd] = path
        return fd

    @_with_errno
    def create(self, path: str, mode: int, flags: int = 0) -> int:
        self._begin(change=True)
        fd = os.open(self._real(path), os.O_RDWR | os.O_CREAT | flags & (os.O_EXCL | os.O_TRUNC), mode)
        if flags & os.O_EXCL:
            try:
                self._end("create", errno.EEXIST, path)
            except OSError:
                os.close(fd)
                raise
        else:
            self._end("open", 0, path)
        self._open[fd] = path
        return fd

    @_with_errno
    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        if self.faults.stale_handles and os.fstat(fh).st_nlink == 0:
            raise mfusepy.FuseOSError(errno.ESTALE)  # this client keeps what it unlinks itself
        return os.pread(fh, size, offset)

    @_with_errno
    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        faults = self.faults
        if faults.read_only:
            raise mfusepy.FuseOSError(errno.EROFS)
        if faults.full_error and faults.full_at == "write":
            raise mfusepy.FuseOSError(getattr(errno, faults.full_error))
        with self._lock:
            self._written[fh] = min(offset, self._written.get(fh, offset))
        return os.pwrite(fh, data, offset)

    @_with_errno
    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        self._begin(change=True)
        os.truncate(fh or self._real(path), length)

    @_with_errno
    def flush(self, path: str, fh: int) -> int:
        """Sends what was written to the server, at close or fsync."""
        with self._lock:
            begin = self._written.pop(fh, None)
        if begin is not None and self.faults.full_error:
            os.ftruncate(fh, begin)
            raise mfusepy.FuseOSError(getattr(errno, self.faults.full_error))
        return 0

    @_with_errno
    def fsync(self, path: str, datasync: int, fh: int) -> int:
        time.sleep(self.faults.fsync_s)
        os.fsync(fh)
        return self.flush(path, fh)

    @_with_errno
    def release(self, path: str, fh: int) -> int:
        with self._lock:
            self._open.pop(fh, None)
            self._written.pop(fh, None)
        os.close(fh)
        return 0

    # -- names --

    @_with_errno
    def unlink(self, path: str) -> None:
        self._begin(change=True)
        name = os.path.basename(path)
        if name.startswith(_NFS_HIDDEN) and any(
            os.path.basename(self._real(opened)) == name for opened in list(self._open.values())
        ):
            raise mfusepy.FuseOSError(errno.EBUSY)
        os.unlink(self._real(path))
        self._end("unlink", errno.ENOENT, path)

    @_with_errno
    def rename(self, old: str, new: str) -> None:
        self._begin(change=True)
        os.rename(self._real(old), self._real(new))
        is_hidden = os.path.basename(new).startswith(_HIDDEN)
        with self._lock:
            for fd, path in self._open.items():
                if path == old:
                    self._open[fd] = new
        if not is_hidden:
            self._end("rename", getattr(errno, self.faults.rename_error), old, new)

    @_with_errno
    def link(self, target: str, source: str) -> None:
        self._begin(change=True)
        os.link(self._real(source), self._real(target))
        self._end("link", errno.EEXIST, target)

    @_with_errno
    def symlink(self, target: str, source: str) -> None:
        self._begin(change=True)
        os.symlink(source, self._real(target))
        self._end("symlink", 0, target)

    @_with_errno
    def mkdir(self, path: str, mode: int) -> None:
        self._begin(change=True)
        os.mkdir(self._real(path), mode)
        self._end("mkdir", errno.EEXIST, path)

    @_with_errno
    def rmdir(self, path: str) -> None:
        self._begin(change=True)
        os.rmdir(self._real(path))
        self._end("rmdir", errno.ENOENT, path)

    @_with_errno
    def chmod(self, path: str, mode: int) -> None:
        self._begin(change=True)
        os.chmod(self._real(path), stat.S_IMODE(mode))

    @_with_errno
    def chown(self, path: str, uid: int, gid: int) -> None:
        self._begin(change=True)
        os.chown(self._real(path), uid, gid, follow_symlinks=False)

    @_with_errno
    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        self._begin(change=True)
        os.utime(self._real(path), ns=times, follow_symlinks=False)


class LockingClient(FaultyClient):
    """Client that is asked for each lock; of the other one, locks are local to the mount."""

    @_with_errno
    def flock(self, path: str, fh: int, op: int) -> int:
        if self.faults.flock != "shared":
            raise mfusepy.FuseOSError(getattr(errno, self.faults.flock))
        fcntl.flock(fh, op if op & fcntl.LOCK_UN else op | fcntl.LOCK_NB)
        return 0


def _follow(client: FaultyClient, mount: str) -> None:
    for line in sys.stdin:
        values = json.loads(line)
        client.faults = Faults(**{**values, "lost_operations": tuple(values["lost_operations"])})
        print("ok", flush=True)
    subprocess.run(["umount", "-l", mount], check=False)  # the tests' process has ended
    os._exit(0)


@contextlib.contextmanager
def _ready_line(mount: str) -> Iterator[None]:
    def announce() -> None:
        while not os.path.ismount(mount):
            time.sleep(0.01)
        print("ready", flush=True)

    threading.Thread(target=announce, daemon=True).start()
    yield


def main(root: str, mount: str, faults_json: str) -> None:
    values = json.loads(faults_json)
    faults = Faults(**{**values, "lost_operations": tuple(values["lost_operations"])})
    client = (FaultyClient if faults.flock == "local" else LockingClient)(root, faults)
    threading.Thread(target=_follow, args=(client, mount), daemon=True).start()
    with _ready_line(mount):
        mfusepy.FUSE(
            client, mount, foreground=True, nothreads=False, allow_other=True, use_ino=True, big_writes=True,
            fsname=f"faulty-{secrets.token_hex(4)}", subtype="faulty", default_permissions=True,
            attr_timeout=faults.attr_s, entry_timeout=faults.entry_s, negative_timeout=faults.negative_s,
            hard_remove=not faults.keep_open_files,
        )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
