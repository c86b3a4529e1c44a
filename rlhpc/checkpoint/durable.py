"""Writes that survive a crash: data reaches the disk before the name does."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def fsync_folder(folder: Path) -> None:
    """Make the names inside `folder` durable (a rename is on disk only after this)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_file(path: Path) -> None:
    """Make the bytes of `path` durable, whoever wrote them."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and fsync it. Not atomic: for files inside a staging folder."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, data: bytes) -> None:
    """Give `path` the content `data`: readers see the old file or the new one, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write_durably(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)
