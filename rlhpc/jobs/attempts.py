"""Counts every start of a segment's driver, so that a job that makes no progress is not restarted for ever.

The file outlives the job's processes, so it also counts attempts whose end no process recorded (a failed node, a
requeue by the scheduler).
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from rlhpc.jobs.claim import SegmentFiles, read_json_file, write_json

_KEPT = 100


class Attempts:
    """The attempts of one submission; a new submission starts counting afresh.

    Args:
        files: The segment's files.
        token: The submission's token.
    """

    def __init__(self, files: SegmentFiles, token: str) -> None:
        self._path, self._token = files.attempts, token
        found = read_json_file(self._path) or {}
        rows = found.get("attempts")
        self._rows: list[dict[str, Any]] = list(rows) if found.get("token") == token and isinstance(rows, list) else []

    @property
    def count(self) -> int:
        return len(self._rows)

    @property
    def last_end(self) -> str:
        """How the last attempt ended; "" while it is running, or if there was none."""
        return str(self._rows[-1].get("how") or "") if self._rows and "ended" in self._rows[-1] else ""

    def begin(self, step: int, job_id: str) -> None:
        """Records that the driver starts from checkpoint `step` (-1: none)."""
        self._rows.append(
            {"number": self.count, "step": step, "job_id": job_id, "began": time.time(), "how": "running"}
        )
        self._write()

    def end(self, how: str) -> None:
        """Records how the last attempt ended."""
        if self._rows:
            self._rows[-1].update(how=how, ended=time.time())
            self._write()

    def note(self, node: str) -> None:
        """Records the node on which the last attempt failed."""
        if self._rows and node:
            self._rows[-1]["node"] = node
            self._write()

    def idle(self, newest: int) -> int:
        """How many attempts in a row began at checkpoint `newest` and so have added no checkpoint."""
        count = 0
        for row in reversed(self._rows):
            if row.get("step") != newest:
                break
            count += 1
        return count

    def blames(self, node: str) -> bool:
        """Whether the attempt before the last one also failed on this node."""
        return len(self._rows) > 1 and self._rows[-2].get("node") == node

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk is no reason not to train
            write_json(self._path, {"token": self._token, "attempts": self._rows[-_KEPT:]})
