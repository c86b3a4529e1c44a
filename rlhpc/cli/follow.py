"""Progress display of `rlhpc run`: one progress bar for the training, and the names of the phases before and after.

Snakemake's output in a file shows the running rules; the run's own metrics show the progress of training.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.logger import ProgressBar

#: Rule → description of its phase; `{step}` is a wildcard of the rule.
_PHASE_TEXTS = {
    "prepare": "planning",
    "sft": "starting the processes of the SFT run",
    "convert_sft": "exporting the SFT model",
    "demos": "recording demonstrations",
    "train_segment": "starting processes",
    "eval": "evaluating checkpoint {step}",
    "eval_start": "evaluating the start",
    "record": "recording episodes",
    "convert": "exporting the policy",
    "report": "writing the report",
}
_TRACKS_BY_RULE = {"sft": "sft", "train_segment": "run"}
_RULE = re.compile(r"^(?:local)?(?:rule|checkpoint) (\w+):$")
_FINISHED = re.compile(r"^Finished jobid: \d+ \(Rule: (\w+)\)")
_FAILED = re.compile(r"^Error in (?:rule|checkpoint) (\w+)")
_LOG = re.compile(r"^ +log: (\S+)")
#: Last line of Snakemake's block about a starting job; the output of its command may follow minutes later.
_BLOCK_END = re.compile(r"^    resources: ")
_QUEUED_JOB = re.compile(r"^rlhpc: (\S+ segment \d+: Slurm job .*)$")
#: Seconds between progress lines if the output is not a terminal.
_LINE_INTERVAL_S = 30.0


@dataclass
class RuleJob:
    """Job of a rule that runs or has failed.

    Attributes:
        rule: Name of the rule.
        wildcards: Wildcards of its files.
        log: Output of its command.
    """

    rule: str
    wildcards: dict[str, str] = field(default_factory=dict)
    log: Path | None = None

    def read_line(self, line: str, folder: Path) -> bool:
        """Stores the wildcards or the log path (below `folder`) from a line of the job's block.

        Returns whether the line has wildcards or a log path.
        """
        if log_match := _LOG.match(line):
            self.log = folder / log_match[1].rstrip(",")
            return True
        if line.strip().startswith("wildcards: "):
            assignments = (assignment.partition("=") for assignment in line.split(": ", 1)[1].split(", "))
            self.wildcards = {name: wildcard_value for name, _, wildcard_value in assignments}
            return True
        return False

    def phase_text(self) -> str:
        """Formats the job as the name of a phase, with the evaluation suite unless it is the default."""
        phase_text = _PHASE_TEXTS.get(self.rule, self.rule.replace("_", " "))
        phase_text = phase_text.format(step=self.wildcards.get("step", "")).rstrip()
        suite = self.wildcards.get("suite", "default")
        return phase_text if suite == "default" else f"{phase_text}, {suite}"


class WorkflowLog:
    """Incremental reader of Snakemake's output.

    Attributes:
        started_jobs: Jobs that started since the last `read`.
        running_counts: Running rules, with the number of jobs of each.
        failed_jobs: Jobs that failed, in the order of their failures.
        queued_job: Last line about a queued job.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self._path, self._folder, self._offset = path, folder, 0
        self._block: RuleJob | None = None
        self._is_failure = False
        self.started_jobs: list[RuleJob] = []
        self.running_counts: dict[str, int] = {}
        self.failed_jobs: list[RuleJob] = []
        self.queued_job = ""

    def read(self) -> list[RuleJob]:
        """Reads new lines; returns the jobs that started."""
        self.started_jobs = []
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new_bytes = file.read()
        except OSError:
            return []
        *lines, incomplete_line = new_bytes.split(b"\n")  # read again once it is complete
        self._offset += len(new_bytes) - len(incomplete_line)
        for line in lines:
            self._parse_line(line.decode("utf-8", "replace"))
        return self.started_jobs

    def _parse_line(self, line: str) -> None:
        if rule_match := _RULE.match(line):
            self._end_block()
            self._block, self._is_failure = RuleJob(rule_match[1]), False
        elif rule_match := _FAILED.match(line):
            self._end_block()
            self._block, self._is_failure = RuleJob(rule_match[1]), True
        elif rule_match := _FINISHED.match(line):
            self._end_block()  # the end of a short job may directly follow its start
            self._change_count(rule_match[1], -1)
        elif rule_match := _QUEUED_JOB.match(line):
            self.queued_job = rule_match[1]
        elif self._block is not None and self._block.read_line(line, self._folder):
            pass
        elif not line.startswith(" ") or _BLOCK_END.match(line):
            self._end_block()

    def _end_block(self) -> None:
        job, self._block = self._block, None
        if job is None or job.rule in ("all", "train"):
            return
        if self._is_failure:
            self.failed_jobs.append(job)
            self._change_count(job.rule, -1)
        else:
            self.started_jobs.append(job)
            self._change_count(job.rule, 1)

    def _change_count(self, rule: str, count_change: int) -> None:
        self.running_counts[rule] = max(0, self.running_counts.get(rule, 0) + count_change)


@dataclass
class Track:
    """Training run whose progress is displayed.

    Attributes:
        name: Label in front of the bar.
        paths: Files of the run.
        total: Steps of the complete run.
    """

    name: str
    paths: RunPaths
    total: int

    def row(self) -> dict[str, Any]:
        """Returns the last row of the run's metrics, with the mean return of the last evaluation as `eval/return_mean`."""
        row = last_row(self.paths.metrics)
        result_files = sorted(self.paths.eval_results("default"), key=lambda path: path.stat().st_mtime)
        if row and result_files:
            with contextlib.suppress(OSError, ValueError):
                row.setdefault("eval/return_mean", json.loads(result_files[-1].read_text()).get("return_mean"))
        return {name: metric_value for name, metric_value in row.items() if isinstance(metric_value, int | float)}


def last_row(path: Path, tail_bytes: int = 1 << 16) -> dict[str, Any]:
    """Returns the last complete row of a metrics file, read from its last `tail_bytes` bytes; {} without such a row."""
    try:
        with path.open("rb") as file:
            file_size = file.seek(0, 2)
            file.seek(max(0, file_size - tail_bytes))
            lines = file.read().split(b"\n")[:-1]
        row = json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else {}


class WorkflowFollower:
    """Progress display of a workflow: on a terminal, or in few lines in a file.

    Args:
        log: Snakemake's output.
        tracks: Training runs by the names in `_TRACKS_BY_RULE`.
        stream: Output stream; stderr by default.
    """

    def __init__(self, log: WorkflowLog, tracks: dict[str, Track], stream: TextIO | None = None) -> None:
        self._log, self._tracks = log, tracks
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._bar: ProgressBar | None = None
        self._track = ""
        self._rows_at_start = {name: last_row(track.paths.metrics) for name, track in tracks.items()}
        self._job: RuleJob | None = None
        self._printed_errors: set[str] = set()
        self._is_line_open = False
        self._started_at = time.monotonic()

    def update(self) -> None:
        """Reads new output and metrics, and updates the display."""
        for job in self._log.read():
            if (track := _TRACKS_BY_RULE.get(job.rule)) in self._tracks:
                if track != self._track:
                    self._close_bar()
                    self._track = str(track)
                    self._print_phase(job)
            elif self._bar is None:
                self._print_phase(job)
            else:
                self._job = job
        self._update_bar()
        if self._bar is None:
            self._update_detail()

    def _update_bar(self) -> None:
        track = self._tracks.get(self._track)
        if track is None:
            return
        row = track.row()
        step = int(row.get("step", 0))
        has_moved = row and row.get("time/wall_s") != self._rows_at_start[self._track].get("time/wall_s")
        if self._bar is None and has_moved and self._is_training():
            self._end_line()
            self._bar = ProgressBar(
                track.total, max(step - 1, 0), name=track.name, stream=self._stream, interval_s=_LINE_INTERVAL_S
            )
        if self._bar is None:
            return
        self._bar.update(step, row)
        if not self._is_training() and not self._has_next_segment():
            self._close_bar()
            if self._job is not None:
                self._print_phase(self._job)

    def _is_training(self) -> bool:
        return any(
            self._log.running_counts.get(rule) for rule, track in _TRACKS_BY_RULE.items() if track == self._track
        )

    def _has_next_segment(self) -> bool:
        """Returns whether another segment follows; between two segments no rule trains."""
        track = self._tracks[self._track]
        return int(last_row(track.paths.metrics).get("step", 0)) < track.total and not self._log.failed_jobs

    def _print_phase(self, job: RuleJob) -> None:
        """Prints the name of the current phase."""
        self._job = job
        phase_text = job.phase_text()
        if phase_text not in self._printed_errors:
            self._printed_errors.add(phase_text)
            self._end_line()
            self._stream.write(f"  {phase_text}" + ("" if self._is_terminal else "\n"))
            self._is_line_open = self._is_terminal
            self._stream.flush()

    def _update_detail(self) -> None:
        """Displays progress within a phase: the output of an evaluation, or the state of a queued job."""
        if self._job is None:
            return
        waiting_text = self._log.queued_job if self._job.rule in _TRACKS_BY_RULE else ""
        if not self._is_terminal and waiting_text and waiting_text not in self._printed_errors:
            self._printed_errors.add(waiting_text)
            self._stream.write(f"  {waiting_text}\n")
            self._stream.flush()
        if not self._is_line_open:
            return
        if self._job.log is not None and not waiting_text:
            with contextlib.suppress(OSError):
                last_line = self._job.log.read_text(errors="replace").strip().rpartition("\n")[2]
                waiting_text = last_line.partition("eval: ")[2]
        if waiting_text:
            self._stream.write(f"\r\x1b[2K  {self._job.phase_text()}: {waiting_text[:90]}")
            self._stream.flush()

    def _end_line(self) -> None:
        if self._is_line_open:
            self._stream.write("\n")
            self._is_line_open = False

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        """Updates the display a last time, and ends the bar or the line."""
        self.update()
        self._close_bar()
        self._end_line()
        self._stream.flush()


def find_error(log: WorkflowLog, path: Path, num_lines: int = 15) -> tuple[str, Path]:
    """Returns the error of a failed workflow, and the file with the error: a failed rule's log, otherwise Snakemake's log."""
    for file in (*(job.log for job in log.failed_jobs if job.log is not None), path):
        with contextlib.suppress(OSError):
            if log_text := file.read_text(errors="replace").strip():
                return _extract_error_excerpt(log_text, num_lines), file
    return "", path


def _extract_error_excerpt(log_text: str, num_lines: int) -> str:
    """Returns up to `num_lines` lines from the last recognised error on; the last lines if no error is recognised."""
    text_lines = log_text.splitlines()
    error_lines = [
        n for n, line in enumerate(text_lines) if re.search(r"rlhpc: error: |^\w*(Error|Exception)\b.*:", line)
    ]
    first_line = error_lines[-1] if error_lines else max(0, len(text_lines) - num_lines)
    return "\n".join(text_lines[first_line : first_line + num_lines])
