"""The doctor on mounted filesystems with faults: it says which assumption does not hold, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.jobs.doctor.filesystem_checks import examine
from tests.filesystems.beds import SharedFolder, need_mounts, remount, small_filesystem
from tests.filesystems.faults import Faults

need_mounts()


@pytest.mark.parametrize(
    ("faults", "subject", "level", "words"),
    [
        (Faults(), "exclusive links", "pass", "is refused"),
        (Faults(), "removed open files", "pass", ".nfs0"),
        (Faults(keep_open_files=False), "removed open files", "fail", "No such file"),
        (
            Faults(lost_replies=1.0, lost_operations=("link",)),
            "exclusive links",
            "warn",
            "replies of the server are lost",
        ),
        (Faults(lost_replies=1.0, lost_operations=("create",)), "exclusive creation", "warn", "a new file"),
        (Faults(lost_replies=1.0, lost_operations=("rename",)), "renames", "warn", "replies of the server are lost"),
        (Faults(flock="ENOLCK"), "file locks", "pass", "No locks available"),
        (Faults(listing_s=1e6, own_changes_listed=False), "listings", "fail", "lacks a file"),
        (Faults(mtime_s=3600.0), "file times", "fail", "live jobs would count as dead"),
        (Faults(fsync_s=1.2), "durable writes", "warn", "1 MiB is on the disk after"),
        (Faults(full_error="EDQUOT"), "durable writes", "fail", "Disk quota exceeded"),
        (Faults(full_error="ENOSPC", full_at="write"), "durable writes", "fail", "No space left"),
        (Faults(read_only=True), "writing", "fail", "Read-only file system"),
    ],
)
def test_faults(tmp_path: Path, faults: Faults, subject: str, level: str, words: str) -> None:
    with SharedFolder(tmp_path / "bed", faults) as bed:
        findings = {finding.check: finding for finding in examine(bed.clients[0].path)}
    assert "fuse" in findings["filesystem"].result
    assert findings[subject].level == level and words in findings[subject].result, findings[subject]
    assert findings[subject].advice or level == "pass"


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_small_filesystems(tmp_path: Path, kind: str) -> None:
    with small_filesystem(tmp_path, kind, 6) as folder:
        findings = {finding.check: finding.level for finding in examine(folder)}
        assert findings.pop("filesystem") == ("warn" if kind == "tmpfs" else "pass")
        assert set(findings.values()) == {"pass"}, findings
        (folder / "filler").write_bytes(b"0" * int(5.2 * 2**20 if kind == "tmpfs" else 4.5 * 2**20))
        assert "fail" in {finding.level for finding in examine(folder)}
        (folder / "filler").unlink()
        remount(folder, read_only=True)
        assert [finding.level for finding in examine(folder)][1:] == ["fail"]
