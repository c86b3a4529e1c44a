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
from typing import Any

import pytest

from rlhpc.jobs.shared_files import write_json
from rlhpc.runtime import files
from rlhpc.runtime.disk_errors import explain_error, log_stream
from rlhpc.runtime.errors import RegistryError, StorageError
from rlhpc.runtime.files import (
    create_exclusively,
    create_folder,
    follow_umask,
    move_aside,
    remove_if,
    remove_tree,
    rename,
    replace_durably,
    stat_files,
)
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


@needs_root
def test_a_full_filesystem_leaves_the_old_file(writer: Writer, full: Path) -> None:
    with pytest.raises((OSError, StorageError)) as caught:
        writer(full / "file.json", b"c" * 10_000)
    assert (full / "file.json").read_bytes() == b"old"
    assert sorted(p.name for p in full.iterdir()) == ["file.json", "filler"]
    said = explain_error(caught.value, "it")
    assert isinstance(said, StorageError) and said.exit_code == 2
    assert f"{full}/file.json: No space left on device. The filesystem at {full} is full, 0.0 of 1 MiB are free" in str(
        said
    )


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


@pytest.mark.parametrize("count", [3, 200])
def test_each_file_is_queried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    paths = [tmp_path / f"{number}" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes(number))
    (tmp_path / "link").symlink_to(paths[-1])
    queried: list[str] = []
    query = os.stat

    def counted(path: str, **options: Any) -> os.stat_result:
        queried.append(os.fspath(path))
        return query(path, **options)

    monkeypatch.setattr(os, "stat", counted)
    statuses = stat_files([*paths, tmp_path / "missing", tmp_path / "link"])
    monkeypatch.undo()
    assert [*statuses] == [*paths, tmp_path / "link"]
    assert [status.st_size for status in statuses.values()] == [*range(count), count - 1]
    assert sorted(queried) == sorted(map(str, [*paths, tmp_path / "missing", tmp_path / "link"]))


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


def late(call: Callable[..., Any], code: int) -> Callable[..., Any]:
    """A call that is done, and reports an error: the reply was lost, and the request sent again."""

    def done(*args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        raise OSError(code, os.strerror(code))

    return done


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EEXIST])
def test_a_rename_whose_reply_was_lost(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rename", late(Path.rename, code))
    for name in ("new", "old"):
        (tmp_path / "source").write_text(name)
        (tmp_path / "old").write_text("replaced")
        assert rename(tmp_path / "source", tmp_path / name) == tmp_path / name
        assert (tmp_path / name).read_text() == name
    (tmp_path / "folder").mkdir()
    rename(tmp_path / "folder", tmp_path / "renamed")
    (tmp_path / "link").symlink_to("new")
    rename(tmp_path / "link", tmp_path / "best")
    assert (tmp_path / "best").is_symlink()
    replace_durably(tmp_path / "new", b"by a temporary file")
    assert (tmp_path / "new").read_bytes() == b"by a temporary file"


def test_a_rename_whose_reply_was_lost_on_a_filesystem_that_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This host remembers that the name was missing, and the next answers take longer than that memory lasts."""
    clock, is_file = [0.0], files._is_file
    looks = iter([False])

    def stall(path: Path) -> bool:
        clock[0] += 2 * files.MISSING_NAME_S
        return False

    monkeypatch.setattr(files.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(files, "_is_on_server", stall)
    monkeypatch.setattr(files, "_is_file", lambda path, status: next(looks, True) and is_file(path, status))
    monkeypatch.setattr(Path, "rename", late(Path.rename, errno.ENOENT))
    (tmp_path / "source").touch()
    assert rename(tmp_path / "source", tmp_path / "target").exists()


def test_a_file_that_is_replaced_while_the_reply_to_its_removal_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This host remembers for a while that the new name was missing, and the old one is another process's already."""
    path, lstat, looks = tmp_path / "lease", os.lstat, iter(range(3))

    def rename_and_replace(source: Path, target: Path) -> None:
        os.replace(source, target)
        path.write_text("another's")
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    def look(name: Path) -> os.stat_result:
        if name != path and next(looks, None) is not None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return lstat(name)

    monkeypatch.setattr(os, "rename", rename_and_replace)
    monkeypatch.setattr(os, "lstat", look)
    path.write_text("mine")
    assert remove_if(path, lambda name: name.read_text() == "mine")
    assert path.read_text() == "another's" and os.listdir(tmp_path) == ["lease"]


@pytest.mark.parametrize("are_replies_lost", [False, True])
@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_what_another_process_removes_at_the_same_moment_is_not_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], are_replies_lost: bool
) -> None:
    """The error is that of a rename whose reply was lost; the server is asked which of the two it was."""
    path, taken_path, rename_file = tmp_path / "path", tmp_path / "taken", os.rename
    make(path)

    def lose_and_rename(source: Path, target: Path) -> None:
        rename_file(source, taken_path)
        rename_file(source, target)

    monkeypatch.setattr(os, "rename", lose_and_rename)
    monkeypatch.setattr(files.time, "sleep", lambda pause_s: pytest.fail("it waits"))
    if are_replies_lost:
        monkeypatch.setattr(Path, "mkdir", late(Path.mkdir, errno.EEXIST))
        monkeypatch.setattr(Path, "touch", late(Path.touch, errno.EEXIST))
    assert not move_aside(path, tmp_path / "private") and os.listdir(tmp_path) == ["taken"]
    rename_file(taken_path, path)
    if make is Path.touch:
        assert not remove_if(path, lambda name: True) and os.listdir(tmp_path) == ["taken"]


def test_a_file_is_moved_aside_on_a_full_filesystem_that_loses_replies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "rename", late(os.rename, errno.ENOENT))
    monkeypatch.setattr(Path, "mkdir", fail)
    assert move_aside(tmp_path / "file", tmp_path / "private") and os.listdir(tmp_path) == ["private"]


def test_a_rename_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise FileExistsError(errno.EEXIST, "File exists")

    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "nothing", tmp_path / "target")
    (tmp_path / "source").touch()
    (tmp_path / "target").touch()
    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "source", tmp_path / "no" / "target")
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(FileExistsError):
        rename(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "source").exists()


def test_a_link_whose_reply_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", late(os.link, errno.EEXIST))
    assert create_exclusively(tmp_path / "claim", b"mine")
    monkeypatch.undo()
    assert not create_exclusively(tmp_path / "claim", b"another's")
    assert (tmp_path / "claim").read_bytes() == b"mine" and len(list(tmp_path.iterdir())) == 1


def test_a_new_folder_whose_reply_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", late(Path.mkdir, errno.EEXIST))
    create_folder(tmp_path / "staging")
    monkeypatch.undo()
    (tmp_path / "staging" / "file").touch()
    (tmp_path / "link").symlink_to("staging")
    for name in ("staging", "link"):
        with pytest.raises(FileExistsError):
            create_folder(tmp_path / name)
    assert remove_tree(tmp_path / "staging") and remove_tree(tmp_path / "nothing")


def test_a_status_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("12345")
    os.link(path, tmp_path / "second")
    status = path.stat()
    expected = (status.st_ino, 2, 5, status.st_mtime_ns)
    for statx in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not statx:
                patch.setattr(files, "_load_statx", lambda: None)
            answer = files.server_status(path)
        assert (answer.inode, answer.num_links, answer.size, answer.mtime_ns) == expected
    with pytest.raises(FileNotFoundError):
        files.server_status(tmp_path / "nothing")


def test_a_file_that_was_replaced_while_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("content")
    replies = iter([errno.ESTALE] * 3)
    read = files._read_file

    def stale(path: Path, max_bytes: int) -> bytes:
        for code in replies:
            raise OSError(code, os.strerror(code))
        return read(path, max_bytes)

    monkeypatch.setattr(files, "_read_file", stale)
    assert files.read_file(tmp_path / "file") == b"content"
    replies = iter([errno.ESTALE] * 1000)
    with pytest.raises(OSError, match="Stale file handle"):
        files.read_file(tmp_path / "file")
