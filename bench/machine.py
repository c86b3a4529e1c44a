"""Machine of the measurements, and the file format of figures."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhpc.runtime.repository import run_git

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Returns the machine, without its name, and the measured commit."""
    import torch

    model = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), platform.machine())  # fmt: skip
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
            "torch": torch.__version__, "load": os.getloadavg()[0], "date": time.strftime("%Y-%m-%d"),
            "commit": commit()}  # fmt: skip


def commit() -> str:
    """Returns the checked out commit, with `-dirty` if the code differs from it; "" if there is no repository."""

    repository, status_arguments = (
        RESULTS.parents[1],
        ("status", "--porcelain", "--", "rlhpc", "bench", ":!bench/results"),
    )
    try:
        return run_git(repository, "rev-parse", "--short", "HEAD") + (
            "-dirty" if run_git(repository, *status_arguments) else ""
        )
    except (OSError, subprocess.SubprocessError):
        return ""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the minimum, median, maximum and count of the values."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values), "n": len(values)}


def goal(text: str, measured: float, at_most: float | None = None, at_least: float | None = None) -> dict[str, Any]:
    """Returns a goal together with the measurement."""
    bound_text = f"<= {at_most:.4g}" if at_most is not None else f">= {at_least:.4g}"
    is_met = measured <= at_most if at_most is not None else measured >= (at_least or 0.0)
    return {"goal": text, "measured": measured, "wanted": bound_text, "met": bool(is_met)}


def write(name: str, command: str, content: dict[str, Any]) -> Path:
    """Writes `results/<name>.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"command": command, "machine": machine(), **content}, indent=2) + "\n")
    return path
