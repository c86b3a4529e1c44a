"""Daemons of the test cluster: start, find, end, and wait for them with a deadline and their log at hand."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.eventually import Patience


class ClusterError(RuntimeError):
    """The test cluster did not do what it was asked to; the message ends with the logs' last lines."""


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for a later one of the same number."""

    pid: int
    started: int
    """Clock ticks since boot, field 22 of /proc/PID/stat."""

    @classmethod
    def of(cls, pid: int) -> Process | None:
        fields = _stat(pid)
        return cls(pid, int(fields[19])) if fields else None

    def alive(self) -> bool:
        """False also for a zombie: it holds nothing any more, and its parent may be a shell that never waits."""
        with suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        fields = _stat(self.pid)
        return fields is not None and int(fields[19]) == self.started and fields[0] not in "ZX"

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name, state first; None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def every() -> Iterator[Process]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := Process.of(int(entry))):
            yield process


def command_line(pid: int) -> str:
    """Its arguments, each ended by a NUL byte; empty where the process is gone."""
    return _read(f"/proc/{pid}/cmdline").decode(errors="replace")


def own_network_namespace() -> str:
    """What /proc/PID/ns/net of this process reads."""
    return os.readlink("/proc/self/ns/net")


def in_network_namespace(namespace: str) -> list[Process]:
    """Processes whose /proc/PID/ns/net reads `namespace`, that is, everything that runs on one node.

    Raises:
        ClusterError: It is this host's own: what ends a node's processes would end everything here.
    """
    if namespace == own_network_namespace():
        raise ClusterError("the network namespace of a node is this host's own")
    return [process for process in every() if _readlink(f"/proc/{process.pid}/ns/net") == namespace]


def of_steps(log: Path, slurm_conf: Path, node: str) -> list[Process]:
    """The step daemons of a node that shares this host, their tasks, and what those started.

    A step daemon, whose own arguments and environment are gone, is known by the log that it shares with its slurmd, a task by
    its environment, and the rest by their parents.
    """
    marks = {f"SLURM_CONF={slurm_conf}".encode(), f"SLURMD_NODENAME={node}".encode()}
    roots: set[int] = set()
    for process in every():
        if command_line(process.pid).startswith("slurmstepd:"):
            if str(log) in _open_files(process.pid):
                roots.add(process.pid)
        elif marks <= set(_read(f"/proc/{process.pid}/environ").split(b"\0")):
            roots.add(process.pid)
    return [process for process in every() if roots & set(_lineage(process.pid)) and process.alive()]


def _open_files(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            yield _readlink(f"/proc/{pid}/fd/{descriptor}")


def _lineage(pid: int) -> Iterator[int]:
    while pid > 1:
        yield pid
        fields = _stat(pid)
        pid = int(fields[1]) if fields else 0


def _readlink(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def start(argv: Sequence[str | Path], *, env: Mapping[str, str], output: Path) -> Process:
    """Start a daemon in a session of its own: it outlives the command that started it."""
    with output.open("ab") as sink:
        child = subprocess.Popen(
            [str(part) for part in argv],
            env=dict(env),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    process = Process.of(child.pid)
    child.returncode = 0  # `Process.alive` waits for it; Popen must neither wait nor warn
    if process is None:
        raise ClusterError(f"{argv[0]} ended at once\n{tail([output])}")
    return process


def end(processes: Iterable[Process], *, grace_s: float = 0.0, deadline_s: float = 10.0) -> None:
    """SIGTERM, `grace_s` later SIGKILL (at once where it is 0), and wait until they are gone."""
    remaining = list(processes)
    if grace_s:
        for process in remaining:
            process.kill(signal.SIGTERM)
        with suppress(ClusterError):
            wait_until(lambda: not any(process.alive() for process in remaining), "", deadline_s=grace_s)
    for process in remaining:
        process.kill()
    wait_until(
        lambda: not any(process.alive() for process in remaining),
        f"{[process.pid for process in remaining]} to be gone after SIGKILL",
        deadline_s=deadline_s,
    )


def wait_until(
    happened: Callable[[], object], what: str, *, deadline_s: float, logs: Iterable[Path] = (), poll_s: float = 0.05
) -> None:
    """Return once `happened()` is true.

    Raises:
        ClusterError: it was not within `deadline_s`; the message has the last lines of `logs`.
    """
    patience = Patience(deadline_s)
    while not happened():
        if patience.is_over():
            raise ClusterError(f"waited {deadline_s:g} s for {what}\n{tail(logs)}".rstrip())
        time.sleep(poll_s)


def tail(logs: Iterable[Path], lines: int = 15) -> str:
    """The last lines of each log that exists and is not empty."""
    parts = []
    for log in logs:
        text = _read(str(log)).decode(errors="replace").splitlines()[-lines:]
        if text:
            parts.append("\n".join([f"--- {log} (last {len(text)} lines)", *text]))
    return "\n".join(parts)
