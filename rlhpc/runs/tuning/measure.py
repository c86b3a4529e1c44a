"""Short real runs, by `rlhpc train`, and what their metrics say of a step."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.logger import read_metrics
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.host import node_name

#: Steps of a short run that do not count: at its beginning, where things are set up, and the last, whose successor does not
#: begin.
_FIRST, _LAST = 2, 1
_POLL_S, _GRACE_S = 0.1, 30.0
#: Gives a process some of this one's cores before it becomes another program.
_BOUND = "import os, sys; os.sched_setaffinity(0, eval(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"


@dataclass(frozen=True)
class Measured:
    """What a short run showed.

    Attributes:
        step_s: Seconds from the end of a step to that of the next, the median.
        metrics: Metric → its median over the steps.
        memory: Group → most bytes of host memory of a rank on this machine, shared pages in proportion.
        device_memory: Group → most bytes of accelerator memory of a rank on this machine.
    """

    step_s: float
    metrics: Mapping[str, float]
    memory: Mapping[str, float] = field(default_factory=dict)
    device_memory: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ShortRuns:
    """Runs a configuration for a few steps at a time.

    Attributes:
        config: File of the configuration, with all values resolved.
        folder: Where the short runs have their folders, which are removed, and `logs`, which stay.
        always: Overrides of every run.
        steps: Steps that count.
        deadline_s: Seconds that a run may take.
    """

    config: Path
    folder: Path
    always: tuple[str, ...]
    steps: int
    deadline_s: float

    def run(self, name: str, overrides: Sequence[str], cores: frozenset[int] = frozenset()) -> Measured:
        """Runs the configuration with some changes.

        Args:
            name: Of the run and of its log.
            overrides: The changes.
            cores: Cores that it may use; empty for all.

        Raises:
            RlhpcError: It failed, with the words that it ended with, or did not end in time.
        """
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        count = _FIRST + self.steps + _LAST
        words = [
            *self.always, *overrides, f"runner.run_dir={json.dumps(str(self.folder / 'runs'))}", f"runner.name={name}",
            f"runner.max_steps={count}", "runner.segments=1", "runner.save_interval=-1", "runner.resume_dir=null",
            "runner.logger.logger_backends=[jsonl]",
        ]  # fmt: skip
        command = [sys.executable, "-P", "-m", "rlhpc.cli", "train", str(self.config), *words]
        if cores:
            command = [sys.executable, "-P", "-c", _BOUND, repr(set(cores)), *command]
        paths = RunPaths.of(self.folder / "runs", name)
        try:
            with log.open("wb") as output:
                watched = _watch(command, output, paths, self.deadline_s)
            if watched.code != 0:
                raise _failure(name, watched.code, log)
            rows = read_metrics(paths.metrics)
        finally:
            shutil.rmtree(paths.root, ignore_errors=True)
        return _summed_up(rows, watched)


@dataclass
class _Watched:
    code: int = 0
    memory: dict[str, float] = field(default_factory=dict)
    device_memory: dict[str, float] = field(default_factory=dict)


def _watch(command: Sequence[str], output: Any, paths: RunPaths, deadline_s: float) -> _Watched:
    """Runs a command to its end, and looks at how much memory the run's ranks have."""
    found, begun, looked = _Watched(), time.monotonic(), 0.0
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0)
    try:
        while process.poll() is None:
            now = time.monotonic()
            if now - begun > deadline_s:
                raise RlhpcError(
                    f"a short run did not end within {deadline_s:.0f} s (log {output.name}); give it longer with --deadline, "
                    "or fewer steps with --steps"
                )
            if now - looked > min(1.0, (now - begun) / 20):  # short ones are seen, too, and long ones left alone
                looked = now
                _look(paths, found)
            time.sleep(_POLL_S)
    finally:
        _end(process)
    found.code = process.returncode
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a run that is still at work: it need not save."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # the second one ends it at once
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)


def _look(paths: RunPaths, found: _Watched) -> None:
    """Notes the most memory that a rank of each group has had so far."""
    here, pids = node_name(), dict[int, str]()
    for file in paths.registry.glob("*/members/*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads(file.read_bytes())
            if record["node"] == here or str(record["node"]).startswith(f"{here}-v"):
                pids[int(record["pid"])] = str(record["group"])
    on_devices = _device_memory() if pids else {}
    for pid, group in pids.items():
        with contextlib.suppress(psutil.Error):
            held = float(psutil.Process(pid).memory_full_info().pss)
            found.memory[group] = max(found.memory.get(group, 0.0), held)
        if pid in on_devices:
            found.device_memory[group] = max(found.device_memory.get(group, 0.0), on_devices[pid])


def _device_memory() -> dict[int, float]:
    """Bytes of accelerator memory of each process that computes on one."""
    found: dict[int, float] = {}
    for line in _nvidia_smi("--query-compute-apps=pid,used_memory"):
        pid, _, held = line.partition(",")
        if pid.strip().isdigit() and held.strip().isdigit():
            found[int(pid)] = found.get(int(pid), 0.0) + float(held) * 2**20
    return found


def device_size() -> int:
    """Bytes of the smallest accelerator's memory; 0 if there is none, or nobody knows."""
    sizes = [int(line) for line in _nvidia_smi("--query-gpu=memory.total") if line.strip().isdigit()]
    return min(sizes, default=0) * 2**20


def _nvidia_smi(query: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _failure(name: str, code: int, log: Path) -> RlhpcError:
    """What to say about a run that failed: its own last words."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    marked = next((i for i, line in enumerate(lines) if line.startswith("rlhpc: error: ")), None)
    words = "\n".join(lines[-1:] if marked is None else lines[marked:]).removeprefix("rlhpc: error: ")
    kind = ConfigError if code == ConfigError.exit_code else RlhpcError
    return kind(f"the short run {name} failed (log {log}): {words or f'exit code {code}'}")


def _summed_up(rows: Sequence[Mapping[str, Any]], watched: _Watched) -> Measured:
    ends = [float(row["time/wall_s"]) for row in rows]
    apart = [after - before for before, after in zip(ends[_FIRST - 1 :], ends[_FIRST:], strict=False)]
    counted = rows[_FIRST : len(rows) - _LAST]
    names = {name for row in counted for name, value in row.items() if isinstance(value, (int, float))}
    medians = {
        name: statistics.median(float(row[name]) for row in counted if isinstance(row.get(name), (int, float)))
        for name in names
    }
    return Measured(statistics.median(apart[: len(counted)]), medians, watched.memory, watched.device_memory)
