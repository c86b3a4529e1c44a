"""Fork of the ranks of a job step: its tasks on a node import the large modules once, in a process that forks their ranks.

Each task of a step is a process that Slurm starts. The first task of a node starts a server, which imports and forks like the
fork server of a host (`fork_server`). Every task then asks the server for its rank and stays as the rank's representative
towards Slurm: it ends as the rank ends, and the server ends the rank when its task has ended. Tasks that cannot reach the
server, because each has its own container, import by themselves.

Ranks that join a run on one node (`rlhpc join`) come one after another, each with a process of its own in place of a task.
They share a server as long as one of them runs.

If an import must not be forked (`fork_server.run_imports`), the server starts again without this import, which each rank makes
by itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import importlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.runtime import pickle_stream
from rlhpc.runtime.imports import run_module
from rlhpc.runtime.launchers.fork_server import import_variables, run_imports, unforkable_text
from rlhpc.runtime.os_resources import adopt_orphans, die_with_parent, kill_group, readable_descriptors, reaped_children
from rlhpc.runtime.scratch import Scratch
from rlhpc.runtime.worker_spec import WorkerSpec

log = logging.getLogger(__name__)

#: Seconds that a task waits for another task of its node to open the server's socket; the imports take place afterwards.
_OPEN_TIMEOUT_S = 30.0
#: Seconds that a rank may take to end by itself after its task has ended.
_GRACE_S = 2.0
#: Seconds after its start for which a server without ranks waits for tasks.
_IDLE_S = 60.0
#: Seconds between two checks of the server, in case a signal is lost.
_CHECK_S = 10.0
#: Variables by which a step's task is found and killed (`srun_commands.killing_step`); the server belongs to no task.
_TASK_VARIABLES = ("RLHPC_STEP", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID")


def _make_socket_path(worker_spec: WorkerSpec, is_joined: bool) -> Path:
    # several nodes of a test cluster may be one host
    words = [worker_spec.group, worker_spec.incarnation, os.environ.get("SLURMD_NODENAME", "")]
    if (
        is_joined
    ):  # each rank has its own incarnation; those of other jobs, steps and Pythons have a server of their own
        step = [os.environ.get(name, "") for name in ("SLURMD_NODENAME", "SLURM_JOB_ID", "SLURM_STEP_ID")]
        words = [worker_spec.group, "joined", *step, sys.executable, *worker_spec.preload]
    digest = hashlib.blake2b(" ".join(words).encode(), digest_size=6).hexdigest()
    return Scratch(worker_spec.token).sockets / f"fork-{digest}"


def pid_file(folder: Path, step_mark: str, task: str) -> Path:
    """Returns the file with the process id of a task's forked rank.

    Args:
        folder: The session's socket folder.
        step_mark: Mark of the step, the value of `RLHPC_STEP`.
        task: Number of the task.
    """
    return folder / f"forked-{step_mark}-{task}"


def _read_namespaces() -> tuple[int, ...]:
    """Returns the namespaces that a rank must share with its task: those of processes and of mounted filesystems."""
    return tuple(os.stat(f"/proc/self/ns/{name}").st_ino for name in ("pid", "mnt"))


# -- in a task --------------------------------------------------------------------------------------------------------------


def run_forked(worker_spec: WorkerSpec, entry_point: str, *, is_joined: bool = False) -> int | None:
    """Runs a task's rank in a process that the node's server forks, and waits for its end.

    Args:
        worker_spec: Specification of the rank; `preload` has what the server imports.
        entry_point: Entry point of the rank (`module:function`), a function from the specification to an exit status.
        is_joined: Whether the rank joins a run; it then reads this process's stdin.

    Returns:
        The rank's wait status; None if the server cannot fork it, so that the task has to run the rank itself.
    """
    connection = _connect(worker_spec, entry_point, is_joined)
    if connection is None:
        return None
    request = {
        "spec": worker_spec,
        "environ": dict(os.environ),
        "affinity": sorted(os.sched_getaffinity(0)),
        "namespaces": _read_namespaces(),
    }
    try:
        socket.send_fds(connection, [b"\0"], [1, 2, 0] if is_joined else [1, 2])
        pickle_stream.send(connection, request)
    except OSError:
        return None
    if is_joined and connection.fileno() not in readable_descriptors([connection.fileno(), 0]):
        print(
            f"rlhpc: {worker_spec.name} was told to leave before it had started; it ends", file=sys.stderr, flush=True
        )
        return 1 << 8
    answer = pickle_stream.receive(connection)
    if answer is None or "refused" in answer:
        log.info(
            "this rank imports by itself: %s", "the node's server has ended" if answer is None else answer["refused"]
        )
        return None
    rank_end = pickle_stream.receive(connection)
    if rank_end is None:
        print(
            f"rlhpc: error: the server that forked {worker_spec.name} on this node has ended",
            file=sys.stderr,
            flush=True,
        )
        return 1 << 8
    return int(rank_end["status"])


def end_like(status: int) -> None:
    """Ends this process as another one with this wait status has ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.WIFSIGNALED(status):
        signal_number = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)
        time.sleep(1.0)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def _connect(worker_spec: WorkerSpec, entry_point: str, is_joined: bool) -> socket.socket | None:
    """Connects to the node's server; the first task of the node starts it. Returns None if this fails."""
    path = _make_socket_path(worker_spec, is_joined)
    deadline = time.monotonic() + _OPEN_TIMEOUT_S
    try:
        while True:
            _start_missing_server(worker_spec, entry_point, path)
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(path))
                return connection
            except (FileNotFoundError, ConnectionRefusedError):  # it does not listen yet, or it ends
                connection.close()
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.01)
    except OSError as error:
        log.warning("this rank imports by itself: no server of this node can be reached: %s", error)
        return None


def _start_missing_server(worker_spec: WorkerSpec, entry_point: str, path: Path) -> None:
    """Starts the node's server unless one runs; the server holds the lock until it ends."""
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)  # the socket of a server that has ended
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen(4096)
                _start_server(worker_spec, entry_point, listener, lock)
    finally:
        os.close(lock)


def _start_server(worker_spec: WorkerSpec, entry_point: str, listener: socket.socket, lock: int) -> None:
    variables = {**os.environ, **import_variables(worker_spec)}
    environment = {name: value for name, value in variables.items() if name not in _TASK_VARIABLES}
    arguments = [
        str(listener.fileno()),
        str(lock),
        worker_spec.token,
        entry_point,
        str(worker_spec.local_world_size),
        *worker_spec.preload,
    ]
    # The server is not a child of the task: whoever kills a task with its children must not end the ranks of other tasks.
    intermediate_pid = os.fork()
    if intermediate_pid == 0:
        status = 1
        try:
            with open(worker_spec.log_err, "ab", buffering=0) as log_err:
                subprocess.Popen(
                    run_module(__name__, *arguments, python=sys.executable), stdin=subprocess.DEVNULL, stdout=log_err,
                    stderr=log_err, pass_fds=[listener.fileno(), lock], env=environment, start_new_session=True,
                )  # fmt: skip
            status = 0
        finally:
            os._exit(status)
    if os.waitstatus_to_exitcode(os.waitpid(intermediate_pid, 0)[1]):
        raise OSError(f"its process did not start; see {worker_spec.log_err}")


# -- in the server ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _ForkedRank:
    """Rank that the server has forked.

    Attributes:
        connection: Connection to the rank's task.
        pid: Process id of the rank.
        pid_file: File with the process id.
        is_joined: Whether the rank has joined the run.
        kill_at: Time (`time.monotonic`) at which the rank is killed, because its task has ended; None before.
    """

    connection: socket.socket
    pid: int
    pid_file: Path
    is_joined: bool
    kill_at: float | None = None


class _NodeServer:
    """Server that forks the ranks of a step's tasks on one node.

    Args:
        listener: Socket to which the tasks connect.
        lock: Descriptor of the lock that keeps other tasks from starting a server.
        token: Token of the session's scratch folders.
        entry_point: Entry point of a rank (`run_forked`).
        num_tasks: Number of tasks on this node.
        changed_variables: Environment variables that the imports have set: name → value before (None if unset) and after.
    """

    def __init__(
        self,
        listener: socket.socket,
        lock: int,
        token: str,
        entry_point: str,
        num_tasks: int,
        changed_variables: Mapping[str, tuple[str | None, str]],
    ) -> None:
        self._listener, self._lock, self._folder, self._entry = listener, lock, Scratch(token).sockets, entry_point
        self._changed_variables = changed_variables
        self._num_expected = num_tasks
        self._ranks: dict[int, _ForkedRank] = {}  # by the connection's descriptor
        self._idle_until = time.monotonic() + _IDLE_S

    def serve(self) -> None:
        """Runs until all tasks have come and ended; does not wait long for tasks that do not come."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        while self._ranks or (self._num_expected > 0 and time.monotonic() < self._idle_until):
            poll = select.poll()
            for descriptor in (self._listener.fileno(), self._reader.fileno()):
                poll.register(descriptor, select.POLLIN)
            for descriptor, rank in self._ranks.items():
                if rank.kill_at is None:
                    poll.register(descriptor, select.POLLIN)
            ready_fds = {descriptor for descriptor, _ in poll.poll(self._timeout_s() * 1000)}
            if self._reader.fileno() in ready_fds:
                with contextlib.suppress(BlockingIOError):
                    self._reader.recv(4096)
            self._reap()
            for descriptor in ready_fds & set(self._ranks):
                self._end(self._ranks[descriptor])
            for rank in self._ranks.values():
                if rank.kill_at is not None and time.monotonic() >= rank.kill_at:
                    kill_group(rank.pid, signal.SIGKILL)
            if self._listener.fileno() in ready_fds:
                self._accept()
                self._num_expected -= 1

    def _timeout_s(self) -> float:
        waits_for_end = any(rank.kill_at is not None for rank in self._ranks.values())
        return 0.05 if waits_for_end else _CHECK_S if self._ranks else 1.0

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        with contextlib.suppress(OSError, EOFError):
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
            request = pickle_stream.receive(connection)
            try:
                if request is None or len(descriptors) not in (2, 3):
                    connection.close()
                elif request["namespaces"] != _read_namespaces():
                    pickle_stream.send(connection, {"refused": "it is in another container than the node's server"})
                    connection.close()
                else:
                    self._fork(connection, request, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _fork(self, connection: socket.socket, request: Mapping[str, Any], streams: list[int]) -> None:
        environ = request["environ"]
        path = pid_file(self._folder, environ.get("RLHPC_STEP", ""), environ.get("SLURM_PROCID", ""))
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pickle_stream.send(connection, {"refused": str(error)})
            connection.close()
            return
        if pid == 0:
            self._run_rank(server, connection, request, streams)
        self._ranks[connection.fileno()] = _ForkedRank(connection, pid, path, len(streams) == 3)
        with contextlib.suppress(OSError):  # the task has ended, which the next poll tells
            pickle_stream.send(connection, {"pid": pid})
        with contextlib.suppress(OSError):
            path.write_text(str(pid))

    def _run_rank(self, server: int, connection: socket.socket, request: Mapping[str, Any], streams: list[int]) -> None:
        """Runs a rank in the forked process; does not return.

        Args:
            server: Process id of the server.
            connection: Connection to the rank's task.
            request: Request of the task.
            streams: The task's output, its errors, and for a joined rank its input.
        """
        status = 1
        try:
            os.setsid()
            die_with_parent(server)
            signal.set_wakeup_fd(-1)
            for signal_number in (signal.SIGCHLD, *_IGNORED_SIGNALS):
                signal.signal(signal_number, signal.SIG_DFL)
            for sock in (self._listener, self._reader, self._writer, connection):
                sock.close()
            for rank in self._ranks.values():
                rank.connection.close()
            os.close(self._lock)
            for stream, descriptor in zip(streams, (1, 2, 0), strict=False):
                os.dup2(stream, descriptor)
                os.close(stream)
            environ = request["environ"]
            # as if the rank had imported by itself; a variable with a value of its own keeps it
            changed_variables = {
                n: after for n, (before, after) in self._changed_variables.items() if environ.get(n) == before
            }
            os.environ.clear()
            os.environ.update({**environ, **changed_variables})
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, request["affinity"])
            module, _, name = self._entry.partition(":")
            status = getattr(importlib.import_module(module), name)(request["spec"])
        finally:
            # Skip the interpreter's teardown, because the atexit handlers belong to the server.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _end(self, rank: _ForkedRank) -> None:
        """Ends a rank whose task has ended; the task sends nothing after its request.

        A joined rank ends at once: if it may end by itself, the end of its input tells it so.
        """
        kill_group(rank.pid, signal.SIGKILL if rank.is_joined else signal.SIGTERM)
        rank.kill_at = time.monotonic() + _GRACE_S

    def _reap(self) -> None:
        """Reaps ended ranks and notifies their tasks."""
        for pid, status in reaped_children():
            for descriptor, rank in list(self._ranks.items()):
                if rank.pid == pid:
                    kill_group(pid, signal.SIGKILL)
                    del self._ranks[descriptor]
                    rank.pid_file.unlink(missing_ok=True)
                    with contextlib.suppress(OSError):
                        pickle_stream.send(rank.connection, {"status": status})
                    rank.connection.close()


#: Signals that the scheduler sends to all processes of a step; the server ends with the tasks.
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def _import_forkable(preload: Sequence[str], environ: Mapping[str, str]) -> None:
    """Imports for all ranks; starts this process again without an item that must not be forked.

    Args:
        preload: Modules, and functions that import (`module:function`).
        environ: Environment variables with which the process started.
    """
    unforkable = run_imports(preload)
    if unforkable is not None:
        print(unforkable_text(*unforkable), file=sys.stderr)
        arguments = sys.argv[1 : len(sys.argv) - len(preload)]
        remaining_items = [item for item in preload if item != unforkable[0]]
        command = run_module(f"{__package__}.node_fork", *arguments, *remaining_items, python=sys.executable)
        os.execve(command[0], command, environ)


def main() -> None:
    """Runs the server: `python -m rlhpc.runtime.launchers.node_fork FD LOCK TOKEN ENTRY TASKS ITEM…` (`Worker.preloads`)."""
    fd, lock, token, entry_point, num_tasks, *preload = sys.argv[1:]
    for signal_number in _IGNORED_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    adopt_orphans()
    gc.disable()  # as in the fork server of a host
    Scratch(token).hold_caches()
    environ = dict(os.environ)
    _import_forkable(preload, environ)
    changed_variables = {n: (environ.get(n), value) for n, value in os.environ.items() if environ.get(n) != value}
    gc.collect()
    gc.enable()
    gc.freeze()
    listener = socket.socket(fileno=int(fd))
    _NodeServer(listener, int(lock), token, entry_point, int(num_tasks), changed_variables).serve()


if __name__ == "__main__":
    main()
