"""The test bed itself: each fault is there, and breaks code that does not expect it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.jobs.shared_files import renewed_within
from rlhpc.runtime import files
from rlhpc.runtime.files import (
    create_exclusively,
    create_folder,
    move_aside,
    read_file,
    remove_tree,
    rename,
    replace_durably,
    server_status,
)
from tests.eventually import wait_until
from tests.filesystems.beds import SharedFolder, need_mounts, remount, small_filesystem
from tests.filesystems.faults import Faults

need_mounts()


@pytest.fixture
def bed_of(tmp_path: Path) -> Callable[..., SharedFolder]:
    def mounted(*faults: Faults) -> SharedFolder:
        return SharedFolder(tmp_path / "bed", *faults)

    return mounted


def test_hosts_have_names_and_processes_of_their_own_and_the_same_path(bed_of: Callable[..., SharedFolder]) -> None:
    with bed_of(Faults(), Faults()) as bed:
        first, second = bed.clients
        (first.path / "file").write_text("of the first")
        for client in (first, second):
            code, text = client.run("sh", "-c", f"hostname; echo $$; cat {bed.path}/file")
            assert (code, text.split("\n")) == (0, [client.name, "1", "of the first"])


def test_names_attributes_and_listings_are_cached(bed_of: Callable[..., SharedFolder]) -> None:
    """A missing name, a size and a listing stay as they were seen, on the host that saw them."""
    with bed_of(Faults(), Faults(attr_s=1e6, entry_s=1e6, negative_s=1e6, listing_s=1e6)) as bed:
        writer, reader = (client.path for client in bed.clients)
        (writer / "grows").write_text("1")
        assert not (reader / "later").exists() and (reader / "grows").stat().st_size == 1
        assert os.listdir(reader) == ["grows"]
        (writer / "later").touch()
        (writer / "grows").write_text("12345")
        assert not (reader / "later").exists() and (reader / "grows").stat().st_size == 1
        assert os.listdir(reader) == ["grows"]
        assert server_status(reader / "grows").size == 5 and read_file(reader / "grows") == b"12345"


@pytest.mark.parametrize("negative_s", [0.0, 2.0])
@pytest.mark.parametrize("rename_error", ["ENOENT", "EEXIST"])
def test_lost_replies(bed_of: Callable[..., SharedFolder], rename_error: str, negative_s: float) -> None:
    """The plain calls report an error though they succeeded; rlhpc's do not."""
    faults = Faults(attr_s=negative_s, negative_s=negative_s, lost_replies=1.0, rename_error=rename_error)
    with bed_of(faults) as bed:
        folder, server = bed.clients[0].path, bed.backing
        (server / "source").write_text("content")
        plain: dict[str, tuple[Callable[[], object], int]] = {
            "link": (lambda: os.link(folder / "source", folder / "linked"), errno.EEXIST),
            "mkdir": (lambda: os.mkdir(folder / "made"), errno.EEXIST),
            "create": (lambda: os.open(folder / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY), errno.EEXIST),
            "rename": (lambda: os.rename(folder / "source", folder / "renamed"), getattr(errno, rename_error)),
            "unlink": (lambda: os.unlink(folder / "linked"), errno.ENOENT),
            "rmdir": (lambda: os.rmdir(folder / "made"), errno.ENOENT),
        }
        for call, code in plain.values():
            with pytest.raises(OSError) as caught:
                call()
            assert caught.value.errno == code
        assert sorted(path.name for path in server.iterdir()) == ["new", "renamed"]

        bed.clients[0].set(lost_operations=("link", "mkdir", "rename", "unlink", "rmdir"))
        for name in ("target", "absent"):
            (folder / name).exists()  # remembered as missing
            (server / "source").write_text(name)
            rename(folder / "source", folder / name)
            assert (server / name).read_text() == name
        assert create_exclusively(folder / "claim", b"mine") and (server / "claim").read_bytes() == b"mine"
        assert not create_exclusively(folder / "claim", b"another's") and (server / "claim").read_bytes() == b"mine"
        create_folder(folder / "staging-1")
        replace_durably(folder / "claim", b"changed")
        assert (server / "claim").read_bytes() == b"changed"
        (folder / "staging-1" / "file").touch()
        with pytest.raises(FileExistsError):
            create_folder(folder / "staging-1")
        assert remove_tree(folder / "staging-1")
        assert not [path for path in server.iterdir() if path.name.endswith(".tmp")]
        with pytest.raises(FileNotFoundError):
            rename(folder / "nothing", folder / "target")


@pytest.mark.parametrize("lost", [(), ("mkdir", "create"), ("mkdir", "create", "unlink", "rmdir")])
@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_what_another_host_removes_at_the_same_moment_is_not_awaited(
    bed_of: Callable[..., SharedFolder],
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None],
    lost: tuple[str, ...],
) -> None:
    """This host remembers that the new name was missing, and the server answers that it is missing, or there by now."""
    faults = Faults(entry_s=2.0, attr_s=2.0, negative_s=1e6, lost_replies=1.0, lost_operations=lost)
    with bed_of(faults, Faults()) as bed:
        path, other, rename_file = bed.clients[0].path / "path", bed.clients[1].path, os.rename
        make(other / "path")

        def lose_and_rename(source: Path, target: Path) -> None:
            assert not os.path.lexists(target)
            rename_file(other / "path", other / "taken")
            rename_file(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", lose_and_rename)
            patch.setattr(files.time, "sleep", lambda pause_s: pytest.fail("it waits"))
            assert not move_aside(path, path.with_name("private"))
        assert os.listdir(bed.backing) == ["taken"]


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_what_was_moved_aside_is_found_although_the_reply_was_lost(
    bed_of: Callable[..., SharedFolder], make: Callable[[Path], None]
) -> None:
    faults = Faults(negative_s=1e6, lost_replies=1.0, lost_operations=("rename", "mkdir", "create"))
    with bed_of(faults) as bed:
        folder = bed.clients[0].path
        make(bed.backing / "path")
        assert not os.path.lexists(folder / "private")
        assert move_aside(folder / "path", folder / "private") and os.listdir(bed.backing) == ["private"]


def test_a_temporary_file_whose_creation_was_answered_with_an_error(bed_of: Callable[..., SharedFolder]) -> None:
    with bed_of(Faults(lost_replies=0.7, lost_operations=("create",), seed=3)) as bed:
        for number in range(20):
            replace_durably(bed.clients[0].path / "file", str(number).encode())
        assert [path.name for path in bed.backing.iterdir()] == ["file"]
        assert (bed.backing / "file").read_text() == "19"


@pytest.mark.parametrize(("flock", "refusal"), [("shared", errno.EAGAIN), ("local", 0), ("ENOLCK", errno.ENOLCK)])
def test_locks(bed_of: Callable[..., SharedFolder], flock: str, refusal: int) -> None:
    with bed_of(Faults(flock=flock), Faults(flock=flock)) as bed:
        first, second = (open(client.path / "lock", "w") for client in bed.clients)  # noqa: SIM115
        with first, second:
            if refusal != errno.ENOLCK:
                fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
                code = 0
            except OSError as error:
                code = error.errno or 0
            assert code == refusal


@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT"])
@pytest.mark.parametrize("at", ["close", "write"])
def test_a_full_server(bed_of: Callable[..., SharedFolder], error: str, at: str) -> None:
    """What a plain write does not report until close is gone; a durable one leaves the old file and no other."""
    with bed_of(Faults()) as bed:
        client = bed.clients[0]
        replace_durably(client.path / "file", b"old")
        client.set(full_error=error, full_at=at)
        plain = os.open(client.path / "plain", os.O_CREAT | os.O_WRONLY)
        code = getattr(errno, error)
        if at == "close":
            assert os.write(plain, b"content") == 7
        else:
            with pytest.raises(OSError) as caught:
                os.write(plain, b"content")
            assert caught.value.errno == code
        if at == "close":
            with pytest.raises(OSError) as caught:
                os.close(plain)
            assert caught.value.errno == code
        else:
            os.close(plain)
        assert (bed.backing / "plain").stat().st_size == 0
        with pytest.raises(OSError) as caught:
            replace_durably(client.path / "file", b"new")
        assert caught.value.errno == code
        assert sorted(path.name for path in bed.backing.iterdir()) == ["file", "plain"]
        assert (bed.backing / "file").read_bytes() == b"old"


def test_removed_open_files_stay_until_they_are_closed(bed_of: Callable[..., SharedFolder]) -> None:
    with bed_of(Faults()) as bed:
        folder = bed.clients[0].path / "folder"
        folder.mkdir()
        with (folder / "open").open("w") as file:
            file.write("content")
            file.flush()
            with pytest.raises(OSError) as caught:
                shutil.rmtree(folder)
            assert caught.value.errno in (errno.ENOTEMPTY, errno.EBUSY)
            assert [name[:4] for name in os.listdir(folder)] == [".nfs"]
            assert not remove_tree(folder) and folder.is_dir()
        wait_until(lambda: remove_tree(folder), 10)


def test_a_file_that_another_host_replaces_is_opened_again(bed_of: Callable[..., SharedFolder]) -> None:
    """Reading from the old file fails with ESTALE; `read_file` returns the new content or the old one, and no error."""
    with bed_of(Faults(stale_handles=True), Faults()) as bed:
        reader, writer = (client.path for client in bed.clients)
        replace_durably(writer / "file", b"old")
        fd = os.open(reader / "file", os.O_RDONLY)
        replace_durably(writer / "file", b"new")
        with pytest.raises(OSError) as caught:
            os.read(fd, 3)
        os.close(fd)
        assert caught.value.errno == errno.ESTALE
        program = (
            "import sys; from pathlib import Path; from rlhpc.runtime.files import replace_durably\n"
            "for number in range(150): replace_durably(Path(sys.argv[1]) / 'file', str(number).encode(), sync=False)"
        )
        replacing = bed.clients[1].start(sys.executable, "-c", program, str(bed.path))
        num_reads = 0
        while replacing.poll() is None:
            assert read_file(reader / "file") in {b"new", *(str(number).encode() for number in range(150))}
            num_reads += 1
        _, errors = replacing.communicate(timeout=10)
        assert replacing.returncode == 0 and num_reads > 10, errors


def test_an_fsync_may_take_long_and_stops_no_other_reader(bed_of: Callable[..., SharedFolder]) -> None:
    with bed_of(Faults(fsync_s=1.5), Faults()) as bed:
        slow, other = bed.clients
        program = (
            "import sys; from pathlib import Path; from rlhpc.runtime.files import replace_durably\n"
            "replace_durably(Path(sys.argv[1]), b'1')"
        )
        job = slow.start(sys.executable, "-c", program, str(bed.path / "file"))
        wait_until(lambda: any(bed.backing.iterdir()), 60)
        assert not (other.path / "file").exists(), "it is visible before it is on the disk"
        assert job.wait(60) == 0 and (other.path / "file").read_bytes() == b"1"


def test_a_client_becomes_read_only_and_writable_again(bed_of: Callable[..., SharedFolder]) -> None:
    with bed_of(Faults()) as bed:
        client = bed.clients[0]
        replace_durably(client.path / "file", b"old")
        client.set(read_only=True)
        with pytest.raises(OSError) as caught:
            replace_durably(client.path / "file", b"new")
        assert caught.value.errno == errno.EROFS and (client.path / "file").read_bytes() == b"old"
        client.set(read_only=False)
        replace_durably(client.path / "file", b"new")


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_real_filesystems_that_are_full_or_read_only(tmp_path: Path, kind: str) -> None:
    with small_filesystem(tmp_path, kind, 6) as folder:
        replace_durably(folder / "file", b"old")
        with pytest.raises(OSError) as caught:
            replace_durably(folder / "file", b"n" * (8 << 20))
        assert caught.value.errno == errno.ENOSPC and (folder / "file").read_bytes() == b"old"
        assert [path.name for path in folder.iterdir() if path.is_file()] == ["file"]
        remount(folder, read_only=True)
        with pytest.raises(OSError) as caught:
            replace_durably(folder / "file", b"new")
        assert caught.value.errno == errno.EROFS
        remount(folder, read_only=False)
        replace_durably(folder / "file", b"new")


def test_a_renewed_file_shows_its_time_on_a_host_that_caches_attributes(bed_of: Callable[..., SharedFolder]) -> None:
    """`stat` would keep a live holder's file unchanged for as long as the cache lasts."""
    with bed_of(Faults(), Faults(attr_s=1e6, entry_s=1e6)) as bed:
        holder, watcher = (client.path / "lease" for client in bed.clients)
        holder.touch()
        before = watcher.stat().st_mtime_ns
        time.sleep(0.05)
        os.utime(holder)
        assert watcher.stat().st_mtime_ns == before
        program = "import os, sys, time\nwhile True: os.utime(sys.argv[1]); time.sleep(0.1)"
        bed.clients[0].start(sys.executable, "-c", program, str(bed.path / "lease"))
        assert renewed_within(watcher, 20.0)
