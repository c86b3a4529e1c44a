"""Checkpoints of a run: atomic saves, the choice of the checkpoint to resume from, and removal of all but the last N.

    with CheckpointWriter(paths, step) as writer:
        writer.add_bytes("runner.json", data)       # or let workers write to writer.path("actor-0.pt") themselves
        writer.commit({"env_steps": 2048})
    prune(paths, keep=3)

A checkpoint is written to `checkpoints/.tmp_global_step_<N>-<token>` and then renamed, so that a folder named
`global_step_<N>` is always complete. Only one process saves at a time: the run's driver.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rlhpc.checkpoint.manifest import (
    COMPLETE,
    FORMAT,
    MANIFEST,
    digest,
    is_complete,
    is_plain_name,
    map_files,
    read_manifest,
    seal,
    verify,
)
from rlhpc.checkpoint.trusted_digests import record_digest
from rlhpc.jobs.paths import RunPaths, step_name
from rlhpc.runtime.disk_errors import GO_ON, advice, is_full
from rlhpc.runtime.errors import CheckpointError
from rlhpc.runtime.files import expand_home, follow_umask, fsync_file, fsync_folder, write_durably

# .tmp_: unfinished save. .old_: checkpoint that a save of the same step replaces. .trash_: checkpoint to be deleted.
_LEFTOVER = re.compile(r"^\.(tmp|old|trash)_global_step_(\d+)-[0-9a-f]+$")


def final_folder(staging: Path) -> Path:
    """Returns the final path of a checkpoint that is being written to `staging`."""
    match = _LEFTOVER.match(staging.name)
    return staging.with_name(step_name(match.group(2))) if match else staging


def _file_entry(size: int, checksum: str) -> dict[str, Any]:
    """Returns the manifest entry of a file."""
    return {"size": size, "sha256": checksum}


def _durable_digest(path: Path) -> tuple[int, str]:
    fsync_file(path)
    return digest(path)


class CheckpointWriter:
    """Context manager that writes one checkpoint; without `commit`, it removes the written files at the end of the block.

    Attributes:
        staging: Folder of the files before `commit`; workers on a shared filesystem may write to it directly.
        final: Path of the checkpoint after `commit`.
    """

    def __init__(self, paths: RunPaths, step: int) -> None:
        if step < 0:
            raise ValueError(f"step {step} is negative")
        self.paths = paths
        self.step = step
        self.final = paths.checkpoint(step)
        self._token = secrets.token_hex(4)
        self.staging = paths.checkpoints / f".tmp_{self.final.name}-{self._token}"
        self._committed = False

    def __enter__(self) -> CheckpointWriter:
        try:
            self.paths.checkpoints.mkdir(parents=True, exist_ok=True)
            clean_leftovers(self.paths)
            self.staging.mkdir()
        except OSError as error:
            raise self._storage_error(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._committed:
            shutil.rmtree(self.staging, ignore_errors=True)
        # Timeouts and lost connections are OSErrors, too, but do not come from the filesystem.
        if isinstance(error, OSError) and not isinstance(error, (ConnectionError, TimeoutError, ChildProcessError)):
            raise self._storage_error(error) from error

    def path(self, name: str) -> Path:
        """Returns the staging path of the checkpoint's file `name`."""
        if not is_plain_name(name) or name in (MANIFEST, COMPLETE):
            raise ValueError(f"{name!r} cannot be a file name in a checkpoint")
        return self.staging / name

    def add_bytes(self, name: str, data: bytes) -> None:
        """Writes `data` as one file of the checkpoint, inside the writer's `with` block."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, data)

    def add_file(self, name: str, source: Path) -> None:
        """Copies one file into the checkpoint, inside the writer's `with` block."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)

    def commit(
        self, meta: dict[str, Any] | None = None, reported: Mapping[str, tuple[int, str] | None] | None = None
    ) -> Path:
        """Writes the manifest, renames the staging folder, and returns the final path.

        The committed checkpoint survives a power failure.

        Args:
            meta: JSON-serializable data for the manifest.
            reported: Name → size and SHA-256 of files that ranks have written, because this node's directory listing may
                lack some of them. None marks a file that its writer did not hash or sync; it is read here.

        Raises:
            CheckpointError: Nothing was written, a reported file is missing, or the filesystem raised an error.
        """
        try:
            self._write_manifest(meta or {}, reported or {})
            self._rename()
        except OSError as error:
            shutil.rmtree(self.staging, ignore_errors=True)
            raise self._storage_error(error) from error
        self._committed = True
        return self.final

    def _write_manifest(self, meta: dict[str, Any], reported: Mapping[str, tuple[int, str] | None]) -> None:
        written_entries = {name: file_entry for name, file_entry in reported.items() if file_entry is not None}
        files: dict[str, dict[str, Any]] = {}
        unlisted: list[Path] = []
        folders = {self.staging}
        follow_umask(self.staging)
        staged_paths = {*self.staging.rglob("*")}
        staged_paths |= {path for name in reported if (path := self.staging / name).is_file()}
        for path in sorted(staged_paths):
            if path.is_dir():
                folders.add(path)
                continue
            folders.add(path.parent)
            name = path.relative_to(self.staging).as_posix()
            if name in written_entries:
                files[name] = _file_entry(*written_entries[name])
            elif file_entry := self._linked_entry(name, path):
                files[name] = file_entry
            else:
                unlisted.append(path)
        sizes = sum(path.stat().st_size for path in unlisted)
        for path, size_and_digest in zip(unlisted, map_files(_durable_digest, unlisted, sizes), strict=True):
            files[path.relative_to(self.staging).as_posix()] = _file_entry(*size_and_digest)
        if missing := [name for name, (size, _) in written_entries.items() if not self._has_size(name, size)]:
            raise CheckpointError(
                f"checkpoint {self.final}: {', '.join(missing)} was written, and is gone or of another size"
            )
        if not files:
            raise CheckpointError(f"checkpoint {self.final}: nothing was written to {self.staging}")
        manifest = {"format": FORMAT, "global_step": self.step, "files": files, "meta": meta}
        manifest_bytes = json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n"
        write_durably(self.staging / MANIFEST, manifest_bytes)
        for folder in folders:
            fsync_folder(folder)
        write_durably(self.staging / COMPLETE, seal(manifest_bytes))
        fsync_folder(self.staging)
        record_digest(manifest_bytes)

    def _has_size(self, name: str, size: int) -> bool:
        path = self.staging / name
        return path.is_file() and path.stat().st_size == size

    def _linked_entry(self, name: str, path: Path) -> dict[str, Any] | None:
        """Returns the manifest entry of a hard link to another checkpoint's file, from that checkpoint's manifest.

        Returns None for other files. The linked file is not read here; damage to its bytes is detected in both checkpoints.
        """
        if path.stat().st_nlink < 2:
            return None
        for _, other_checkpoint in reversed(self.paths.checkpoint_steps()):
            linked = other_checkpoint / name
            if is_complete(other_checkpoint) and linked.is_file() and linked.samefile(path):
                file_entry: dict[str, Any] | None = read_manifest(other_checkpoint)["files"].get(name)
                return file_entry
        return None

    def _rename(self) -> None:
        # A rename cannot replace a folder that is not empty, so the old checkpoint of this step is renamed first.
        # `clean_leftovers` restores the old checkpoint if this process dies between the two renames.
        replaced_path = self.paths.checkpoints / f".old_{self.final.name}-{self._token}"
        if self.final.exists():
            self.final.rename(replaced_path)
        try:
            self.staging.rename(self.final)
        except OSError:
            if replaced_path.exists():
                replaced_path.rename(self.final)
            raise
        fsync_folder(self.paths.checkpoints)
        shutil.rmtree(replaced_path, ignore_errors=True)

    def _storage_error(self, error: OSError) -> CheckpointError:
        failed_path = error.filename or self.staging
        if isinstance(error, FileNotFoundError) and not self.paths.root.is_dir():
            return CheckpointError(
                f"checkpoint of step {self.step} could not be saved: the run folder {self.paths.root} was removed while the "
                "run went on: it ends, and its logs may be gone with it"
            )
        keep_hint = ", or lower runner.keep_checkpoints" if is_full(error) else ""
        return CheckpointError(
            f"checkpoint of step {self.step} could not be saved: {failed_path}: {error.strerror or error}. "
            f"{advice(error, failed_path)}{keep_hint}, then continue from the last checkpoint with: {GO_ON}"
        )


def clean_leftovers(paths: RunPaths) -> list[Path]:
    """Removes the files of interrupted saves. Only the process that saves may call this function.

    If an interrupted save was replacing a checkpoint, that checkpoint is restored.

    Returns:
        The folders that were removed or restored.
    """
    if not paths.checkpoints.is_dir():
        return []
    leftovers = [
        (match.group(1), int(match.group(2)), path)
        for path in paths.checkpoints.iterdir()
        if (match := _LEFTOVER.match(path.name))
    ]
    for leftover_type, step, path in leftovers:
        final = paths.checkpoint(step)
        if leftover_type == "old" and is_complete(path) and not final.exists():
            path.rename(final)
            fsync_folder(paths.checkpoints)
        else:
            _remove_unsealed(path)
    return [path for _, _, path in leftovers]


def _remove_unsealed(folder: Path) -> None:
    """Deletes a folder; deletes its COMPLETE marker first, so that a partly deleted folder never looks complete."""
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Resumable:
    """Checkpoint to resume from.

    Attributes:
        path: Checkpoint folder; None for a fresh start.
        step: Global step of the checkpoint; 0 for a fresh start.
        skipped: Newer checkpoints with faults, newest first, each with the faults as text.
    """

    path: Path | None = None
    step: int = 0
    skipped: list[tuple[Path, str]] = field(default_factory=list)


def find_resumable(paths: RunPaths, resume_dir: str | Path | None) -> Resumable:
    """Finds the checkpoint that `runner.resume_dir` refers to.

    Args:
        paths: Paths of the run.
        resume_dir: None (fresh start), "auto" (the newest checkpoint without faults), a `global_step_<N>` folder anywhere,
            or the name of such a folder in this run.

    Raises:
        CheckpointError: A checkpoint requested by name does not exist or has faults.
    """
    if resume_dir is None or str(resume_dir).strip().lower() in ("", "null", "none"):
        return Resumable()
    if str(resume_dir).strip().lower() == "auto":
        with contextlib.suppress(OSError):  # a read-only run folder can still be resumed from
            clean_leftovers(paths)
        return newest_valid(paths)
    path = _find_requested(paths, expand_home(resume_dir))
    require_valid(path, hint="or take the newest sound checkpoint with: rlhpc train <config> runner.resume_dir=auto")
    return Resumable(path, int(read_manifest(path)["global_step"]))


def newest_valid(paths: RunPaths, *, checksums: bool = True) -> Resumable:
    """Returns the newest checkpoint without faults, and all newer checkpoints with faults. Changes nothing on disk."""
    skipped: list[tuple[Path, str]] = []
    for step, path in reversed(paths.checkpoint_steps()):
        faults = verify(path, checksums=checksums)
        if not faults:
            return Resumable(path, step, skipped)
        skipped.append((path, "; ".join(faults)))
    return Resumable(None, 0, skipped)


def require_valid(checkpoint: Path, *, hint: str = "", checksums: bool = True) -> None:
    """Checks that a checkpoint has no faults; without `checksums`, the files' contents are not read.

    Raises:
        CheckpointError: The checkpoint has faults; the message lists folder, files and reasons, then `hint`.
    """
    faults = verify(checkpoint, checksums=checksums)
    if faults:
        faults_text = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
        advice = f". Restore the file, {hint}" if hint else ""
        raise CheckpointError(f"checkpoint {checkpoint} cannot be used: {faults_text}{advice}")


def _find_requested(paths: RunPaths, requested: Path) -> Path:
    for path in (requested.absolute(), *([paths.checkpoints / requested] if len(requested.parts) == 1 else [])):
        if path.is_dir():
            return path
    existing_names = ", ".join(path.name for _, path in paths.checkpoint_steps() if is_complete(path))
    raise CheckpointError(
        f"runner.resume_dir={requested}: no such checkpoint folder. "
        + (f"{paths.checkpoints} has: {existing_names}. " if existing_names else f"{paths.checkpoints} has none. ")
        + "Give a global_step_<N> folder, or runner.resume_dir=auto"
    )


def prune(paths: RunPaths, keep: int, protect: Iterable[int] = (), *, checksums: bool = True) -> list[Path]:
    """Deletes all but the `keep` newest complete checkpoints.

    The newest checkpoint without faults is always kept. Incomplete folders are deleted once a newer checkpoint is
    complete.

    Args:
        paths: Paths of the run.
        keep: Number of checkpoints to keep; 0 or less keeps all.
        protect: Steps to keep in any case, such as steps under evaluation and ends of segments.
        checksums: Read the files to find the newest checkpoint without faults; False compares only their sizes.

    Returns:
        The deleted folders.
    """
    if keep <= 0:
        return []
    all_steps = paths.checkpoint_steps()
    complete = [step for step, path in all_steps if is_complete(path)]
    kept_steps = set(complete[-keep:]) | set(protect)
    valid_checkpoint = newest_valid(paths, checksums=checksums)
    if valid_checkpoint.path is None:
        return []
    kept_steps.add(valid_checkpoint.step)
    newest = complete[-1]
    removed: list[Path] = []
    for step, path in all_steps:
        if step in kept_steps or (step not in complete and step > newest):
            continue
        trash_path = paths.checkpoints / f".trash_{path.name}-{secrets.token_hex(4)}"
        try:
            path.rename(trash_path)  # no reader may find a partly deleted checkpoint
        except OSError as error:
            raise CheckpointError(f"old checkpoint {path} could not be deleted: {error.strerror}") from error
        _remove_unsealed(trash_path)
        removed.append(path)
    return removed


def move_newer_aside(paths: RunPaths, step: int) -> list[Path]:
    """Renames checkpoints newer than `step`, so that a run that resumes at `step` cannot load them.

    Returns:
        The new names, `superseded-<time>-global_step_<N>`.
    """
    timestamp = time.strftime("%Y%m%dT%H%M%S")
    newer_paths = [path for newer, path in paths.checkpoint_steps() if newer > step]
    return [path.rename(paths.checkpoints / f"superseded-{timestamp}-{path.name}") for path in newer_paths]
