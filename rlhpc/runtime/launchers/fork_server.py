"""Fork server: a process per host that imports the large modules once and forks the ranks.

The server only imports and forks. It uses no thread, no CUDA context, no ZeroMQ context and no torch operator, so that a fork
is safe. When the driver has ended for any reason, the server reads end-of-file from its socket, kills its children and removes
the session's scratch folders. If the server itself is killed, the kernel kills the workers (PDEATHSIG).

A group with imports of its own (`Worker.preloads`) has an import server: a fork of this server that imports for the group's
ranks and forks them. An import that opens an accelerator cannot be forked, because the accelerator's driver does not survive
it. A new import server then takes the place of the first one, without this import, which each rank makes by itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.runtime import pickle_stream
from rlhpc.runtime.imports import run_module
from rlhpc.runtime.os_resources import adopt_orphans, die_with_parent, kill_group, readable_descriptors, reaped_children
from rlhpc.runtime.scratch import Scratch
from rlhpc.runtime.worker_spec import BEHIND_PREFIX, WorkerSpec

GRACE_S = 2.0
#: Seconds that killed ranks may take to end.
_KILL_S = 5.0
#: Seconds between two checks for ended children, in case a SIGCHLD is lost; normally SIGCHLD wakes the server.
_CHECK_S = 10.0
#: Device files of accelerators: NVIDIA, AMD, Intel, and the kernel's class `accel`. A container may have /dev elsewhere.
_DEVICE_FILES = re.compile(r".*/dev/(nvidia.*|kfd|dri/.*|accel.*)")


def import_variables(worker_spec: WorkerSpec) -> dict[str, str]:
    """Returns the rank's environment variables that its group's imports get.

    Libraries read variables at import. The device mask is that of one rank; the node's own is as good for an import.
    """
    return {name: value for name, value in worker_spec.env.items() if name != "CUDA_VISIBLE_DEVICES"}


def run_imports(items: Sequence[str]) -> tuple[str, str] | None:
    """Imports for ranks that this process will fork; leaves out missing modules, whose ranks report them in their logs.

    Args:
        items: Modules, and functions that import (`module:function`).

    Returns:
        The first item that must not be forked, and the reason; the items after it are not imported. None if there is no such
        item.
    """
    for item in items:
        module, _, function = item.partition(":")
        reason = ""
        try:
            imported_module = importlib.import_module(module)
            if function:
                getattr(imported_module, function)()
        except ImportError:
            continue
        except Exception as error:
            reason = f"it fails: {type(error).__name__}: {error}"
        if devices := _opened_accelerators():
            reason = f"it opens {devices[0]}"
        if reason:
            return item, reason
    return None


def unforkable_text(item: str, reason: str) -> str:
    """Returns the message that each rank of a node performs an import separately."""
    return f"rlhpc: each rank of this node makes the import {item} by itself, because {reason}"


def _opened_accelerators() -> list[str]:
    """Returns the device files of accelerators that this process has open."""
    paths = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(filter(_DEVICE_FILES.fullmatch, paths))


@dataclass(eq=False)
class _ImportServer:
    """Fork of the server that has a group's imports, and forks the ranks that need them.

    Attributes:
        control: Socket of the main server to it.
        pid: Its process id.
        items: What it imports.
        pending: Specifications of ranks that wait for the end of the imports, with their pickles.
        is_serving: Whether its imports have ended.
        ranks: Process id of each of its ranks, by name and incarnation.
    """

    control: socket.socket
    pid: int
    items: list[str]
    pending: list[tuple[WorkerSpec, bytes]] = field(default_factory=list)
    is_serving: bool = False
    ranks: dict[tuple[str, str], int] = field(default_factory=dict)


class ForkServer:
    """Handler of one driver's `start` and `kill` requests over `control`.

    Args:
        control: The driver's socket.
        token: Token of the session's scratch folders.
        entry: Entry point of a forked rank (`module:function`), a function from a `WorkerSpec` to an exit status. A rank with
            a separate interpreter runs the module as a program.
        imported: What this process has imported.
    """

    def __init__(self, control: socket.socket, token: str, entry: str, imported: Sequence[str] = ()) -> None:
        self.control, self.scratch, self.entry = control, Scratch(token), entry
        #: Name and incarnation of each child, by process id.
        self.children: dict[int, tuple[str, str]] = {}
        #: What ranks need not import, or have to import by themselves.
        self._settled_items = set(imported)
        #: Import servers by their imports and the variables that these get.
        self._import_servers: dict[tuple[Any, ...], _ImportServer] = {}

    def serve(self, *, removes_folder: bool = True) -> None:
        """Runs until the driver sends `stop` or has ended.

        Args:
            removes_folder: Remove the session's scratch folders at the end.
        """
        signal.signal(signal.SIGCHLD, lambda *_: None)
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._inherited_ends = (reader, writer)
        pickle_stream.send(self.control, {"event": "ready", "pid": os.getpid()})
        while True:
            import_servers = {server.control.fileno(): server for server in self._import_servers.values()}
            ready_fds = readable_descriptors([self.control.fileno(), reader.fileno(), *import_servers], _CHECK_S)
            if reader.fileno() in ready_fds:
                with contextlib.suppress(BlockingIOError):
                    reader.recv(4096)
            self.reap()
            for descriptor in ready_fds & set(import_servers):
                self._handle_event(import_servers[descriptor])
            if self.control.fileno() in ready_fds:
                request = pickle_stream.receive(self.control)
                if request is None or request["op"] == "stop":
                    self.end(removes_folder)
                    return
                if request["op"] == "start":
                    self.start(request["spec"])
                elif request["op"] == "kill":
                    self._kill(request)

    def _kill(self, request: Mapping[str, Any]) -> None:
        """Signals ranks; a rank that waits for its group's imports ends at once."""
        for pid, rank in self.children.items():
            if rank in request["ranks"]:
                kill_group(pid, request["signal"])
        for server in self._import_servers.values():
            if server.is_serving:
                self._send(server.control, request)
            for pending in [p for p in server.pending if p[0].identity in request["ranks"]]:
                server.pending.remove(pending)
                self._send(
                    self.control, {"event": "exit", "rank": pending[0].identity, "status": int(request["signal"])}
                )

    def start(self, body: bytes) -> None:
        """Starts one worker and reports its pid; the import server of its group does so if there is something to import."""
        worker_spec: WorkerSpec = pickle.loads(body)
        items = [item for item in worker_spec.shared_imports if item not in self._settled_items]
        try:
            if items and not worker_spec.interpreter:
                self._start_with_imports(worker_spec, body, items)
                return
            pid = self._spawn(worker_spec, body) if worker_spec.interpreter else self._fork(worker_spec)
        except OSError as error:
            pickle_stream.send(self.control, {"event": "refused", "rank": worker_spec.identity, "error": f"{error}"})
            return
        self.children[pid] = worker_spec.identity
        pickle_stream.send(self.control, {"event": "started", "rank": worker_spec.identity, "pid": pid})

    def _start_with_imports(self, worker_spec: WorkerSpec, body: bytes, items: list[str]) -> None:
        """Passes a rank to the import server of its group; starts that server for the first rank."""
        key = (*items, *sorted(import_variables(worker_spec).items()))
        server = self._import_servers.get(key)
        if server is None:
            server = self._import_servers[key] = self._fork_import_server(worker_spec, items)
        if server.is_serving:
            self._send(server.control, {"op": "start", "spec": body})
        else:
            server.pending.append((worker_spec, body))

    def _fork_import_server(self, worker_spec: WorkerSpec, items: list[str]) -> _ImportServer:
        control, server_end = socket.socketpair()
        main_pid = os.getpid()
        pid = os.fork()
        if pid:
            server_end.close()
            return _ImportServer(control, pid, items)
        try:
            self._become_child(main_pid)
            control.close()
            adopt_orphans()
            os.environ.update(import_variables(worker_spec))
            gc.disable()
            unforkable = run_imports(items)
            if unforkable is None:
                gc.collect()
                gc.enable()
                gc.freeze()
                imported = [*self._settled_items, *items]
                ForkServer(server_end, self.scratch.token, self.entry, imported).serve(removes_folder=False)
            else:
                pickle_stream.send(server_end, {"event": "unforkable", "item": unforkable[0], "reason": unforkable[1]})
        finally:
            # Without the interpreter's teardown, as in `_fork`.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(0)

    def _handle_event(self, server: _ImportServer) -> None:
        """Passes an event of an import server's rank on to the driver, or starts the ranks that have waited for imports."""
        event = pickle_stream.receive(server.control)
        if event is None:
            self._replace(server, server.items, "the process that made it has ended")
        elif event["event"] == "unforkable":
            self._replace(server, [event["item"]], event["reason"])
        elif event["event"] == "ready":
            server.is_serving = True
            for _, body in server.pending:
                self._send(server.control, {"op": "start", "spec": body})
            server.pending.clear()
        else:
            if event["event"] == "started":
                server.ranks[event["rank"]] = event["pid"]
            else:
                server.ranks.pop(event["rank"], None)
            self._send(self.control, event)

    def _replace(self, server: _ImportServer, items: Sequence[str], reason: str) -> None:
        """Removes an import server that has ended, and starts the ranks that have waited for it in another way.

        Args:
            server: The import server.
            items: What the ranks have to import by themselves, if the import server has not served.
            reason: The reason for that.
        """
        self._import_servers = {key: other for key, other in self._import_servers.items() if other is not server}
        server.control.close()
        for rank, pid in server.ranks.items():  # the kernel has killed them with their server
            kill_group(pid, signal.SIGKILL)
            self._send(self.control, {"event": "exit", "rank": rank, "status": int(signal.SIGKILL)})
        if server.is_serving:
            return
        self._settled_items.update(items)
        for worker_spec, _ in server.pending[:1]:
            with contextlib.suppress(OSError), Path(worker_spec.log_err).open("a") as log:
                log.writelines(f"{unforkable_text(item, reason)}\n" for item in items)
        for _, body in server.pending:
            self.start(body)

    @staticmethod
    def _send(receiver: socket.socket, message: Mapping[str, Any]) -> None:
        """Sends a message to the driver or an import server, unless it has ended, which is noticed elsewhere."""
        with contextlib.suppress(OSError):
            pickle_stream.send(receiver, message)

    def _become_child(self, server_pid: int) -> None:
        """Detaches a process that this server has forked from the server's session, sockets and signals."""
        os.setsid()
        die_with_parent(server_pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        import_sockets = [server.control for server in self._import_servers.values()]
        for inherited_socket in (self.control, *self._inherited_ends, *import_sockets):
            inherited_socket.close()

    def _fork(self, spec: WorkerSpec) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            self._become_child(server)
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
            self._send(self.control, {"event": "exit", "rank": rank, "status": status})

    def end(self, removes_folder: bool) -> None:
        """Ends all children with SIGTERM, and after `GRACE_S` seconds with SIGKILL.

        Args:
            removes_folder: Remove the session's scratch folders afterwards.
        """
        import_servers, import_deadline = list(self._import_servers.values()), time.monotonic() + GRACE_S + _KILL_S
        for server in import_servers:
            if server.is_serving:
                self._send(server.control, {"op": "stop"})
            else:
                kill_group(server.pid, signal.SIGKILL)
        for signal_number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, _KILL_S)):
            for pid in list(self.children):
                kill_group(pid, signal_number)
            deadline = time.monotonic() + grace_s
            while self.children and time.monotonic() < deadline:
                self.reap()
                time.sleep(0.01)
        for server in import_servers:
            server.control.settimeout(max(0.1, import_deadline - time.monotonic()))
            while (event := pickle_stream.receive(server.control)) is not None:
                self._send(self.control, event)
            kill_group(server.pid, signal.SIGKILL)
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
    server = ForkServer(control, token, entry_point, modules)
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
