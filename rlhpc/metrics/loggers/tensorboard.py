"""TensorBoard's event files, through one handle.

tensorboard's own writer, where TensorFlow is missing, opens and closes its file for each record, and torch's makes a
record of each scalar: on a shared file system every metric of every step costs a round trip for an open and a close.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.loggers.base import RunFacts
from rlhpc.runtime.host import node_name


class TensorBoardLogger:
    """One event a row, with all its scalars; one write an event."""

    def __init__(self) -> None:
        self._folder = Path()
        self._purge_step: int | None = None
        self._file: IO[bytes] | None = None
        self._records: Any = None

    def open(self, run: RunFacts, resume_step: int | None) -> int | None:
        self._folder = RunPaths(run.folder).tensorboard
        if resume_step is None or not any(self._folder.glob("events.out.tfevents.*")):
            return None
        self._purge_step = resume_step + 1
        return resume_step

    def log(self, step: int, row: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._records is None:
            self._begin()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def commit(self) -> None:
        """Nothing waits in memory."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        stem = f"events.out.tfevents.{int(now):010d}.{node_name()}.{os.getpid()}"
        number = 0
        while (path := self._folder / f"{stem}.{number}").exists():  # two starts in one second
            number += 1
        self._file = path.open("xb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=now, file_version="brain.Event:2"))
        if self._purge_step is not None:
            # TensorBoard then hides what a killed start logged beyond the step that this one continues from.
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=now, step=self._purge_step, session_log=start))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()
