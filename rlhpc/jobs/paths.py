"""Every file name of a run folder, in one place (the layout is a public format)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(r"^global_step_(\d+)$")


@dataclass(frozen=True)
class RunPaths:
    """Paths below one run folder; creates nothing itself."""

    root: Path

    @classmethod
    def of(cls, run_dir: str | Path, name: str) -> RunPaths:
        """Paths of run `name` below `run_dir`, absolute."""
        return cls(Path(run_dir).expanduser().absolute() / name)

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

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
        """What loggers must know when the run is resumed, such as the service's id of the run."""
        return self.root / "loggers.json"

    @property
    def registry(self) -> Path:
        return self.root / "registry"

    def generation(self, job: str, restart: int) -> Path:
        """Registry folder of one generation."""
        return self.registry / f"{job}-{restart}"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def segment_logs(self, segment: int) -> Path:
        """Worker logs of one segment: `<group>-<rank>.{out,err}` and `driver.{out,err}`."""
        return self.logs / f"segment_{segment}"

    @property
    def segments(self) -> Path:
        """Folder of the small JSON files that finished segments write last."""
        return self.root / "segments"

    def segment_done(self, segment: int) -> Path:
        return self.segments / f"{segment}.json"

    @property
    def submit(self) -> Path:
        """submitit's folder: job pickles and the record that lets a later process re-attach."""
        return self.root / "submit"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"global_step_{step}"

    def checkpoint_steps(self) -> list[tuple[int, Path]]:
        """All `global_step_<N>` folders, oldest first, complete or not."""
        if not self.checkpoints.is_dir():
            return []
        found = [(int(m.group(1)), p) for p in self.checkpoints.iterdir() if (m := _STEP.match(p.name))]
        return sorted(found)

    @property
    def eval(self) -> Path:
        return self.root / "eval"

    def eval_result(self, step: int, suite: str) -> Path:
        return self.eval / f"global_step_{step}" / f"{suite}.json"

    def export(self, step: int) -> Path:
        return self.root / "export" / f"global_step_{step}"

    @property
    def report(self) -> Path:
        return self.root / "report" / "index.html"

    @property
    def accounting(self) -> Path:
        """What the run's Slurm jobs cost, by role and job component."""
        return self.root / "report" / "accounting.json"

    @property
    def driver_lock(self) -> Path:
        """Locked while a process drives the run. Outside the registry, whose removal must not let a second driver in."""
        return self.root / ".driver.lock"

    @property
    def driver_record(self) -> Path:
        """Says which process drives the run."""
        return self.root / ".driver.json"

    @property
    def driver_state(self) -> Path:
        """What `rlhpc status` shows: step, rates, ETA, stop reason; replaced atomically."""
        return self.root / "status.json"
