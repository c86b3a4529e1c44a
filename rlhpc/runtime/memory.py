"""Memory of this host, and how much of it this process may still take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_MEMINFO, _GROUPS, _OWN = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def free_memory() -> int:
    """Bytes that are free on this host, or in the control groups of this process (a Slurm job's, a container's) if less."""
    free = 0
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    return max(0, min([free, *_left_in_groups()]))


def total_memory() -> int:
    """Returns the bytes of this host's memory, or the limit of the control groups of this process if that is less."""
    total = 0
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) << 10
    limits = []
    for name in ("memory.max", "memory.limit_in_bytes"):
        for folder in _folders():
            with contextlib.suppress(OSError, ValueError):  # no such controller, no right to read it, or "max"
                limits.append(int((folder / name).read_text()))
    return min([total, *limits])


def _left_in_groups() -> Iterator[int]:
    """What each control group above this process leaves, in either version of control groups."""
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for folder in _folders():
            try:
                most, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
                inactive = [int(line.split()[1]) for line in (folder / "memory.stat").read_text().splitlines()
                            if line.startswith(("inactive_file ", "total_inactive_file "))]  # fmt: skip
            except (OSError, ValueError):
                continue  # no such controller here, or one that we may not read
            if most != "max":
                # The kernel drops files' pages before it kills anybody.
                yield int(most) - now + max(inactive, default=0)


def _folders() -> Iterator[Path]:
    """The folders of this process's control groups, and those above them."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _GROUPS / "memory" if controllers else _GROUPS
        folder = root / path.lstrip("/")
        while True:
            yield folder
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent
