"""Node-local scratch of one session: a socket folder and a shared-memory folder, both mode 0700.

Every process of the session holds a shared flock on `<sockets>/lock`. When all of them are gone, however they died, the
lock is free, and the next session of the same user that starts on this host removes what they left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import secrets
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from rlhpc.runtime.errors import ConfigError, RegistryError

log = logging.getLogger(__name__)

# UNIX socket paths end at 107 bytes, and TMPDIR is often a long path on clusters; /tmp is short and local everywhere.
_SOCKET_ROOT = Path("/tmp")
_SHM_ROOT = Path("/dev/shm")
_YOUNG_S = 60.0
#: Descriptors of the locks that this process holds, by token.
_held: dict[str, int] = {}


def host_id() -> str:
    """Identity of the machine whose shared memory and UNIX sockets this process can reach.

    `RLHPC_HOST_ID` overrides it, so that a test can make two hosts out of one.
    """
    override = os.environ.get("RLHPC_HOST_ID")
    if override:
        return override
    return _this_machine()


@functools.cache
def _this_machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{os.uname().nodename}:{boot.read_text().strip() if boot.exists() else ''}"


@dataclass(frozen=True)
class Scratch:
    """The two folders of a session on this host."""

    token: str

    @property
    def sockets(self) -> Path:
        return _SOCKET_ROOT / f"rlhpc-{os.getuid()}-{self.token}"

    @property
    def shm(self) -> Path:
        root = _SHM_ROOT if os.access(_SHM_ROOT, os.W_OK) else _SOCKET_ROOT
        return root / f"rlhpc-{os.getuid()}-{self.token}-shm"

    @property
    def spill(self) -> Path:
        """Where payloads go when the shared memory is full: ordinary files, slower but correct.

        Below `RLHPC_SCRATCH` (the site's `cluster.scratch`) where that is set, else beside the sockets.
        """
        root = os.environ.get("RLHPC_SCRATCH")
        return Path(root) / f"rlhpc-{os.getuid()}-{self.token}-spill" if root else self.sockets / "spill"

    @classmethod
    def create(cls) -> Scratch:
        """Makes fresh folders, after removing those of dead sessions. Returns the scratch with its lock held."""
        remove_stale()
        scratch = cls(secrets.token_hex(4))
        scratch.sockets.mkdir(mode=0o700)
        scratch.shm.mkdir(mode=0o700)
        try:
            scratch.spill.mkdir(mode=0o700)
        except OSError as error:
            scratch.remove()
            raise ConfigError(
                f"cluster.scratch: cannot make {scratch.spill}: {error.strerror}; it must be a folder of every node"
            ) from error
        scratch.hold()
        return scratch

    def ensure(self) -> None:
        """Makes the folders on a host where the session's driver does not run, and takes the lock.

        Raises:
            RegistryError: Somebody else has made them.
        """
        for _ in range(100):
            for folder in (self.sockets, self.shm, self.spill):
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    folder.mkdir(mode=0o700)
            try:
                for folder in (self.sockets, self.shm):
                    found = folder.lstat()
                    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not stat.S_ISDIR(found.st_mode):
                        raise RegistryError(f"{folder} belongs to somebody else or is open to others; it is not used")
                self.hold()
                if self.spill.exists() and self.shm.exists():
                    return
            except FileNotFoundError:
                continue  # another rank of the session was just leaving and took them away
        raise RegistryError(f"cannot make {self.sockets}")

    def hold(self) -> None:
        """Takes the shared lock for the rest of this process's life (the descriptor is kept open on purpose)."""
        fd = os.open(self.sockets / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        _held[self.token] = fd

    def leave(self) -> None:
        """Gives the lock back; the last process of the session on this host removes the folders."""
        fd = _held.pop(self.token, None)
        if fd is None:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.remove()
        except BlockingIOError:
            pass
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Removes both folders; safe to call twice and from several processes."""
        shutil.rmtree(self.spill, ignore_errors=True)
        shutil.rmtree(self.shm, ignore_errors=True)
        shutil.rmtree(self.sockets, ignore_errors=True)

    def used_bytes(self) -> int:
        """Bytes of shared memory that the session's payloads hold now."""
        total = 0
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.shm):
                with contextlib.suppress(FileNotFoundError):
                    total += entry.stat().st_size
        return total


def remove_stale() -> list[str]:
    """Removes the folders of this user's sessions on this host that no process holds any more; returns their tokens."""
    removed = []
    prefix = f"rlhpc-{os.getuid()}-"
    tokens = {
        p.name[len(prefix) :].removesuffix("-shm") for r in (_SOCKET_ROOT, _SHM_ROOT) for p in r.glob(prefix + "*")
    }
    for token in tokens:
        scratch = Scratch(token)
        folder = scratch.sockets if scratch.sockets.exists() else scratch.shm
        try:
            if time.time() - folder.stat().st_mtime < _YOUNG_S and not (scratch.sockets / "lock").exists():
                continue  # being made at this moment
            with open(scratch.sockets / "lock", "rb+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                scratch.remove()
        except BlockingIOError:
            continue  # alive
        except FileNotFoundError:
            scratch.remove()  # a folder without a lock and no longer young
        except OSError as error:
            log.debug("left %s alone: %s", folder, error)
            continue
        removed.append(token)
    return removed
