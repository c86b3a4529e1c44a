"""Recognition of checkpoints that this user's own runs have written: the user already trusts the code that they name.

A run records the digest of each manifest that it commits below `$XDG_STATE_HOME/rlhpc/manifests` (by default
`~/.local/state`). A checkpoint of another user has no record there, even if this user has unpacked it.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from rlhpc.checkpoint.manifest import MANIFEST, digest, is_complete, parse_manifest
from rlhpc.runtime.host import state_folder

#: Larger files are not read, because they contain tensors, which name no code.
_MAX_TEXT_BYTES = 16 << 20


def record_digest(manifest: bytes) -> None:
    """Records the digest of a manifest that this process has written.

    If the record cannot be written, the checkpoint counts as a checkpoint of another user.
    """
    with contextlib.suppress(OSError):
        record_file = _record_path(manifest)
        record_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        record_file.touch(mode=0o600)


def is_trusted(checkpoint: Path) -> bool:
    """Returns whether a run of this user wrote a checkpoint, and the files that can name code are unchanged."""
    try:
        manifest_bytes = (checkpoint / MANIFEST).read_bytes()
        if not is_complete(checkpoint) or not _record_path(manifest_bytes).is_file():
            return False
        manifest, _ = parse_manifest(manifest_bytes)  # a recorded manifest is valid
        small_files = [
            (name, file_entry)
            for name, file_entry in manifest["files"].items()
            if file_entry["size"] <= _MAX_TEXT_BYTES
        ]
        return all(
            digest(checkpoint / name) == (file_entry["size"], file_entry["sha256"]) for name, file_entry in small_files
        )
    except OSError:
        return False


def _record_path(manifest: bytes) -> Path:
    return state_folder("manifests") / hashlib.sha256(manifest).hexdigest()
