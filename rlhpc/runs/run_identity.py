"""Run identity: each run name stands for one training configuration. Checks before a start, and the configuration file of a
submitted job.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from rlhpc.config import config_to_yaml, segment_ends
from rlhpc.config.sections import RunConfig
from rlhpc.jobs.job_record import reopen, segment_to_reopen, wait_for_end
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.segment import SegmentJournal
from rlhpc.runs.config_changes import require_same_run
from rlhpc.runs.configuration import load_config
from rlhpc.runs.task_type import task_type_of
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, read_file, replace_durably

#: Comments at the beginning of a submitted configuration: the user's file, and the overrides as a JSON list.
_SUBMITTED_FROM, _OVERRIDES = "As submitted from ", "Overrides: "
_NAME_ADVICE = (
    "Give this one a name of its own (runner.name=…) or another folder (runner.run_dir=…), or go back to the old values"
)
_WAY_OUT = (
    f"{_NAME_ADVICE}; to continue this very run with the new ones from its last checkpoint on, add --resume-with "
    "(in the workflow: --config resume_with=true)"
)


def has_begun(paths: RunPaths) -> bool:
    """Returns whether the run has checkpoints or finished segments, which another configuration must not continue."""
    return bool(paths.complete_steps()) or any(paths.segments.glob("*.json"))


def check_same_run(paths: RunPaths, cfg: RunConfig, *, resume_with: bool = False) -> None:
    """Checks that the configuration describes the same training as the run in the folder.

    Args:
        paths: The run folder that the configuration names.
        cfg: The configuration.
        resume_with: True to continue the run with a changed configuration.

    Raises:
        ConfigError: The training differs from the training so far; the message names the keys.
    """
    if not resume_with and has_begun(paths):
        require_same_run(paths.config, cfg, subject=f"run {paths.root}", way_out=_WAY_OUT)


def make_longer(paths: RunPaths, cfg: RunConfig, segment: int, *, wait: bool = False) -> None:
    """Reopens a finished segment if the run has become longer since the end of the segment.

    Args:
        paths: The run folder.
        cfg: The configuration, possibly with a later end.
        segment: Number of the segment to train.
        wait: True to wait until the job that finished the segment has ended; must be False within that job.

    Raises:
        ConfigError: The run would become shorter, or a segment with successors would end at another step.
        SubmitError: The job that finished the segment does not end.
    """
    goal = None
    if paths.config.exists():
        saved_cfg = load_config(paths.config, check=False, site="")
        goal = task_type_of(saved_cfg).checks.goal(saved_cfg)
    is_goal_moved = goal is not None and goal != task_type_of(cfg).checks.goal(cfg)
    if segment_to_reopen(paths, segment_ends(cfg), goal_moved=is_goal_moved) == segment:
        if wait:
            wait_for_end(paths, segment)
        paths.submit.mkdir(parents=True, exist_ok=True)
        with SegmentJournal(paths, segment).submit_lock():
            # another process may have reopened it, and its job may even have finished it again
            if segment_to_reopen(paths, segment_ends(cfg), goal_moved=is_goal_moved) == segment:
                reopen(paths, segment)


def write_config(path: Path, cfg: RunConfig, comment: str) -> None:
    """Writes a configuration for a driver to read, with a comment in its first line.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        replace_durably(path, f"# {comment}\n{config_to_yaml(cfg)}".encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def read_source(path: Path) -> tuple[str, list[str]]:
    """Returns the user's configuration file and overrides of a submitted segment; ("", []) if its file lacks them."""
    try:
        lines = read_file(path).decode().splitlines()[:2]
    except (OSError, ValueError):
        return "", []
    source_line = next((line.removeprefix(f"# {_SUBMITTED_FROM}") for line in lines if _SUBMITTED_FROM in line), "")
    for line in lines:
        if line.startswith(f"# {_OVERRIDES}"):
            with contextlib.suppress(ValueError):
                return source_line, [str(override) for override in json.loads(line.removeprefix(f"# {_OVERRIDES}"))]
    return source_line, []


class SubmittedConfig:
    """Configuration file of a submitted segment, which the segment's job reads.

    A job may wait for days and start several times. The user's file may change in that time.
    """

    def __init__(
        self, files: SegmentJournal, cfg: RunConfig, source: str | Path, overrides: Sequence[str] = ()
    ) -> None:
        self.path = files.config
        self._files, self._cfg, self._source, self._overrides = files, cfg, source, [*overrides]

    def __call__(self, is_live: bool) -> None:
        """Writes the configuration or, if the segment has a live job, compares it with the configuration of that job. Called
        under the submit lock.

        Raises:
            ConfigError: The live job has a different training configuration.
        """
        if is_live:
            root = self._files.paths.root
            require_same_run(
                self.path,
                self._cfg,
                subject=f"segment {self._files.segment} of {root} has a job, which",
                way_out=f"{_NAME_ADVICE}; or end the job first (rlhpc cancel {root})",
            )
            return
        comment = (
            f"{_SUBMITTED_FROM}{expand_home(self._source).absolute()}\n# {_OVERRIDES}{json.dumps(self._overrides)}"
        )
        write_config(self.path, self._cfg, comment)
