"""Where a run's numbers come from: provenance.json.

Facts about the first start are at the top; `segments` has one entry per start, so a resume on another node or from
another commit is visible.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.durable import replace_durably
from rlhpc.runtime.environment_values import to_plain
from rlhpc.runtime.host import node_name
from rlhpc.runtime.plain import is_count, read_file, read_json
from rlhpc.runtime.repository import git_state
from rlhpc.runtime.storage import storage_error

#: By group, what each rank has.
Placement = Mapping[str, Sequence[Mapping[str, Any]]]
_MOST_SLOTS = 1024
"""Most accelerators of a node that a placement may name."""
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


class PlacedStart(NamedTuple):
    """A start of a run in a Slurm job.

    Attributes:
        job: Id of the job.
        began: Unix time.
        placement: Of its ranks.
    """

    job: str
    began: float
    placement: Placement


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


def record_placement(paths: RunPaths, placement: Placement) -> None:
    """Records where the ranks of the start that was written last are: in its entry of `segments`, and at the top.

    Args:
        paths: The run.
        placement: By group, what each rank has: `{"rank", "node_rank", "accelerators", …}`.
    """
    starts = list(read_provenance(paths).get("segments") or ())
    if starts:
        starts[-1] = {**starts[-1], "placement": placement}
    update_provenance(paths, placement=placement, segments=starts)


def placed_starts(record: Mapping[str, Any]) -> list[PlacedStart]:
    """Returns the starts of a run in Slurm jobs that have recorded their placement, in their order."""
    starts = []
    for start in record.get("segments") or ():
        with contextlib.suppress(KeyError, TypeError, ValueError):
            began = datetime.fromisoformat(str(start["started"])).timestamp()
            starts.append(PlacedStart(str(start["slurm"]["JOB_ID"]), began, dict(start["placement"])))
    return starts


def read_provenance(paths: RunPaths) -> dict[str, Any]:
    """The record; empty if there is none or it cannot be read."""
    try:
        record = read_json(read_file(paths.provenance))
    except (OSError, ValueError):
        return {}
    return _typed(record) if isinstance(record, dict) else {}


def _typed(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the parts of a wrong type: the file may be anybody's."""
    mappings, lists = ("git", "versions", "slurm", "placement"), ("segments",)
    typed = {
        name: value for name, value in record.items()
        if not (name in mappings and not isinstance(value, dict)) and not (name in lists and not isinstance(value, list))
    }  # fmt: skip
    if "segments" in typed:
        typed["segments"] = [_typed(start) for start in typed["segments"] if isinstance(start, dict)]
    if "placement" in typed and not all(map(_is_group, typed["placement"].values())):
        del typed["placement"]
    return typed


def _is_group(ranks: Any) -> bool:
    """Says whether these are the places of a group's ranks."""
    return isinstance(ranks, list) and all(
        isinstance(rank, dict) and is_count(rank.get("rank", 0)) and is_count(rank.get("node_rank", 0))
        and isinstance(rank.get("accelerators", []), list)
        and all(is_count(slot) and slot < _MOST_SLOTS for slot in rank.get("accelerators", []))
        for rank in ranks
    )  # fmt: skip


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


def _config_checksum(cfg: object) -> str | None:
    if cfg is None:
        return None
    if "omegaconf" in sys.modules:
        from omegaconf import OmegaConf

        if OmegaConf.is_config(cfg):
            cfg = to_plain(cfg)  # without secrets: whoever has the checksum could find them by trying
    return hashlib.sha256(json.dumps(cfg, sort_keys=True, default=str).encode()).hexdigest()
