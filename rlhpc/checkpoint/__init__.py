"""Checkpoints: saving, verification, resume and conversion. This package itself does not import torch."""

from rlhpc.checkpoint.manifest import is_complete, read_manifest, verify
from rlhpc.checkpoint.store import (
    CheckpointWriter,
    Resumable,
    clean_leftovers,
    find_resumable,
    move_newer_aside,
    newest_valid,
    prune,
    require_valid,
)

__all__ = [
    "CheckpointWriter",
    "Resumable",
    "clean_leftovers",
    "find_resumable",
    "is_complete",
    "move_newer_aside",
    "newest_valid",
    "prune",
    "read_manifest",
    "require_valid",
    "verify",
]
