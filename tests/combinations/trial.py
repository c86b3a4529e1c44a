"""One row: trains it, trains it again from a checkpoint in its middle, and judges both."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import warm
from tests.combinations.array import accepted
from tests.combinations.options import ROOT, Kind, Row

STEPS, SAVED = 3, 2
#: Metrics of clocks and of the machine.
_MEASURED = ("time/", "system/", "memory/")

#: Without a value where all returns of a step are alike.
_UNDEFINED = {"train/explained_variance"}


@dataclass(frozen=True)
class Outcome:
    """What became of a row.

    Attributes:
        row: As it was run: accepted by `rlhpc plan`.
        faults: What is wrong with it: `crash`, `hang`, `refused late`, `non-finite`, `rows`, `resume`, with details.
        command: That shows it again.
    """

    row: Row
    faults: list[str]
    command: str


@dataclass(frozen=True)
class Start:
    """A run of `rlhpc train`: its exit code (None: it hung), what it said, and its rows of metrics."""

    code: int | None
    said: str
    rows: list[dict[str, Any]]


def attempt(kind: Kind, row: Row, folder: Path, *, seed: object, deadline_s: float) -> Outcome:
    """Runs a row, in a folder of its own, which it leaves empty of checkpoints.

    Args:
        kind: Of the run.
        row: Options; those that `rlhpc plan` refuses together are put back.
        folder: For the configuration and the runs.
        seed: Of which options are put back.
        deadline_s: After so many seconds a run hangs.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    row, _ = accepted(kind, row, folder, random.Random(str(seed)))
    words = [str(kind.write(row, folder)), *kind.overrides(row)]
    faults = list[str]()
    first = train(words, "run", folder, deadline_s)
    faults += faults_of(first, range(1, STEPS + 1), "")
    if not faults:
        saved = folder / "run" / "checkpoints" / f"global_step_{SAVED}"
        again = train([*words, f"runner.resume_dir={saved}"], "again", folder, deadline_s)
        faults += faults_of(again, range(SAVED + 1, STEPS + 1), "resume: ")
        if not faults and kind.resumes(row):
            one, other = compared(first.rows[-1]), compared(again.rows[-1])
            differing = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
            if differing:
                faults.append(f"resume: not bit for bit: {', '.join(differing[:6])}")
    for name in ("run", "again"):
        shutil.rmtree(folder / name / "checkpoints", ignore_errors=True)
    quoted = " ".join(f"'{word}'" if set(word) & set(" {}[]") else word for word in words)
    return Outcome(row, faults, f"PYTHONPATH={ROOT} rlhpc train {quoted}")


def train(words: list[str], name: str, folder: Path, deadline_s: float) -> Start:
    """Runs `rlhpc train` with these words to its end, as the run of this name in a folder."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "RLHPC_MODELS": str(folder.parent / "models"),
    }  # fmt: skip
    process = warm.Popen(
        [sys.executable, "-m", "rlhpc.cli", "train", *words, f"runner.name={name}"], cwd=folder, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    code: int | None
    try:
        said, _ = process.communicate(timeout=deadline_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        code = None
        os.killpg(process.pid, signal.SIGTERM)
        try:
            said, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
    metrics = folder / name / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return Start(code, said, rows)


def faults_of(start: Start, steps: range, where: str) -> list[str]:
    """Returns what is wrong with a run that should have made these steps; `where` begins each message."""
    lines = [line for line in start.said.splitlines() if line.strip()]
    errors = [line for line in lines if "error: " in line]
    end = [*lines, *errors][-1] if lines else "nothing was said"
    if start.code is None:
        return [f"{where}hang: {end}"]
    if start.code == 2:
        return [f"{where}refused late: {end}"]
    if start.code != 0:
        return [f"{where}crash ({start.code}): {end}"]
    faults = list[str]()
    if [row["step"] for row in start.rows] != list(steps):
        faults.append(f"{where}rows: {[row['step'] for row in start.rows]} rather than {list(steps)}")
    infinite = sorted(
        {
            key
            for row in start.rows
            for key, value in row.items()
            if not math.isfinite(math.nan if value is None else value)
        }
        - _UNDEFINED
    )
    if infinite:
        faults.append(f"{where}non-finite: {', '.join(infinite)}")
    return faults


def compared(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics of a row that are the same in each run of a configuration."""
    return {key: value for key, value in row.items() if not key.startswith(_MEASURED)}
