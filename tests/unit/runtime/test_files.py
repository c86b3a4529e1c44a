"""Files are replaced whole or not at all, and a filesystem that takes no more is named."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhpc.jobs.segment import write_json
from rlhpc.runtime.disk_errors import advice, explained, full_among, log_stream, mount_of
from rlhpc.runtime.errors import RegistryError, StorageError, WorkerFailed
from rlhpc.runtime.files import follow_umask, replace_durably
from rlhpc.runtime.registry import write_atomic
from tests.users import needs_root

Writer = Callable[[Path, bytes], None]
WRITERS: dict[str, Writer] = {
    "durable": replace_durably,
    "registry": write_atomic,
    "claims": lambda path, data: write_json(path, {"value": data.decode()}),
}


@pytest.fixture(params=list(WRITERS))
def writer(request: pytest.FixtureRequest) -> Writer:
    return WRITERS[request.param]


@contextmanager
def size_limit() -> Iterator[None]:
    """No file of this process may grow beyond 4096 bytes: the first write is cut short there, the next one fails.

    For a moment only: pytest's own output may be such a file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)


def test_a_short_write_leaves_the_old_file(writer: Writer, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    writer(path, b"a" * 100)
    before = path.read_bytes()
    with pytest.raises((OSError, StorageError)) as caught, size_limit():
        writer(path, b"b" * 10_000)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"], "and nothing beside it"
    assert "file.json" in str(caught.value)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A folder on a small filesystem with a good file on it, and no room any more."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    try:
        (folder / "file.json").write_bytes(b"old")
        with pytest.raises(OSError, match="No space left"), (folder / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@needs_root
def test_a_full_filesystem_leaves_the_old_file(writer: Writer, full: Path) -> None:
    with pytest.raises((OSError, StorageError)) as caught:
        writer(full / "file.json", b"c" * 10_000)
    assert (full / "file.json").read_bytes() == b"old"
    assert sorted(p.name for p in full.iterdir()) == ["file.json", "filler"]
    said = explained(caught.value, "it")
    assert isinstance(said, StorageError) and said.exit_code == 2
    assert f"{full}/file.json: No space left on device. The filesystem at {full} is full, 0.0 of 1 MiB are free" in str(
        said
    )


@needs_root
def test_a_failed_write_that_does_not_say_where_is_traced_to_the_full_filesystem(
    full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(full)
    assert full_among(["/proc", "."]) == Path(".")
    error = explained(OSError(errno.ENOSPC, "No space left on device"), "this rank")
    assert isinstance(error, StorageError) and f"The filesystem at {full} is full" in str(error)
    wrapped = RuntimeError("torch.save failed")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert f"The filesystem at {full} is full" in str(explained(wrapped, "this rank"))


def test_a_limit_on_files_is_named_where_the_file_is_not_known() -> None:
    said = str(explained(OSError(errno.EFBIG, "File too large"), "this rank"))
    assert (
        "this rank: File too large. The limit on the size of a file is reached: raise it (ulimit -f), then continue"
        in said
    )


def test_what_means_something_else_stays_what_it_is() -> None:
    for error in (ValueError("x"), OSError(errno.EACCES, "Permission denied", "/x"), WorkerFailed("lost")):
        assert explained(error, "it") is error
    rejected = StorageError("said already")
    rejected.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert explained(rejected, "it") is rejected


def test_quota_limit_and_read_only_are_told_apart() -> None:
    assert "Your quota on the filesystem at /proc" in advice(OSError(errno.EDQUOT, "x"), "/proc/self/none")
    assert "ulimit -f" in advice(OSError(errno.EFBIG, "x"), "/proc")
    assert "at /proc is read-only" in advice(OSError(errno.EROFS, "x"), "/proc/none/of/these")
    assert mount_of("/proc/none/of/these") == Path("/proc")


def test_a_folder_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    gone = tmp_path / "run" / "submit"
    with pytest.raises(FileNotFoundError):
        write_json(gone / "exit.json", {})
    with pytest.raises(RegistryError):
        write_atomic(gone / "current", b"1-0")
    assert not (tmp_path / "run").exists()
    replace_durably(gone / "page.html", b"")
    assert (gone / "page.html").exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664), (0o077, 0o600)])
def test_files_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        (tmp_path / "inner").mkdir()
        made = tmp_path / "inner" / "model.safetensors"
        os.close(os.open(made, os.O_CREAT | os.O_WRONLY, 0o600))
        script = tmp_path / "script"
        script.touch(0o700)
        follow_umask(tmp_path)
        replace_durably(tmp_path / "config.yaml", b"")
        write_atomic(tmp_path / "keys.json", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == stat.S_IMODE((tmp_path / "config.yaml").stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600, "secrets do not"


LOG = """
import os, sys
from rlhpc.runtime.disk_errors import log_stream
sys.stdout, sys.stderr = log_stream(1), log_stream(2)
for _ in range(1000):
    print("a line that finds no room", file=sys.stderr)
    print("another")
os.write(int(sys.argv[1]), b"alive")
"""


@needs_root
def test_a_log_that_finds_no_room_ends_nobody(full: Path) -> None:
    reader, writer = os.pipe()
    with (full / "filler").open("ab") as log:
        done = subprocess.run([sys.executable, "-c", LOG, str(writer)], stdout=log, stderr=log, pass_fds=[writer])
    os.close(writer)
    assert os.read(reader, 100) == b"alive" and done.returncode == 0
    os.close(reader)


def test_a_log_has_what_was_printed(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        stream = log_stream(file.fileno())
        stream.write("one\n")
        assert (tmp_path / "log").read_text() == "one\n", "line by line"
        stream.write("\ud800\n")
        stream.flush()
    assert (tmp_path / "log").read_text() == "one\n\\ud800\n"
