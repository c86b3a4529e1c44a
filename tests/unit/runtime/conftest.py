"""Fixtures of the tests of this folder."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launching import end_session, launch, meet

__all__ = ["end_session", "full", "launch", "meet"]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A folder on a small filesystem with a good file on it, and no room any more."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    try:
        (folder / "file.json").write_bytes(b"old")
        with pytest.raises(OSError, match="No space left"), (folder / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
