"""Whether this configuration can resume from a checkpoint: asked before any process starts."""

from __future__ import annotations

from pathlib import Path

from rlhpc.jobs.paths import CONFIG
from rlhpc.runs.kinds import Cfg, Kind
from rlhpc.runs.saved import differing, saved_values
from rlhpc.runtime.errors import CheckpointError

_KIND = ("runner.task_type",)


def check_resume(kind: Kind[Cfg], cfg: Cfg, checkpoint: Path) -> None:
    """Refuses a checkpoint of another kind of run, another environment or another model.

    Raises:
        CheckpointError: Names the keys, what the checkpoint has and what the configuration has.
    """
    # A checkpoint without config.yaml is refused, or taken, by the ranks that read it.
    differ = differing(cfg, saved_values(checkpoint / CONFIG, _KIND), _KIND)
    differ = differ or kind.differences(cfg, checkpoint)
    if differ:
        raise CheckpointError(
            f"runner.resume_dir: {checkpoint} is not of this run: {'; '.join(differ)}. Go on with the checkpoint's "
            f"configuration, or start fresh with another runner.name.{kind.other_start}"
        )
