"""Metric rows: metrics.jsonl (one row a step, the public format) and TensorBoard.

Everything a row holds is a function of seeds and configuration, except the namespace `time/`: a killed and resumed
run writes the same rows as one that was never killed, apart from `time/`.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, SupportsFloat

from rlhpc.checkpoint.durable import replace_durably
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.paths import RunPaths

BACKENDS = ("jsonl", "tensorboard")


class MetricLogger:
    """Appends metric rows; `log` twice with one step merges into one row.

    metrics.jsonl is written whatever the backends are: resuming and the report depend on it.
    """

    def __init__(
        self,
        paths: RunPaths,
        backends: Sequence[str] = BACKENDS,
        resume_step: int | None = None,
    ) -> None:
        """Open the run's metric files.

        Args:
            paths: The run.
            backends: From `BACKENDS`.
            resume_step: Step the run continues from: rows of later steps are dropped. None: a fresh run; rows that
                are there are kept in `metrics.<n>.jsonl`.

        Raises:
            ConfigError: A backend does not exist.
        """
        for name in backends:
            if name not in BACKENDS:
                near = difflib.get_close_matches(name, BACKENDS, n=1)
                raise ConfigError(
                    f"runner.logger.logger_backends: {name!r} is not a metrics backend; choose from "
                    f"{', '.join(BACKENDS)}" + (f" (did you mean {near[0]!r}?)" if near else "")
                )
        self._path = paths.metrics
        self._tensorboard_dir = paths.tensorboard if "tensorboard" in backends else None
        self._tensorboard: Any = None
        self._last_step: int | None = None
        self._last_row: dict[str, Any] = {}
        self._last_offset = 0
        self._committed = 0
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                _set_aside(self._path)
            else:
                self._truncate(resume_step)
            self._file: IO[bytes] = self._path.open("ab")
        except OSError as error:
            raise self._failed(error) from error
        self._purge_step = None if resume_step is None else resume_step + 1

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Add metrics to the row of `step`; visible to readers at the return, durable after `commit`.

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
        self._log_tensorboard(step, values)

    def commit(self) -> None:
        """Make all rows durable. Call before a checkpoint is committed: its step's row must not be lost."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        self._committed = self._file.tell()
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def close(self) -> None:
        """Commit and close."""
        if not self._file.closed:
            self.commit()
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

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
            # The row was promised to be on disk, so it must not be missing for a moment either.
            head = self._path.read_bytes()[: self._last_offset]
            self._file.close()
            replace_durably(self._path, head + line)
            self._file = self._path.open("ab")
            self._committed = self._file.tell()
            return
        self._file.truncate(self._last_offset)
        self._file.write(line)
        self._file.flush()

    def _truncate(self, resume_step: int) -> None:
        """Keep whole rows up to `resume_step`; the last one wins where a step occurs twice."""
        raw = self._path.read_bytes() if self._path.exists() else b""
        rows = {step: row for step, row in _parse(raw) if step <= resume_step}
        kept = b"".join(_line(step, rows[step]) for step in sorted(rows))
        if kept != raw:
            replace_durably(self._path, kept)
        if rows:
            self._last_step = max(rows)
            self._last_row = rows[self._last_step]
            self._last_offset = len(kept) - len(_line(self._last_step, self._last_row))
        self._committed = len(kept)

    def _log_tensorboard(self, step: int, values: dict[str, Any]) -> None:
        if self._tensorboard_dir is None:
            return
        if self._tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step: TensorBoard hides what a killed segment logged beyond the step this one continues from.
            self._tensorboard = SummaryWriter(str(self._tensorboard_dir), purge_step=self._purge_step, flush_secs=30)
        for name, value in values.items():
            self._tensorboard.add_scalar(name, float("nan") if value is None else value, step)

    def _failed(self, error: OSError) -> RlhpcError:
        return RlhpcError(
            f"{error.filename or self._path}: metrics could not be written: {error.strerror}. Make room or fix the "
            "permissions, then continue with: rlhpc train <config> runner.resume_dir=auto"
        )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl, by step; a torn or foreign line is left out. Not-a-number and infinite values are None.

    A file that does not exist has no rows.
    """
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    rows = dict(_parse(raw))
    return [{"step": step, **rows[step]} for step in sorted(rows)]


def series(rows: Sequence[Mapping[str, Any]], name: str, against: str = "step") -> tuple[list[float], list[float]]:
    """Two columns of the rows that have both, as x and y."""
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


def _line(step: int, values: Mapping[str, Any]) -> bytes:
    row = {"step": step, **{name: values[name] for name in sorted(values)}}
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _parse(raw: bytes) -> list[tuple[int, dict[str, Any]]]:
    rows: list[tuple[int, dict[str, Any]]] = []
    for line in raw.splitlines():
        try:
            row = json.loads(line)
            step = row.pop("step")
        except (ValueError, KeyError, AttributeError, TypeError):
            continue
        if isinstance(step, int):
            rows.append((step, row))
    return rows


def _set_aside(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
