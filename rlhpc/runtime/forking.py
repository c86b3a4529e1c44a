"""The driver's end of the fork server (`rlhpc.runtime.forkserver`), which forks the ranks of a host."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rlhpc.runtime.descriptors import raise_limit
from rlhpc.runtime.import_paths import python_path, run_module
from rlhpc.runtime.scratch import Scratch

#: What every fork server imports.
PRELOAD = ("torch", "numpy", "zmq", "cloudpickle", "rlhpc.runtime.process", "rlhpc.runtime.worker")


class ForkServerProcess:
    """The driver's end of a fork server, and the scratch folders that the server removes when the driver is gone.

    Args:
        preload: Modules that it imports besides `PRELOAD`; None imports nothing, where no rank is forked.

    Raises:
        ConfigError: A process may open too few files here for a run.
    """

    def __init__(self, preload: Sequence[str] | None) -> None:
        raise_limit()  # the driver's own, which the server and its ranks inherit
        self.scratch = Scratch.create()
        self.control, theirs = socket.socketpair()
        # Threads that wait for one another sleep soon: on a busy node spinning takes the core from who is waited for.
        environment = {"GOMP_SPINCOUNT": "1000", **os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = python_path()
        with self.words_file.open("ab") as err:
            self.process = subprocess.Popen(
                run_module("rlhpc.runtime.forkserver", str(theirs.fileno()), self.scratch.token,
                           str(os.getpid()), *(() if preload is None else (*PRELOAD, *preload))),
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=err, stderr=err, env=environment,
                start_new_session=True,
            )  # fmt: skip
        theirs.close()

    @property
    def words_file(self) -> Path:
        """What the server says for itself, and a rank before it has opened its log."""
        return self.scratch.sockets / "forkserver.err"

    def discard(self) -> None:
        """Ends a server that has started nothing, at once: it may still be importing."""
        self.process.kill()
        self.process.wait()
        self.control.close()
        self.scratch.remove()
