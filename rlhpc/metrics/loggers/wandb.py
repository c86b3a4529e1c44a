"""Weights & Biases logger."""

from __future__ import annotations

import netrc
import os
import urllib.parse
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.metrics.loggers.base import RunFacts, ServiceLogger, last_step_in, require


class WandbLogger(ServiceLogger):
    """Logger to a W&B run; offline, in `<run>/wandb`, without a login."""

    def __init__(self, *, project: str = "rlhpc", mode: str | None = None, **options: Any) -> None:
        """Creates the logger.

        Args:
            project: W&B's project.
            mode: `online` or `offline`; by default `WANDB_MODE`, else online with an API key.
            options: Further arguments of `wandb.init`: entity, group, tags, notes, settings…
        """
        self._project, self._mode, self._options = project, mode, options

    def open(self, run: RunFacts, resume_step: int | None) -> int | None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # do not send error reports to W&B
        wandb = require("wandb")
        options = dict(self._options)
        wandb_mode = self._mode or os.environ.get("WANDB_MODE") or ("online" if _is_logged_in() else "offline")
        settings = {
            "console": "off",  # the driver's output has its own files
            "silent": True,
            "x_disable_meta": True,  # metadata has the command line, which may hold secrets
            **(options.pop("settings", None) or {}),
        }
        run.saved_state.setdefault("id", uuid.uuid4().hex[:8])
        arguments = {
            "project": self._project, "name": run.name, "id": run.saved_state["id"], "resume": "allow", "mode": wandb_mode,
            "dir": str(run.folder), "config": dict(run.config), **options,
        }  # fmt: skip
        self._run = wandb.init(**arguments, settings=wandb.Settings(**settings))
        if wandb_mode == "online":
            return self._run.starting_step - 1 if self._run.starting_step else None
        return None if resume_step is None else _last_step(run.folder / "wandb", run.saved_state["id"])

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step, commit=True)


def _is_logged_in() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urllib.parse.urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _last_step(folder: Path, run_id: str) -> int | None:
    """Returns the last step in the files of earlier offline starts."""
    from wandb.proto.wandb_internal_pb2 import Record

    paths = folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
    return last_step_in(paths, Record.FromString, "history", lambda record: record.history.step.num)
