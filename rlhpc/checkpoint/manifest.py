"""Manifest of a checkpoint: manifest.json lists every file with size and SHA-256, COMPLETE seals the manifest.

    global_step_<N>/manifest.json   {"format": 1, "global_step": N, "files": {name: {"size", "sha256"}}, "meta": {...}}
    global_step_<N>/COMPLETE        {"manifest_sha256": "..."}, written last

COMPLETE contains the checksum of the manifest, so an altered manifest is detected as reliably as an altered tensor.

A run also records the digest of each manifest that it commits below `$XDG_STATE_HOME/rlhpc/manifests` (by default
`~/.local/state`), so that this user's own checkpoints are recognized: the user already trusts the code that they name. A
checkpoint of another user has no record there, even if this user has unpacked it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from rlhpc.jobs.paths import COMPLETE, MANIFEST, step_of
from rlhpc.runtime.errors import CheckpointError
from rlhpc.runtime.files import read_json
from rlhpc.runtime.host import state_folder

T = TypeVar("T")

FORMAT = 1

#: Maximum number of threads that hash, and minimum number of bytes for which threads are started.
_MAX_THREADS = 16
_MIN_THREADED_BYTES = 8 << 20


def digest(path: Path) -> tuple[int, str]:
    """Returns size in bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), checksum


def map_files(run_on_file: Callable[[Path], T], paths: Sequence[Path], nbytes: int) -> list[T]:
    """Returns `run_on_file(path)` of each file, in order.

    Uses several threads for large amounts of data, because hashing releases Python's lock.

    Args:
        run_on_file: Function that reads one file.
        paths: The files.
        nbytes: Size of all files together.
    """
    num_workers = min(len(paths), len(os.sched_getaffinity(0)), _MAX_THREADS)
    if num_workers < 2 or nbytes < _MIN_THREADED_BYTES:
        return [run_on_file(path) for path in paths]
    with ThreadPoolExecutor(num_workers, thread_name_prefix="checksums") as pool:
        return list(pool.map(run_on_file, paths))


def seal(manifest: bytes) -> bytes:
    """Returns the content of COMPLETE for a manifest."""
    return json.dumps({"manifest_sha256": hashlib.sha256(manifest).hexdigest()}).encode() + b"\n"


def is_plain_name(name: object) -> bool:
    """Returns whether `name` is a relative path that stays inside the checkpoint."""
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and str(path) == name


def is_complete(checkpoint: Path) -> bool:
    """Returns whether the save was completed. Only `verify` detects later damage."""
    return (checkpoint / COMPLETE).is_file()


def verify(checkpoint: Path, *, checks_digests: bool = True) -> list[str]:
    """Returns a message for each damaged or missing file of a checkpoint folder; [] if a run can resume from it.

    Ignores files that the manifest does not list, because nothing reads them.

    Args:
        checkpoint: A `global_step_<N>` folder.
        checks_digests: Compare checksums, too; False compares only sizes, without reading the data.
    """
    try:
        return _verify(Path(checkpoint), checks_digests)
    except OSError as error:
        return [f"{error.filename or checkpoint}: {error.strerror or error}"]


def _verify(checkpoint: Path, checks_digests: bool) -> list[str]:
    if not checkpoint.is_dir():
        return ["not a folder" if checkpoint.exists() else "no such folder"]
    faults: list[str] = []
    if not is_complete(checkpoint):
        faults.append(f"{COMPLETE}: missing, the save did not end")
    manifest_bytes = _read_if_exists(checkpoint / MANIFEST)
    if manifest_bytes is None:
        return [*faults, f"{MANIFEST}: missing"]
    manifest, manifest_fault = parse_manifest(manifest_bytes)
    if manifest_fault:
        return [*faults, manifest_fault]
    if is_complete(checkpoint) and (checkpoint / COMPLETE).read_bytes().strip() != seal(manifest_bytes).strip():
        faults.append(f"{MANIFEST}: does not match the checksum in {COMPLETE}, one of the two was altered")
    if (named_step := step_of(checkpoint.name)) is not None and named_step != manifest["global_step"]:
        faults.append(f"{MANIFEST}: is of step {manifest['global_step']}, the folder is {checkpoint.name}")
    files = {checkpoint / name: (name, file_entry) for name, file_entry in sorted(manifest["files"].items())}
    file_faults = map_files(
        lambda path: _verify_file(path, files[path][1], checks_digests),
        list(files),
        sum(file_entry["size"] for _, file_entry in files.values()) if checks_digests else 0,
    )
    return [
        *faults,
        *(f"{name}: {fault}" for (name, _), fault in zip(files.values(), file_faults, strict=True) if fault),
    ]


def _verify_file(path: Path, manifest_entry: dict[str, Any], checks_digests: bool) -> str:
    if not path.is_file():
        return "missing"
    file_size = path.stat().st_size
    if file_size != manifest_entry["size"]:
        return f"{file_size} bytes, the manifest says {manifest_entry['size']}" + (
            " (truncated)" if file_size < manifest_entry["size"] else ""
        )
    if checks_digests and digest(path)[1] != manifest_entry["sha256"]:
        return "checksum differs from the manifest's, the file was altered"
    return ""


def _read_if_exists(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def parse_manifest(manifest_bytes: bytes) -> tuple[dict[str, Any], str]:
    """Parses a manifest; returns the manifest and its fault, which is "" for a valid manifest."""
    try:
        manifest = read_json(manifest_bytes)
    except ValueError as error:
        return {}, f"{MANIFEST}: not JSON ({error})"
    if not isinstance(manifest, dict):
        return {}, f"{MANIFEST}: not a JSON object"
    if manifest.get("format") != FORMAT:
        return {}, f"{MANIFEST}: format {manifest.get('format')!r}, this version reads {FORMAT}"
    step, files = manifest.get("global_step"), manifest.get("files")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        return {}, f"{MANIFEST}: global_step is {step!r}, not a step number"
    if not isinstance(files, dict) or not files:
        return {}, f"{MANIFEST}: lists no files"
    for name, file_entry in files.items():
        is_valid = (
            isinstance(file_entry, dict)
            and isinstance(file_entry.get("size"), int)
            and isinstance(file_entry.get("sha256"), str)
        )
        if not is_plain_name(name) or not is_valid:
            return {}, f"{MANIFEST}: bad entry {name!r}"
    if not isinstance(manifest.get("meta", {}), dict):
        return {}, f"{MANIFEST}: meta is not an object"
    return manifest, ""


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint.

    Raises:
        CheckpointError: The file is missing, or is not a valid manifest.
    """
    try:
        manifest_bytes = _read_if_exists(Path(checkpoint) / MANIFEST)
    except OSError as error:
        raise CheckpointError(f"{Path(checkpoint) / MANIFEST}: {error.strerror}") from error
    if manifest_bytes is None:
        raise CheckpointError(f"{checkpoint}: no {MANIFEST}, this is not a checkpoint folder (global_step_<N>)")
    manifest, fault = parse_manifest(manifest_bytes)
    if fault:
        raise CheckpointError(f"{checkpoint}: {fault}")
    return manifest


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
