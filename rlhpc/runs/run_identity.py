"""Run identity: a run's name stands for one configuration. Checks before a start, and the configuration file of a submitted
job.
"""

from __future__ import annotations

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
from rlhpc.runtime.files import expand_home, replace_durably

_NAME = (
    "Give this one a name of its own (runner.name=…) or another folder (runner.run_dir=…), or go back to the old values"
)
_WAY_OUT = (
    f"{_NAME}; to continue this very run with the new ones from its last checkpoint on, add --resume-with "
    "(in the workflow: --config resume_with=true)"
)


def has_begun(paths: RunPaths) -> bool:
    """Returns whether the run has checkpoints or finished segments that another configuration would continue."""
    return bool(paths.complete_steps()) or any(paths.segments.glob("*.json"))


def check_same_run(paths: RunPaths, cfg: RunConfig, *, resume_with: bool = False) -> None:
    """Raises an error if the configuration describes another run than the one in the folder.

    Args:
        paths: The run folder that the configuration names.
        cfg: The configuration.
        resume_with: The user wants to continue the run with a changed configuration.

    Raises:
        ConfigError: The training differs from that of the run so far; names the keys.
    """
    if not resume_with and has_begun(paths):
        require_same_run(paths.config, cfg, subject=f"run {paths.root}", way_out=_WAY_OUT)


def make_longer(paths: RunPaths, cfg: RunConfig, segment: int, *, wait: bool = False) -> None:
    """Reopens a finished segment of a run that is now longer than when the segment finished.

    Args:
        paths: The run folder.
        cfg: The configuration, perhaps with a later end.
        segment: The segment that is to be trained.
        wait: Wait until the job that finished the segment has ended; not allowed within that job.

    Raises:
        ConfigError: The run would be shorter, or segments with successors would end at another step.
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


class SubmittedConfig:
    """Configuration at the submission of a segment, which its job reads.

    A job may wait for days and start several times, and the user's file may change in that time.
    """

    def __init__(self, files: SegmentJournal, cfg: RunConfig, source: str | Path) -> None:
        self.path = files.config
        self._files, self._cfg, self._source = files, cfg, source

    def __call__(self, live: bool) -> None:
        """Writes the configuration, or compares it with that of a live job; called under the submission's lock.

        Raises:
            ConfigError: The live job has a different training configuration.
        """
        if live:
            root = self._files.paths.root
            require_same_run(
                self.path,
                self._cfg,
                subject=f"segment {self._files.segment} of {root} has a job, which",
                way_out=f"{_NAME}; or end the job first (rlhpc cancel {root})",
            )
            return
        write_config(self.path, self._cfg, f"As submitted from {expand_home(self._source).absolute()}")
