"""Judge processes of the reward pool: a server that imports the modules of the rewards, and judges that the server forks.

The server only imports and forks, so a judge that hung or died is replaced in milliseconds. Judges are killed with all their
child processes, including daemons. When the pool's process ends for any reason, the server reads end-of-file from its socket
and ends all processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from rlhpc.language.rewards.base import HasMemoryLimit, HasPreload, Reward, Sample
from rlhpc.language.rewards.registry import build_reward
from rlhpc.runtime import pickle_stream
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.os_resources import (
    adopt_orphans,
    die_with_parent,
    outlive_parent,
    readable_descriptors,
    reaped_children,
)

Spec = list[tuple[str, Any, dict[str, Any]]]
"""Rewards as (name, class or function, arguments)."""


def judge(rewards: dict[str, Reward], sample: Sample) -> tuple[dict[str, float], str]:
    """Scores a sample; returns the values of the rewards that succeed, and the errors of the other rewards as text."""
    term_values, errors = {}, []
    for name, reward in rewards.items():
        try:
            term_value = float(reward(sample))
            if not math.isfinite(term_value):
                raise ValueError(f"it gave {term_value}")
            term_values[name] = term_value
        except (Exception, SystemExit) as error:
            errors.append(f"{name}: {type(error).__name__}: {error}")
    return term_values, "; ".join(errors)


def _run_judge(term_specs: Spec, connection: socket.socket) -> None:
    """Runs a judge process: builds the rewards, then scores samples one by one."""
    memory_limits_mb = [factory.memory_mb if isinstance(factory, HasMemoryLimit) else 0 for _, factory, _ in term_specs]
    if all(memory_limits_mb):
        memory_limit = max(memory_limits_mb) << 20
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    try:
        rewards = {name: build_reward(name, factory, kwargs) for name, factory, kwargs in term_specs}
    except BaseException as error:
        reason = str(error) if isinstance(error, ConfigError) else "".join(traceback.format_exception(error))
        pickle_stream.send(connection, {"failed": reason, "config": isinstance(error, ConfigError)})
        return
    pickle_stream.send(connection, {"ready": os.getpid()})
    while (request := pickle_stream.receive(connection)) is not None:
        ticket, sample = request
        pickle_stream.send(connection, {"ticket": ticket, "verdict": judge(rewards, sample)})


class JudgeServer:
    """Server that forks and kills judge processes at the request of a pool, which arrives on the socket `control`."""

    def __init__(self, control: socket.socket, spec: Spec, folder: Path) -> None:
        self.control = control
        self.spec = spec
        self.folder = folder
        self.judges: dict[int, int] = {}  # number of each judge, by process id

    def serve(self) -> None:
        """Runs until the pool is closed or its process has ended."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        while True:
            ready_fds = readable_descriptors([self.control.fileno(), reader.fileno()])
            if reader.fileno() in ready_fds:
                with contextlib.suppress(BlockingIOError):
                    reader.recv(4096)
            if self.control.fileno() in ready_fds:
                request = pickle_stream.receive(self.control)
                if request is None:
                    break
                if request["op"] == "start":
                    self._start_process(request["judge"])
                else:
                    for pid in [pid for pid, judge_number in self.judges.items() if judge_number == request["judge"]]:
                        _kill_tree(pid)
            self._reap()
        for pid in self.judges:
            _kill_tree(pid)
        _kill_tree(os.getpid(), includes_root=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_process(self, number: int) -> None:
        """Forks a judge process with a socket that the pool has sent."""
        _, (fd,), _, _ = socket.recv_fds(self.control, 1, 1)
        server, pid = os.getpid(), os.fork()
        if pid:
            os.close(fd)
            self.judges[pid] = number
            return
        try:
            os.setsid()
            die_with_parent(server)
            adopt_orphans()
            signal.set_wakeup_fd(-1)
            for signal_number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(signal_number, signal.SIG_DFL)
            self.control.close()
            with contextlib.suppress(OSError):  # when memory runs out, a judge is killed before the trainer
                Path("/proc/self/oom_score_adj").write_text("800")
            folder = self.folder / str(number)
            folder.mkdir()
            tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
            random.seed()
            _run_judge(self.spec, socket.socket(fileno=fd))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def _reap(self) -> None:
        """Removes judge processes that have ended, and kills their child processes."""
        for pid, _ in reaped_children():
            judge_number = self.judges.pop(pid, None)
            if judge_number is not None:
                shutil.rmtree(self.folder / str(judge_number), ignore_errors=True)
        for pid in _read_children(os.getpid()):
            if pid not in self.judges:
                _kill_tree(pid)  # child process of a dead judge


def _read_children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _kill_tree(pid: int, includes_root: bool = True) -> None:
    """Kills a process and its descendants. Suspends the process first, so that it starts no further descendants."""
    import psutil

    with contextlib.suppress(psutil.Error):
        root_process = psutil.Process(pid)
        if includes_root:
            root_process.suspend()
        while descendants := [
            descendant
            for descendant in root_process.children(recursive=True)
            if descendant.status() != psutil.STATUS_ZOMBIE
        ]:
            for process in descendants:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if not includes_root:
                psutil.wait_procs(descendants, timeout=1)
        if includes_root:
            root_process.kill()


def main() -> None:
    """Runs the server. The command line arguments are the socket's descriptor, the process id of the pool, and the folder of
    the judges' files. The first message on the socket specifies the rewards (`Spec`).
    """
    fd, pool_pid, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    die_with_parent(pool_pid)  # while a user's module is imported, the socket is not read
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    adopt_orphans()
    control = socket.socket(fileno=fd)
    try:
        term_specs: Spec = pickle.loads(pickle_stream.receive(control) or b"")
        import psutil  # noqa: F401

        for _, factory, _ in term_specs:
            for module in factory.preload if isinstance(factory, HasPreload) else ():
                with contextlib.suppress(ImportError):  # the judge reports it in an error message
                    importlib.import_module(module)
    except BaseException as error:
        pickle_stream.send(control, {"failed": "".join(traceback.format_exception(error)), "config": False})
        return
    gc.collect()
    gc.freeze()
    outlive_parent()  # from now on end-of-file ends the server, not the end of the thread that started it
    pickle_stream.send(control, {"ready": os.getpid()})
    JudgeServer(control, term_specs, Path(folder)).serve()
