"""Checks of the run folder's filesystem: on a sound one, on ones with faults, and their place on the page of assumptions."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs.doctor import Finding
from rlhpc.jobs.doctor import filesystem_checks as checks
from tests.extras import ROOT

MOUNTINFO = r"""
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:40 / /home rw,relatime shared:2 - nfs4 server:/export/home rw,vers=4.2,hard,acregmax=600,addr=10.0.0.1
31 21 0:41 / /scratch rw - lustre 10.0.0.2@o2ib:/fs rw,localflock
32 21 0:42 / /with\040space rw - nfs server:/space rw,soft,nocto
33 21 0:43 / /dev/shm rw - tmpfs tmpfs rw,size=1000k
34 30 0:44 / /home/me ro - nfs4 server:/me rw,vers=4.2
35 21 0:45 / /homes rw - xfs /dev/sdb rw
no mount at all
"""


def result_of(folder: Path, subject: str) -> Finding:
    return next(finding for finding in checks.examine(folder) if finding.check == subject)


def test_a_sound_filesystem_passes_and_nothing_stays(tmp_path: Path) -> None:
    findings = list(checks.examine(tmp_path))
    assert {finding.check: finding.level for finding in findings[1:]} == dict.fromkeys(checks._CHECKS, "pass")
    assert findings[0].check == "filesystem" and f"{tmp_path} is on " in findings[0].result
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/var/run/me", ("/", "ext4", "/dev/sda1")),
        ("/home/you/runs", ("/home", "nfs4", "server:/export/home")),
        ("/home/me/runs", ("/home/me", "nfs4", "server:/me")),
        ("/homes", ("/homes", "xfs", "/dev/sdb")),
        ("/with space/x", ("/with space", "nfs", "server:/space")),
    ],
)
def test_the_mount_of_a_folder(folder: str, expected: tuple[str, str, str]) -> None:
    mount = checks.mount_of(Path(folder), MOUNTINFO)
    assert mount is not None and (mount.point, mount.fs_type, mount.source) == expected
    assert checks.mount_of(Path(folder), "") is None


@pytest.mark.parametrize(
    ("folder", "level", "words"),
    [
        ("/", "pass", "is on ext4 (/dev/sda1 at /)"),
        ("/dev/shm", "warn", "only this host sees"),
        ("/home/x", "warn", "acregmax and acdirmax of at most 60 s"),
        ("/scratch", "warn", "locks are local to each node"),
        ("/with space", "warn", "mount it with hard"),
    ],
)
def test_types_and_options(folder: str, level: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_: MOUNTINFO)
    finding = checks._check_type(Path(folder))
    assert finding.level == level and words in finding.result + finding.advice


def refuse(code: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return call


def late(call: Callable[..., Any], error: int) -> Callable[..., Any]:
    """A call that is done, and reports an error."""

    def done(*args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        raise OSError(error, os.strerror(error))

    return done


def make_again(folder: Path) -> None:
    os.makedirs(folder, exist_ok=True)


def keep_both(source: Path, target: Path) -> Path:
    target.write_bytes(source.read_bytes())
    return target


@pytest.mark.parametrize(
    ("subject", "target", "name", "replacement", "level", "words"),
    [
        ("exclusive links", os, "link", late(os.link, errno.EEXIST), "warn", "replies of the server are lost"),
        ("exclusive links", os, "link", refuse(errno.EPERM), "warn", "no hard links"),
        ("exclusive links", os, "link", lambda *_: None, "fail", "two jobs could own a segment"),
        ("exclusive creation", Path, "mkdir", make_again, "fail", "a folder succeeds"),
        ("renames", Path, "rename", late(Path.rename, errno.ENOENT), "warn", "replies of the server are lost"),
        ("renames", Path, "rename", keep_both, "fail", "does not replace the old one"),
        ("durable writes", os, "fsync", refuse(errno.EDQUOT), "fail", "Disk quota exceeded"),
        ("file locks", fcntl, "flock", refuse(errno.ENOLCK), "pass", "no flock (No locks available)"),
        ("file locks", fcntl, "flock", lambda *_: None, "warn", "two holders of one flock"),
        ("file times", os, "utime", lambda *_: None, "fail", "live jobs would count as dead"),
        ("listings", os, "listdir", lambda *_: [], "fail", "lacks a file that this host has just written"),
        ("permissions", Path, "symlink_to", refuse(errno.EOPNOTSUPP), "warn", "no symbolic links"),
    ],
)  # fmt: skip
def test_a_faulty_filesystem(
    tmp_path: Path, subject: str, target: Any, name: str, replacement: Any, level: str, words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(target, name, replacement)
    monkeypatch.setattr(checks, "_CHECKS", {subject: checks._CHECKS[subject]})
    monkeypatch.setattr(checks, "_MAX_GRANULARITY_S", 0.2)
    try:
        finding = checks._CHECKS[subject](subject, scratch)
    except OSError as error:
        finding = Finding("fail", subject, error.strerror, checks._suggest_remedy(error))
    assert finding.level == level and words in finding.result, finding
    assert finding.advice or level == "pass" or subject == "file locks"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", refuse(errno.EROFS))
    findings = list(checks.examine(tmp_path))
    assert [finding.check for finding in findings] == ["filesystem", "writing"]
    assert "Read-only file system" in findings[1].result and "read-only" in findings[1].advice


def test_each_check_is_on_the_page_and_each_line_of_the_page_names_a_check() -> None:
    page = (ROOT / "docs/explanation/filesystems.md").read_text()
    rows = [line.split("|")[-2] for line in page.splitlines() if line.startswith("|") and "---" not in line][1:]
    names = {name for cell in rows for name in cell.split("`")[1::2]}
    own = {"filesystem", "writing", *checks._CHECKS}
    assert own <= names, own - names
    assert names - own <= {"shared folder", "folder of runs", "quota", "nocto"}, names - own
    assert all(cell.count("`") or "cannot be tried on one host" in cell for cell in rows if cell.strip() != "check")
