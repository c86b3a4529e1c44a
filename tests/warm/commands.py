"""`rlhpc` and `python` for shells: what a script or a Snakemake rule starts by these names is started warm.

A shell makes its own children, so what it starts is a small program that has the real process started in its place: it passes
on its descriptors, signals and exit status. The process is no child of the shell, therefore: not for tests about who is whose
parent, or about what is left of a shell that was killed.
"""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import shutil
import socket
import sys
import tempfile
import threading
from pathlib import Path

from tests.warm.starting import Popen

_PROGRAM = """#!{python} -ISE
import array, os, pickle, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
body = pickle.dumps(({words!r} + sys.argv[1:], dict(os.environ), os.getcwd()))
standard = array.array("i", [0, 1, 2]).tobytes()
server.sendmsg([len(body).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, standard)])
server.sendall(body)
said = server.recv(8)
status = int.from_bytes(said, "little", signed=True) if said else 1
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class Commands:
    """A folder with the two programs, for `PATH`, and the server of what they start. A context manager."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rlhpc-warm-"))  # short, for the socket's address
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self.folder / "socket"))
        self._listening.listen(64)
        scripts = Path(sys.executable).parent
        for name, words in (("rlhpc", [str(scripts / "rlhpc")]), ("python", [sys.executable])):
            program = _PROGRAM.format(python=sys.executable, address=str(self.folder / "socket"), words=words)
            (self.folder / name).write_text(program)
            (self.folder / name).chmod(0o755)

    def __enter__(self) -> Commands:
        Popen([sys.executable, "-c", ""]).wait()  # the server of warm processes starts in this thread, which stays
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        shutil.rmtree(self.folder)

    @property
    def environment(self) -> dict[str, str]:
        """Has bash run them by these names wherever they are looked for: first on PATH and before PATH."""
        functions = {f"BASH_FUNC_{name}%%": f'() {{ {self.folder}/{name} "$@"; }}' for name in ("rlhpc", "python")}
        return {"PATH": f"{self.folder}:{Path(sys.executable).parent}:{os.environ['PATH']}", **functions}

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(16))
            descriptors = array.array("i", b"".join(data for _, _, data in ancillary))
            body = b""
            while len(body) < int.from_bytes(head, "little"):
                body += connection.recv(1 << 16)
            words, environment, folder = pickle.loads(body)
            stdin, stdout, stderr = descriptors
            process = Popen(
                words, env=environment, cwd=folder, stdin=stdin, stdout=stdout, stderr=stderr, process_group=0
            )
            for descriptor in descriptors:
                os.close(descriptor)
            threading.Thread(target=self._pass_on, args=[connection, process], daemon=True).start()
            status = process.wait()
            with contextlib.suppress(OSError):
                connection.sendall(status.to_bytes(8, "little", signed=True))

    @staticmethod
    def _pass_on(connection: socket.socket, process: Popen) -> None:
        """Signals; and the end of what stands in the process's place, which is the process's own."""
        with contextlib.suppress(OSError):
            while said := connection.recv(1):
                process.send_signal(said[0])
            process.kill()
