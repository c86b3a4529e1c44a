"""Sender and receivers that share memory."""

from __future__ import annotations

import os

from rlhpc.runtime.comm.payload import Origin
from rlhpc.runtime.scratch import Scratch

ORIGIN = Origin("here", "ipc://nowhere")
SIZE = 1 << 20


def nowhere(origin: Origin, path: str, size: int, reader: int, share: object) -> memoryview:
    raise AssertionError("a segment of this host is mapped")


def files(scratch: Scratch) -> list[str]:
    return sorted(entry.name for entry in os.scandir(scratch.shm))
