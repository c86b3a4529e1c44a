"""Metric rows: metrics.jsonl (one row per step, the public format), and the loggers that receive the same rows.

All values of a row are a function of seeds and configuration, except the namespace `time/`: apart from that, a run that
was killed and resumed writes the same rows as a run that was never killed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, SupportsFloat

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.loggers import RunFacts
from rlhpc.metrics.loggers.feed import Feed, Memory, end_all
from rlhpc.metrics.loggers.registry import build_loggers
from rlhpc.runtime.disk_errors import storage_error
from rlhpc.runtime.errors import ConfigError, StorageError
from rlhpc.runtime.files import is_count, open_file, read_file, read_json, replace_durably

#: Largest metrics.jsonl that is read.
_MAX_BYTES = 2 << 30

#: Default loggers of a run.
BACKENDS = ("jsonl", "tensorboard")


class MetricLogger:
    """Logger of metric rows; logging the same step twice merges both into one row.

    metrics.jsonl is always written, because resuming and the report depend on it. A failing backend is dropped with a
    warning; failing to write metrics.jsonl is an error.
    """

    def __init__(
        self,
        paths: RunPaths,
        backends: Sequence[str] = BACKENDS,
        resume_step: int | None = None,
        kwargs: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Opens the run's metric files.

        Args:
            paths: Files of the run.
            backends: Names of loggers, see `rlhpc.metrics.loggers`.
            resume_step: Step from which the run continues; rows of later steps are dropped. None for a fresh run; existing
                rows are moved to `metrics.<n>.jsonl`.
            kwargs: Name of a logger → its keyword arguments.
            config: The run's configuration without secrets, for the loggers.

        Raises:
            ConfigError: A backend does not exist, its package is missing, or it does not accept its arguments.
        """
        loggers = build_loggers(backends, kwargs or {})
        self._path = paths.metrics
        self._feeds: list[Feed] = []
        backlog: list[tuple[int, Mapping[str, float]]] = []
        self._last_step: int | None = None
        self._last_row: dict[str, Any] = {}
        self._last_offset = 0
        self._committed = 0
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                _set_aside(self._path)
            else:
                backlog = [(step, _numbers(row)) for step, row in self._truncate(resume_step)]
            self._file: IO[bytes] = self._path.open("ab")
            memory = Memory(paths.loggers, fresh=resume_step is None)
        except OSError as error:
            raise self._failed(error) from error
        for name, logger in loggers.items():
            run = RunFacts(paths.root.name, paths.root, config or {}, memory.recall(name))
            self._feeds.append(Feed(name, logger, run, memory, resume_step, backlog))

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Adds metrics to the row of `step`; readers see them when this returns, and they are durable after `commit`.

        Args:
            step: Global step, never smaller than the last one.
            metrics: `{"train/episode_return": 21.0, ...}`; namespaces train/ rollout/ env/ eval/ time/.
        """
        values = {name: _plain(value) for name, value in metrics.items()}
        if self._last_step is not None and step < self._last_step:
            raise ValueError(f"metrics of step {step} come after those of step {self._last_step}")
        try:
            if step == self._last_step:
                self._merge(values)
            else:
                self._last_step, self._last_row, self._last_offset = step, values, self._file.tell()
                self._file.write(_line(step, values))
                self._file.flush()
        except OSError as error:
            raise self._failed(error) from error
        if self._feeds:
            numbers = _numbers(values)
            for feed in self._feeds:
                feed.log(step, numbers)

    def commit(self) -> None:
        """Makes all rows durable. Call this before committing a checkpoint: its step's row must not be lost."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        self._committed = self._file.tell()
        for feed in self._feeds:
            feed.commit()

    def close(self) -> None:
        """Commits and closes; the loggers have a minute to finish."""
        try:
            if not self._file.closed:
                self.commit()
                self._file.close()
        finally:
            feeds, self._feeds = self._feeds, []
            end_all(feeds)

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _merge(self, values: dict[str, Any]) -> None:
        step = self._last_step
        assert step is not None
        self._last_row = {**self._last_row, **values}
        line = _line(step, self._last_row)
        if self._last_offset < self._committed:
            # The committed row must stay on disk at every moment.
            head = self._path.read_bytes()[: self._last_offset]
            self._file.close()
            replace_durably(self._path, head + line)
            self._file = self._path.open("ab")
            self._committed = self._file.tell()
            return
        self._file.truncate(self._last_offset)
        self._file.write(line)
        self._file.flush()

    def _truncate(self, resume_step: int) -> list[tuple[int, dict[str, Any]]]:
        """Keeps complete rows up to `resume_step`, and returns them; if a step occurs twice, the last row wins."""
        raw = self._path.read_bytes() if self._path.exists() else b""
        rows = {step: row for step, row in _parse(raw) if step <= resume_step}
        content = b"".join(_line(step, rows[step]) for step in sorted(rows))
        if content != raw:
            replace_durably(self._path, content)
        if rows:
            self._last_step = max(rows)
            self._last_row = rows[self._last_step]
            self._last_offset = len(content) - len(_line(self._last_step, self._last_row))
        self._committed = len(content)
        return sorted(rows.items())

    def _failed(self, error: OSError) -> StorageError:
        return storage_error(error, self._path, "metrics")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics.jsonl, by step; torn or foreign lines are omitted. NaN and infinite values are None.

    A missing file has no rows.

    Raises:
        ConfigError: It cannot be read, is not a regular file, or is too large for metrics.
    """
    try:
        raw = read_file(Path(path), _MAX_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return _rows(raw)


def read_last_metrics(path: Path, size: int = 1 << 16) -> list[dict[str, Any]]:
    """Returns the rows at the end of a metrics.jsonl, in the form of `read_metrics`; none from an unreadable file.

    Args:
        path: The file.
        size: Number of bytes to read.
    """
    try:
        with open_file(Path(path)) as file:
            file.seek(max(0, file.seek(0, 2) - size))
            return _rows(file.read(size))
    except OSError:
        return []


def _rows(raw: bytes) -> list[dict[str, Any]]:
    rows = dict(_parse(raw))
    return [{"step": step, **_renamed(rows[step])} for step in sorted(rows)]


#: Names that earlier versions gave to metrics.
_FORMER_NAMES = {
    "train/success_rate": "train/success_once",
    "rollout/success_rate": "rollout/success_once",
    "eval/success_rate": "eval/success_at_end",
}


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row under the current names."""
    if not _FORMER_NAMES.keys() & row.keys():
        return row
    return {_FORMER_NAMES.get(name, name): value for name, value in row.items()}


def series(rows: Sequence[Mapping[str, Any]], name: str, against: str = "step") -> tuple[list[float], list[float]]:
    """Returns the columns `against` and `name` as x and y, from the rows that have both."""
    pairs = [(float(row[against]), float(row[name])) for row in rows if _has(row, name) and _has(row, against)]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _has(row: Mapping[str, Any], name: str) -> bool:
    value = row.get(name)
    return isinstance(value, (int, float)) and math.isfinite(value)


def _plain(value: SupportsFloat) -> int | float | None:
    if isinstance(value, (bool, int)):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns a row for loggers: non-finite values are NaN; non-numbers in a foreign row are omitted."""
    numbers = {name: math.nan if value is None else value for name, value in values.items()}
    return {name: value for name, value in numbers.items() if isinstance(value, (int, float))}


def _line(step: int, values: Mapping[str, Any]) -> bytes:
    row = {"step": step, **{name: values[name] for name in sorted(values)}}
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _parse(raw: bytes) -> list[tuple[int, dict[str, Any]]]:
    rows: list[tuple[int, dict[str, Any]]] = []
    for line in raw.splitlines():
        try:
            row = read_json(line)
            step = row.pop("step")
        except (ValueError, KeyError, AttributeError, TypeError):
            continue
        if is_count(step):
            rows.append((step, row))
    return rows


def _set_aside(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
