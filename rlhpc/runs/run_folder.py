"""Run folder of a training start: the checkpoint to resume from, the files of the run, and the status for `rlhpc status`."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.checkpoint import Resumable, find_resumable, move_newer_aside, newest_valid
from rlhpc.config import config_to_yaml, segment_end, total_steps
from rlhpc.config.sections import RunConfig
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.metrics import write_provenance
from rlhpc.runs.config_changes import recorded_changes
from rlhpc.runs.run_identity import check_same_run
from rlhpc.runtime.disk_errors import advice, storage_error
from rlhpc.runtime.errors import ConfigError, RlhpcError, StaleGeneration, StorageError
from rlhpc.runtime.files import replace_durably
from rlhpc.runtime.host import node_name
from rlhpc.runtime.ownership import require_own_run_folder, require_private
from rlhpc.runtime.registry import TIMELINE
from rlhpc.runtime.standard_streams import tell

_STATUS_INTERVAL_S = 2.0


def note(note_text: str) -> None:
    """Prints a note for the user."""
    tell(f"rlhpc: {note_text}")


@dataclass
class RunFolder:
    """Run folder of one start of a run.

    Attributes:
        paths: Paths of the run's files.
        segment: Number of the segment that this start trains; None for the complete run.
        end_step: Step at which this start ends.
        total: Number of steps of the complete run.
        resume: Checkpoint to resume from.
        foreign: True if the checkpoint belongs to another run.
        started: Unix time of the start.
        marks: Stage of the start → Unix time at which it was reached.
        step_facts: Figures of the last step, which status.json keeps when the run ends, however it ends.
    """

    paths: RunPaths
    segment: int | None
    end_step: int
    total: int
    resume: Resumable
    foreign: bool = False
    started: float = field(default_factory=time.time)
    marks: dict[str, float] = field(default_factory=dict)
    step_facts: dict[str, Any] = field(default_factory=dict)
    _status_written: float = 0.0

    @classmethod
    def plan(cls, cfg: RunConfig, segment: int | None = None, *, resume_with: bool = False) -> RunFolder:
        """Determines the checkpoint from which the run continues; writes nothing.

        Args:
            cfg: The configuration.
            segment: Number of a segment, below `runner.segments`; None for the complete run.
            resume_with: True to continue the run even if its training configuration has changed.

        Raises:
            ConfigError: The folder has checkpoints and `runner.resume_dir` is not set, the checkpoints have another
                configuration, or the segment does not exist.
            OwnershipError: The folder or a private folder in it belongs to another user, or other users can access it.
            CheckpointError: `runner.resume_dir` names an unusable checkpoint.
        """
        paths = RunPaths.from_run_dir(cfg.runner.run_dir, cfg.runner.name)
        resume_from, checkpoints = resolve_resume(cfg, segment, resume_with=resume_with)
        last_step, segments = total_steps(cfg), cfg.runner.segments
        resume = find_resumable(paths, resume_from)
        for path, reason in resume.skipped:
            note(f"skipped {path.name}: {reason}")
        if str(resume_from).lower() == "auto" and resume.path is None and checkpoints:
            raise ConfigError(
                f"runner.resume_dir=auto: none of the {len(checkpoints)} checkpoints in {paths.checkpoints} can be used (see "
                "above). Restore one, or start fresh with another runner.name"
            )
        is_foreign = resume.path is not None and resume.path.parent.resolve() != paths.checkpoints.resolve()
        end_step = last_step if segment is None else segment_end(last_step, segment, segments)
        return cls(paths, segment, end_step, last_step, resume, is_foreign)

    @property
    def continues_run(self) -> bool:
        """True if this start continues the run itself, not a checkpoint of another run."""
        return self.resume.path is not None and not self.foreign

    def open(self, cfg: RunConfig) -> None:
        """Creates the folder, writes config.yaml and provenance.json, and renames newer checkpoints; called once per start.

        Raises:
            ConfigError: The folder cannot be written.
        """
        resumed_step = None
        if self.continues_run:
            resumed_step = {"step": self.resume.step, "changes": recorded_changes(self.paths.config, cfg)}
        try:
            self.paths.root.mkdir(parents=True, exist_ok=True)
            replace_durably(self.paths.config, config_to_yaml(cfg).encode())
        except OSError as error:
            raise ConfigError(
                f"runner.run_dir: {error.filename or self.paths.root} cannot be written: {error.strerror}. "
                f"{advice(error, self.paths.root)}, or choose another runner.run_dir"
            ) from error
        if self.continues_run:
            for moved_checkpoint in move_newer_aside(self.paths, self.resume.step):
                note(f"kept a newer checkpoint as {moved_checkpoint.name}")
        write_provenance(self.paths, cfg, [*sys.orig_argv], resumed_step)

    def mark(self, name: str) -> None:
        """Stores the current time for a stage of the start, unless the stage already has a time."""
        self.marks.setdefault(name, time.time())

    def write_marks(self, registry: Path) -> None:
        """Writes `timeline.json`, with the time of each stage of this start, to the generation's folder."""
        self._write(registry / TIMELINE, json.dumps({"driver": self.started, **self.marks}).encode() + b"\n", "times")

    def write_status(self, state: str, step: int, *, force: bool = False, **facts: Any) -> None:
        """Replaces status.json, at most every two seconds unless `force` is true. `facts` are additional fields."""
        now, facts = time.time(), {**self.step_facts, **facts}
        if not force and now - self._status_written < _STATUS_INTERVAL_S:
            return
        self._status_written = now
        record = {
            "state": state,
            "segment": self.segment,
            "step": step,
            "max_steps": self.total,
            "end_step": self.end_step,
            "pid": os.getpid(),
            "host": node_name(),
            "started": self.started,
            "updated": now,
            **{key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in facts.items()},
        }
        self._write(self.paths.driver_state, json.dumps(record, indent=1).encode() + b"\n", "the run's status")

    def finished_segments(self) -> list[int]:
        """Returns the end steps of all finished segments."""
        records = (read_json_file(path) for path in self.paths.segments.glob("*.json"))
        return [int(record["global_step"]) for record in records if record and "global_step" in record]

    def finish_segment(self, step: int, stop_reason: str) -> dict[str, Any]:
        """Writes `segments/<k>.json` as the last file of the segment.

        Returns:
            The content of the file: segment, global_step, checkpoint, stop_reason.
        """
        newest_checkpoint = newest_valid(self.paths, checks_digests=False)
        record = {
            "segment": self.segment or 0,
            "global_step": step,
            "checkpoint": str(newest_checkpoint.path) if newest_checkpoint.path else None,
            "stop_reason": stop_reason,
        }
        self._write(
            self.paths.segment_done(self.segment or 0), json.dumps(record).encode() + b"\n", "the segment's end"
        )
        return record

    def _write(self, path: Path, data: bytes, content_name: str) -> None:
        """Replaces a file in the run folder; raises `StaleGeneration` if the run folder was removed."""
        try:
            if not self.paths.root.is_dir():
                raise StaleGeneration(f"the run folder {self.paths.root} was removed while the run went on: it ends")
            replace_durably(path, data)
        except OSError as error:
            raise storage_error(error, path, content_name) from error


def resolve_resume(
    cfg: RunConfig, segment: int | None = None, *, resume_with: bool = False
) -> tuple[str | None, list[Path]]:
    """Determines the checkpoint from which a run resumes. Checks the owner of the run folder and the configuration; does not
    read a checkpoint.

    Args:
        cfg, segment, resume_with: See `RunFolder.plan`.

    Returns:
        The checkpoint to resume from, in the form of `runner.resume_dir`, and all complete checkpoints of the run.

    Raises:
        ConfigError, OwnershipError: See `RunFolder.plan`.
    """
    paths = RunPaths.from_run_dir(cfg.runner.run_dir, cfg.runner.name)
    require_own_run_folder(paths.root)
    for folder in (paths.registry, paths.submit):
        if os.path.lexists(folder):
            require_private(folder, tighten=True)
    segments = cfg.runner.segments
    if segments < 1:
        raise ConfigError(f"runner.segments is {segments}; it must be at least 1")
    if segment is not None and not 0 <= segment < segments:
        raise ConfigError(f"segment {segment} does not exist: runner.segments is {segments} (0 to {segments - 1})")
    resume_from = cfg.runner.resume_dir
    complete_checkpoints = [path for _, path in paths.complete_steps()]
    if segment is not None and (resume_from is None or complete_checkpoints):
        resume_from = "auto"  # a restarted segment continues from its newest checkpoint
    if resume_from is None and complete_checkpoints:
        raise ConfigError(
            f"{paths.root} has checkpoints already (newest: {complete_checkpoints[-1].name}). To continue them pass "
            "runner.resume_dir=auto; to start fresh pass another runner.name, or remove the folder"
        )
    check_same_run(paths, cfg, resume_with=resume_with)
    return resume_from, complete_checkpoints


def read_segment_done(paths: RunPaths, segment: int) -> dict[str, Any] | None:
    """Returns the record of a finished segment; None if the segment is not finished."""
    return read_json_file(paths.segment_done(segment))


def keep_traceback(folder: RunFolder, error: BaseException) -> None:
    """Appends the traceback of an unexpected error to the driver's log; adds a note with the file's path to the error."""
    if isinstance(error, (RlhpcError, KeyboardInterrupt, SystemExit)):
        return
    path = folder.paths.segment_logs(folder.segment or 0) / "driver.err"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as log:
            log.write("".join(traceback.format_exception(error)))
    except OSError:
        return
    error.add_note(f"traceback in {path}")


def fail_status(folder: RunFolder, step: int, error: BaseException) -> None:
    """Writes a failure with its reason to status.json; ignores an unwritable folder."""
    try:
        if folder.paths.root.is_dir():
            failure = error if isinstance(error, RlhpcError) else None
            message = str(error) if failure is not None else f"{type(error).__name__}: {error}"
            notes = getattr(error, "__notes__", ())
            folder.write_status(
                "failed", step, force=True, stop_reason="; ".join([*message.splitlines()[:1], *notes]),
                restartable=failure is not None and failure.restartable, node=failure.node if failure is not None else "",
            )  # fmt: skip
    except (OSError, StorageError):
        pass
