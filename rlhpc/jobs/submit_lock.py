"""Submit lock: one process at a time checks whether a job exists, and starts it if not."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from rlhpc.jobs.lease import Lease
from rlhpc.jobs.segment import SegmentFiles
from rlhpc.runtime.errors import DeadlineExceeded, SubmitError


class LeaseLock:
    """Lock on decisions about a job, for one process of any host at a time.

    Args:
        path: File that names the process; its folder must exist.
        subject: Name of the job, for messages.
        timeout_s: Maximum wait for another process.

    Raises:
        DeadlineExceeded: On entering: the other process did not finish in time.
        SubmitError: On entering: the folder cannot be written.
    """

    def __init__(self, path: Path, subject: str, timeout_s: float = 120.0) -> None:
        self._subject = subject
        self._timeout_s = timeout_s
        self._lease = Lease(path)

    def __enter__(self) -> LeaseLock:
        end = time.monotonic() + self._timeout_s
        path = self._lease.path
        try:
            while not self._lease.take_over():
                if time.monotonic() > end:
                    raise DeadlineExceeded(
                        f"{self._subject}: another process has been submitting it for "
                        f"{self._timeout_s:.0f} s and holds {path}; if it hangs, end it and try again"
                    )
                time.sleep(0.1)
        except OSError as error:
            raise SubmitError(f"cannot write {path}: {error.strerror or error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lease.release()


class SubmitLock(LeaseLock):
    """Lock on submitting a segment, whose folder `submit/` must exist."""

    def __init__(self, files: SegmentFiles, timeout_s: float = 120.0) -> None:
        super().__init__(files.lease, f"segment {files.segment}", timeout_s)
