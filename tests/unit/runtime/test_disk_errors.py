"""Errors of a full or read-only disk, told apart and traced to their filesystem."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rlhpc.runtime.disk_errors import advice, explain_error, first_full_filesystem, mount_of
from rlhpc.runtime.errors import StorageError, WorkerFailed
from tests.users import needs_root


@needs_root
def test_a_failed_write_that_does_not_say_where_is_traced_to_the_full_filesystem(
    full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(full)
    assert first_full_filesystem(["/proc", "."]) == Path(".")
    error = explain_error(OSError(errno.ENOSPC, "No space left on device"), "this rank")
    assert isinstance(error, StorageError) and f"The filesystem at {full} is full" in str(error)
    wrapped = RuntimeError("torch.save failed")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert f"The filesystem at {full} is full" in str(explain_error(wrapped, "this rank"))


def test_a_limit_on_files_is_named_where_the_file_is_not_known() -> None:
    said = str(explain_error(OSError(errno.EFBIG, "File too large"), "this rank"))
    assert (
        "this rank: File too large. The limit on the size of a file is reached: raise it (ulimit -f), then continue"
        in said
    )


def test_what_means_something_else_stays_what_it_is() -> None:
    for error in (ValueError("x"), OSError(errno.EACCES, "Permission denied", "/x"), WorkerFailed("lost")):
        assert explain_error(error, "it") is error
    rejected = StorageError("said already")
    rejected.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert explain_error(rejected, "it") is rejected


def test_quota_limit_and_read_only_are_told_apart() -> None:
    assert "Your quota on the filesystem at /proc" in advice(OSError(errno.EDQUOT, "x"), "/proc/self/none")
    assert "ulimit -f" in advice(OSError(errno.EFBIG, "x"), "/proc")
    assert "at /proc is read-only" in advice(OSError(errno.EROFS, "x"), "/proc/none/of/these")
    assert mount_of("/proc/none/of/these") == Path("/proc")
