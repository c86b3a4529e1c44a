"""Where a run's numbers come from: provenance.json.

Facts about the first start are at the top; `segments` has one entry per start, so a resume on another node or from
another commit is visible.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.durable import replace_durably
from rlhpc.runtime.environment_values import to_plain
from rlhpc.runtime.host import node_name
from rlhpc.runtime.plain import read_json
from rlhpc.runtime.storage import storage_error

_PACKAGES = (
    "torch",
    "numpy",
    "gymnasium",
    "safetensors",
    "pyzmq",
    "omegaconf",
    "submitit",
    "snakemake",
    "transformers",
)
_SLURM = (
    "JOB_ID",
    "JOB_NAME",
    "JOB_PARTITION",
    "JOB_ACCOUNT",
    "JOB_NODELIST",
    "JOB_NUM_NODES",
    "RESTART_COUNT",
    "HET_SIZE",
)


def write_provenance(paths: RunPaths, cfg: object, command: Sequence[str] | str) -> dict[str, Any]:
    """Records this start of the run; a later start appends to `segments` and leaves the rest as it is.

    Args:
        paths: The run.
        cfg: Resolved configuration (DictConfig or dict); its checksum is recorded.
        command: Command line, as argv or as typed.

    Returns:
        The whole record.
    """
    now = _segment(cfg, command)
    record = read_provenance(paths)
    if not record:
        record = {"format": 1, "run": paths.root.name, "created": now["started"], **now, "segments": []}
        del record["started"]
    record.setdefault("segments", []).append(now)
    _write(paths, record)
    return record


def update_provenance(paths: RunPaths, **facts: Any) -> None:
    """Adds or replaces keys of the record, e.g. `placement={"actor": [{"rank", "node", "accelerators"}]}`."""
    _write(paths, {**read_provenance(paths), **facts})


def read_provenance(paths: RunPaths) -> dict[str, Any]:
    """The record; empty if there is none or it cannot be read."""
    try:
        record = read_json(paths.provenance.read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _write(paths: RunPaths, record: dict[str, Any]) -> None:
    try:
        replace_durably(paths.provenance, json.dumps(record, indent=2, default=str).encode() + b"\n")
    except OSError as error:
        raise storage_error(error, paths.provenance, "provenance") from error


def _segment(cfg: object, command: Sequence[str] | str) -> dict[str, Any]:
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command if isinstance(command, str) else shlex.join(command),
        "folder": str(Path.cwd()),
        "host": node_name(),
        "user": os.environ.get("USER") or os.environ.get("LOGNAME") or str(os.getuid()),
        "pid": os.getpid(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "cpus_granted": len(os.sched_getaffinity(0)),
        "versions": versions(),
        "git": git_state(Path.cwd()),
        "slurm": {key: value for key in _SLURM if (value := os.environ.get(f"SLURM_{key}")) is not None},
        "config_sha256": _config_checksum(cfg),
    }


def versions() -> dict[str, str]:
    """Installed versions of the packages that the numbers depend on; does not import them."""
    from rlhpc import __version__

    found = {"rlhpc": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(folder: Path) -> dict[str, Any]:
    """The commit, the branch and whether the tree is dirty; empty outside a repository or without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {}


def _config_checksum(cfg: object) -> str | None:
    if cfg is None:
        return None
    if "omegaconf" in sys.modules:
        from omegaconf import OmegaConf

        if OmegaConf.is_config(cfg):
            cfg = to_plain(cfg)  # without secrets: whoever has the checksum could find them by trying
    return hashlib.sha256(json.dumps(cfg, sort_keys=True, default=str).encode()).hexdigest()
