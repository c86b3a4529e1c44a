"""Node-local scratch folders of a session (mode 0700): for sockets, for shared memory, and for payloads on disk.

Every process of the session holds a shared flock on `<sockets>/lock`, and on the other folders themselves, because a job may
have a private /tmp but share /dev/shm. When all processes have ended for any reason, the locks are free. The next session of
the same user on this host, or `rlhpc clean`, then removes the remaining folders. Both only remove real folders that belong to
this user, because any user may write to the parent folders.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhpc.runtime.disk_errors import advice
from rlhpc.runtime.errors import ConfigError, RegistryError, StorageError
from rlhpc.runtime.host import SHM_ROOT, SOCKET_ROOT, node_name
from rlhpc.runtime.ownership import make_private, require_private

log = logging.getLogger(__name__)

# UNIX socket paths end at 107 bytes, and TMPDIR is often a long path on clusters; /tmp is short and local everywhere.
_SOCKET_ROOT, _SHM_ROOT = SOCKET_ROOT, SHM_ROOT
#: Seconds for which a new folder without a lock counts as being created.
_YOUNG_S = 60.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF)
_MAX_ATTEMPTS = 100
_SUFFIXES = ("", "-shm", "-spill")
#: Locks by token: (process id, descriptors, with the lock file's first). A forked child takes its own locks.
_held: dict[str, tuple[int, list[int]]] = {}


def scratch_root() -> Path | None:
    """Returns the site's `cluster.scratch`, if it is set."""
    root = os.environ.get("RLHPC_SCRATCH")
    return Path(root) if root else None


def cache_folder() -> Path | None:
    """Returns a private folder of this user below `cluster.scratch`, for reproducible data that later runs can use.

    Returns None without `cluster.scratch`.

    Raises:
        OwnershipError: Another user has created the folder, so its content must not be used.
        ConfigError: `cluster.scratch` cannot be used.
    """
    root = scratch_root()
    if root is None:
        return None
    _check_scratch_root()
    folder = root / f"rlhpc-cache-{os.getuid()}"
    make_private(folder)
    return folder


def _session() -> Scratch | None:
    """Returns the scratch folders of this process's newest session; None if the process has no session."""
    sessions = [Scratch(token) for token, (pid, _) in _held.items() if pid == os.getpid()]
    return next((session_scratch for session_scratch in reversed(sessions) if session_scratch.sockets.is_dir()), None)


def session_folder() -> Path | None:
    """Returns the session's folder for temporary files on this host; None in a process without a session.

    The folder is removed when the session ends.
    """
    session = _session()
    return session.files if session else None


def make_socket_folder(name: str) -> Path:
    """Creates a private folder with a short path on this host, for UNIX sockets.

    In a process of a session, the folder is inside the session's socket folder.
    """
    session = _session()
    return Path(tempfile.mkdtemp(prefix=f"rlhpc-{name}-", dir=session.sockets if session else _SOCKET_ROOT))


def make_temporary_folder(name: str) -> Path:
    """Creates a private folder for files that this process needs while it runs.

    In a process of a session, the folder is inside the session's folder, so that the end of the session removes both.

    Args:
        name: Purpose of the folder, used in the folder's name.
    """
    return Path(tempfile.mkdtemp(prefix=f"rlhpc-{name}-", dir=session_folder()))


@contextlib.contextmanager
def temporary_folder(name: str) -> Iterator[Path]:
    """Creates a folder like `make_temporary_folder`, and removes the folder at the end of the block."""
    folder = make_temporary_folder(name)
    try:
        yield folder
    finally:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Removes a folder, even if it is deeply nested or a program has changed its permissions. Never raises.

    `language.agents.shells` has a copy for interpreters without rlhpc.
    """
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        for command in (["chmod", "-R", "u+rwX", str(folder)], ["rm", "-rf", "--one-file-system", str(folder)]):
            with contextlib.suppress(OSError):
                subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


@dataclass(frozen=True)
class Scratch:
    """Scratch folders of a session on this host, identified by the session's token."""

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
        """Folder for payloads in ordinary files, which are slower than shared memory; used when the shared memory is full.

        The folder is below `RLHPC_SCRATCH` (the site's `cluster.scratch`) if this is set, otherwise in the socket folder.
        """
        root = scratch_root()
        return root / f"rlhpc-{os.getuid()}-{self.token}-spill" if root else self.sockets / "spill"

    @property
    def files(self) -> Path:
        """Folder for temporary files of any size, below `cluster.scratch` if this is set."""
        return self.spill if scratch_root() else self.sockets

    @property
    def folders(self) -> tuple[Path, ...]:
        """All folders that a session creates on this host, in the order of their creation."""
        return self.sockets, self.shm, self.spill

    @property
    def _separate_folders(self) -> tuple[Path, ...]:
        """Folders of the session that are not inside the folder with the lock."""
        return tuple(folder for folder in self.folders[1:] if not folder.is_relative_to(self.sockets))

    def hold_caches(self) -> None:
        """Makes this process and its children use a session folder for torch's compile cache, unless a folder is already set.

        Torch creates the cache folder with its first optimizer, even if nothing is compiled. The default folder in /tmp would
        remain after the session.
        """
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(self.sockets / "torchinductor"))

    def free_memory(self) -> None:
        """Removes all payload segments; called when no worker can read them any more."""
        for folder in (self.shm, self.spill):
            with contextlib.suppress(FileNotFoundError):
                for dir_entry in os.scandir(folder):
                    if not dir_entry.is_dir(follow_symlinks=False):  # folders belong to programs of episodes
                        Path(dir_entry.path).unlink(missing_ok=True)

    @classmethod
    def create(cls) -> Scratch:
        """Removes the folders of dead sessions, then creates the folders of a new session and takes their locks.

        Raises:
            ConfigError: `cluster.scratch` cannot be used.
            StorageError: /tmp or /dev/shm has no free space or is not writable.
            RegistryError: The folders could not be made, because other processes remove them repeatedly.
        """
        remove_stale()
        _check_scratch_root()
        for attempt in range(_MAX_ATTEMPTS):
            session_scratch = cls(secrets.token_hex(4))
            try:
                for folder in session_scratch.folders:
                    folder.mkdir(mode=0o700)
                session_scratch.hold()
                if session_scratch._is_whole():
                    return session_scratch
                session_scratch.release()  # another session removed a folder as stale before it was locked
            except (FileExistsError, FileNotFoundError) as error:
                # the name exists, or another session has removed a folder before it was locked: try the next name
                if attempt == _MAX_ATTEMPTS - 1:
                    raise _make_folder_error(session_scratch, error) from error
            except OSError as error:
                session_scratch.remove()
                raise _make_folder_error(session_scratch, error) from error
            session_scratch.remove()
        raise RegistryError(f"cannot make folders in {_SOCKET_ROOT} and {_SHM_ROOT}: others go on removing them")

    def ensure(self) -> None:
        """Creates missing folders, for example on a host without the driver, and takes the locks.

        Raises:
            OwnershipError: Another user has created one of the folders.
            ConfigError, StorageError: As for `create`.
            RegistryError: The folder could not be made, because other processes remove it repeatedly.
        """
        _check_scratch_root()
        for _ in range(_MAX_ATTEMPTS):
            try:
                for folder in self.folders:
                    make_private(folder)
                self.hold()
                if self._is_whole():
                    return
                self.release()
            except FileNotFoundError as error:
                if not _SOCKET_ROOT.is_dir() or ((root := scratch_root()) and not root.is_dir()):
                    raise _make_folder_error(self, error) from error
                # another rank of the session was just ending and removed the folders
            except OSError as error:
                raise _make_folder_error(self, error) from error
        raise RegistryError(f"cannot make {self.sockets}: others of this run go on removing it")

    def _is_whole(self) -> bool:
        """Returns whether the folders exist and are the same folders that this process has locked."""
        _, fds = _held[self.token]
        try:
            for folder in self.folders:
                require_private(folder)
            locked_paths = (self.sockets / "lock", *self._separate_folders)
            return all(os.path.samestat(os.fstat(fd), path.lstat()) for fd, path in zip(fds, locked_paths, strict=True))
        except FileNotFoundError:
            return False

    def hold(self) -> None:
        """Takes the shared locks and keeps them until `release`, or until the process ends."""
        if self.token in _held and _held[self.token][0] == os.getpid():
            return  # `leave` releases only one set of locks, so a second set would keep the folders forever
        fds: list[int] = []
        try:
            fds.append(os.open(self.sockets / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            fcntl.flock(fds[0], fcntl.LOCK_SH)
            for folder in self._separate_folders:
                fds.append(os.open(folder, _FOLDER))
                with contextlib.suppress(OSError):  # no locks here; `remove_stale` leaves the folder alone
                    fcntl.flock(fds[-1], fcntl.LOCK_SH)
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        _held[self.token] = (os.getpid(), fds)

    def release(self) -> None:
        """Releases this process's locks without removing the folders."""
        _, fds = _held.pop(self.token)
        for fd in fds:
            os.close(fd)

    def leave(self) -> None:
        """Releases the locks; if this is the last process of the session on this host, removes the folders."""
        if _held.get(self.token, (0,))[0] != os.getpid():
            return
        try:
            fcntl.flock(_held[self.token][1][0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.remove()
        except BlockingIOError:
            pass
        finally:
            self.release()

    def remove(self) -> None:
        """Removes the folders; safe to call twice and from several processes."""
        for folder in (*self._separate_folders, self.sockets):  # the folder with the lock last
            if _is_own_folder(folder):
                remove_folder(folder)

    def used_bytes(self) -> int:
        """Returns the bytes of shared memory that the session's payloads use."""
        num_bytes = 0
        with contextlib.suppress(FileNotFoundError):
            for dir_entry in os.scandir(self.shm):
                with contextlib.suppress(FileNotFoundError):
                    num_bytes += dir_entry.stat(follow_symlinks=False).st_size
        return num_bytes


def _check_scratch_root() -> None:
    """Refuses a `cluster.scratch` that cannot be used, or in which any user could replace another user's folders.

    Raises:
        ConfigError: The message has the reason.
    """
    root = scratch_root()
    if root is None:
        return
    try:
        mode_bits = root.stat().st_mode
    except OSError as error:
        raise ConfigError(f"cluster.scratch: {root}: {error.strerror}; it must be a folder of every node") from error
    if mode_bits & stat.S_IWOTH and not mode_bits & stat.S_ISVTX:
        raise ConfigError(
            f"cluster.scratch: everybody may rename what is in {root} (mode {stat.S_IMODE(mode_bits):04o}): give it "
            f"the sticky "
            f"bit (chmod +t {root}), or name a folder of your own"
        )


def _make_folder_error(session_scratch: Scratch, error: OSError) -> ConfigError | StorageError:
    failed_path = str(error.filename or session_scratch.sockets)
    root = scratch_root()
    if root is not None and failed_path.startswith(str(session_scratch.spill)):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ConfigError(
                f"cluster.scratch: cannot make {failed_path}: {error.strerror}. {advice(error, failed_path)}"
            )
        return ConfigError(
            f"cluster.scratch: cannot make {failed_path}: {error.strerror}; it must be a folder of every node"
        )
    return StorageError(
        f"cannot make {failed_path} on node {node_name()}: {error.strerror or error}. {advice(error, failed_path)}"
    )


# -- folders of dead sessions -------------------------------------------------------------------------------------------------


def _is_own_folder(path: Path) -> bool:
    """Returns whether the path is a real folder that belongs to this user and has mode 0700, like all folders of a session."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _find_session_folders() -> dict[str, list[Path]]:
    """Returns the folders of this user's sessions on this host, by token. Omits links and folders of other users."""
    prefix = f"rlhpc-{os.getuid()}-"
    folders_by_token: dict[str, list[Path]] = {}
    for root in {_SOCKET_ROOT, _SHM_ROOT, scratch_root() or _SOCKET_ROOT}:
        with contextlib.suppress(OSError):
            for dir_entry in os.scandir(root):
                token, separator, folder_type = dir_entry.name.removeprefix(prefix).partition("-")
                if (
                    dir_entry.name.startswith(prefix)
                    and token
                    and separator + folder_type in _SUFFIXES
                    and _is_own_folder(Path(dir_entry.path))
                ):
                    folders_by_token.setdefault(token, []).append(Path(dir_entry.path))
    # the folder with the lock last: while it exists, the others may be removed
    return {token: sorted(folders, key=_has_lock) for token, folders in folders_by_token.items()}


def _has_lock(folder: Path) -> bool:
    """Returns whether the folder contains the session's lock file."""
    return folder.name.count("-") == 2


def _try_lock(folder: Path) -> int | None:
    """Takes a folder's lock exclusively and returns its descriptor; None if a process of the session holds it.

    Raises:
        OSError: The lock does not exist, or the path is not a lock of a session.
    """
    if _has_lock(folder):
        # non-blocking: a pipe of this name would block the open
        fd = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    else:
        fd = os.open(folder, _FOLDER)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode) and not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "no file", str(folder / "lock"))
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


def _is_young(folder: Path) -> bool:
    try:
        return time.time() - folder.lstat().st_mtime < _YOUNG_S
    except OSError:
        return False


@contextlib.contextmanager
def _lock_session(folders: list[Path]) -> Iterator[bool]:
    """Yields whether the session of these folders has ended; during the block, no process can join the session."""
    fds: list[int] = []
    is_over, has_lock = True, any(map(_has_lock, folders))
    for folder in folders:
        try:
            fd = _try_lock(folder)
        except OSError as error:
            # on a filesystem without locks, only the lock file tells whether the session has ended
            is_over = is_over and not _is_young(folder) and (has_lock or error.errno not in _NO_LOCKS)
            continue
        if fd is None:
            is_over = False
        else:
            fds.append(fd)
    # without the folder that has the lock, the session is either dead or just being created
    if not has_lock:
        is_over = is_over and not any(map(_is_young, folders))
    try:
        yield is_over
    finally:
        for fd in fds:
            os.close(fd)


def remove_stale() -> list[Path]:
    """Removes the folders of this user's dead sessions on this host; returns the removed folders.

    Ignores errors, and folders of other users with such names.
    """
    removed_folders = []
    for _, folders in sorted(_find_session_folders().items()):
        with _lock_session(folders) as is_over:
            for folder in folders if is_over else ():
                remove_folder(folder)
                if folder.exists():
                    log.debug("%s could not be removed", folder)
                else:
                    removed_folders.append(folder)
    return removed_folders


def live() -> list[Path]:
    """Returns the folders of this user's sessions on this host that are alive or being created."""
    live_folders = []
    for _, folders in sorted(_find_session_folders().items()):
        with _lock_session(folders) as is_over:
            live_folders += [] if is_over else folders
    return live_folders
