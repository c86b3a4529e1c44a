"""Wait client: replaces a waiting command by a small shell that prints the output of the wait server.

The waiting command connects to the server (`wait_server`, one per user and host), or starts a server if none runs. Then the
command becomes a shell, which takes about a megabyte of memory. The shell reads lines for stderr (E) and stdout (O) from the
connection, and at the end the exit code (X). The closed connection tells either side that the other side has ended. If the
server has ended, the shell becomes a Python process again (`rlhpc.cli.wait`), which hands over again. The server sends each
shell a pause in seconds for this case (D), so that a hundred shells do not start Python at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import JobProbe, ProcessId
from rlhpc.jobs.segment import JobRecord, SegmentJournal
from rlhpc.jobs.shared_probe import make_wait_folder, wait_folder
from rlhpc.jobs.waiter import Waiter, interruption_text
from rlhpc.runtime.env_references import read_values
from rlhpc.runtime.imports import python_path, run_module

#: Files in the wait folder: the server's socket, and the lock that the server holds while it lives.
SOCKET, LOCK = "watcher", "watcher.lock"
#: First message of the server, before the lines for the shell.
WELCOME = b"ok\n"
#: Environment variables of the shell: its program, its output on Ctrl-C, and the wait in JSON for a later Python process.
_PROGRAM, _STOPPED, _WAIT = "RLHPC_SHELL", "RLHPC_STOPPED", "RLHPC_WAIT"
#: Maximum seconds to connect to a server, after which this process waits by itself.
_CONNECT_TIMEOUT_S = 20.0
#: Maximum number of started servers in a row that accepted no request.
_MAX_STARTS = 4
_SHELL = "/bin/sh"
_CONNECTION_FD = 3
#: Command of the shell; short, because `ps` shows it.
SHELL_COMMAND = f'eval "${_PROGRAM}"'
SHELL_PROGRAM = r"""trap 'printf "%s\n" "$RLHPC_STOPPED" >&2; exit 130' INT
alone= pause=0
while IFS= read -r line <&3; do
  case $line in
    E*) printf '%s\n' "${line#E}" >&2 ;;
    O*) printf '%s\n' "${line#O}" || exit 141 ;;
    A*) alone=--alone; break ;;
    D*) pause=${line#D} ;;
    X*) exit "${line#X}" ;;
  esac
done
exec 3<&-
[ "$pause" = 0 ] || sleep "$pause"
exec "$@" $alone
"""


@dataclass(frozen=True)
class Wait:
    """Description of a wait, from which any process of the user on this host can continue the wait.

    Attributes:
        root: The run folder.
        record: The job's record, as JSON.
        began: Start of the wait, in monotonic seconds.
        answers: Whether to print the result to stdout as JSON.
        secrets: Names of environment variables with secret values.
    """

    root: str
    segment: int
    record: dict[str, Any]
    began: float
    deadline_s: float | None
    poll_s: float
    progress_s: float
    asked_by: dict[str, Any] | None
    answers: bool
    secrets: list[str] = field(default_factory=list)

    @classmethod
    def from_waiter(cls, waiter: Waiter, *, answers: bool) -> Wait:
        asked_by = waiter.asked_by.to_json() if waiter.asked_by is not None else None
        return cls(
            str(waiter.files.paths.root), waiter.files.segment, {**waiter.record.to_json(), "command": []}, waiter.began,
            waiter.deadline_s, waiter.poll_s, waiter.progress_s, asked_by, answers, sorted(read_values()),
        )  # fmt: skip

    @classmethod
    def from_environment(cls) -> Wait:
        """Returns the wait of the shell that became this process."""
        return cls(**json.loads(os.environ.pop(_WAIT)))

    def waiter(
        self,
        out: Callable[[str], None],
        find_probe: Callable[[JobRecord, SegmentJournal], JobProbe] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Waiter:
        record = JobRecord.from_json(self.record)
        assert record is not None
        return Waiter(
            SegmentJournal(RunPaths(Path(self.root)), self.segment), record, out, find_probe=find_probe, poll_s=self.poll_s,
            progress_s=self.progress_s, deadline_s=self.deadline_s, asked_by=ProcessId.from_json(self.asked_by),
            began=self.began, environment=environment,
        )  # fmt: skip


def hand_over(wait_request: Wait) -> None:
    """Replaces this process by a shell that prints the server's output; returns only if no server is available."""
    connection = _connect_or_start(wait_request) if os.access(_SHELL, os.X_OK) else None
    if connection is None:
        return
    files = SegmentJournal(RunPaths(Path(wait_request.root)), wait_request.segment)
    record = JobRecord.from_json(wait_request.record)
    assert record is not None
    # the shell needs PYTHONPATH to start Python again; it submits no job
    environment = {**os.environ, _WAIT: json.dumps(asdict(wait_request)), "PYTHONPATH": python_path()}
    environment |= {_PROGRAM: SHELL_PROGRAM, _STOPPED: f"rlhpc: error: {interruption_text(files, record)}"}
    name = f"rlhpc submit: {files.paths.root.name}"
    with connection, contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(connection.fileno(), _CONNECTION_FD)
        os.set_inheritable(_CONNECTION_FD, True)
        os.execve(_SHELL, ["sh", "-c", SHELL_COMMAND, name, *run_module("rlhpc.cli.wait")], environment)


def is_peer_same_user(connection: socket.socket) -> bool:
    """Returns whether the process at the other end belongs to this user."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(uid == os.geteuid())


def address(folder_fd: int, name: str = SOCKET) -> str:
    """Returns a short socket address of a file in an open folder, because a socket address has limited length."""
    return f"/proc/self/fd/{folder_fd}/{name}"


def _connect_or_start(wait_request: Wait) -> socket.socket | None:
    """Connects to a server and sends it the wait; starts a server if none runs. Returns None if no server is available."""
    deadline, num_started = time.monotonic() + _CONNECT_TIMEOUT_S, 0
    request = {**asdict(wait_request), "values": {n: os.environ[n] for n in wait_request.secrets if n in os.environ}}
    try:
        while time.monotonic() < deadline and num_started < _MAX_STARTS:
            with _open_wait_folder() as folder_fd:
                connection = _connect(folder_fd, json.dumps(request).encode() + b"\n")
                if connection is not None:
                    return connection
                if _start_server(folder_fd):
                    num_started += 1
                else:
                    time.sleep(0.05)  # another server is starting or about to end
    except OSError:
        pass
    return None


@contextlib.contextmanager
def _open_wait_folder() -> Any:
    """Opens the folder that a user's waiting commands share.

    Raises:
        OSError: The folder cannot be created, or other users have access to it.
    """
    path = wait_folder()
    if not make_wait_folder(path):
        raise PermissionError(f"{path} is not this user's alone")
    folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


def _connect(folder_fd: int, request: bytes) -> socket.socket | None:
    """Returns a connection to a server that accepted the request; None if no server runs or the server is about to end."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_CONNECT_TIMEOUT_S)
        connection.connect(address(folder_fd))
        if not is_peer_same_user(connection):
            raise PermissionError("the watcher is another user's")
        connection.sendall(request)
        if connection.recv(len(WELCOME), socket.MSG_WAITALL) == WELCOME:
            connection.settimeout(None)
            return connection
    except (FileNotFoundError, ConnectionError):
        pass
    except BaseException:
        connection.close()
        raise
    connection.close()
    return None


def _start_server(folder_fd: int) -> bool:
    """Starts a server, and returns True, unless another process holds the lock. The server inherits the bound socket, so a
    client can connect at once.
    """
    try:
        lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=folder_fd)
    except FileNotFoundError:
        return False  # a server that has just ended removed the folder
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(LOCK, dir_fd=folder_fd, follow_symlinks=False).st_ino != os.fstat(lock).st_ino:
            return False  # this is the lock of a server that has just ended
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET, dir_fd=folder_fd)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address(folder_fd))
            listener.listen(1024)
            inherited_fds = (lock, listener.fileno(), folder_fd)
            subprocess.Popen(
                run_module("rlhpc.jobs.wait_server", *map(str, inherited_fds)),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=inherited_fds,
                start_new_session=True, cwd="/", env={**os.environ, "PYTHONPATH": python_path()},
            )  # fmt: skip
        return True
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(lock)
