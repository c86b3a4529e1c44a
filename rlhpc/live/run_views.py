"""Views of single runs for the pages: curves, evaluations, samples, videos, logs and traced steps, as JSON values."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.jobs.status import log_files, read_log_tail
from rlhpc.language.reporting.sample_pages import previews_path, read_samples, samples_path
from rlhpc.live.metric_table import MAX_POINTS, MetricCurve, MetricTable, combine_seeds, cut_range, smooth, thin
from rlhpc.metrics.provenance import read_provenance, resumes_with_changes, typed_result, with_pass_at
from rlhpc.runs.compare import seed_groups
from rlhpc.runtime.errors import UserError
from rlhpc.runtime.files import is_number
from rlhpc.runtime.text import printable

if TYPE_CHECKING:
    from rlhpc.tracing.analysis import StepAnalysis
    from rlhpc.tracing.model import Trace

#: Seconds within which the charts of a page share one look at a metrics.jsonl.
_UPDATE_S = 1.0
#: Maximum seconds for which `MetricTables.close` waits.
_CLOSE_S = 5.0
#: Maximum memory of the metric tables that are kept, in bytes.
_MAX_TABLE_BYTES = 512 << 20
#: Bytes of metrics.jsonl that a request reads itself; longer files are sampled first, and read by a thread.
_READ_AT_ONCE = 4 << 20
#: Points of all curves of a chart together, and minimum number of points of a curve.
_MAX_CHART_POINTS, _MIN_POINTS = 8 * MAX_POINTS, 200
#: Maximum number of samples of one answer, of characters of one text, and of lines of a log.
_MAX_SAMPLES, _MAX_CHARACTERS, _MAX_LOG_LINES = 100, 100_000, 5000
#: Maximum number of images of one sample.
_MAX_IMAGES = 32
#: Suffixes of pictures and videos that a page may show → their media types.
MEDIA_TYPES = {
    ".mp4": "video/mp4",
    ".gif": "image/gif",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".svg": "image/svg+xml",
}
#: Folders of a run with pictures and videos.
_MEDIA_FOLDERS = ("eval", "play", "report/curves")
#: Metrics that the page shows first, if the chosen runs have them.
FIRST_METRICS = (
    "train/episode_return", "train/success_once", "train/reward", "train/accuracy", "eval/return_mean", "eval/success_once",
    "eval/accuracy", "train/loss", "train/kl", "train/approx_kl", "train/entropy", "train/grad_norm", "time/step_s",
)  # fmt: skip


@dataclass(frozen=True)
class CurveRequest:
    """Request for one metric of several runs.

    Attributes:
        metric: Name of the metric.
        against: Metric of the x axis.
        smoothing: Share of the points over which the curve is averaged, from 0 to 1.
        low, high: Range of the x axis; None leaves that end open.
        is_grouped: Whether runs that differ only in their seeds become one curve with a band.
    """

    metric: str
    against: str = "step"
    smoothing: float = 0.0
    low: float | None = None
    high: float | None = None
    is_grouped: bool = False


class MetricTables:
    """Metric tables of the runs that were asked for last.

    A request takes about as long for long runs as for short ones: it reads a few megabytes at most, takes samples of the other
    runs, and leaves it to a thread to read these in full.
    """

    def __init__(self) -> None:
        self._tables: OrderedDict[Path, MetricTable] = OrderedDict()
        self._updated_at: dict[Path, float] = {}
        self._groups: tuple[tuple[Any, ...], dict[str, list[str]]] = ((), {})
        self._resumes: dict[Path, tuple[int, list[tuple[int, str]]]] = {}
        self._lock = threading.Lock()
        self._unread_paths: dict[Path, None] = {}
        self._reader: threading.Thread | None = None
        self._is_closed = False

    def names(self, runs: Mapping[str, RunPaths]) -> dict[str, list[str]]:
        """Returns all metrics of the runs, and those of them that a reader wants to see first."""
        with self._lock:
            names = sorted({name for table in self._update_tables(runs).values() for name in table.names()})
        first_names = [name for name in FIRST_METRICS if name in names]
        return {"names": names, "first": first_names or [name for name in names if name.startswith("train/")][:6]}

    def curves(
        self, runs: Mapping[str, RunPaths], labels: Mapping[str, str], request: CurveRequest
    ) -> list[dict[str, Any]]:
        """Returns the curves of a chart; `is_sample` says that a run of a curve has not been read in full yet.

        Args:
            runs: Name → files of each run.
            labels: Name of a run → its label in a sweep, "" outside a sweep.
            request: The metric, and how it is shown.
        """
        with self._lock:
            tables = self._update_tables(runs)
            curves = {name: table.curve(request.metric, request.against) for name, table in tables.items()}
            marks = {name: self._resume_marks(runs[name], table, request.against) for name, table in tables.items()}
            sampled_runs = {name for name, table in tables.items() if table.is_sample}
        groups = self._seed_groups(runs, labels) if request.is_grouped else {name: [name] for name in runs}
        max_points = min(MAX_POINTS, max(_MIN_POINTS, _MAX_CHART_POINTS // max(1, len(groups))))
        lines = []
        for group, members in groups.items():
            smooth_curves = [smooth(curves[name], request.smoothing) for name in members]
            curve = combine_seeds(smooth_curves) if request.is_grouped else smooth_curves[0]
            lines.append(
                {
                    "name": group,
                    "runs": members,
                    "marks": [mark for name in members for mark in marks[name]],
                    "is_sample": not sampled_runs.isdisjoint(members),
                    **_visible(curve, request, max_points).to_json(),
                }
            )
        return lines

    def _seed_groups(self, runs: Mapping[str, RunPaths], labels: Mapping[str, str]) -> dict[str, list[str]]:
        """Returns the groups of runs that differ only in their seeds; compares them again after a change of a file."""
        key = tuple(
            (name, labels.get(name, ""), _mtime_ns(paths.config), _mtime_ns(paths.provenance))
            for name, paths in runs.items()
        )
        if self._groups[0] != key:
            self._groups = key, seed_groups(runs, labels)
        return self._groups[1]

    def _resume_marks(self, paths: RunPaths, table: MetricTable, against: str) -> list[dict[str, Any]]:
        """Returns where the run was resumed with another configuration: `x`, on the axis of `against`, and `text`."""
        resumes = self._resumes.get(paths.root, (-1, []))[1]
        if not resumes:
            return []
        axis = table.curve(against)
        marks = []
        for step, changes in resumes:
            index = int(axis.x.searchsorted(step, "right")) - 1
            if index >= 0:
                marks.append({"x": float(axis.y[index]), "text": f"{paths.root.name} from step {step} on: {changes}"})
        return marks

    def _update_tables(self, runs: Mapping[str, RunPaths]) -> dict[str, MetricTable]:
        """Returns the tables of runs, with the rows that were written since the last call."""
        num_bytes = 0
        for paths in runs.values():
            path, table = paths.metrics, self._tables.get(paths.metrics)
            if time.monotonic() - self._updated_at.get(path, -math.inf) <= _UPDATE_S:
                continue
            self._updated_at[path] = time.monotonic()
            mtime_ns = _mtime_ns(paths.provenance)
            if self._resumes.get(paths.root, (-1, []))[0] != mtime_ns:
                self._resumes[paths.root] = mtime_ns, resumes_with_changes(read_provenance(paths))
            if table is not None and not table.is_sample:
                table.update()
                continue
            size = _size(path)
            if num_bytes + size <= _READ_AT_ONCE:
                num_bytes += size
                self._tables[path] = MetricTable(path)
                self._tables[path].update()
            else:
                if table is None:
                    self._tables[path] = MetricTable.sample(path)
                self._unread_paths[path] = None
        for paths in runs.values():
            self._tables.move_to_end(paths.metrics)
        self._drop_tables(len(runs))
        if self._unread_paths and not self._is_closed and (self._reader is None or not self._reader.is_alive()):
            self._reader = threading.Thread(target=self._read_tables, daemon=True, name="metrics-reader")
            self._reader.start()
        return {name: self._tables[paths.metrics] for name, paths in runs.items()}

    def close(self) -> None:
        """Waits until the run that is being read has been read, for some seconds at most; no other is read."""
        with self._lock:
            self._is_closed = True
            reader = self._reader
        if reader is not None:
            reader.join(_CLOSE_S)

    def _drop_tables(self, num_requested: int) -> None:
        """Drops the least recently requested tables until the others fit into memory."""
        while len(self._tables) > num_requested and self._is_full():
            path, _ = self._tables.popitem(last=False)
            self._updated_at.pop(path, None)

    def _is_full(self) -> bool:
        return sum(table.nbytes for table in self._tables.values()) > _MAX_TABLE_BYTES

    def _read_tables(self) -> None:
        """Reads sampled runs in full, one after the other."""
        while True:
            with self._lock:
                if self._is_closed or self._is_full():
                    self._unread_paths.clear()  # they remain samples
                path = next(iter(self._unread_paths), None)
                if path is None:
                    self._reader = None
                    return
                del self._unread_paths[path]
                if path not in self._tables or not self._tables[path].is_sample:
                    continue
            table = MetricTable(path)
            table.update()
            with self._lock:
                if path in self._tables:
                    self._tables[path] = table


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _visible(curve: MetricCurve, request: CurveRequest, max_points: int) -> MetricCurve:
    if curve.low is not None:  # few points
        return curve
    low = -float("inf") if request.low is None else request.low
    high = float("inf") if request.high is None else request.high
    return thin(cut_range(curve, low, high), max_points)


def evaluations(paths: RunPaths) -> list[dict[str, Any]]:
    """Returns a run's evaluations by suite and step: the numbers of each result, and the files with samples and a video."""
    results = []
    for path in paths.eval_results():
        result, _ = typed_result(read_json_file(path) or {})
        if "global_step" not in result:
            continue
        results.append(
            {
                "step": int(result["global_step"]),
                "suite": str(result.get("suite", path.stem)),
                "numbers": {name: value for name, value in with_pass_at(result).items() if is_number(value)},
                "samples": _name_if_there(paths, samples_path(path)),
                "video": _name_if_there(paths, path.with_suffix(".mp4")),
            }
        )
    return sorted(results, key=lambda result: (result["suite"], result["step"]))


def _name_if_there(paths: RunPaths, path: Path) -> str:
    return str(path.relative_to(paths.root)) if path.is_file() else ""


def media(paths: RunPaths) -> list[str]:
    """Returns the names of the run's videos and pictures, relative to its folder."""
    files = (path for folder in _MEDIA_FOLDERS for path in sorted((paths.root / folder).rglob("*")))
    previews = {previews_path(path) for path in paths.eval_results()}
    files = (path for path in files if path.parent not in previews)  # the samples show them
    return [str(path.relative_to(paths.root)) for path in files if path.suffix in MEDIA_TYPES and path.is_file()]


def media_file(paths: RunPaths, name: str) -> Path:
    """Returns the path of a video or picture of a run.

    Raises:
        UserError: The run has no such file, or the file is a link to outside the run.
    """
    path = (paths.root / name).resolve()
    is_inside = path.is_relative_to(paths.root.resolve()) and name.startswith(tuple(f"{f}/" for f in _MEDIA_FOLDERS))
    if not is_inside or path.suffix not in MEDIA_TYPES or not path.is_file():
        raise UserError(f"{paths.root.name} has no video or picture {name}")
    return path


@dataclass(frozen=True)
class SampleQuery:
    """Query for samples of an evaluation.

    Attributes:
        text: Text that the prompt, the response or the transcript contains; case does not matter.
        verdict: `right`, `wrong`, or "" for both.
        min_reward, max_reward: Range of the reward; None leaves that end open.
        start: Number of matching samples to skip.
        count: Maximum number of samples to return.
    """

    text: str = ""
    verdict: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    start: int = 0
    count: int = 20

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Returns whether a sample fits the query."""
        if self.verdict and (self.verdict == "right") != bool(row["right"]):
            return False
        if self.min_reward is not None or self.max_reward is not None:
            low, high = (
                -math.inf if self.min_reward is None else self.min_reward,
                math.inf if self.max_reward is None else self.max_reward,
            )
            if not is_number(row.get("reward")) or not low <= row["reward"] <= high:
                return False
        text = self.text.lower()
        return not text or text in f"{row['prompt']}\n{row['response']}".lower() or text in _transcript(row).lower()


def _transcript(row: Mapping[str, Any]) -> str:
    return json.dumps(row["episode"], ensure_ascii=False) if "episode" in row else ""


def find_samples(paths: RunPaths, result: str, query: SampleQuery) -> dict[str, Any]:
    """Returns the samples of an evaluation that fit a query, and their number.

    Args:
        paths: The run.
        result: Name of the samples file in the run folder, as `evaluations` returns it.
        query: The query.

    Raises:
        UserError: The run has no such samples, or they cannot be read.
    """
    files = {_name_if_there(paths, samples_path(path)): path for path in paths.eval_results()}
    if not result or result not in files:
        raise UserError(f"{paths.root.name} has no samples {result}")
    rows: list[Any] = []
    num_matches = num_samples = 0
    try:
        for row in read_samples(paths.root / result):
            num_samples += 1
            if query.matches(row):
                if query.start <= num_matches < query.start + min(query.count, _MAX_SAMPLES):
                    rows.append(_readable(row | _find_images(paths, previews_path(files[result]), row)))
                num_matches += 1
    except OSError as error:
        raise UserError(f"{result} cannot be read: {error.strerror}") from None
    return {"rows": rows, "matches": num_matches, "samples": num_samples}


def _find_images(paths: RunPaths, folder: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{"images": paths}` with the row's image files, relative to the run folder; {} for a row without images."""
    if "images" not in row:
        return {}
    names = []
    for name in row["images"][:_MAX_IMAGES]:
        with contextlib.suppress(UserError, OSError, ValueError):
            file = media_file(paths, str((folder / name).relative_to(paths.root)))
            if file.parent == folder.resolve():
                names.append(str((folder / name).relative_to(paths.root)))
    return {"images": names}


def _readable(value: Any) -> Any:
    """Returns a JSON value whose texts are short enough for a page and have no invisible control characters."""
    if isinstance(value, str):
        return printable(value[:_MAX_CHARACTERS])
    if isinstance(value, dict):
        return {printable(str(name)): _readable(item) for name, item in value.items()}
    return [_readable(item) for item in value] if isinstance(value, list) else value


def logs(paths: RunPaths) -> list[str]:
    """Returns the labels of a run's logs, such as `driver` and `rollout-0`, sorted."""
    return sorted(set(log_files(paths).values()))


def log_tail(paths: RunPaths, label: str, num_lines: int) -> list[str]:
    """Returns the last lines of the logs with a label, without characters that control a terminal.

    Raises:
        UserError: The run has no such log.
    """
    files = [path for path, file_label in log_files(paths).items() if file_label == label]
    if not files:
        raise UserError(f"{paths.root.name} has no log {label!r}")
    lines: Iterator[str] = (line for path in files for line in read_log_tail(path, min(num_lines, _MAX_LOG_LINES)))
    return [printable(line[:_MAX_CHARACTERS]) for line in lines]


class StepTraces:
    """Traced steps of the run that was asked for last, read again when its files have changed."""

    def __init__(self) -> None:
        self._signature: Any = None
        self._steps: tuple[Trace, dict[int, StepAnalysis]] | None = None
        self._lock = threading.Lock()

    def rows(self, paths: RunPaths) -> list[dict[str, Any]]:
        """Returns a row for each traced step (`step_rows`); [] for a run without a trace."""
        from rlhpc.runs.step_pages import read_config, step_rows

        trace_analysis = self._read_trace(paths)
        return [] if trace_analysis is None else step_rows(trace_analysis[1], read_config(paths))

    def page(self, paths: RunPaths, step: int) -> str:
        """Returns the page of a traced step, as `rlhpc report` writes it.

        Raises:
            UserError: The step was not traced.
        """
        from rlhpc.runs.step_pages import read_config, render_step

        trace_analysis = self._read_trace(paths)
        if trace_analysis is None or step not in trace_analysis[1]:
            raise UserError(f"step {step} of this run was not traced")
        return render_step(trace_analysis[0], trace_analysis[1][step], read_config(paths))

    def _read_trace(self, paths: RunPaths) -> tuple[Trace, dict[int, StepAnalysis]] | None:
        from rlhpc.runs.step_pages import read_steps
        from rlhpc.tracing.read import trace_files

        with self._lock:
            stats = [(path, path.stat()) for path in trace_files(paths.root)]
            signature = paths.root, [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
            if signature != self._signature:
                self._steps, self._signature = read_steps(paths), signature
            return self._steps
