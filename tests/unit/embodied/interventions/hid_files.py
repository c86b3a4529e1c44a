"""Recorded reports of input devices, sent through a pipe."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

FILES = Path(__file__).parents[3] / "data" / "hid"


def descriptor_bytes(name: str) -> bytes:
    return bytes.fromhex((FILES / f"{name}.descriptor.hex").read_text())


def reports(name: str) -> list[bytes]:
    lines = (FILES / f"{name}.reports.txt").read_text().splitlines()
    return [bytes.fromhex(line) for line in lines if not line.startswith("#")]


class Pipe:
    """A device that is a pipe: its reports are written by the test."""

    def __init__(self, name: str, folder: Path) -> None:
        self.path, self.descriptor = folder / f"hidraw-{name}", folder / f"{name}.descriptor"
        self.descriptor.write_bytes(descriptor_bytes(name))
        self.reports = iter(reports(name))
        self._fd: int | None = None

    def attach(self) -> None:
        if not self.path.exists():
            os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)

    def send(self, count: int = 1) -> None:
        """Sends the next reports."""
        assert self._fd is not None
        os.write(self._fd, b"".join(next(self.reports) for _ in range(count)))

    def detach(self) -> None:
        assert self._fd is not None
        os.close(self._fd)
        self._fd = None


@contextlib.contextmanager
def attached(name: str, folder: Path) -> Iterator[Pipe]:
    pipe = Pipe(name, folder)
    pipe.attach()
    try:
        yield pipe
    finally:
        with contextlib.suppress(AssertionError):
            pipe.detach()
