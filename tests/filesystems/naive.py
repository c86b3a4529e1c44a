"""Naive versions of parts of rlhpc, which do not expect a fault: the tests show that the fault breaks them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhpc.checkpoint import export_folder, store
from rlhpc.jobs import driver_lock, lease, segment, shared_files
from rlhpc.jobs.paths import RunPaths, step_of
from rlhpc.runtime import files, registry
from rlhpc.runtime.errors import DeadlineExceeded, UserError

#: Environment variable of an agent that names the naive version to use.
NAIVE = "RLHPC_TESTS_NAIVE"


def _believe_rename() -> None:
    def rename(source: Path, target: Path) -> Path:
        return source.rename(target)

    store.rename = export_folder.rename = files.rename = rename


def _believe_link() -> None:
    def create(path: Path, data: bytes, *, mode: int = 0o666) -> bool:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        temporary.write_bytes(data)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    lease.create_exclusively = create


def _believe_mkdir() -> None:
    def create(path: Path, *, mode: int = 0o777) -> None:
        path.mkdir(mode=mode)

    store.create_folder = export_folder.create_folder = create


def _believe_create() -> None:
    def create(path: Path, mode: int) -> tuple[int, Path]:
        temporary = path.with_name(f".{path.name}.tmp")
        return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), temporary

    files._open_temporary = create


def _lock_by_flock() -> None:
    """The driver lock and the submit lock are flocks, as in many programs."""

    @contextlib.contextmanager
    def sole_driver(paths: RunPaths) -> Iterator[None]:
        with open(paths.root / "lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError("is being trained by process 1 on host0 host1") from None
            yield

    @contextlib.contextmanager
    def submit_lock(path: Path, subject: str, timeout_s: float) -> Iterator[None]:
        deadline = time.monotonic() + timeout_s
        with open(path, "w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise DeadlineExceeded("another process has been submitting it") from None
                    time.sleep(0.1)
            yield

    driver_lock.sole_driver = sole_driver
    segment.lease_lock = submit_lock


def _use_cached_status() -> None:
    def status(path: Path) -> files.ServerStatus:
        result = os.stat(path)
        return files.ServerStatus(result.st_ino, result.st_nlink, result.st_size, result.st_mtime_ns)

    shared_files.server_status = files.server_status = segment.server_status = status


def _believe_missing_names() -> None:
    segment.MISSING_NAME_S = lease.MISSING_NAME_S = registry.MISSING_NAME_S = 0.0


def _believe_listings() -> None:
    def steps(paths: RunPaths) -> list[tuple[int, Path]]:
        names = os.listdir(paths.checkpoints) if paths.checkpoints.is_dir() else []
        return sorted((step, paths.checkpoint(step)) for name in names if (step := step_of(name)) is not None)

    RunPaths.checkpoint_steps = steps  # type: ignore[method-assign]


def _ignore_close() -> None:
    """Writes and closes without looking at the answer, as C programs do."""

    def write(path: Path, data: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.write(fd, data)
        with contextlib.suppress(OSError):
            os.close(fd)

    store.write_durably = files.write_durably = write
    store.fsync_folder = lambda folder: None
    store.fsync_file = lambda path: None


def _believe_that_it_is_gone() -> None:
    def move_aside(path: Path, private_path: Path) -> bool:
        try:
            os.rename(path, private_path)
        except FileNotFoundError:
            return False
        return True

    files.move_aside = store.move_aside = registry.move_aside = move_aside


def _look_before_removal() -> None:
    def unlink(path: Path, missing_ok: bool = False) -> None:
        if not missing_ok or os.path.lexists(path):
            os.unlink(path)

    Path.unlink = unlink  # type: ignore[method-assign]


def _require_removal() -> None:
    def remove(folder: Path) -> bool:
        if folder.exists():
            shutil.rmtree(folder)
        return True

    files.remove_tree = store.remove_tree = export_folder.remove_tree = remove


#: Name → function that replaces a part of rlhpc in this process.
VERSIONS: dict[str, Callable[[], None]] = {
    "believes a rename's error": _believe_rename,
    "believes a link's error": _believe_link,
    "believes a folder's error": _believe_mkdir,
    "believes a temporary file's error": _believe_create,
    "locks by flock": _lock_by_flock,
    "uses the cached status": _use_cached_status,
    "believes that a name is missing": _believe_missing_names,
    "believes listings": _believe_listings,
    "ignores close": _ignore_close,
    "believes that a file is gone": _believe_that_it_is_gone,
    "looks before it removes": _look_before_removal,
    "requires that a folder is gone": _require_removal,
}
