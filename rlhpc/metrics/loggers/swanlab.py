"""SwanLab logger."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

from rlhpc.metrics.loggers.base import RunFacts, ServiceLogger, last_step_in, printing_to_stderr, records, require


class SwanLabLogger(ServiceLogger):
    """Logger to a SwanLab run; offline, in `<run>/swanlab`, without a login."""

    def __init__(self, *, project: str = "rlhpc", mode: str | None = None, **options: Any) -> None:
        """Creates the logger.

        Args:
            project: SwanLab's project.
            mode: `online`, `offline` or `local`; by default `SWANLAB_MODE`, else online with an API key.
            options: Further arguments of `swanlab.init`: workspace, group, tags, settings…
        """
        self._project, self._mode, self._options = project, mode, options

    def open(self, run: RunFacts, resume_step: int | None) -> int | None:
        with printing_to_stderr():
            swanlab = require("swanlab")
        options = dict(self._options)
        settings = {
            "terminal": {"proxy_type": "none"},  # the driver's output has its own files
            "probe": {"runtime": False},  # runtime data has the command line, which may hold secrets
            **(options.pop("settings", None) or {}),
        }
        run.saved_state.setdefault("id", uuid.uuid4().hex[:16])
        folder = run.folder / "swanlab"
        folder.mkdir(exist_ok=True)
        _remove_empty(folder)
        last_step = None if resume_step is None else _last_step(folder, run.saved_state["id"])
        with printing_to_stderr():
            swanlab_settings = swanlab.Settings(**settings)
            wandb_mode = (
                self._mode or os.environ.get("SWANLAB_MODE") or ("online" if swanlab_settings.api_key else "offline")
            )
            arguments = {
                "project": self._project, "name": run.name, "id": run.saved_state["id"], "resume": "allow", "mode": wandb_mode,
                "log_dir": str(folder), "config": dict(run.config), **options,
            }  # fmt: skip
            self._run = swanlab.init(**arguments, settings=swanlab_settings)
        return last_step


def _remove_empty(folder: Path) -> None:
    """Removes folders without a record, which killed starts have left.

    `swanlab sync` of several folders stops at the first one without a record. SwanLab writes in blocks of 8 KiB, so a killed
    start may have written nothing.
    """
    for path in folder.glob("run-*/run-*.swanlab"):
        if next(records(path), None) is None:
            shutil.rmtree(path.parent)


def _last_step(folder: Path, run_id: str) -> int | None:
    """Returns the last step in the files of earlier starts."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    paths = folder.glob(f"run-*-{run_id}/run-{run_id}.swanlab")
    return last_step_in(paths, Record.FromString, "scalar", lambda record: record.scalar.step)
