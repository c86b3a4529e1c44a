"""File names of a run folder. The layout is a public format."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, is_count, read_file, read_json

#: Names of files inside a checkpoint, including those copied into it from the run.
CONFIG, COMPLETE, MANIFEST, MODEL = "config.yaml", "COMPLETE", "manifest.json", "model.safetensors"
REGISTRY, LOGS = "registry", "logs"
#: Name of the link to a run's best checkpoint; commands accept it in place of a step.
BEST = "best"
_CHECKPOINTS, _EXPORT, PAGE = "checkpoints", "export", "index.html"
_STEP = re.compile(r"global_step_(\d+)")
_RECORD = re.compile(r"segment_(\d+)\.json")


def refuse_braces(*paths: str | Path) -> None:
    """Rejects paths that the workflow's rules cannot name.

    Raises:
        ConfigError: Snakemake would read a part of a path, relative to the working directory, as a wildcard.
    """
    for path in map(Path, paths):
        absolute_path = path.absolute()
        path_text = str(
            absolute_path.relative_to(Path.cwd()) if absolute_path.is_relative_to(Path.cwd()) else absolute_path
        )
        if "{" in path_text or "}" in path_text:
            raise ConfigError(
                f"{path_text}: Snakemake reads braces in a path as wildcards; choose a path without them (runner.run_dir of "
                "the run), or train without a workflow: rlhpc train"
            )


def step_name(step: int | str) -> str:
    """Returns the name of the folder that belongs to a step; the step may also be a pattern such as `*`."""
    return f"global_step_{step}"


def step_of(name: str) -> int | None:
    """Returns the step of a step's folder by its name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def segment_name(segment: int | str) -> str:
    """Returns the prefix of the names of all files and folders that belong to a segment."""
    return f"segment_{segment}"


@dataclass(frozen=True)
class RunPaths:
    """Paths below one run folder; creates nothing."""

    root: Path

    @classmethod
    def from_run_dir(cls, run_dir: str | Path, name: str) -> RunPaths:
        """Returns the absolute paths of run `name` below `run_dir`."""
        return cls(expand_home(run_dir).absolute() / name)

    @classmethod
    def from_checkpoint(cls, checkpoint: Path) -> RunPaths | None:
        """Returns the paths of the run that contains a checkpoint; None if the checkpoint is not in a run folder."""
        return cls(checkpoint.parent.parent) if checkpoint.parent.name == _CHECKPOINTS else None

    @property
    def config(self) -> Path:
        return self.root / CONFIG

    @property
    def provenance(self) -> Path:
        return self.root / "provenance.json"

    @property
    def provenance_files(self) -> Path:
        """Folder of the files that `provenance.json` names: lists of packages, differences from commits, modules."""
        return self.root / "provenance"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        """Folder of the recorded traces: a file for each rank, `<group>-<rank>.jsonl`."""
        return self.root / "trace"

    @property
    def nsys(self) -> Path:
        """Folder of the reports of Nsight Systems, for groups of `runner.trace.profile.nsys`."""
        return self.trace / "nsys"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def loggers(self) -> Path:
        """File with the state that loggers need on resume, such as the run's id at the logging service."""
        return self.root / "loggers.json"

    @property
    def registry(self) -> Path:
        return self.root / REGISTRY

    def generation(self, job_id: str, restart: int) -> Path:
        """Returns the registry folder of one generation."""
        return self.registry / f"{job_id}-{restart}"

    @property
    def logs(self) -> Path:
        return self.root / LOGS

    def segment_logs(self, segment: int) -> Path:
        """Returns the folder of a segment's worker logs: `<group>-<rank>.{out,err}` and `driver.{out,err}`."""
        return self.logs / segment_name(segment)

    @property
    def segments(self) -> Path:
        """Folder of the small JSON files that finished segments write last."""
        return self.root / "segments"

    def segment_done(self, segment: int) -> Path:
        return self.segments / f"{segment}.json"

    def finished_segments(self) -> list[int]:
        """Returns the segments that have finished, ascending."""
        return sorted(int(path.stem) for path in self.segments.glob("*.json") if path.stem.isdigit())

    @property
    def submit(self) -> Path:
        """Folder of submitit: job pickles, and the records by which a later process attaches to a job."""
        return self.root / "submit"

    def submitted_segments(self) -> list[int]:
        """Returns the segments that have been submitted, ascending.

        Raises:
            OSError: The folder belongs to another user.
        """
        matches = (_RECORD.fullmatch(path.name) for path in self.submit.glob(f"{segment_name('*')}.json"))
        return sorted(int(match.group(1)) for match in matches if match)

    @property
    def checkpoints(self) -> Path:
        return self.root / _CHECKPOINTS

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / step_name(step)

    @property
    def best(self) -> Path:
        """Link to the best checkpoint, by `runner.keep_best`."""
        return self.checkpoints / BEST

    def best_step(self) -> int | None:
        """Returns the step of the best checkpoint; None if there is no best checkpoint."""
        step = step_of(self.best.resolve().name)
        return step if step is not None and (self.checkpoint(step) / COMPLETE).is_file() else None

    def chosen_step(self) -> int | None:
        """Returns the step of the checkpoint that represents the run: the best checkpoint if the run keeps it
        (`runner.keep_best`), otherwise the last complete checkpoint. None if there is no checkpoint.

        Commands and the workflow use this step for evaluation, export, recording and the displayed result.
        """
        return self.best_step() or max((step for step, _ in self.complete_steps()), default=None)

    @property
    def newest_save(self) -> Path:
        """File with the step of the newest complete save, for hosts whose listing of the folder is outdated."""
        return self.root / ".newest_save.json"

    def checkpoint_steps(self) -> list[tuple[int, Path]]:
        """Returns all `global_step_<N>` folders, oldest first, complete or not.

        The listing may lack a folder that another host has just written, so the newest save is looked up by its name, too.
        """
        if not self.checkpoints.is_dir():
            return []
        steps = {step for path in self.checkpoints.iterdir() if (step := step_of(path.name)) is not None}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            newest_step = read_json(read_file(self.newest_save))["global_step"]
            if is_count(newest_step) and self.checkpoint(newest_step).is_dir():
                steps.add(newest_step)
        return [(step, self.checkpoint(step)) for step in sorted(steps)]

    def complete_steps(self) -> list[tuple[int, Path]]:
        """Returns the complete checkpoints, oldest first."""
        return [(step, path) for step, path in self.checkpoint_steps() if (path / COMPLETE).is_file()]

    @property
    def eval(self) -> Path:
        return self.root / "eval"

    def eval_result(self, step: int | str, suite: str) -> Path:
        return self.eval / step_name(step) / f"{suite}.json"

    def eval_results(self, suite: str = "*") -> list[Path]:
        """Returns the files with existing results of one suite, or of all suites."""
        return sorted(self.eval.glob(f"{step_name('*')}/{suite}.json"))

    def export(self, step: int | str) -> Path:
        return self.root / _EXPORT / step_name(step)

    @property
    def chosen_export(self) -> Path:
        """Folder with the exported policy of `chosen_step`, from which another run can start."""
        return self.root / _EXPORT / "chosen"

    def recording(self, step: int | str) -> Path:
        """Returns the file of recorded episodes of a step's policy."""
        return self.root / "demos" / f"{step_name(step)}.h5"

    def video(self, step: int | str) -> Path:
        """Returns the video file of a step's policy, which `rlhpc play` writes."""
        return self.root / "play" / f"{step_name(step)}.mp4"

    @property
    def report(self) -> Path:
        return self.root / "report" / PAGE

    @property
    def accounting(self) -> Path:
        """File with the cost of the run's Slurm jobs, by role and job component."""
        return self.root / "report" / "accounting.json"

    @property
    def energy(self) -> Path:
        """File with the energy of the run by role and phase, from counters of accelerators and processors."""
        return self.root / "energy.json"

    @property
    def tuning(self) -> Path:
        """Folder of the results of `rlhpc tune`: costs, candidates and the recommended configuration."""
        return self.root / "tune"

    @property
    def tuning_record(self) -> Path:
        """JSON file with the result of `rlhpc tune`."""
        return self.tuning / "tune.json"

    @property
    def tuned_config(self) -> Path:
        """File with the configuration that `rlhpc tune` recommends."""
        return self.tuning / "tuned.yaml"

    @property
    def alerts(self) -> Path:
        """Folder of the run's alerts: a JSON file for each of them."""
        return self.root / "alerts"

    def alert(self, name: str) -> Path:
        """Returns the file of an alert. Its existence means that the alert is delivered."""
        return self.alerts / f"{name}.json"

    @property
    def attendance(self) -> Path:
        """Attendance log: a line for each rank that joined or left during the run, with the reason for leaving."""
        return self.root / "attendance.jsonl"

    @property
    def helpers(self) -> Path:
        """Folder of submitit for the helper jobs. Their ranks join the run."""
        return self.submit / "helpers"

    def helper_jobs(self, group: str) -> Path:
        """Returns the record of the helper jobs of one group."""
        return self.submit / f"helpers-{group}.json"

    @property
    def requested_ranks(self) -> Path:
        """File with the requested number of helper ranks."""
        return self.submit / "scale.json"

    @property
    def driver_record(self) -> Path:
        """Driver lock file. It is outside the registry, because removing the registry must not admit a second driver."""
        return self.root / ".driver.json"

    @property
    def driver_state(self) -> Path:
        """File with the state for `rlhpc status`: step, rates, ETA, stop reason; replaced atomically."""
        return self.root / "status.json"


def model_name(folder: Path) -> str:
    """Returns the name of the model in a folder: the run's name for a checkpoint or export, otherwise the folder's name."""
    step = folder.name.partition("-")[0]  # exports of critics append a suffix to the step's name
    if step_of(step) is None or folder.parent.name not in (_CHECKPOINTS, _EXPORT):
        return folder.name
    return folder.parent.parent.name


@dataclass(frozen=True)
class SweepPaths:
    """Paths of a sweep: the folders of its runs lie below the sweep's folder; creates nothing."""

    root: Path

    @classmethod
    def from_run(cls, run: RunPaths) -> SweepPaths | None:
        """Returns the sweep that contains a run; None if no sweep does."""
        sweep = cls(run.root.parent)
        return sweep if sweep.is_there else None

    @property
    def is_there(self) -> bool:
        """True if the sweep exists; False also for a name that the filesystem rejects."""
        return os.path.isfile(self.record)

    @property
    def record(self) -> Path:
        """File with the record of the sweep's current runs."""
        return self.root / "sweep.json"

    @property
    def cancel_mark(self) -> Path:
        """Marker file of a cancelled sweep. While it exists, no workflow starts another run of the sweep."""
        return self.root / ".cancelled"

    @property
    def page(self) -> Path:
        return self.root / "compare.html"

    @property
    def logs(self) -> Path:
        return self.root / LOGS

    def run(self, name: str) -> RunPaths:
        return RunPaths(self.root / name)
