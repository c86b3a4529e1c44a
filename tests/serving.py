"""Folders of a session, and a process that serves its segments to other hosts, less its service."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from rlhpc.runtime.comm.bulk_transfer import BulkServer
from rlhpc.runtime.comm.shared_memory import SegmentPool
from rlhpc.runtime.comm.zero_copy import ForwardedData, Lender
from rlhpc.runtime.os_resources import readable_descriptors
from rlhpc.runtime.registry import CurveKeys
from rlhpc.runtime.scratch import Scratch


@contextlib.contextmanager
def temporary_scratch() -> Iterator[Scratch]:
    """Creates the folders of a session; at the end, removes them and closes the descriptors of their locks."""
    scratch = Scratch.create()
    try:
        yield scratch
    finally:
        scratch.remove()
        scratch.release()


class Serving:
    """Accepts in a thread, until it is closed."""

    def __init__(self, scratch: Scratch, keys: CurveKeys, name: str) -> None:
        self.pool, self.forwarded_data = SegmentPool(scratch), ForwardedData()
        self.lender = Lender(self.pool)
        folders = (scratch.shm, scratch.spill)
        self.server = BulkServer(name, keys, "127.0.0.1", folders, self.lender, self.forwarded_data)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while not self._ending.is_set():
            if readable_descriptors([self.server.sock.fileno()], 0.05):
                self.server.accept()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self.server.close()
