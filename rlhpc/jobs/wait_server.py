"""Wait server (`python -m rlhpc.jobs.wait_server`): one process per user and host that follows all runs with waiting commands.

The first waiting command starts the server (`wait_client`). The server ends when no command waits any more. It has one thread
per waiting command, so that a hanging filesystem delays only the commands that use this filesystem.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterable

from rlhpc.jobs.job_record import probe_for
from rlhpc.jobs.probes import JobProbe, JobReport, JobState, SlurmProbe
from rlhpc.jobs.segment import JobRecord, SegmentJournal
from rlhpc.jobs.shared_probe import SharedProbe
from rlhpc.jobs.wait_client import LOCK, SOCKET, WELCOME, Wait, address, is_peer_same_user
from rlhpc.jobs.waiter import answer_line
from rlhpc.runtime.env_references import mask_values
from rlhpc.runtime.errors import RlhpcError

#: Seconds without a waiting command after which the server ends.
_LINGER_S = 2.0
#: Maximum seconds between a process's connection and its request.
_REQUEST_S = 10.0
#: Number of shells per second that become Python processes if the server is killed: all at once might overload the machine.
_STARTS_PER_S = 8
_STACK_BYTES = 1 << 20


class ReportCache(JobProbe):
    """Cache of Slurm's last reports on all followed jobs. One thread at a time queries Slurm for all jobs."""

    def __init__(self, probe: JobProbe, interval_s: float = 1.0) -> None:
        self._probe, self._interval_s = probe, interval_s
        self._lock, self._query_lock = threading.Lock(), threading.Lock()
        self._next_query = 0.0
        self._num_waiters: dict[str, int] = {}
        self._reports: dict[str, JobReport] = {}

    def enter(self, job_id: str) -> None:
        with self._lock:
            self._num_waiters[job_id] = self._num_waiters.get(job_id, 0) + 1
            self._next_query = 0.0

    def query(self, job_ids: Iterable[str]) -> dict[str, JobReport]:
        now = time.monotonic()
        if now >= self._next_query and self._query_lock.acquire(blocking=False):
            try:
                with self._lock:
                    self._next_query, followed_ids = now + self._interval_s, list(self._num_waiters)
                reports = self._probe.query(followed_ids)
                with self._lock:
                    self._reports = reports
            finally:
                self._query_lock.release()
        unknown_report = JobReport(JobState.UNKNOWN, conclusive=False)
        return {job: self._reports.get(job, unknown_report) for job in job_ids}

    def leave(self, job_ids: Iterable[str]) -> None:
        for job in job_ids:
            with self._query_lock, self._lock:  # otherwise a query in progress would add the job again
                self._num_waiters[job] = self._num_waiters.get(job, 1) - 1
                if self._num_waiters[job] > 0:
                    continue
                del self._num_waiters[job]
                self._reports.pop(job, None)
                self._probe.leave([job])


class Watcher:
    """Server for the connections of waiting shells.

    Args:
        listener: Socket that accepts the connections.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._cache = ReportCache(SharedProbe(SlurmProbe()))
        self._threads: list[threading.Thread] = []

    def serve(self) -> None:
        """Serves until no command waits any more."""
        self._listener.settimeout(_LINGER_S / 4)
        served_at = time.monotonic()
        while time.monotonic() - served_at < _LINGER_S:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                served_at = time.monotonic() if self._threads else served_at
                continue
            except OSError:  # too many open files: the connecting process waits by itself after a timeout
                time.sleep(_LINGER_S / 4)
                continue
            served_at = time.monotonic()
            pause_s = sum(thread.is_alive() for thread in self._threads) // _STARTS_PER_S
            thread = threading.Thread(target=self._serve_connection, args=(connection, pause_s), daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the user's thread limit is reached: the connecting process waits by itself
                connection.close()
                continue
            self._threads.append(thread)

    def _serve_connection(self, connection: socket.socket, poll_pause_s: int) -> None:
        with connection, contextlib.suppress(OSError, ValueError, TypeError):
            connection.settimeout(_REQUEST_S)
            if not is_peer_same_user(connection):
                return
            with connection.makefile("rb") as file:
                request = json.loads(file.readline())
            environ_values = request.pop("values")
            wait_request = Wait(**request)
            connection.settimeout(None)
            connection.sendall(WELCOME + f"D{poll_pause_s}\n".encode())
            self._wait_for_segment(wait_request, connection, environ_values)

    def _wait_for_segment(self, wait_request: Wait, connection: socket.socket, environ_values: dict[str, str]) -> None:
        waiter = wait_request.waiter(
            lambda line: _send_lines(connection, "E", f"rlhpc: {line}"), self._find_probe, environ_values
        )
        hangup = select.poll()
        hangup.register(connection, select.POLLIN)  # the connection becomes readable only when it closes
        try:
            while (wait_result := waiter.poll()) is None:
                if hangup.poll(1000 * waiter.poll_s):
                    return
            answer = waiter.answer(wait_result)
            _send_lines(connection, "E", f"rlhpc: {answer_line(answer)}")
            if wait_request.answers:
                _send_lines(connection, "O", json.dumps(answer))
            _send_lines(connection, "X", "0")
        except RlhpcError as error:
            _send_lines(connection, "E", f"rlhpc: error: {mask_values(str(error), environ_values)}")
            _send_lines(connection, "X", str(error.exit_code))
        except Exception:  # tells the shell to wait by itself and report the error
            _send_lines(connection, "A", "")
        finally:
            waiter.leave()

    def _find_probe(self, record: JobRecord, files: SegmentJournal) -> JobProbe:
        if record.executor != "slurm":
            return probe_for(record, files)
        self._cache.enter(record.job_id)
        return self._cache


def _send_lines(connection: socket.socket, stream: str, message_text: str) -> None:
    """Sends each line of a text after its stream (`E`, `O`, `X` or `A`), without the zero bytes that a shell cannot read."""
    lines = message_text.replace("\0", "").split("\n")
    with contextlib.suppress(OSError):  # a closed connection is detected elsewhere
        connection.sendall("".join(f"{stream}{line}\n" for line in lines).encode("utf-8", "replace"))


def main(arguments: list[str]) -> None:
    """Runs the server. `arguments` are the inherited file descriptors of the lock, the socket, and the folder of both."""
    lock, socket_fd, folder_fd = map(int, arguments)
    for fd in map(int, arguments):
        os.set_inheritable(fd, False)  # squeue must not inherit it
    threading.stack_size(_STACK_BYTES)
    watcher = Watcher(socket.socket(fileno=socket_fd))
    watcher.serve()
    # a process that connects from now on starts another server as soon as the lock of this server is removed
    with contextlib.suppress(OSError):
        if os.stat(LOCK, dir_fd=folder_fd).st_ino == os.fstat(lock).st_ino:  # otherwise the lock was removed
            for name in (SOCKET, LOCK):
                os.unlink(name, dir_fd=folder_fd)
        os.rmdir(os.readlink(address(folder_fd, "").rstrip("/")))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
