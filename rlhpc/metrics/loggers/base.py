"""What a logger is, and what it is told about the run."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlhpc.runtime.lookup import required

_switching = threading.Lock()
_printing = 0
_stdout = sys.stdout


@dataclass(frozen=True)
class RunFacts:
    """The run whose rows a logger gets."""

    name: str
    """`runner.name`."""
    folder: Path
    """The run folder; a logger keeps its files in a folder of its own below it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration, nested, without secrets."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What the logger must know when the run is resumed, such as the service's id of the run: JSON-able, kept in
    `loggers.json` after `open`, `commit` and `close`. Empty at a fresh start."""


class RunLogger(Protocol):
    """A place for metric rows. Built with what `runner.logger.kwargs` has for its name.

    All methods are called on one thread, which is not the one that trains. Whatever they raise ends this logger with
    a warning; the run and the other loggers go on.
    """

    def open(self, run: RunFacts, resume_step: int | None) -> int | None:
        """Begins, or goes on where the run is resumed.

        Args:
            run: The run.
            resume_step: The step that the run continues from; None for a fresh start.

        Returns:
            The last step that is there already. Rows up to it are not given to `log`; those after it that
            metrics.jsonl has are given first. None: nothing is there.
        """

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Adds a row; values may be NaN. Steps ascend; a step may come twice, with other metrics."""

    def commit(self) -> None:
        """A checkpoint is about to be written: what was logged should not be lost."""

    def close(self) -> None:
        """The end of this start; the run may be resumed later. Also called after a failure of `open` or `log`."""


class ServiceLogger:
    """What the loggers share whose library has an object for a run, with `log` and `finish`; `open` puts it into `_run`."""

    _run: Any = None

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def commit(self) -> None:
        """The library writes by itself; what a killed start had in memory is handed over again at a resume."""

    def close(self) -> None:
        if self._run is not None:
            with printing_to_stderr():
                self._run.finish()


def require(name: str) -> Any:
    """The package that a logger is called after, which not everybody has.

    Raises:
        ConfigError: It is not there; says what to install.
    """
    return required(name, f"logger {name!r} needs a package that cannot be imported", name)


@contextlib.contextmanager
def printing_to_stderr() -> Iterator[None]:
    """For libraries that print: standard output belongs to rlhpc's own results. Several threads may be in here at once, and
    none waits for another, whose service may hang: the last one to leave puts standard output back."""
    global _printing, _stdout
    with _switching:
        if not _printing:
            _stdout, sys.stdout = sys.stdout, sys.stderr
        _printing += 1
    try:
        yield
    finally:
        with _switching:
            _printing -= 1
            if not _printing:
                sys.stdout = _stdout
