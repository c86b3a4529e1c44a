"""What waits for runs on this machine, and what it weighs."""

from __future__ import annotations

import contextlib
from pathlib import Path


def watchers(tmpdir: Path) -> list[int]:
    """Pids of the watchers that were started with that folder for temporary files."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"rlhpc.jobs.wait_server" in words and program(int(folder.name)).startswith("python"):
                variables = (folder / "environ").read_bytes().split(b"\0")
                if f"TMPDIR={tmpdir}".encode() in variables:
                    found.append(int(folder.name))
    return found


def program(pid: int) -> str:
    """Name of the file that a process runs; "" of one that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/exe").readlink().name
    return ""


def resident_kib(pid: int) -> int:
    """Resident memory of a process, shared pages included."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def proportional_kib(pid: int) -> int:
    """The same, each shared page divided by the number of processes that share it."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0
