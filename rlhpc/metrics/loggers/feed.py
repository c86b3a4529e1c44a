"""Feed of a logger on its own thread, so that the network, a full disk or a hanging service never delays training."""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.metrics.loggers.base import RunFacts, RunLogger
from rlhpc.runtime.files import replace_durably

#: Maximum number of queued rows, beyond which a logger is abandoned.
_MAX_QUEUED_ROWS = 20_000
#: Seconds within which all loggers must finish.
CLOSE_S = 60.0
_COMMIT, _END = object(), object()

Row = tuple[int, Mapping[str, float]]


class LoggerStates:
    """State of the loggers for a resumed run (`loggers.json`)."""

    def __init__(self, path: Path, *, is_new: bool) -> None:
        self._path, self._lock = path, threading.Lock()
        self._content: dict[str, dict[str, Any]] = {}
        if is_new:
            path.unlink(missing_ok=True)
            return
        with contextlib.suppress(OSError, ValueError):
            saved_content = json.loads(path.read_text())
            self._content = {
                key: logger_content for key, logger_content in saved_content.items() if isinstance(logger_content, dict)
            }

    def state_of(self, name: str) -> dict[str, Any]:
        """Returns a copy of a logger's stored state."""
        return dict(self._content.get(name, {}))

    def store(self, name: str, content: dict[str, Any]) -> None:
        """Replaces a logger's state and writes it to the file."""
        with self._lock:
            if self._content.get(name, {}) != content:
                self._content[name] = dict(content)
                replace_durably(self._path, json.dumps(self._content, indent=1).encode() + b"\n")


class Feed:
    """Feed of one logger: passes rows to the logger in order; prints a warning and ends at the first failure."""

    def __init__(
        self,
        name: str,
        logger: RunLogger,
        run: RunFacts,
        logger_states: LoggerStates,
        resume_step: int | None = None,
        backlog: Sequence[Row] = (),
    ) -> None:
        """Starts the thread.

        Args:
            name: Name of the logger, for messages and `loggers.json`.
            logger: Logger that is not yet open.
            run: Facts of the run, with the logger's stored state as `saved_state`.
            logger_states: State of all loggers.
            resume_step: Argument of `RunLogger.open`.
            backlog: Rows of metrics.jsonl from earlier starts; the logger first receives its missing rows.
        """
        self._name, self._logger, self._run, self._logger_states = name, logger, run, logger_states
        self._resume_step, self._backlog = resume_step, backlog
        self._queue: queue.Queue[Any] = queue.Queue(_MAX_QUEUED_ROWS)
        self._has_ended = False
        self._thread = threading.Thread(target=self._pass_rows, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Queues a row; returns at once."""
        self._put_in_queue((step, row))

    def commit(self) -> None:
        """Asks the logger to commit; returns at once."""
        self._put_in_queue(_COMMIT)

    def end(self) -> None:
        """Asks the logger to close; `wait` waits for it."""
        self._put_in_queue(_END)

    def wait(self, deadline: float) -> None:
        """Waits until the logger has ended; prints a warning if the logger still runs at `deadline` (of `time.monotonic`)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and not self._has_ended:
            self._abandon("it did not end in time")

    def _put_in_queue(self, queue_item: Any) -> None:
        if self._has_ended:
            return
        try:
            self._queue.put_nowait(queue_item)
        except queue.Full:
            self._abandon(f"it is {_MAX_QUEUED_ROWS} rows behind")

    def _abandon(self, reason: str) -> None:
        self._has_ended = True
        print(
            f"rlhpc: warning: logger {self._name} is given up: {reason}. The run goes on and metrics.jsonl has every row; "
            "a resumed run hands over what is missing",
            file=sys.stderr,
            flush=True,
        )

    def _pass_rows(self) -> None:
        try:
            last_step = self._logger.open(self._run, self._resume_step)
            self._logger_states.store(self._name, self._run.saved_state)
            for step, row in self._backlog:
                if last_step is None or step > last_step:
                    self._logger.log(step, row)
            self._backlog = ()
            while not self._has_ended and (queue_item := self._queue.get()) is not _END:
                if queue_item is _COMMIT:
                    self._logger.commit()
                    self._logger_states.store(self._name, self._run.saved_state)
                elif last_step is None or queue_item[0] > last_step:
                    self._logger.log(*queue_item)
                self._queue.task_done()
            self._logger.close()
            self._logger_states.store(self._name, self._run.saved_state)
        except Exception as error:
            # No exception of a service or its library may reach the training.
            if not self._has_ended:
                first_line = next(iter(str(error).strip().splitlines()), "")
                self._abandon(f"{type(error).__name__}: {first_line}")
            with contextlib.suppress(Exception):
                self._logger.close()
            with contextlib.suppress(OSError):
                self._logger_states.store(self._name, self._run.saved_state)


def end_all(feeds: Iterable[Feed]) -> None:
    """Ends all feeds in parallel and waits for them, at most `CLOSE_S` seconds in total."""
    feeds = list(feeds)
    for feed in feeds:
        feed.end()
    deadline = time.monotonic() + CLOSE_S
    for feed in feeds:
        feed.wait(deadline)
