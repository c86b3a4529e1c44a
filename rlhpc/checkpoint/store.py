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
import functools
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping
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
    record_digest,
    seal,
    verify,
)
from rlhpc.jobs.paths import RunPaths, step_name
from rlhpc.runtime.disk_errors import GO_ON, advice, is_full
from rlhpc.runtime.errors import CheckpointError
from rlhpc.runtime.files import (
    create_folder,
    expand_home,
    follow_umask,
    fsync_file,
    fsync_folder,
    is_taken,
    move_aside,
    remove_tree,
    rename,
    replace_durably,
    replace_folder,
    server_status,
    stat_files,
    write_durably,
)
from rlhpc.runtime.text import format_names

# .tmp_: unfinished save. .old_: checkpoint that a save of the same step replaces. .trash_: checkpoint to be deleted.
_LEFTOVER = re.compile(r"^\.(tmp|old|trash)_global_step_(\d+)-[0-9a-f]+$")


def final_folder(staging: Path) -> Path:
    """Returns the final path of a checkpoint that is being written to `staging`."""
    match = _LEFTOVER.match(staging.name)
    return staging.with_name(step_name(match.group(2))) if match else staging


def _make_file_entry(num_bytes: int, checksum: str) -> dict[str, Any]:
    """Returns the manifest entry of a file."""
    return {"size": num_bytes, "sha256": checksum}


def _compute_durable_digest(path: Path) -> tuple[int, str]:
    fsync_file(path)
    return digest(path)


def _read_server_size(path: Path) -> int | None:
    """Returns the size of a file that another host may have written; None if the file is missing."""
    try:
        return server_status(path).size
    except FileNotFoundError:
        return None


class CheckpointWriter:
    """Context manager that writes one checkpoint; without `commit`, it removes the written files at the end of the block.

    Attributes:
        staging: Folder of the files before `commit`; workers on a shared filesystem may write to it directly.
        final: Path of the checkpoint after `commit`.

    Raises:
        ValueError: The step is negative.
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
        self._names = set[str]()

    def __enter__(self) -> CheckpointWriter:
        try:
            self.paths.checkpoints.mkdir(parents=True, exist_ok=True)
            clean_leftovers(self.paths)
            create_folder(self.staging)
        except OSError as error:
            raise self._make_storage_error(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._committed:
            remove_tree(self.staging)
        # Timeouts and lost connections are OSErrors, too, but do not come from the filesystem.
        if isinstance(error, OSError) and not isinstance(error, (ConnectionError, TimeoutError, ChildProcessError)):
            raise self._make_storage_error(error) from error

    def path(self, name: str) -> Path:
        """Returns the staging path of the checkpoint's file `name`, which must exist at `commit`.

        Raises:
            ValueError: The name is not a plain file name, or it is the name of a file that the writer itself writes.
        """
        if not is_plain_name(name) or name in (MANIFEST, COMPLETE):
            raise ValueError(f"{name!r} cannot be a file name in a checkpoint")
        self._names.add(name)
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
        self, meta: dict[str, Any] | None = None, reported_files: Mapping[str, tuple[int, str] | None] | None = None
    ) -> Path:
        """Writes the manifest, renames the staging folder, and returns the final path.

        The committed checkpoint survives a power failure.

        Args:
            meta: JSON-serializable data for the manifest.
            reported_files: Name → size and SHA-256 of files that ranks have written, because this node's directory listing may
                lack some of them. None marks a file that its writer did not hash or sync; it is read here.

        Raises:
            CheckpointError: Nothing was written, a reported file is missing, or the filesystem raised an error.
        """
        try:
            self._write_manifest(meta or {}, {**dict.fromkeys(self._names), **(reported_files or {})})
            self._rename()
        except OSError as error:
            remove_tree(self.staging)
            raise self._make_storage_error(error) from error
        self._committed = True
        return self.final

    def _write_manifest(self, meta: dict[str, Any], reported_files: Mapping[str, tuple[int, str] | None]) -> None:
        file_entries = {name: file_entry for name, file_entry in reported_files.items() if file_entry is not None}
        files: dict[str, dict[str, Any]] = {}
        unlisted_files: dict[Path, os.stat_result] = {}
        folders = {self.staging}
        statuses = stat_files({*self.staging.rglob("*"), *(self.staging / name for name in reported_files)})
        for path, status in sorted(statuses.items()):
            if stat.S_ISDIR(status.st_mode):
                folders.add(path)
                continue
            folders.add(path.parent)
            name = path.relative_to(self.staging).as_posix()
            if name in file_entries:
                files[name] = _make_file_entry(*file_entries[name])
            elif file_entry := self._make_linked_entry(name, path, status):
                files[name] = file_entry
            else:
                unlisted_files[path] = status
        follow_umask(self.staging, statuses)
        unlisted_bytes = sum(status.st_size for status in unlisted_files.values())
        for path, size_and_digest in zip(
            unlisted_files, map_files(_compute_durable_digest, [*unlisted_files], unlisted_bytes), strict=True
        ):
            files[path.relative_to(self.staging).as_posix()] = _make_file_entry(*size_and_digest)
        sizes_on_disk = {name: _read_server_size(self.staging / name) for name in reported_files}
        if missing_names := [
            name
            for name, file_entry in reported_files.items()
            if (file_size := sizes_on_disk[name]) is None or (file_entry is not None and file_size != file_entry[0])
        ]:
            raise CheckpointError(
                f"checkpoint {self.final}: {', '.join(missing_names)} was written, and is gone or of another size"
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

    def _make_linked_entry(self, name: str, path: Path, status: os.stat_result) -> dict[str, Any] | None:
        """Returns the manifest entry of a hard link to another checkpoint's file, from that checkpoint's manifest.

        Returns None for other files. The linked file is not read here; damage to its bytes is detected in both checkpoints.
        """
        if status.st_nlink < 2:
            return None
        for _, other_checkpoint in reversed(self.paths.checkpoint_steps()):
            linked_file = other_checkpoint / name
            if is_complete(other_checkpoint) and linked_file.is_file() and linked_file.samefile(path):
                file_entry: dict[str, Any] | None = read_manifest(other_checkpoint)["files"].get(name)
                return file_entry
        return None

    def _rename(self) -> None:
        # `clean_leftovers` restores the old checkpoint if this process dies while it replaces it.
        replaced_path = self.paths.checkpoints / f".old_{self.final.name}-{self._token}"
        replace_folder(self.staging, self.final, replaced_path)
        with contextlib.suppress(OSError):  # the checkpoint is complete without this hint
            replace_durably(self.paths.newest_save, json.dumps({"global_step": self.step}).encode(), parents=False)

    def _make_storage_error(self, error: OSError) -> CheckpointError:
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
            try:
                rename(path, final)
                fsync_folder(paths.checkpoints)
                continue
            except FileNotFoundError:
                continue  # a process that was taken for dead has ended its save
            except OSError as error:
                if not is_taken(error):
                    raise
        _discard(path)
    return [path for _, _, path in leftovers]


def _discard(path: Path, may_go: Callable[[Path], bool] = lambda trash_path: True) -> bool:
    """Deletes a checkpoint or the files of an interrupted save.

    Renames the folder first, so that no process finds it, or completes it, while it is deleted, and deletes its COMPLETE
    marker first, so that the remainder is never taken for a checkpoint.

    Args:
        path: The folder.
        may_go: Called with the folder's new name. If it returns False, another process has given the name to another folder,
            which gets it back.

    Returns:
        False if the folder stays, or was gone.
    """
    match = _LEFTOVER.match(path.name)
    if match and match.group(1) == "trash":
        trash_path = path
    else:
        name = step_name(match.group(2)) if match else path.name
        trash_path = path.with_name(f".trash_{name}-{secrets.token_hex(4)}")
        if not move_aside(path, trash_path):  # an earlier driver on another host has removed it
            return False
        if not may_go(trash_path):
            try:
                rename(trash_path, path)
                return False
            except FileNotFoundError:  # another process has deleted it as a leftover
                return False
            except OSError as error:
                if not is_taken(error):
                    raise
                # a third folder has the name by now, and is newer
    (trash_path / COMPLETE).unlink(missing_ok=True)
    remove_tree(trash_path)
    return True


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


def newest_valid(paths: RunPaths, *, checks_digests: bool = True) -> Resumable:
    """Returns the newest checkpoint without faults, and all newer checkpoints with faults. Changes nothing on disk."""
    skipped_checkpoints: list[tuple[Path, str]] = []
    for step, path in reversed(paths.checkpoint_steps()):
        faults = verify(path, checks_digests=checks_digests)
        if not faults:
            return Resumable(path, step, skipped_checkpoints)
        skipped_checkpoints.append((path, "; ".join(faults)))
    return Resumable(None, 0, skipped_checkpoints)


def require_valid(checkpoint: Path, *, hint: str = "", checks_digests: bool = True) -> None:
    """Checks that a checkpoint has no faults; without `checks_digests`, the files' contents are not read.

    Raises:
        CheckpointError: The checkpoint has faults; the message lists folder, files and reasons, then `hint`.
    """
    faults = verify(checkpoint, checks_digests=checks_digests)
    if faults:
        faults_text = format_names(faults, separator="; ")
        advice = f". Restore the file, {hint}" if hint else ""
        raise CheckpointError(f"checkpoint {checkpoint} cannot be used: {faults_text}{advice}")


def _find_requested(paths: RunPaths, requested_folder: Path) -> Path:
    for path in (
        requested_folder.absolute(),
        *([paths.checkpoints / requested_folder] if len(requested_folder.parts) == 1 else []),
    ):
        if path.is_dir():
            return path
    existing_names = ", ".join(path.name for _, path in paths.checkpoint_steps() if is_complete(path))
    raise CheckpointError(
        f"runner.resume_dir={requested_folder}: no such checkpoint folder. "
        + (f"{paths.checkpoints} has: {existing_names}. " if existing_names else f"{paths.checkpoints} has none. ")
        + "Give a global_step_<N> folder, or runner.resume_dir=auto"
    )


def prune(paths: RunPaths, keep: int, protect: Iterable[int] = (), *, checks_digests: bool = True) -> list[Path]:
    """Deletes all but the `keep` newest complete checkpoints.

    The newest checkpoint without faults is always kept. Incomplete folders are deleted once a newer checkpoint is
    complete.

    Args:
        paths: Paths of the run.
        keep: Number of checkpoints to keep; 0 or less keeps all.
        protect: Steps to keep in any case, such as steps under evaluation and ends of segments.
        checks_digests: Read the files to find the newest checkpoint without faults; False compares only their sizes.

    Returns:
        The deleted folders.

    Raises:
        CheckpointError: A checkpoint could not be deleted.
    """
    if keep <= 0:
        return []
    all_steps = paths.checkpoint_steps()
    saves = {step: _save_of(path) for step, path in all_steps}
    complete_steps = [step for step, save in saves.items() if save is not None]
    kept_steps = set(complete_steps[-keep:]) | set(protect)
    valid_checkpoint = newest_valid(paths, checks_digests=checks_digests)
    if valid_checkpoint.path is None or not complete_steps:
        return []
    kept_steps.add(valid_checkpoint.step)
    newest_step = complete_steps[-1]
    removed_paths: list[Path] = []
    for step, path in all_steps:
        if step in kept_steps or (step not in complete_steps and step > newest_step):
            continue
        try:
            if _discard(path, functools.partial(_is_save, saves[step])):
                removed_paths.append(path)
        except OSError as error:
            raise CheckpointError(f"old checkpoint {path} could not be deleted: {error.strerror}") from error
    return removed_paths


def _save_of(checkpoint: Path) -> tuple[int, int] | None:
    """Returns the identity of a complete checkpoint, which a later save of the same step does not share; else None."""
    try:
        status = (checkpoint / COMPLETE).stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _is_save(save: tuple[int, int] | None, checkpoint: Path) -> bool:
    return _save_of(checkpoint) == save


def move_newer_aside(paths: RunPaths, step: int) -> list[Path]:
    """Renames checkpoints newer than `step`, so that a run that resumes at `step` cannot load them.

    Returns:
        The new names, `superseded-<time>-global_step_<N>`.
    """
    timestamp, new_paths = time.strftime("%Y%m%dT%H%M%S"), []
    for newer_step, path in paths.checkpoint_steps():
        if newer_step > step:
            with contextlib.suppress(FileNotFoundError):  # an earlier driver on another host has removed it
                new_paths.append(rename(path, paths.checkpoints / f"superseded-{timestamp}-{path.name}"))
    return new_paths
