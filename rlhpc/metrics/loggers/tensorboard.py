"""TensorBoard logger: event files, through one handle.

Without TensorFlow, tensorboard's own writer opens and closes its file for each record, and torch's writer writes a record
for each scalar. On a shared file system, every metric of every step would then cost a round trip for an open and a close.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.loggers.base import RunFacts
from rlhpc.runtime.host import node_name

#: Key in `loggers.json` of the last step whose row was written.
_LAST_STEP_KEY = "step"


class TensorBoardLogger:
    """Logger to TensorBoard's event files: each row is one event with all its scalars, and each event is one write."""

    def __init__(self) -> None:
        self._folder = Path()
        self._purge_step: int | None = None
        self._file: IO[bytes] | None = None
        self._records: Any = None
        self._saved_state: dict[str, Any] = {}

    def open(self, run: RunFacts, resume_step: int | None) -> int | None:
        self._folder, self._saved_state = RunPaths(run.folder).tensorboard, run.saved_state
        if resume_step is None or not any(self._folder.glob("events.out.tfevents.*")):
            return None
        last_step = self._saved_state.get(_LAST_STEP_KEY)
        logged_step = None if last_step is None else min(int(last_step), resume_step)
        self._purge_step = 0 if logged_step is None else logged_step + 1
        return logged_step

    def log(self, step: int, row: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._records is None:
            self._open_file()
        summary_values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=summary_values)))
        self._saved_state[_LAST_STEP_KEY] = step

    def commit(self) -> None:
        """Does nothing: no rows wait in memory."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open_file(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        start_time = time.time()
        stem = f"events.out.tfevents.{int(start_time):010d}.{node_name()}.{os.getpid()}"
        paths = (self._folder / f"{stem}.{file_number}" for file_number in itertools.count())
        # Several starts may fall into one second.
        self._file = next(path for path in paths if not path.exists()).open("xb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=start_time, file_version="brain.Event:2"))
        if self._purge_step is not None:
            # TensorBoard then hides rows of earlier starts from the first step of this start on.
            session_start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=start_time, step=self._purge_step, session_log=session_start))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()
