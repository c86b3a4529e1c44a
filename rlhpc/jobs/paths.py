"""File names of a run folder, all in one place (the layout is a public format)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home

#: Names of files inside a checkpoint, including those copied into it from the run.
CONFIG, COMPLETE, MANIFEST, MODEL = "config.yaml", "COMPLETE", "manifest.json", "model.safetensors"
REGISTRY, LOGS = "registry", "logs"
#: Name of the link to a run's best checkpoint, and the word that stands for it.
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
        absolute = path.absolute()
        path_text = str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute)
        if "{" in path_text or "}" in path_text:
            raise ConfigError(
                f"{path_text}: Snakemake reads braces in a path as wildcards; choose a path without them (runner.run_dir of "
                "the run), or train without a workflow: rlhpc train"
            )


def step_name(step: int | str) -> str:
    """Returns the name of the folder that belongs to a step; a pattern such as `*` may take the step's place."""
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
    def of(cls, run_dir: str | Path, name: str) -> RunPaths:
        """Returns the paths of run `name` below `run_dir`, absolute."""
        return cls(expand_home(run_dir).absolute() / name)

    @classmethod
    def around(cls, checkpoint: Path) -> RunPaths | None:
        """Returns the run folder that contains a checkpoint; None if it is not in one."""
        return cls(checkpoint.parent.parent) if checkpoint.parent.name == _CHECKPOINTS else None

    @property
    def config(self) -> Path:
        return self.root / CONFIG

    @property
    def provenance(self) -> Path:
        return self.root / "provenance.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def loggers(self) -> Path:
        """State that loggers need when the run is resumed, such as the run's id at the logging service."""
        return self.root / "loggers.json"

    @property
    def registry(self) -> Path:
        return self.root / REGISTRY

    def generation(self, job: str, restart: int) -> Path:
        """Returns the registry folder of one generation."""
        return self.registry / f"{job}-{restart}"

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
        """submitit's folder: job pickles and the record that lets a later process re-attach."""
        return self.root / "submit"

    def submitted(self) -> list[int]:
        """Returns the segments that have been submitted, ascending.

        Raises:
            OSError: The folder is another user's.
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
        """Returns the step of the best checkpoint; None for a run that keeps none."""
        step = step_of(self.best.resolve().name)
        return step if step is not None and (self.checkpoint(step) / COMPLETE).is_file() else None

    def chosen_step(self) -> int | None:
        """Returns the step of the checkpoint that represents the run if no other is named: the best one if the run keeps it
        (`runner.keep_best`), otherwise the last complete one; None without a checkpoint.

        Evaluation, export, recording and the displayed result of a run use this step, in commands and in the workflow.
        """
        return self.best_step() or max((step for step, _ in self.complete_steps()), default=None)

    def checkpoint_steps(self) -> list[tuple[int, Path]]:
        """Returns all `global_step_<N>` folders, oldest first, complete or not."""
        if not self.checkpoints.is_dir():
            return []
        return sorted((step, p) for p in self.checkpoints.iterdir() if (step := step_of(p.name)) is not None)

    def complete_steps(self) -> list[tuple[int, Path]]:
        """Returns the complete checkpoints, oldest first."""
        return [(step, path) for step, path in self.checkpoint_steps() if (path / COMPLETE).is_file()]

    @property
    def eval(self) -> Path:
        return self.root / "eval"

    def eval_result(self, step: int | str, suite: str) -> Path:
        return self.eval / step_name(step) / f"{suite}.json"

    def eval_results(self, suite: str = "*") -> list[Path]:
        """Returns the existing results of one suite, or of all."""
        return sorted(self.eval.glob(f"{step_name('*')}/{suite}.json"))

    def export(self, step: int | str) -> Path:
        return self.root / _EXPORT / step_name(step)

    @property
    def chosen_export(self) -> Path:
        """Folder of the chosen step's policy (`chosen_step`), for a run that starts from it."""
        return self.root / _EXPORT / "chosen"

    def recording(self, step: int | str) -> Path:
        """Returns the file of recorded episodes of a step's policy."""
        return self.root / "demos" / f"{step_name(step)}.h5"

    def film(self, step: int | str) -> Path:
        """Returns the film of a step's policy that `rlhpc play` writes."""
        return self.root / "play" / f"{step_name(step)}.mp4"

    @property
    def report(self) -> Path:
        return self.root / "report" / PAGE

    @property
    def accounting(self) -> Path:
        """Cost of the run's Slurm jobs, by role and job component."""
        return self.root / "report" / "accounting.json"

    @property
    def tuning(self) -> Path:
        """Results of `rlhpc tune`: costs, candidates, the configuration of the best."""
        return self.root / "tune"

    @property
    def tuned(self) -> Path:
        """JSON file with the result of `rlhpc tune`."""
        return self.tuning / "tune.json"

    @property
    def tuned_config(self) -> Path:
        """Configuration with the changes that `rlhpc tune` recommends."""
        return self.tuning / "tuned.yaml"

    @property
    def attendance(self) -> Path:
        """Ranks that joined the run while it was running, with a line for each join and each leave with its reason."""
        return self.root / "attendance.jsonl"

    @property
    def helpers(self) -> Path:
        """submitit's folder of the helper jobs, whose ranks join the run."""
        return self.submit / "helpers"

    def helper_jobs(self, group: str) -> Path:
        """Returns the record of the helper jobs of one group."""
        return self.submit / f"helpers-{group}.json"

    @property
    def asked_ranks(self) -> Path:
        """Requested number of ranks of helper jobs."""
        return self.submit / "scale.json"

    @property
    def driver_record(self) -> Path:
        """Process that drives the run. Not in the registry, whose removal must not admit a second driver."""
        return self.root / ".driver.json"

    @property
    def driver_state(self) -> Path:
        """State for `rlhpc status`: step, rates, ETA, stop reason; replaced atomically."""
        return self.root / "status.json"


def model_name(folder: Path) -> str:
    """Returns the name of a model in a folder: for a run's checkpoint or export the run's name instead of
    `global_step_<N>`.
    """
    step = folder.name.partition("-")[0]  # exports of critics have the folder's name and a suffix
    if step_of(step) is None or folder.parent.name not in (_CHECKPOINTS, _EXPORT):
        return folder.name
    return folder.parent.parent.name


@dataclass(frozen=True)
class SweepPaths:
    """Paths of a sweep, whose runs are folders below its own; creates nothing."""

    root: Path

    @classmethod
    def around(cls, run: RunPaths) -> SweepPaths | None:
        """Returns the sweep that a run is part of; None if it is part of none."""
        sweep = cls(run.root.parent)
        return sweep if sweep.is_there else None

    @property
    def is_there(self) -> bool:
        """True if the sweep exists. A name that the filesystem refuses is reported when its folder is created."""
        return os.path.isfile(self.record)

    @property
    def record(self) -> Path:
        """Record of the sweep's current runs."""
        return self.root / "sweep.json"

    @property
    def cancelled(self) -> Path:
        """Marker that exists while the sweep is cancelled: no workflow starts another of its runs."""
        return self.root / ".cancelled"

    @property
    def page(self) -> Path:
        return self.root / "compare.html"

    @property
    def logs(self) -> Path:
        return self.root / LOGS

    def run(self, name: str) -> RunPaths:
        return RunPaths(self.root / name)
