"""Trackio logger, for Hugging Face's local-first tracker."""

from __future__ import annotations

import os
from typing import Any

from rlhpc.metrics.loggers.base import RunFacts, ServiceLogger, printing_to_stderr, require


class TrackioLogger(ServiceLogger):
    """Logger to a Trackio run; in `<run>/trackio` unless a Space or a server is named."""

    def __init__(self, *, project: str = "rlhpc", **options: Any) -> None:
        """Creates the logger.

        Args:
            project: Trackio's project.
            options: Further arguments of `trackio.init`: space_id, server_url, group, auto_log_gpu…
        """
        self._project, self._options = project, options

    def open(self, run: RunFacts, resume_step: int | None) -> int | None:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        with printing_to_stderr():
            trackio = require("trackio")
            from trackio.fragments import import_inbox_dir

            if resume_step is not None:
                import_inbox_dir()  # on a network file system, Trackio keeps rows in files next to the database
            arguments = {
                "project": self._project, "name": run.name, "config": dict(run.config), "embed": False,
                "resume": "never" if resume_step is None else "allow", "auto_log_gpu": False, "auto_log_cpu": False,
                **self._options,
            }  # fmt: skip
            self._run = trackio.init(**arguments)
        run.saved_state["id"] = self._run.id
        # The database or server determines the step of the run's next row.
        next_step = int(getattr(self._run, "_next_step", 0))
        return next_step - 1 if resume_step is not None and next_step > 0 else None
