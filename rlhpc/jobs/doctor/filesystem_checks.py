"""Checks of the filesystem of a run folder: each assumption of rlhpc is tried on this host, in a temporary folder.

The assumptions are listed in docs/explanation/filesystems.md. What only two hosts can show (a file of one host seen by
another, locks between nodes) is checked by the probe jobs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhpc.jobs.doctor.slurm_facts import Finding
from rlhpc.runtime.files import fsync_folder, remove_tree, server_status

#: Filesystem types that only this host sees.
_LOCAL_TYPES = ("tmpfs", "ramfs", "overlay", "aufs")
#: Mount options by which a client reports outdated names, sizes or locks → remedy.
_RISKY_OPTIONS = {
    "nocto": "mount it without nocto: a client then asks the server when it opens a file",
    "nolock": "locks are local to each node; runs do not use them, but other programs may",
    "localflock": "locks are local to each node; runs do not use them, but other programs may",
    "soft": "mount it with hard: a soft mount answers with errors while the server is busy, and a write may be lost",
}
_MAX_ATTRIBUTE_CACHE_S = 60
_SLOW_S = 1.0
_WRITE_BYTES = 1 << 20
_MAX_GRANULARITY_S = 2.5
_LOST_REPLY = "replies of the server are lost. rlhpc checks for it"
_RETRANSMITTED = "ask why requests are sent twice (nfsstat -rc counts retransmissions)"
_ELSEWHERE = "put runs (runner.run_dir) on another filesystem"


@dataclass(frozen=True)
class Mount:
    """Mounted filesystem of a folder, from /proc/self/mountinfo."""

    point: str
    fs_type: str
    source: str
    options: tuple[str, ...]


def mount_of(folder: Path, mountinfo: str) -> Mount | None:
    """Returns the mount that contains a folder; None if the text has none.

    Args:
        folder: Absolute path without links.
        mountinfo: Content of /proc/self/mountinfo.
    """
    deepest_mount: Mount | None = None
    for line in mountinfo.splitlines():
        mount_text, separator, source_text = line.partition(" - ")
        fields, source_fields = mount_text.split(), source_text.split()
        if not separator or len(fields) < 6 or len(source_fields) < 3:
            continue
        mount_point = _unescape(fields[4])
        if folder.is_relative_to(mount_point) and (
            deepest_mount is None or len(mount_point) >= len(deepest_mount.point)
        ):
            options = {*fields[5].split(","), *source_fields[2].split(",")}
            deepest_mount = Mount(mount_point, source_fields[0], _unescape(source_fields[1]), tuple(sorted(options)))
    return deepest_mount


def _unescape(escaped_path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped_path)


def examine(folder: Path) -> Iterator[Finding]:
    """Runs all checks in a temporary folder below `folder`, which must exist."""
    yield _check_type(folder)
    scratch_folder = folder / f".rlhpc-doctor-{secrets.token_hex(8)}"
    try:
        scratch_folder.mkdir(mode=0o700)
    except OSError as error:
        yield Finding("fail", "writing", f"{folder}: {error.strerror}", _suggest_remedy(error))
        return
    try:
        for check_subject, run_check in _CHECKS.items():
            try:
                yield run_check(check_subject, scratch_folder)
            except OSError as error:
                yield Finding("fail", check_subject, f"{folder}: {error.strerror or error}", _suggest_remedy(error))
    finally:
        remove_tree(scratch_folder)


def _suggest_remedy(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room, or ask for a larger quota: a run that cannot save stops"
    if error.errno == errno.EROFS:
        return f"ask why it is read-only, or {_ELSEWHERE}"
    return _ELSEWHERE


def _check_type(folder: Path) -> Finding:
    """Names the filesystem, and warns about types and options on which files of other hosts are not seen in time."""
    subject = "filesystem"
    try:
        mount = mount_of(folder.resolve(), Path("/proc/self/mountinfo").read_text())
    except OSError:
        mount = None
    if mount is None:
        return Finding("warn", subject, f"{folder}: its type cannot be read from /proc/self/mountinfo")
    summary = f"{folder} is on {mount.fs_type} ({mount.source} at {mount.point})"
    if mount.fs_type in _LOCAL_TYPES:
        remedy = "put runs that use other nodes on a filesystem that all nodes see"
        return Finding("warn", subject, f"{summary}, which only this host sees and which may be gone later", remedy)
    mount_options = {option_text.partition("=")[0]: option_text.partition("=")[2] for option_text in mount.options}
    remedies = [f"{name}: {option_remedy}" for name, option_remedy in _RISKY_OPTIONS.items() if name in mount_options]
    cache_s = max(
        (
            int(mount_options[name])
            for name in ("acregmax", "acdirmax", "actimeo")
            if mount_options.get(name, "").isdigit()
        ),
        default=0,
    )
    if cache_s > _MAX_ATTRIBUTE_CACHE_S:
        remedies.append(f"attributes are cached for {cache_s} s: ask for acregmax and acdirmax of at most 60 s")
    if remedies:
        return Finding("warn", subject, f"{summary}, mounted with {', '.join(mount.options)}", "; ".join(remedies))
    return Finding("pass", subject, summary)


def _check_exclusive_link(subject: str, folder: Path) -> Finding:
    """Links a file to a new name, and again: the second link must be refused."""
    source, target = folder / "link-source", folder / "link-target"
    source.touch()
    try:
        os.link(source, target)
    except FileExistsError:
        if server_status(source).num_links < 2:
            return Finding("fail", subject, "a link to a new name is refused as existing", _ELSEWHERE)
        return Finding(
            "warn", subject, f"a link that was made was answered with EEXIST: {_LOST_REPLY}",
            _RETRANSMITTED,
        )  # fmt: skip
    except OSError as error:
        return Finding(
            "warn", subject, f"no hard links ({error.strerror}): claims and leases are created by O_EXCL in their place",
            "a job that dies while it creates a claim delays its successor by some seconds; nothing else changes",
        )  # fmt: skip
    try:
        os.link(source, target)
    except FileExistsError:
        return Finding("pass", subject, "the second link to a name is refused")
    return Finding("fail", subject, "a second link replaced the first: two jobs could own a segment", _ELSEWHERE)


def _check_exclusive_create(subject: str, folder: Path) -> Finding:
    """Creates a file and a folder exclusively, and again: the second creations must be refused."""
    creations: dict[str, Callable[[Path], None]] = {
        "file": lambda path: os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)),
        "folder": lambda path: path.mkdir(),
    }
    for creation_name, create in creations.items():
        path = folder / f"exclusive-{creation_name}"
        try:
            create(path)
        except FileExistsError:
            return Finding(
                "warn", subject, f"a new {creation_name} was answered with EEXIST: {_LOST_REPLY}",
                _RETRANSMITTED,
            )  # fmt: skip
        try:
            create(path)
        except FileExistsError:
            continue
        return Finding("fail", subject, f"an exclusive creation of a {creation_name} succeeds twice", _ELSEWHERE)
    return Finding("pass", subject, "the second creation of a file or folder is refused")


def _rename(subject: str, folder: Path) -> Finding:
    """Replaces a file by renaming another one over it, and renames a folder with a file."""
    source, target = folder / "rename-source", folder / "rename-target"
    source.write_text("new")
    target.write_text("old")
    inode = source.stat().st_ino
    try:
        source.rename(target)
    except (FileNotFoundError, FileExistsError) as error:
        return Finding(
            "warn", subject, f"a rename was answered with {error.strerror}: {_LOST_REPLY}",
            _RETRANSMITTED,
        )  # fmt: skip
    if target.read_text() != "new" or source.exists():
        return Finding("fail", subject, "a renamed file does not replace the old one", _ELSEWHERE)
    if target.stat().st_ino != inode:
        return Finding(
            "fail", subject, "a renamed file gets another inode number: a lost reply cannot be seen", _ELSEWHERE
        )
    (folder / "rename-folder").mkdir()
    (folder / "rename-folder" / "file").write_text("content")
    (folder / "rename-folder").rename(folder / "renamed-folder")
    if not (folder / "renamed-folder" / "file").is_file():
        return Finding("fail", subject, "a renamed folder loses its files", _ELSEWHERE)
    return Finding("pass", subject, "a rename replaces a file, and moves a folder")


def _check_durable_write(subject: str, folder: Path) -> Finding:
    """Writes a megabyte, waits until it is on the disk, and reads it again."""
    path, written_bytes = folder / "written", os.urandom(_WRITE_BYTES)
    start_time = time.monotonic()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(written_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)  # NFS may report a used-up quota only here
    fsync_folder(folder)
    write_s = time.monotonic() - start_time
    if path.read_bytes() != written_bytes:
        return Finding("fail", subject, "a written file has other content when it is read", _ELSEWHERE)
    summary = f"1 MiB is on the disk after {write_s * 1000:.0f} ms"
    if write_s > _SLOW_S:
        return Finding(
            "warn", subject, summary, "slow: checkpoints and claims wait for it; ask about the load of the server"
        )
    return Finding("pass", subject, summary)


def _check_locks(subject: str, folder: Path) -> Finding:
    """Tries flock between two descriptors of this host. Runs do not use it in their folder."""
    path = folder / "locked"
    first_fd, second_fd = (os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for _ in range(2))
    try:
        fcntl.flock(first_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Finding("pass", subject, "flock works on this host; runs do not use it in their folder")
        return Finding("warn", subject, "two holders of one flock on this host; runs do not use it in their folder")
    except OSError as error:
        return Finding("pass", subject, f"no flock ({error.strerror}); runs do not use it in their folder")
    finally:
        os.close(first_fd)
        os.close(second_fd)


def _check_times(subject: str, folder: Path) -> Finding:
    """Measures the delay until a renewed file shows its new time, because a lease without a new time counts as expired."""
    path = folder / "renewed"
    path.write_bytes(b"")
    first_mtime_ns, start_time = server_status(path).mtime_ns, time.monotonic()
    while (elapsed_s := time.monotonic() - start_time) < _MAX_GRANULARITY_S:
        time.sleep(0.01)
        os.utime(path)
        if server_status(path).mtime_ns != first_mtime_ns:
            return Finding("pass", subject, f"a renewed file has another time after {elapsed_s * 1000:.0f} ms")
    return Finding(
        "fail", subject, f"a renewed file has the same time after {elapsed_s:.1f} s: live jobs would count as dead", _ELSEWHERE
    )  # fmt: skip


def _check_listing(subject: str, folder: Path) -> Finding:
    """Lists a folder before and after this host changes it."""
    os.listdir(folder)
    path = folder / "listed"
    path.write_text("12345")
    if path.name not in os.listdir(folder):
        return Finding("fail", subject, "a listing lacks a file that this host has just written", _ELSEWHERE)
    if path.stat().st_size != 5:
        return Finding("fail", subject, "a file that this host has just written shows another size", _ELSEWHERE)
    path.unlink()
    if path.name in os.listdir(folder) or path.exists():
        return Finding("fail", subject, "a listing has a file that this host has just removed", _ELSEWHERE)
    return Finding("pass", subject, "listings and sizes follow this host's changes at once")


def _open_files(subject: str, folder: Path) -> Finding:
    """Removes an open file and its folder, and checks for remaining files."""
    file_path = folder / "opened"
    file_path.mkdir()
    with (file_path / "file").open("w+") as file:
        file.write("content")
        file.flush()
        (file_path / "file").unlink()
        remaining_names = os.listdir(file_path)
        file.seek(0)
        if file.read() != "content":
            return Finding("fail", subject, "an open file loses its content when it is removed", _ELSEWHERE)
    if remaining_names:
        return Finding(
            "pass",
            subject,
            f"a removed file that is open stays as {remaining_names[0]} until it is closed, and so does its folder",
        )
    return Finding("pass", subject, "a removed file that is open leaves nothing in its folder")


def _check_permissions(subject: str, folder: Path) -> Finding:
    """Checks that modes are kept: keys and job records must be closed to other users."""
    path = folder / "private"
    path.mkdir(mode=0o700)
    mode_bits = path.stat().st_mode & 0o777
    if mode_bits & 0o077:
        return Finding(
            "fail",
            subject,
            f"a folder of mode 0700 has mode {mode_bits:04o}: other users could read a run's keys",
            _ELSEWHERE,
        )
    try:
        (folder / "symlink").symlink_to("private")
    except OSError as error:
        return Finding(
            "warn",
            subject,
            f"modes are kept; no symbolic links ({error.strerror})",
            "set runner.keep_best to null: its link cannot be made",
        )
    return Finding("pass", subject, "modes and symbolic links are kept")


_CHECKS: dict[str, Callable[[str, Path], Finding]] = {
    "exclusive links": _check_exclusive_link,
    "exclusive creation": _check_exclusive_create,
    "renames": _rename,
    "durable writes": _check_durable_write,
    "file locks": _check_locks,
    "file times": _check_times,
    "listings": _check_listing,
    "removed open files": _open_files,
    "permissions": _check_permissions,
}
