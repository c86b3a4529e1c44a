"""Launcher of ranks on this host, and the driver's side of the fork server (`rlhpc.runtime.launchers.fork_server`)."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.runtime import pickle_stream
from rlhpc.runtime.errors import SubmitError, WorkerFailed
from rlhpc.runtime.imports import run_module
from rlhpc.runtime.launchers import RankProcess, Reports, node_imports, rank_environment
from rlhpc.runtime.os_resources import raise_limit
from rlhpc.runtime.scratch import Scratch
from rlhpc.runtime.text import tail

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster, Node
    from rlhpc.runtime.worker_spec import WorkerSpec

#: Entry point of a forked rank.
ENTRY = "rlhpc.runtime.worker_process:live"
#: Modules that every fork server imports.
PRELOAD = ("torch", "numpy", "zmq", "cloudpickle", "rlhpc.runtime.worker_process", "rlhpc.runtime.worker")


class ForkServerProcess:
    """Process of a fork server, and the scratch folders that the server removes when the driver has ended.

    Args:
        preload: Modules that the server imports in addition to `PRELOAD`; None imports no module, for sessions that fork no
            rank.

    Raises:
        ConfigError: The limit of open files is too low for a run.
    """

    _prewarmed: ForkServerProcess | None = None

    @classmethod
    def prewarm(cls, preload: Sequence[str]) -> None:
        """Starts the server that `take` will return, so that its imports overlap with other work of this process."""
        if cls._prewarmed is None:
            cls._prewarmed = cls(preload)
            atexit.unregister(cls._discard)
            atexit.register(cls._discard, os.getpid())

    @classmethod
    def take(cls, preload: Sequence[str] | None) -> ForkServerProcess:
        """Returns the server that `prewarm` started, or a new one."""
        server, cls._prewarmed = cls._prewarmed or cls(preload), None
        return server

    @classmethod
    def _discard(cls, owner_pid: int) -> None:
        """Ends the prewarmed server of a process that never started a session. The server may still be importing."""
        server = cls._prewarmed
        if server is not None and owner_pid == os.getpid():
            server.process.kill()
            server.process.wait()
            server.control.close()
            server.scratch.remove()

    def __init__(self, preload: Sequence[str] | None) -> None:
        raise_limit()  # the server and its ranks inherit the driver's limit
        self.scratch = Scratch.create()
        self.control, server_end = socket.socketpair()
        environment = rank_environment(os.environ, 1) | {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with self.output_file.open("ab") as err:
            self.process = subprocess.Popen(
                run_module("rlhpc.runtime.launchers.fork_server", str(server_end.fileno()), self.scratch.token,
                           str(os.getpid()), ENTRY, *(() if preload is None else (*PRELOAD, *preload))),
                pass_fds=[server_end.fileno()], stdin=subprocess.DEVNULL, stdout=err, stderr=err, env=environment,
                start_new_session=True,
            )  # fmt: skip
        server_end.close()

    @property
    def output_file(self) -> Path:
        """File with the output of the server and of ranks that have not opened their logs."""
        return self.scratch.sockets / "forkserver.err"


class ForkLauncher:
    """Launcher that makes the fork server start ranks, by a fork or with a separate interpreter.

    Args:
        server: The fork server.
        log_dir: Folder for the server's output.
        reports: Receiver of the ranks' events.
        preload: Modules that a node imports before the ranks of a group are forked.
    """

    grace_s = 1.5
    limit_s = 4.0

    def __init__(self, server: ForkServerProcess, log_dir: Path, reports: Reports, preload: Sequence[str] = ()) -> None:
        self._preload = tuple(preload)
        self.server, self._log_dir, self._reports = server, log_dir, reports
        self._lock = threading.Lock()
        self._processes: dict[tuple[str, str], RankProcess] = {}
        #: State of the server: "importing", "serving" or "ended".
        self._state = "importing"
        threading.Thread(target=self._receive_events, name="rlhpc-monitor", daemon=True).start()

    def _send_request(self, **message: Any) -> None:
        with self._lock, contextlib.suppress(OSError):
            pickle_stream.send(self.server.control, message)

    def _receive_events(self) -> None:
        """Reports the server's events to the session; runs on a separate thread."""
        while (event := pickle_stream.receive(self.server.control)) is not None:
            if event["event"] == "ready":
                self._state = "serving"
            else:
                self._handle_event(event)
        was_serving, self._state = self._state == "serving", "ended"
        unexpected_ends = self._reports.record_ends(list(self._processes.values()))
        if unexpected_ends:
            self._report_server_lost(
                unexpected_ends[0], "and its workers with it" if was_serving else "before it had started a rank"
            )

    def _handle_event(self, event: dict[str, Any]) -> None:
        """Reports an event of a rank. The event has the rank's incarnation, so that it never affects a successor."""
        process = self._processes.get(event["rank"])
        if process is None:
            return
        if event["event"] == "started":
            self._reports.record_start(process, event["pid"])
        elif event["event"] == "refused":
            worker_spec = process.spec
            self._reports.fail(SubmitError(f"cannot start {worker_spec.name} on {worker_spec.node}: {event['error']}"))
        elif event["event"] == "exit":
            self._reports.record_exit(process, event["status"])

    def _report_server_lost(self, process: RankProcess, moment_text: str) -> None:
        """Reports the end of the server as a failure that no rank has caused."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.server.process.wait(1.0)  # the output is complete after the end of the process
        path, output = self._log_dir / "forkserver.err", self.early_output(process)
        with contextlib.suppress(OSError):
            path.write_text(output)
        node = process.spec.node
        self._reports.fail(WorkerFailed(
            f"the fork server of node {node} died, {moment_text} (log {path}){tail(str(self.server.output_file))}", node=node,
            log_path=str(path),
        ))  # fmt: skip

    def prepare(self, spec: WorkerSpec, node: Node, fork: bool) -> None:
        if not node.is_local:
            raise SubmitError(
                f"node {node.name} is not this machine: rank {spec.rank} of {spec.group!r} needs a job step"
            )
        if node.visible_devices:
            mask_text = ",".join(str(node.visible_devices[i]) for i in spec.device_mask)
            spec.env.setdefault("CUDA_VISIBLE_DEVICES", mask_text)
        spec.preload = node_imports(spec, self._preload, fork)
        if (not fork or spec.command_prefix) and not spec.interpreter:
            spec.interpreter = sys.executable

    def start(self, processes: Sequence[RankProcess], cluster: Cluster) -> None:
        self._processes = {identity: m for identity, m in self._processes.items() if not m.has_exited}
        self._processes.update({process.spec.identity: process for process in processes})
        if self._state == "ended":
            self._reports.record_ends(processes)
            self._report_server_lost(processes[0], "and can start no more ranks")
            return
        for process in processes:
            self._send_request(op="start", spec=pickle.dumps(process.spec))

    def _send_signal(self, processes: Sequence[RankProcess], signal_number: int) -> None:
        self._send_request(
            op="kill",
            ranks=[process.spec.identity for process in processes if not process.has_exited],
            signal=signal_number,
        )

    def end(self, processes: Sequence[RankProcess]) -> None:
        self._send_signal(processes, signal.SIGTERM)

    def kill(self, processes: Sequence[RankProcess]) -> None:
        self._send_signal(processes, signal.SIGKILL)

    def early_output(self, process: RankProcess) -> str:
        with contextlib.suppress(OSError):
            return self.server.output_file.read_text(errors="replace")
        return ""

    def arrival_report(self, processes: Sequence[RankProcess]) -> list[str]:
        return []

    def cut_short(self) -> bool:
        """Kills the server if it is still importing, because it would handle a request only later; returns whether it was."""
        if self._state != "importing":
            return False
        self.server.process.kill()
        return True

    def close(self, clears_folders: bool) -> None:
        self._send_request(op="stop")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.server.process.wait(timeout=10)
        self.server.control.close()
