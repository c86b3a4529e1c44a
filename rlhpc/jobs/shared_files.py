"""Small files on a shared filesystem that processes on several hosts read and replace."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhpc.runtime.files import read_file, read_json, repeat_look, replace_durably, server_status


def revalidate_folder(folder: Path) -> int:
    """Returns the time at which an entry of the folder was last added, removed or renamed, in ns; -1 if the folder is missing.

    Opening the folder makes the NFS client query the server (close-to-open consistency) instead of its cache of names.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)


def read_json_file(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in a file; None if the file is missing or holds no JSON object (yet)."""
    revalidate_folder(path.parent)
    try:
        json_value = read_json(read_file(path).decode())
    except (OSError, ValueError):
        return None
    return json_value if isinstance(json_value, dict) else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces a file atomically with a JSON object; returns when the object is on disk."""
    replace_durably(path, json.dumps(value, indent=1).encode() + b"\n", mode=0o600, parents=False)


def renewed_within(
    path: Path, watch_s: float, alive_again: Callable[[], bool] = lambda: False, *, is_permanent: bool = False
) -> bool:
    """Watches a file for up to `watch_s`; returns True as soon as its modification time changes or `alive_again`
    returns True.

    Returns False after that time, or if the file is removed. Does not use the file's age, because the clocks of two hosts
    may differ.

    Args:
        path: Path of the file.
        watch_s: Seconds to watch.
        alive_again: Returns whether another sign of life has come.
        is_permanent: Whether no process removes the file. A missing file is then being replaced by its holder: on NFS it has
            no name for a moment if a process of the holder's host has it open.
    """

    def read_mtime() -> int | None:
        try:
            return server_status(path).mtime_ns
        except FileNotFoundError:
            if is_permanent:
                return None
            raise

    with contextlib.suppress(FileNotFoundError):
        first_mtime = read_mtime()
        for _ in repeat_look(min(0.5, watch_s / 4), watch_s):
            if read_mtime() not in (None, first_mtime) or alive_again():
                return True
    return False
