"""Memory and processor time of idle processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

import psutil


def read_pss_mb(pids: Iterable[int]) -> float:
    """Returns the proportional set size of processes, in MB: shared pages count once over all processes that share them."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1000


def list_descendants(pid: int) -> list[int]:
    """Returns the ids of all descendants of process `pid`."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def measure_cpu_percent(pids: Iterable[int], seconds: float = 10.0) -> float:
    """Returns the percentage of one core that the processes use in total, from the scheduler's nanoseconds, since clock ticks
    are too coarse.
    """

    def read_used_s() -> float:
        total = 0
        for pid in pids:
            for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):
                    total += int(file.read_text().split()[0])
        return total / 1e9

    pids = list(pids)
    cpu_before, start_s = read_used_s(), time.perf_counter()
    time.sleep(seconds)
    return (read_used_s() - cpu_before) / (time.perf_counter() - start_s) * 100
