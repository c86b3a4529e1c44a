"""Bundle of a run: a zip file or a folder with configuration, code, environment and results, as a Workflow Run RO-Crate.

The same run gives the same bytes: names are sorted, and times are those of the run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.export_folder import filled_folder
from rlhpc.jobs.paths import RunPaths
from rlhpc.publishing.contents import BundleOptions, gather_contents
from rlhpc.publishing.crate import metadata
from rlhpc.publishing.file_set import FileSet
from rlhpc.publishing.layout import CHECKSUMS, METADATA, README
from rlhpc.runtime.disk_errors import advice
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import fsync_file, fsync_folder, write_durably

#: Folders whose files have no entity of their own in the metadata, because they may be thousands.
_UNLISTED = ("code/project", "code/rlhpc", "code/modules", "run/logs")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_READ_BYTES = 1 << 20


def write_bundle(paths: RunPaths, output: Path, options: BundleOptions) -> dict[str, Any]:
    """Writes the bundle of a run.

    Args:
        paths: The run.
        output: A `.zip` file, or a folder; must not exist.
        options: Choices of the user.

    Returns:
        Content of `bundle.json`.

    Raises:
        ConfigError: The output exists or cannot be written, the run is still running, or it has a file that must not be in a
            bundle.
    """
    if output.exists() or output.is_symlink():
        raise ConfigError(f"{output}: it exists; remove it, or choose another place with -o")
    files, record = gather_contents(paths, options)
    files.add_bytes(README, _format_readme(record).encode())
    _add_metadata(files, record)
    try:
        if output.suffix == ".zip":
            _write_zip(output, files)
        else:
            with filled_folder(output) as staging:
                for name, file in files.files.items():
                    target = staging / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    if isinstance(file.content, Path):
                        shutil.copyfile(file.content, target)
                    else:
                        write_durably(target, file.content)
    except OSError as error:
        raise ConfigError(
            f"{output}: cannot be written: {error.strerror or error}. {advice(error, output)}, or choose another place with -o"
        ) from error
    return record


def _add_metadata(files: FileSet, record: dict[str, Any]) -> None:
    """Adds the list of checksums of all files, and the RO-Crate metadata, which has the checksum of the list."""
    checksums = {name: file.checksum() for name, file in files.files.items()}
    lines = "".join(f"{checksums[name][1]}  {name}\n" for name in sorted(checksums))
    files.add_bytes(CHECKSUMS, lines.encode())
    checksums[CHECKSUMS] = files.files[CHECKSUMS].checksum()
    files.add_bytes(METADATA, metadata(record, checksums, _list_unlisted_folders(checksums)))


def _list_unlisted_folders(file_names: Iterable[str]) -> list[str]:
    """Returns the folders of a bundle whose files the metadata does not list one by one."""
    return [folder for folder in _UNLISTED if any(name.startswith(f"{folder}/") for name in file_names)]


def _write_zip(output: Path, files: FileSet) -> None:
    """Writes a zip file atomically. Times and permissions in it are fixed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary_path = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        with zipfile.ZipFile(temporary_path, "x", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            for folder in _list_unlisted_folders(files.files):
                zip_info = zipfile.ZipInfo(f"{folder}/", _EPOCH)
                zip_info.external_attr, zip_info.create_system = (0o40755 << 16) | 0x10, 3
                archive.writestr(zip_info, b"")
            for name in sorted(files.files):
                zip_info = zipfile.ZipInfo(name, _EPOCH)
                zip_info.compress_type, zip_info.external_attr, zip_info.create_system = (
                    zipfile.ZIP_DEFLATED,
                    0o100644 << 16,
                    3,
                )
                file_content = files.files[name].content
                with archive.open(zip_info, "w", force_zip64=_is_large(file_content)) as target:
                    if isinstance(file_content, Path):
                        with file_content.open("rb") as source_file:
                            shutil.copyfileobj(source_file, target, _READ_BYTES)
                    else:
                        target.write(file_content)
        fsync_file(temporary_path)
        # A link fails if the output exists by now, where a rename would replace it.
        os.link(temporary_path, output)
        fsync_folder(output.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary_path.unlink()


def _is_large(file_content: bytes | Path) -> bool:
    return isinstance(file_content, Path) and file_content.stat().st_size >= 1 << 31


def _format_readme(record: dict[str, Any]) -> str:
    promise = record["not_promised"]
    repeat = (
        "Repeated with the same packages on the same kind of processor, the run is the same bit for bit."
        if not promise
        else "Repeated, the run is not promised to be the same bit for bit: " + "; ".join(promise) + "."
    )
    return f"""# Run {record["run"]}

A run of rlhpc {record["versions"].get("rlhpc", "")} as a Workflow Run RO-Crate: {record["global_step"]} of
{record["max_steps"]} training steps.

    rlhpc reproduce FILE             shows what would run, and runs nothing
    rlhpc reproduce FILE --trust     runs it again, and says what differs

{repeat}

| path | what it is |
|---|---|
| `config.yaml`, `sft.yaml` | the configuration as it was run |
| `bundle.json` | what `rlhpc reproduce` reads |
| `environment/packages.txt` | the installed packages |
| `code/` | the code at its commit with its changes, the changes alone (`.diff`), and the user's modules |
| `workflow/` | the workflow |
| `inputs/` | data sets and models, if they are included |
| `run/` | metrics, evaluations, checkpoints, report, logs and batch scripts |
| `checksums.sha256` | checksums of all files: `sha256sum --check checksums.sha256` |
| `ro-crate-metadata.json` | the same for programs that read RO-Crates |

Keys, tokens, home folders and accounts were taken out of all texts.
"""
