"""Folders that exports are written into: created beside the target, and renamed when they are complete."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.durable import follow_umask, fsync_file, fsync_folder
from rlhpc.runtime.errors import CheckpointError
from rlhpc.runtime.plain import read_json


def default_output(checkpoint: Path, step: int) -> Path:
    """`export/global_step_<N>` of the run that contains the checkpoint."""
    return (RunPaths.around(checkpoint) or RunPaths(checkpoint.parent)).export(step)


@contextlib.contextmanager
def filled_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write into, which takes the target's name and place if the block succeeds.

    Everything written is on disk before the folder gets the name; an exception leaves `target` as it was.
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
    """Refuses to replace anything that is not an export.

    Raises:
        CheckpointError: `target` is something else.
    """
    exported = any((target / name).is_file() for name in ("config.json", "adapter_config.json"))
    if target.exists() and not exported and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an export folder; give another output folder")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object that a policy's folder must have.

    Raises:
        CheckpointError: It has none.
    """
    try:
        content = read_json(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing, so the policy cannot be rebuilt") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content
