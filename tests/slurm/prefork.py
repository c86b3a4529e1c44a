"""Light ranks of job steps: a process per node imports torch once and forks the ranks, so that 64 fit on a small machine.

`cluster.container` puts this program before the command of each rank. The task of the step only stands in for the forked
rank: it passes signals on, ends as the rank ends, and takes the rank with it when it is killed.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time

#: On the node's own /tmp.
SOCKET = "/tmp/rlhpc-prefork.sock"
IMPORTS_S = 240.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def words(*, with_false_clock: str = "") -> list[str]:
    """Returns the words for `cluster.container`.

    Args:
        with_false_clock: Shell command that sets the variables of a false clock for the ranks of a node; "" for none.
    """
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), with_false_clock]


def main() -> int:
    """Runs a rank's command in a fork of the node's server, which the first rank starts."""
    false_clock, *command = sys.argv[1:]
    if false_clock == "--server":
        _Server(int(command[0])).serve()
        return 0
    connection = _connect(false_clock)
    request = json.dumps({"command": command, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    descriptors = array.array("i", [0, 1, 2])
    connection.sendmsg([len(request).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    connection.sendall(request)
    answers = connection.makefile("r")
    rank = int(answers.readline() or 0)
    if not rank:
        return 1
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: _kill(rank, number))
    status = int(answers.readline() or signal.SIGKILL)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _connect(false_clock: str) -> socket.socket:
    deadline = time.monotonic() + IMPORTS_S
    with open(f"{SOCKET}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        started = False
        while time.monotonic() < deadline:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(SOCKET)
                return connection
            except OSError:
                connection.close()
            if not started:
                started = True
                _start_server(false_clock)
            select.poll().poll(100)  # not sleep: libfaketime shifts its deadline
    raise SystemExit(f"prefork: waited {IMPORTS_S:.0f} s for the node's server")


def _start_server(false_clock: str) -> None:
    """Starts the server as a process that Slurm does not take for one of the step."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{SOCKET}.new")
    listener.listen(512)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RLHPC_STEP"))}
    server = [sys.executable, "-P", os.path.abspath(__file__), "--server", str(listener.fileno())]
    with open("/tmp/rlhpc-prefork.log", "ab") as log:
        subprocess.run(  # the shell ends at once: the server is nobody's child
            ["sh", "-c", f'{false_clock}\n"$@" &', "sh", *server], pass_fds=[listener.fileno()], env=environment,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, check=True,
        )  # fmt: skip
    listener.close()
    os.rename(f"{SOCKET}.new", SOCKET)


class _Server:
    """Imports what ranks need, then forks one for each connection; uses no thread."""

    def __init__(self, listener: int) -> None:
        self.listener = socket.socket(fileno=listener)
        self.connection_of: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Runs until it is killed."""
        import gc

        import gymnasium.envs.classic_control
        import torch

        import rlhpc.embodied.workers.actor
        import rlhpc.embodied.workers.env
        import rlhpc.embodied.workers.rollout
        import rlhpc.runtime.worker_process  # noqa: F401

        assert gymnasium and torch
        gc.collect()
        gc.freeze()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.listener, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select(0.2):
                if key.fileobj is self.listener:
                    self.fork(self.listener.accept()[0])
                else:  # the task has ended, whatever ended it
                    self.end(key.data)
            self.reap()

    def fork(self, connection: socket.socket) -> None:
        """Forks the rank that a task asks for."""
        received, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(12))
        if not ancillary:
            return
        descriptors = array.array("i", ancillary[0][2])
        request = json.loads(connection.makefile("rb").read(int.from_bytes(received, "big")))
        pid = os.fork()
        if not pid:
            _become(request, list(descriptors), [self.listener, *self.connection_of.values(), connection])
        for descriptor in descriptors:
            os.close(descriptor)
        self.connection_of[pid] = connection
        self.selector.register(connection, selectors.EVENT_READ, pid)
        with contextlib.suppress(OSError):
            connection.sendall(f"{pid}\n".encode())

    def end(self, pid: int) -> None:
        self.selector.unregister(self.connection_of[pid])
        _kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                connection = self.connection_of.pop(pid)
                with contextlib.suppress(KeyError):
                    self.selector.unregister(connection)
                with contextlib.suppress(OSError):
                    connection.sendall(f"{status}\n".encode())
                connection.close()


def _become(request: dict, descriptors: list[int], inherited: list[socket.socket]) -> None:
    """Turns this fork into the rank; does not return."""
    status = 1
    try:
        for one in inherited:
            one.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        module = request["command"].index("-m") + 1
        sys.argv = request["command"][module:]
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
        from rlhpc.runtime import worker_process

        worker_process.main()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
