"""Faults of one client of a shared folder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Faults:
    """Faults of one client; the default is a filesystem without faults. All but the kernel's caches can change at any time.

    Attributes:
        attr_s: Seconds for which the kernel answers `stat` from its cache (NFS: `acregmax`).
        entry_s: Seconds for which the kernel caches existing names (NFS: `acdirmax`).
        negative_s: Seconds for which the kernel caches missing names (NFS: `lookupcache=all`).
        listing_s: Seconds for which a folder's listing is answered from an earlier one.
        own_changes_listed: Whether a change of this client refreshes its listing of the folder.
        delay_s: Seconds that each operation on a name takes.
        fsync_s: Seconds that an fsync takes.
        mtime_s: Resolution of modification times in seconds; 0 for nanoseconds.
        flock: "shared" (all clients see each other's locks), "local" (each client has its own locks: NFS with `nolock`,
            Lustre with `localflock`), or the name of the error that each lock fails with, such as "ENOLCK".
        lost_replies: Share of the operations on names that succeed, and whose answer is that of a second attempt: EEXIST for
            link, mkdir and an exclusive create, ENOENT for rename, unlink and rmdir.
        lost_operations: Operations that may lose their reply.
        rename_error: Error of a rename whose reply is lost.
        full_error: Error of writes that do not fit, "ENOSPC" or "EDQUOT"; "" for a filesystem that is not full.
        full_at: System call that reports it, "close" or "write". A file whose close fails loses what was written to it since
            the last fsync.
        keep_open_files: An open file that this client unlinks or replaces stays as `.nfs…` until it is closed.
        stale_handles: Reads of a file that another client has removed or replaced fail with ESTALE.
        read_only: Every change fails with EROFS.
        seed: Seed of the draw of lost replies.
    """

    attr_s: float = 0.0
    entry_s: float = 0.0
    negative_s: float = 0.0
    listing_s: float = 0.0
    own_changes_listed: bool = True
    delay_s: float = 0.0
    fsync_s: float = 0.0
    mtime_s: float = 0.0
    flock: str = "shared"
    lost_replies: float = 0.0
    lost_operations: tuple[str, ...] = ("link", "mkdir", "create", "rename", "unlink", "rmdir")
    rename_error: str = "ENOENT"
    full_error: str = ""
    full_at: str = "close"
    keep_open_files: bool = True
    stale_handles: bool = False
    read_only: bool = False
    seed: int = 0
