"""Folders that exports are written into: made beside, and renamed when they are whole."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.durable import follow_umask, fsync_file, fsync_folder
from rlhpc.runtime.errors import CheckpointError


def default_output(checkpoint: Path, step: int) -> Path:
    """`export/global_step_<N>` of the run that the checkpoint lies in."""
    return (RunPaths.around(checkpoint) or RunPaths(checkpoint.parent)).export(step)


@contextlib.contextmanager
def filled_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write into, which takes its name and place when the block ends well.

    What was written and not yet on disk is, before it gets the name; an exception leaves `target` as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(4)
    staging, old = (target.with_name(f".{kind}_{target.name}-{token}") for kind in ("tmp", "old"))
    staging.mkdir()
    try:
        yield staging
        follow_umask(staging)
        for path in staging.rglob("*"):
            (fsync_folder if path.is_dir() else fsync_file)(path)
        fsync_folder(staging)
        if target.exists():
            target.rename(old)
        staging.rename(target)
        fsync_folder(target.parent)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def require_free(target: Path) -> None:
    """Refuses to replace what is not an export.

    Raises:
        CheckpointError: Something else is there.
    """
    exported = any((target / name).is_file() for name in ("config.json", "adapter_config.json"))
    if target.exists() and not exported and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an export folder; give another output folder")
