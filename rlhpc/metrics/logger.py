"""Metric rows of a run: metrics.jsonl (one row per step, the public format), the loggers that receive the same rows, and the
progress display.

Seeds and configuration determine all values of a row except those in the namespace `time/`. Apart from these, a run that was
killed and resumed writes the same rows as a run that was never killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, SupportsFloat, TextIO

from tqdm import tqdm

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.loggers import RunFacts
from rlhpc.metrics.loggers.feed import Feed, LoggerStates, end_all
from rlhpc.metrics.loggers.registry import build_loggers
from rlhpc.metrics.phase_times import active_s
from rlhpc.runtime.disk_errors import storage_error
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import is_count, open_file, read_file, read_json, rename, replace_durably

#: Maximum size of a metrics.jsonl that can be read.
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
            resume_step: Step from which the run continues; rows of later steps are dropped. None for a fresh run, which moves
                existing rows to `metrics.<n>.jsonl`.
            kwargs: Name of a logger → its keyword arguments.
            config: The run's configuration without secrets, for the loggers.

        Raises:
            ConfigError: A backend does not exist, its package is missing, or it does not accept its arguments.
        """
        loggers = build_loggers(backends, kwargs or {})
        self._path = paths.metrics
        self._feeds: list[Feed] = []
        backlog_rows: list[tuple[int, Mapping[str, float]]] = []
        self._last_step: int | None = None
        self._last_row: dict[str, Any] = {}
        self._last_offset = 0
        self._committed_size = 0
        with self._convert_errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                _move_aside(self._path)
            else:
                backlog_rows = [(step, _to_numeric_row(row)) for step, row in self._truncate(resume_step)]
            self._file: IO[bytes] = self._path.open("ab")
            logger_states = LoggerStates(paths.loggers, is_new=resume_step is None)
        for name, logger in loggers.items():
            run_facts = RunFacts(paths.root.name, paths.root, config or {}, logger_states.state_of(name))
            self._feeds.append(Feed(name, logger, run_facts, logger_states, resume_step, backlog_rows))

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Adds metrics to the row of `step`. Readers then see the metrics; `commit` makes them durable.

        Args:
            step: Global step, never smaller than the last one.
            metrics: `{"train/episode_return": 21.0, ...}`; namespaces train/ rollout/ env/ eval/ time/.

        Raises:
            ValueError: A later step was logged before.
        """
        json_row = {name: _to_json_number(metric_value) for name, metric_value in metrics.items()}
        if self._last_step is not None and step < self._last_step:
            raise ValueError(f"metrics of step {step} come after those of step {self._last_step}")
        with self._convert_errors():
            if step == self._last_step:
                self._merge_values(json_row)
            else:
                self._last_step, self._last_row, self._last_offset = step, json_row, self._file.tell()
                self._file.write(_format_row(step, json_row))
                self._file.flush()
        if self._feeds:
            numeric_row = _to_numeric_row(json_row)
            for feed in self._feeds:
                feed.log(step, numeric_row)

    def commit(self) -> None:
        """Makes all rows durable. Call this before committing a checkpoint: its step's row must not be lost."""
        with self._convert_errors():
            self._file.flush()
            os.fsync(self._file.fileno())
        self._committed_size = self._file.tell()
        for feed in self._feeds:
            feed.commit()

    def close(self) -> None:
        """Commits all rows and closes the file; the loggers have a minute to finish."""
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

    def _merge_values(self, values: dict[str, Any]) -> None:
        step = self._last_step
        assert step is not None
        self._last_row = {**self._last_row, **values}
        line = _format_row(step, self._last_row)
        if self._last_offset < self._committed_size:
            # The committed row must stay on disk at every moment.
            earlier_rows = self._path.read_bytes()[: self._last_offset]
            self._file.close()
            replace_durably(self._path, earlier_rows + line)
            self._file = self._path.open("ab")
            self._committed_size = self._file.tell()
            return
        self._file.truncate(self._last_offset)
        self._file.write(line)
        self._file.flush()

    def _truncate(self, resume_step: int) -> list[tuple[int, dict[str, Any]]]:
        """Drops incomplete rows and rows after `resume_step`; returns the remaining (step, row).

        Of two rows of one step, the later one remains.
        """
        file_bytes = self._path.read_bytes() if self._path.exists() else b""
        rows = {step: row for step, row in _parse_rows(file_bytes) if step <= resume_step}
        kept_bytes = b"".join(_format_row(step, rows[step]) for step in sorted(rows))
        if kept_bytes != file_bytes:
            replace_durably(self._path, kept_bytes)
        if rows:
            self._last_step = max(rows)
            self._last_row = rows[self._last_step]
            self._last_offset = len(kept_bytes) - len(_format_row(self._last_step, self._last_row))
        self._committed_size = len(kept_bytes)
        return sorted(rows.items())

    @contextlib.contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Converts an OSError of the block into an error that names the metrics file."""
        try:
            yield
        except OSError as error:
            raise storage_error(error, self._path, "metrics") from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics.jsonl, sorted by step, without incomplete or invalid lines; [] if the file is missing.

    NaN and infinite values are None.

    Raises:
        ConfigError: The file cannot be read, is not a regular file, or is larger than 2 GiB.
    """
    try:
        file_bytes = read_file(Path(path), _MAX_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return rows_in(file_bytes)


def read_last_metrics(path: Path, tail_bytes: int = 1 << 16) -> list[dict[str, Any]]:
    """Returns the rows at the end of a metrics.jsonl, in the form of `read_metrics`; [] if the file cannot be read.

    Args:
        path: The file.
        tail_bytes: Number of bytes to read.
    """
    try:
        with open_file(Path(path)) as file:
            file.seek(max(0, file.seek(0, 2) - tail_bytes))
            return rows_in(file.read(tail_bytes))
    except OSError:
        return []


def rows_in(raw_lines: bytes) -> list[dict[str, Any]]:
    """Returns the rows in a part of a metrics.jsonl that begins at a line's start, in the form of `read_metrics`."""
    rows = dict(_parse_rows(raw_lines))
    return [{"step": step, **_rename_metrics(rows[step])} for step in sorted(rows)]


#: Metric names of earlier versions → current names.
_FORMER_NAMES = {
    "train/success_rate": "train/success_once",
    "rollout/success_rate": "rollout/success_once",
    "eval/success_rate": "eval/success_at_end",
}


def _rename_metrics(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row in which metrics of earlier versions have their current names."""
    if not _FORMER_NAMES.keys() & row.keys():
        return row
    return {_FORMER_NAMES.get(name, name): metric_value for name, metric_value in row.items()}


def series(rows: Sequence[Mapping[str, Any]], name: str, against: str = "step") -> tuple[list[float], list[float]]:
    """Returns the columns `against` and `name` as x and y, from the rows that have both."""
    pairs = [
        (float(row[against]), float(row[name])) for row in rows if has_number(row, name) and has_number(row, against)
    ]
    return [x for x, _ in pairs], [y for _, y in pairs]


def has_number(row: Mapping[str, Any], name: str) -> bool:
    """Returns whether a row has a finite number under this name."""
    metric = row.get(name)
    return isinstance(metric, (int, float)) and math.isfinite(metric)


def _to_json_number(raw_number: SupportsFloat) -> int | float | None:
    if isinstance(raw_number, (bool, int)):
        return int(raw_number)
    float_value = float(raw_number)
    return float_value if math.isfinite(float_value) else None


def _to_numeric_row(json_row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row for loggers: None (a non-finite value) becomes NaN, other types are dropped."""
    row = {name: math.nan if metric_value is None else metric_value for name, metric_value in json_row.items()}
    return {name: metric_value for name, metric_value in row.items() if isinstance(metric_value, (int, float))}


def _format_row(step: int, json_row: Mapping[str, Any]) -> bytes:
    row = {"step": step, **{name: json_row[name] for name in sorted(json_row)}}
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _parse_rows(raw_lines: bytes) -> list[tuple[int, dict[str, Any]]]:
    rows: list[tuple[int, dict[str, Any]]] = []
    for line in raw_lines.splitlines():
        try:
            row = read_json(line)
            step = row.pop("step")
        except (ValueError, KeyError, AttributeError, TypeError):
            continue
        if is_count(step):
            rows.append((step, row))
    return rows


def _move_aside(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    backup_paths = (path.with_name(f"{path.stem}.{backup_number}{path.suffix}") for backup_number in itertools.count(1))
    rename(path, next(backup for backup in backup_paths if not backup.exists()))


Clock = Callable[[], float]
_BAR = "{desc} {percentage:3.0f}%|{bar}| {unit} {n_fmt}/{total_fmt} [{elapsed}, ETA {remaining}{postfix}]"


@contextlib.contextmanager
def quiet_terminal() -> Iterator[None]:
    """Prevents the terminal from printing `^C` into its output while the block runs; does nothing without a terminal."""
    import termios

    try:
        fd = sys.stdin.fileno()
        terminal_settings = termios.tcgetattr(fd)
        is_in_foreground = os.tcgetpgrp(fd) == os.getpgrp()
    except (OSError, ValueError, AttributeError, termios.error):
        is_in_foreground = False
    if not is_in_foreground:  # changing terminal settings from the background would stop the process
        yield
        return
    quiet_settings = list(terminal_settings)
    quiet_settings[3] &= ~termios.ECHOCTL
    termios.tcsetattr(fd, termios.TCSADRAIN, quiet_settings)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, termios.error):
            if os.tcgetpgrp(fd) == os.getpgrp():
                termios.tcsetattr(fd, termios.TCSADRAIN, terminal_settings)


#: Displayed facts of a step, in this order.
_FACT_ORDER = ("return", "eval", "reward", "accuracy", "loss", "failed", "tokens", "rate")
#: (fact, metric, text format). If a row has two metrics of a fact, the display shows the later one.
_FACTS = (
    ("return", "train/episode_return", "return {:.1f}"),
    ("eval", "eval/return_mean", "eval {:.1f}"),
    ("reward", "train/reward", "reward {:.3f}"),
    ("accuracy", "train/accuracy", "accuracy {:.3f}"),
    ("loss", "train/loss", "loss {:.3f}"),
    ("tokens", "time/train_tokens_per_s", "{:,.0f} tokens/s"),
    ("tokens", "time/tokens_per_s", "{:,.0f} tokens/s"),
    ("rate", "time/env_steps_per_s", "{:,.0f} env steps/s"),
)
_NAN_BEFORE_FIRST_EPISODE = ("return", "eval", "rate")


class ProgressBar:
    """Progress display of a training run: step, return, env steps per second, time left.

    On a terminal it is a bar; elsewhere, one line about every `interval_s` seconds and one at the end.
    """

    def __init__(
        self,
        total: int,
        initial: int = 0,
        *,
        name: str = "train",
        unit: str = "step",
        stream: TextIO | None = None,
        interval_s: float = 10.0,
        clock: Clock = active_s,
    ) -> None:
        """Starts the bar.

        Args:
            total: Number of steps of the run.
            initial: Number of steps done before a resume.
            name: Label in front of the bar.
            unit: Unit of the count.
            stream: Output stream; stderr by default.
            interval_s: Seconds between lines if the stream is not a terminal.
            clock: Function that returns monotonic seconds; tests pass another one.
        """
        self._stream = stream or sys.stderr
        self._total, self._initial, self._step = total, initial, initial
        self._name, self._unit, self._interval, self._clock = name, unit, interval_s, clock
        self._start = self._printed_at = clock()
        self._facts: dict[str, str] = {}
        self._has_unprinted_step = False
        self._bar: tqdm | None = None
        self._exit_stack = contextlib.ExitStack()
        if self._stream.isatty():
            self._exit_stack.enter_context(quiet_terminal())
            self._bar = tqdm(
                total=total,
                initial=initial,
                desc=name,
                unit=unit,
                file=self._stream,
                dynamic_ncols=True,
                bar_format=_BAR,
            )

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Shows that `step` is done.

        Args:
            step: Global step.
            metrics: The step's row; the metrics in `_FACTS` are shown.
        """
        progress_facts = self._facts | _format_facts(metrics or {})
        self._facts = {name: progress_facts[name] for name in _FACT_ORDER if name in progress_facts}
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(self._facts.values()), refresh=False)
            self._bar.update(step - self._step)
        self._step = step
        self._has_unprinted_step = True
        if self._bar is None and self._clock() - self._printed_at >= self._interval:
            self._print_line()

    def message(self, text: str) -> None:
        """Prints a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the bar, or prints the last line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
            self._exit_stack.close()
        elif self._has_unprinted_step:
            self._print_line()

    def eta_s(self) -> float | None:
        """Returns the seconds left at the average pace so far; None before the first step."""
        num_done = self._step - self._initial
        return (self._clock() - self._start) / num_done * max(self._total - self._step, 0) if num_done > 0 else None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print_line(self) -> None:
        eta = self.eta_s()
        fragments = [f"{self._name}: {self._unit} {self._step}/{self._total}", *self._facts.values()]
        if eta is not None and self._step < self._total:
            fragments.append(f"ETA {tqdm.format_interval(eta)}")
        print(", ".join(fragments), file=self._stream, flush=True)
        self._printed_at, self._has_unprinted_step = self._clock(), False


def _format_facts(metrics: Mapping[str, float]) -> dict[str, str]:
    fact_values = [(name, metrics.get(metric), fact_format) for name, metric, fact_format in _FACTS]
    fact_texts = {
        name: fact_format.format(fact_value)
        for name, fact_value, fact_format in fact_values
        if fact_value is not None and (fact_value == fact_value or name not in _NAN_BEFORE_FIRST_EPISODE)
    }
    if "reward" in fact_texts:
        fact_texts.pop("loss", None)  # a language model's row has both, and the reward is more informative
    if failed_rewards := metrics.get("rollout/failed_rewards"):
        fact_texts["failed"] = (
            f"{failed_rewards:.0f} of {metrics.get('rollout/step_samples', failed_rewards):.0f} not judged"
        )
    return fact_texts
