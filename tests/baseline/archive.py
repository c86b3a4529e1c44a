"""Archives of baseline runs: run folder, configuration file and data of each, without names of the machine that trained it."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data" / "baseline"
#: Largest size of an archive, in bytes.
MAX_BYTES = 1_000_000
#: Files and folders of a run that name its machine or its processes.
_MACHINE = ("registry", "logs", "submit", "provenance.json", ".driver.json", ".driver.lock", "attendance.jsonl")
#: Paths that stand in an archive for the folder of the run, and for that of the built-in models.
_FOLDER, _MODELS = "/baseline/folder", "/baseline/models"
_TEXTS = (".json", ".jsonl", ".yaml")


def path_of(name: str) -> Path:
    """Returns the path of a run's archive."""
    return DATA / "runs" / f"{name}.tar.xz"


def pack(folder: Path, models: Path, name: str) -> int:
    """Packs a folder in which a run was trained, with equal bytes for equal files; returns the size.

    Args:
        folder: The folder, which is changed.
        models: Folder of the built-in models.
        name: Name of the run.
    """
    _anonymise(folder)
    relocate(folder, {str(folder): _FOLDER, str(models): _MODELS})
    path = path_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:xz", preset=9) as archive:
        for file in sorted(path for path in folder.rglob("*") if path.is_symlink() or path.is_file()):
            entry = tarfile.TarInfo(str(file.relative_to(folder)))
            if file.is_symlink():
                entry.type, entry.linkname = tarfile.SYMTYPE, str(file.readlink())
                archive.addfile(entry)
                continue
            content = file.read_bytes()
            assert str(folder.parent).encode() not in content, f"{name}: {entry.name} has the path of its folder"
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    size = path.stat().st_size
    assert size <= MAX_BYTES, f"{name}: the archive has {size} bytes, more than {MAX_BYTES}"
    return size


def unpack(name: str, folder: Path, models: Path) -> Path:
    """Unpacks a run into a new folder, which it then names as its own; returns the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tarfile.open(path_of(name)) as archive:
        archive.extractall(folder, filter="data")
    relocate(folder, {_FOLDER: str(folder), _MODELS: str(models)})
    return folder


def relocate(folder: Path, paths: Mapping[str, str]) -> None:
    """Replaces paths in all text files below a folder, and seals the checkpoints there anew."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.is_symlink() and file.suffix in _TEXTS:
            text = changed = file.read_text()
            for old, new in paths.items():
                changed = changed.replace(f'"{old}', f'"{new}').replace(f" {old}", f" {new}")
            if changed != text:
                file.write_text(changed)
    for manifest in sorted(folder.rglob("manifest.json")):
        record = json.loads(manifest.read_text())
        files = {name: _entry(manifest.parent / name) for name in record["files"]}
        if files != record["files"]:
            manifest.write_text(json.dumps({**record, "files": files}, indent=1, sort_keys=True))
            seal = {"manifest_sha256": hashlib.sha256(manifest.read_bytes()).hexdigest()}
            (manifest.parent / "COMPLETE").write_text(json.dumps(seal))


def _entry(path: Path) -> dict[str, Any]:
    """Returns the entry of a file in a checkpoint's manifest."""
    content = path.read_bytes()
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


def _anonymise(folder: Path) -> None:
    """Removes what names the machine and its processes."""
    for run in (folder / "runs").iterdir():
        for name in _MACHINE:
            path = run / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        status = run / "status.json"
        record = json.loads(status.read_text())
        status.write_text(json.dumps({**record, "host": "node", "pid": 1}, indent=1) + "\n")
