"""Fork server: a process per host that imports the large modules once and forks the ranks.

The server only imports and forks. It uses no thread, no CUDA context, no ZeroMQ context and no torch operator, so that a fork
is safe. When the driver has ended for any reason, the server reads end-of-file from its socket, kills its children and removes
the session's scratch folders. If the server itself is killed, the kernel kills the workers (PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from rlhpc.runtime import pickle_stream
from rlhpc.runtime.imports import run_module
from rlhpc.runtime.os_resources import adopt_orphans, die_with_parent, kill_group, readable, reaped_children
from rlhpc.runtime.scratch import Scratch
from rlhpc.runtime.worker_spec import BEHIND_PREFIX, WorkerSpec

GRACE_S = 2.0
#: Seconds between two checks for ended children, in case a SIGCHLD is lost; normally SIGCHLD wakes the server.
_CHECK_S = 10.0


class ForkServer:
    """Handler of one driver's `start` and `kill` requests over `control`.

    Args:
        control: The driver's socket.
        token: Token of the session's scratch folders.
        entry: Entry point of a forked rank (`module:function`), a function from a `WorkerSpec` to an exit status. A rank with
            a separate interpreter runs the module as a program.
    """

    def __init__(self, control: socket.socket, token: str, entry: str) -> None:
        self.control, self.scratch, self.entry = control, Scratch(token), entry
        #: Name and incarnation of each child, by process id.
        self.children: dict[int, tuple[str, str]] = {}

    def serve(self) -> None:
        """Runs until the driver sends `stop` or has ended."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._inherited_ends = (reader, writer)
        pickle_stream.send(self.control, {"event": "ready", "pid": os.getpid()})
        while True:
            ready_fds = readable([self.control.fileno(), reader.fileno()], _CHECK_S)
            if reader.fileno() in ready_fds:
                with contextlib.suppress(BlockingIOError):
                    reader.recv(4096)
            self.reap()
            if self.control.fileno() in ready_fds:
                request = pickle_stream.receive(self.control)
                if request is None or request["op"] == "stop":
                    self.end(removes_folder=True)
                    return
                if request["op"] == "start":
                    self.start(request["spec"])
                elif request["op"] == "kill":
                    for pid, rank in self.children.items():
                        if rank in request["ranks"]:
                            kill_group(pid, request["signal"])

    def start(self, body: bytes) -> None:
        """Starts one worker and reports its pid."""
        worker_spec: WorkerSpec = pickle.loads(body)
        try:
            pid = self._spawn(worker_spec, body) if worker_spec.interpreter else self._fork(worker_spec)
        except OSError as error:
            pickle_stream.send(self.control, {"event": "refused", "rank": worker_spec.identity, "error": f"{error}"})
            return
        self.children[pid] = worker_spec.identity
        pickle_stream.send(self.control, {"event": "started", "rank": worker_spec.identity, "pid": pid})

    def _fork(self, spec: WorkerSpec) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            os.setsid()
            die_with_parent(server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited_socket in (self.control, *self._inherited_ends):
                inherited_socket.close()
            module, _, name = self.entry.partition(":")
            status = getattr(importlib.import_module(module), name)(spec)
        finally:
            # Skip the interpreter's teardown, because the atexit handlers belong to the fork server.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _spawn(self, worker_spec: WorkerSpec, body: bytes) -> int:
        """Starts a rank in a new interpreter, for groups with a different Python or engines that cannot be forked."""
        with (
            open(worker_spec.log_err, "ab", buffering=0) as stderr_log,
            open(worker_spec.log_out, "ab", buffering=0) as stdout_log,
        ):
            parent = BEHIND_PREFIX if worker_spec.command_prefix else str(os.getpid())
            child = subprocess.Popen(
                [
                    *worker_spec.command_prefix,
                    *run_module(self.entry.partition(":")[0], parent, python=worker_spec.interpreter),
                ],
                stdin=subprocess.PIPE,
                stdout=stdout_log,
                stderr=stderr_log,
                start_new_session=True,
                env={
                    **os.environ,
                    **worker_spec.env,
                    "PYTHONPATH": os.pathsep.join(p for p in worker_spec.sys_path if p),
                },
            )
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(body)
            child.stdin.close()
        child.returncode = 0  # `reap` reaps this process, together with the forked ones
        return child.pid

    def reap(self) -> None:
        """Reaps and reports every child that has ended, and kills the processes that the child has started."""
        for pid, status in reaped_children():
            rank = self.children.pop(pid, None)
            if rank is None:
                continue
            kill_group(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                pickle_stream.send(self.control, {"event": "exit", "rank": rank, "status": status})

    def end(self, removes_folder: bool) -> None:
        """Ends all children with SIGTERM, and after `GRACE_S` seconds with SIGKILL.

        Args:
            removes_folder: Remove the session's scratch folders afterwards.
        """
        for signal_number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 5.0)):
            for pid in list(self.children):
                kill_group(pid, signal_number)
            deadline = time.monotonic() + grace_s
            while self.children and time.monotonic() < deadline:
                self.reap()
                time.sleep(0.01)
        if removes_folder:
            self.scratch.remove()


def _end_while_importing(control: socket.socket, token: str) -> None:
    """Makes the kernel interrupt the imports when the driver dies; otherwise the server would notice this only afterwards."""

    def on_driver_end(*_: object) -> None:
        with contextlib.suppress(BlockingIOError):
            if not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                Scratch(token).remove()
                os._exit(0)

    signal.signal(signal.SIGIO, on_driver_end)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, fcntl.fcntl(control, fcntl.F_GETFL) | os.O_ASYNC)


def _end_imports(control: socket.socket) -> None:
    """Cancels `_end_while_importing`, because `ForkServer.serve` notices the end of the driver itself."""
    fcntl.fcntl(control, fcntl.F_SETFL, fcntl.fcntl(control, fcntl.F_GETFL) & ~os.O_ASYNC)
    signal.signal(signal.SIGIO, signal.SIG_DFL)


def main() -> None:
    """Runs the server: `python -m rlhpc.runtime.launchers.fork_server FD TOKEN DRIVER_PID ENTRY MODULE…`."""
    fd, token, driver_pid, entry_point, *modules = sys.argv[1:]
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)  # a signal to the job's process group must not end the ranks
    adopt_orphans()
    Scratch(token).hold()
    Scratch(token).hold_caches()
    control = socket.socket(fileno=int(fd))
    server = ForkServer(control, token, entry_point)
    _end_while_importing(control, token)
    if os.getppid() != int(driver_pid):
        server.end(removes_folder=True)
        return
    import_errors: dict[str, Any] = {}
    gc.disable()  # the imports create a million objects that stay, and the collector would walk them again and again
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            import_errors[module] = str(error)  # the rank that needs it reports this in its log
    _end_imports(control)
    gc.collect()
    gc.enable()
    gc.freeze()  # forked ranks share these pages permanently, so the garbage collector must not write to them
    server.serve()


if __name__ == "__main__":
    main()
