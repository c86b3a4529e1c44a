"""Lock on submitting a segment: one process at a time checks whether there is a job, and starts one if not."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import time
from types import TracebackType

from rlhpc.jobs.claim import LEASE_S, SegmentFiles, read_json, renewed_within
from rlhpc.jobs.probes import ProcessId
from rlhpc.runtime.errors import DeadlineExceeded, SubmitError

_NO_FLOCK = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EIO}


class SubmitLock:
    """Lets one process at a time decide about a segment: flock, or a lease file if the filesystem has no locks.

    Args:
        files: The segment's files; their folder must exist.
        timeout_s: How long to wait for another submitter.

    Raises:
        DeadlineExceeded: On entering: the other submitter did not finish in time.
        SubmitError: On entering: the folder cannot be written.
    """

    def __init__(self, files: SegmentFiles, timeout_s: float = 120.0) -> None:
        self._files = files
        self._timeout_s = timeout_s
        self._fd: int | None = None
        self._leased = False

    def __enter__(self) -> SubmitLock:
        end = time.monotonic() + self._timeout_s
        try:
            self._fd = os.open(self._files.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            while not self._try():
                if time.monotonic() > end:
                    raise DeadlineExceeded(
                        f"segment {self._files.segment}: another process has been submitting it for "
                        f"{self._timeout_s:.0f} s and holds {self._files.lock}; if it hangs, end it and try again"
                    )
                time.sleep(0.1)
        except OSError as error:
            self._release()
            raise SubmitError(f"cannot lock {self._files.lock}: {error.strerror or error}") from error
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _try(self) -> bool:
        assert self._fd is not None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
        return self._try_lease()

    def _try_lease(self) -> bool:
        lease = self._files.lease
        try:
            fd = os.open(lease, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            holder = ProcessId.from_json(read_json(lease))
            alive = None if holder is None else holder.alive()
            if alive is False or (alive is None and not renewed_within(lease, LEASE_S)):
                self._remove_stale(holder)
            return False
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(ProcessId.of(os.getpid()).to_json(), file)
        self._leased = True
        return True

    def _remove_stale(self, holder: ProcessId | None) -> None:
        """Removes the lease of a dead holder, and puts it back if somebody else has just taken it."""
        lease = self._files.lease
        aside = lease.with_suffix(f".stale-{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            lease.rename(aside)
            if ProcessId.from_json(read_json(aside)) != holder:
                os.link(aside, lease)
        aside.unlink(missing_ok=True)

    def _release(self) -> None:
        if self._leased:
            self._files.lease.unlink(missing_ok=True)
            self._leased = False
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
